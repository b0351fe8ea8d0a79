"""Offloaded weights that are trained: bit for bit plain torch's, wherever they are meanwhile."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lora import DEVICE, MIB, WIDTH, Model, build, tokens, watched
from torch import Tensor, nn
from training import digest, gradients, leaves_nothing

import stagehand_alloc
from stagehand_alloc import _native
from stagehand_alloc._weights.groups import registry

pytestmark = pytest.mark.usefixtures("gpu")

Make = Callable[[Any], torch.optim.Optimizer]


def full() -> Any:
    """All is trained, but for the first block's first layer."""
    model = Model().requires_grad_(True)
    model.layers[0].up.requires_grad_(False)
    return model


def parts() -> Any:
    """A part of each block is trained."""
    model = Model()
    for layer in model.layers:
        layer.down.requires_grad_(True)
    return model


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def offloaded(make: Any = full, **how: Any) -> Any:
    return stagehand_alloc.offload(build(make), trained=True, **how)


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """What an optimizer keeps, as digests."""
    return {
        number: {k: digest(v) if isinstance(v, Tensor) else v for k, v in sorted(state.items())}
        for number, state in optimizer.state_dict()["state"].items()
    }


def run(
    model: Any,
    pool: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 4,
    accumulate: int = 1,
    clip: bool = False,
) -> list[Any]:
    """Losses and gradients of each step, then weights and what the optimizer keeps."""
    optimizer = optimizer or adamw(model)
    found: list[Any] = []
    for step in range(steps):
        for part in range(accumulate):
            with pool or contextlib.nullcontext():
                loss = model(tokens(step + 50 * part))
            loss.backward()
            found.append(digest(loss))
        if clip:
            found.append(digest(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found.append({name: digest(tensor) for name, tensor in model.state_dict().items()})
    found.append(state_of(optimizer))
    return found


@pytest.fixture(autouse=True)
def leaves_no_weights() -> Iterator[None]:
    yield
    gc.collect()
    assert _native.weights(DEVICE)["bytes"] == 0
    assert _native.check_invariants(DEVICE) == ""


# --- All at home for the optimizer's step


@pytest.mark.parametrize("make", [full, parts])
def test_what_is_trained_leaves_and_is_plain_torchs(make: Any) -> None:
    expected = run(build(make))
    with watched() as seen, leaves_nothing():
        model = offloaded(make)
        assert run(model, stagehand_alloc.pool(high=14 * MIB)) == expected
        _native.drop_weights(DEVICE)
        del model
        gc.collect()
    assert seen.weights["loads"] > 0
    assert seen.weights["written_bytes"] > 0


def test_what_is_trained_is_plain_torchs_without_a_pool() -> None:
    expected = run(build(full))
    assert run(offloaded()) == expected


def test_what_is_trained_is_plain_torchs_where_all_leaves_after_each_step() -> None:
    def away(optimizer: Any, *_: Any) -> None:
        _native.drop_weights(DEVICE)

    expected = run(build(full))
    model = offloaded()
    optimizer = adamw(model)
    optimizer.register_step_post_hook(away)
    assert run(model, stagehand_alloc.pool(), optimizer) == expected


def test_only_what_is_trained_goes_back_to_the_host() -> None:
    model = offloaded(parts)
    trained = sum(p.nbytes for layer in model.layers for p in layer.down.parameters())
    with watched() as seen:
        run(model, stagehand_alloc.pool(), steps=1)
        _native.drop_weights(DEVICE)
    assert trained <= seen.weights["written_bytes"] < 2 * trained


def test_nothing_goes_back_that_no_optimizer_has() -> None:
    model = offloaded()
    with watched() as seen:
        for _ in range(2):
            with stagehand_alloc.pool(high=14 * MIB):
                loss = model(tokens(0))
            loss.backward()
            model.zero_grad()
            _native.drop_weights(DEVICE)
    assert seen.weights["written_bytes"] == 0


def test_where_all_fits_nothing_moves() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=96 * MIB)
    run(model, pool, steps=1)
    optimizer = adamw(model)
    with watched() as seen:
        for step in range(3):
            with pool:
                loss = model(tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (seen.weights["loads"], seen.weights["written_bytes"]) == (0, 0)


def test_weights_that_do_not_fit_the_step_are_an_error_with_numbers() -> None:
    model = offloaded()
    with stagehand_alloc.pool(high=3 * MIB):
        loss = model(tokens(0))
    loss.backward()
    before = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(stagehand_alloc.SizeError, match=r"8 blocks of 4\.\d+ MiB, and high is 3\.00"):
        adamw(model).step()
    assert {name: digest(tensor) for name, tensor in model.state_dict().items()} == before


def test_a_step_that_raises_half_way_keeps_what_it_wrote() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"][: len(group["params"]) // 2]:
                        parameter.add_(1.0)
            raise KeyError("half-way")

    def broken(model: Any, pool: Any) -> Any:
        with pool:
            loss = model(tokens(0))
        loss.backward()
        with pytest.raises(KeyError):
            Half(model.parameters(), lr=1.0).step()
        model.zero_grad()
        return run(model, pool)

    expected = broken(build(full), contextlib.nullcontext())
    model = offloaded()
    assert broken(model, stagehand_alloc.pool(high=14 * MIB)) == expected
    assert registry.stepping == []


def test_a_weight_that_its_own_forward_writes_to_is_plain_torchs() -> None:
    class Clamped(Model):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(True)
            for layer in self.layers:
                layer.register_forward_pre_hook(self.clamp)

        @staticmethod
        def clamp(module: Any, inputs: Any) -> None:
            with torch.no_grad():
                module.up.weight.clamp_(-0.05, 0.05)

    expected = run(build(Clamped))
    model = offloaded(Clamped)
    assert run(model, stagehand_alloc.pool(high=14 * MIB)) == expected


def test_what_resident_and_load_state_dict_wrote_is_trained_on() -> None:
    def written(model: Any, pool: Any, inside: Any) -> Any:
        found = run(model, pool, steps=2)
        other = {name: tensor.clone() * 0.5 for name, tensor in model.state_dict().items()}
        model.load_state_dict(other)
        with inside(model.layers[3]), torch.no_grad():
            model.layers[3].up.weight.mul_(1.5)
            model.layers[3].up.weight.data[0] = 2.0
        return [found, run(model, pool, steps=2)]

    expected = written(build(full), None, lambda _: contextlib.nullcontext())
    model = offloaded()
    pool = stagehand_alloc.pool(high=14 * MIB)
    assert written(model, pool, stagehand_alloc.resident) == expected


def test_a_state_dict_is_of_its_moment() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=14 * MIB)
    run(model, pool, steps=1)
    state = model.state_dict()
    before = {name: digest(state[name]) for name in state if name.startswith("layers")}
    run(model, pool, steps=1)
    _native.drop_weights(DEVICE)
    after = model.state_dict()
    assert {name: digest(state[name]) for name in before} == before
    assert all(
        (digest(after[name]) == before[name]) == name.startswith("layers.0.up") for name in before
    )


def test_restored_weights_are_those_of_the_last_step() -> None:
    model, other = offloaded(), build(full)
    pool = stagehand_alloc.pool(high=14 * MIB)
    run(model, pool)
    run(other)
    stagehand_alloc.restore(model)
    assert [digest(p) for p in model.parameters()] == [digest(p) for p in other.parameters()]
    assert run(model) == run(other)


def test_visit_sees_what_was_trained() -> None:
    model, other = offloaded(), build(full)
    run(model, stagehand_alloc.pool(high=14 * MIB))
    run(other)
    seen = {name: digest(parameter) for name, parameter in stagehand_alloc.visit(model)}
    assert seen == {name: digest(parameter) for name, parameter in other.named_parameters()}


def test_a_trained_weight_cannot_be_touched_outside_of_its_block() -> None:
    model = offloaded()
    run(model, stagehand_alloc.pool(high=14 * MIB), steps=1)
    with pytest.raises(RuntimeError, match=r"'layers\.2\.up\.weight' is on the host"):
        model.layers[2].up.weight.sum()
    with pytest.raises(RuntimeError, match=r"is on the host"), torch.no_grad():
        model.layers[2].up.weight.add_(1)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_copies_out_that_the_driver_refuses_are_made_the_next_time(gpu: Any, call: str) -> None:
    expected = run(build(full), steps=3)
    for nth in range(1, 9):
        model = offloaded()
        optimizer = adamw(model)

        def fail(step: int, nth: int = nth) -> None:
            if step == 1:
                gpu.fail(call, nth=nth, times=1)

        found = faulty(model, optimizer, fail)
        gpu.fail(call, nth=1, times=0)
        assert found == expected
        del model, optimizer
        gc.collect()


def faulty(model: Any, optimizer: torch.optim.Optimizer, fail: Callable[[int], None]) -> list[Any]:
    """`run` of three steps, where ``fail`` makes the driver refuse a call; what raises for it
    before anything was computed is done again.
    """
    found: list[Any] = []
    for step in range(3):
        with stagehand_alloc.pool():
            loss = model(tokens(step))
        loss.backward()
        found += [digest(loss), gradients(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        fail(step)
        for _ in range(3):  # by then the driver answers
            _native.drop_weights(DEVICE)
    found.append({name: digest(tensor) for name, tensor in model.state_dict().items()})
    found.append(state_of(optimizer))
    return found


def test_what_is_trained_stays_where_nobody_says_otherwise() -> None:
    model = stagehand_alloc.offload(build(parts))
    weight = model.layers[1].down.weight
    assert not _native.is_weight(weight)
    assert weight.sum().item() != 0
    assert _native.is_weight(model.layers[1].up.weight)


def test_blocks_without_frozen_weights_say_how_to_offload_them() -> None:
    model = build(full)
    model.layers[0].up.requires_grad_(True)
    with pytest.raises(stagehand_alloc.OffloadError, match="no frozen weights"):
        stagehand_alloc.offload(model)
