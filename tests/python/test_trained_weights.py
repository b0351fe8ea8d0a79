"""Offloaded weights that are trained: bit for bit plain torch's, wherever they are meanwhile."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lora import (
    DEVICE,
    MIB,
    WIDTH,
    Block,
    Checkpointed,
    Dropped,
    Model,
    Twice,
    build,
    tokens,
    watched,
)
from torch import Tensor, nn
from training import digest, gradients, leaves_nothing

import stagehand_alloc
from stagehand_alloc import OffloadError, _native
from stagehand_alloc._tell import StagehandWarning, warn_once
from stagehand_alloc._weights.groups import registry

pytestmark = pytest.mark.usefixtures("gpu", "leaves_no_weights")

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


MODELS = {
    "twice": Twice,
    "layers dropped": Dropped,
    "checkpoint": functools.partial(Checkpointed, False),
    "reentrant checkpoint": functools.partial(Checkpointed, True),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_other_ways_to_write_a_model_are_plain_torchs(make: Any) -> None:
    def all_of_it() -> Any:
        return make().requires_grad_(True)

    expected = run(build(all_of_it), steps=3)
    model = offloaded(all_of_it)
    pool = stagehand_alloc.pool(high=14 * MIB)
    assert run(model, pool, in_chunks(model), steps=3) == expected


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
    with pytest.raises(
        stagehand_alloc.SizeError, match=r"8 blocks of 4\.\d+ MiB, and high is 3\.00"
    ):
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
    for nth in (1, 3, 6):
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
        loss = again(functools.partial(forward_and_backward, model, step))
        found += [digest(loss), gradients(model)]
        again(optimizer.step)
        optimizer.zero_grad(set_to_none=True)
        fail(step)
        for _ in range(3):  # by then the driver answers
            _native.drop_weights(DEVICE)
    found.append({name: digest(tensor) for name, tensor in model.state_dict().items()})
    found.append(state_of(optimizer))
    return found


def forward_and_backward(model: Any, step: int) -> Tensor:
    model.zero_grad()
    with stagehand_alloc.pool():
        loss: Tensor = model(tokens(step))
    loss.backward()
    return loss


def again(call: Callable[[], Any]) -> Any:
    """What it returns, at the second attempt where the first raises an error of ours."""
    try:
        return call()
    except RuntimeError as error:
        if "stagehand_alloc: the CUDA driver failed" not in str(error):
            raise
        return call()


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


# --- An optimizer whose step runs in chunks


def chosen(kind: Any, **how: Any) -> Make:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **how)


def grouped(model: Any) -> torch.optim.Optimizer:
    """Two groups, the second of what AdamW should not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(
        groups,
        lr=1e-2,
    )


OPTIMIZERS: dict[str, Make] = {
    "AdamW": chosen(torch.optim.AdamW, foreach=False),
    "AdamW foreach": chosen(torch.optim.AdamW, foreach=True),
    "AdamW fused": chosen(torch.optim.AdamW, fused=True),
    "AdamW amsgrad": chosen(torch.optim.AdamW, amsgrad=True, maximize=True),
    "two groups": grouped,
    "SGD": chosen(torch.optim.SGD, lr=0.1),
    "SGD momentum": chosen(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": chosen(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": chosen(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": chosen(torch.optim.Adafactor),
    "RAdam": chosen(torch.optim.RAdam),
    "NAdam": chosen(torch.optim.NAdam),
    "Adagrad": chosen(torch.optim.Adagrad),
    "Muon": lambda model: torch.optim.Muon(
        [p for p in model.parameters() if p.requires_grad and p.dim() == 2], lr=1e-2
    ),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def in_chunks(model: Any, make: Make = adamw) -> torch.optim.Optimizer:
    return stagehand_alloc.offload_optimizer(make(model))


@every_optimizer
def test_a_step_in_chunks_is_plain_torchs(make: Make) -> None:
    other = build(full)
    expected = run(other, None, make(other), steps=3)
    with leaves_nothing():
        model = offloaded()
        optimizer = in_chunks(model, make)
        assert run(model, stagehand_alloc.pool(high=14 * MIB), optimizer, steps=3) == expected
        _native.drop_weights(DEVICE)
        del model, optimizer
        gc.collect()


class Wide(nn.Module):
    """Blocks of 4 MiB, which are worth moving."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4096), nn.GELU(), nn.Linear(4096, WIDTH))
            for _ in range(8)
        )
        self.embedding = nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_weights_gradients_and_state_of_more_than_high_stay_below_it() -> None:
    other = build(Wide)
    expected = forwards_and_steps(other, None, adamw(other), 2)
    expected += forwards_and_steps(other, None, adamw(other), 2)
    del other  # whose memory is of the same GPU
    model = offloaded(Wide)
    high = 76 * MIB  # weights are 32 MiB, gradients 32, state 64; activations 68
    optimizer = in_chunks(model)
    found = forwards_and_steps(model, stagehand_alloc.pool(high=high), optimizer, 2)
    optimizer = in_chunks(model)  # another, which has nothing yet
    with watched() as seen:
        found += forwards_and_steps(model, stagehand_alloc.pool(high=high), optimizer, 2)
    assert found == expected
    assert seen.overshoot == 0
    assert seen.mapped_peak <= high
    assert seen.weights["loads"] > 0
    assert seen.weights["written_bytes"] > 64 * MIB


def forwards_and_steps(
    model: Any, pool: Any, optimizer: torch.optim.Optimizer, steps: int
) -> list[str]:
    found = []
    for step in range(steps):
        with pool or contextlib.nullcontext():
            loss = model(tokens(step))
        loss.backward()
        found.append(digest(loss))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_accumulated_clipped_and_scheduled_steps_are_plain_torchs() -> None:
    def scheduled(model: Any, pool: Any, optimizer: torch.optim.Optimizer) -> Any:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        found = []
        for _ in range(3):
            found.append(run(model, pool, optimizer, steps=1, accumulate=2, clip=True))
            schedule.step()
        return [found, schedule.get_last_lr()]

    other = build(full)
    expected = scheduled(other, None, adamw(other))
    model = offloaded()
    pool = stagehand_alloc.pool(high=14 * MIB)
    assert scheduled(model, pool, in_chunks(model)) == expected


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_a_grad_scaler_are_plain_torchs(fused: bool) -> None:
    def scaled(model: Any, pool: Any, optimizer: torch.optim.Optimizer) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            with pool or contextlib.nullcontext():
                loss = model(tokens(step))
            scaler.scale(loss).backward()
            if step == 1:
                model.layers[3].down.weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights = {name: digest(tensor) for name, tensor in model.state_dict().items()}
        return [weights, state_of(optimizer), scaler.get_scale()]

    make = chosen(torch.optim.AdamW, fused=fused, foreach=not fused)
    other = build(full)
    expected = scaled(other, None, make(other))
    model = offloaded()
    assert scaled(model, stagehand_alloc.pool(high=14 * MIB), in_chunks(model, make)) == expected


def test_a_scheduler_that_came_first_still_sees_the_steps(recwarn: Any) -> None:
    model = offloaded()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stagehand_alloc.offload_optimizer(optimizer)
    run(model, None, optimizer, steps=1)
    schedule.step()
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]


def test_parameters_without_a_gradient_have_no_step() -> None:
    def some(model: Any, pool: Any, optimizer: torch.optim.Optimizer) -> Any:
        found = []
        for step in range(4):
            with pool or contextlib.nullcontext():
                loss = model(tokens(step))
            loss.backward()
            for number, parameter in enumerate(model.parameters()):
                if (number + step) % 3 == 0:
                    parameter.grad = None
            if step == 1:
                for parameter in model.layers[2].parameters():
                    parameter.grad = None
            kept = [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
            optimizer.zero_grad()
            found.append(digest(loss))
        state = {name: digest(tensor) for name, tensor in model.state_dict().items()}
        return [found, state, state_of(optimizer)]

    other = build(full)
    expected = some(other, None, adamw(other))
    model = offloaded()
    assert some(model, stagehand_alloc.pool(high=14 * MIB), in_chunks(model)) == expected


def test_hooks_of_a_step_are_called_once() -> None:
    model = offloaded()
    optimizer = in_chunks(model)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    run(model, None, optimizer, steps=2)
    assert called == ["before", "after"] * 2


def test_what_an_optimizer_keeps_is_saved_and_loaded() -> None:
    def both(model: Any, make: Make, pool: Any) -> Any:
        optimizer = make(model)
        run(model, pool, optimizer, steps=2)
        saved, weights = saved_of(model, optimizer)
        run(model, pool, optimizer, steps=1)
        model.load_state_dict(weights)
        fresh = make(model)
        fresh.load_state_dict(copy.deepcopy(saved))
        found = [state_of(fresh), run(model, pool, fresh, steps=1)]
        fresh.load_state_dict(copy.deepcopy(saved))  # where there is some
        return [*found, state_of(fresh), run(model, pool, fresh, steps=1)]

    expected = both(build(full), adamw, None)
    model = offloaded()
    assert both(model, in_chunks, stagehand_alloc.pool(high=14 * MIB)) == expected


def saved_of(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())


def test_an_exception_in_a_chunk_leaves_whole_gradients_weights_and_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = build(full)
    plain = adamw(other)
    model = offloaded()
    optimizer = in_chunks(model)
    pool = stagehand_alloc.pool(high=14 * MIB)
    assert run(model, pool, optimizer, steps=2) == run(other, None, plain, steps=2)
    state, weights = saved_of(model, optimizer)
    calls = 0
    own = torch.optim.AdamW._init_group  # once anything was compiled, not Adam's

    def third(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("in a chunk")
        return own(self, *args)

    with pool:
        loss = model(tokens(7))
    loss.backward()
    before = gradients(model)
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", third)
    with pytest.raises(KeyError):
        optimizer.step()
    monkeypatch.undo()
    assert gradients(model) == before
    assert all(group.native.open == 0 for group in registry.trained().values())
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    assert run(model, pool, optimizer) == run(other, None, plain)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_a_driver_that_refuses_in_a_step_loses_nothing(gpu: Any, call: str) -> None:
    other = build(full)
    plain = adamw(other)
    expected = run(other, None, plain, steps=2)
    then = run(other, None, plain, steps=1)
    for nth in (1, 3, 8):
        model = offloaded()
        optimizer = in_chunks(model)
        assert run(model, None, optimizer, steps=2) == expected
        state, weights = saved_of(model, optimizer)
        _native.drop_weights(DEVICE)
        with stagehand_alloc.pool(high=14 * MIB):
            loss = model(tokens(7))
        loss.backward()
        _native.drop_weights(DEVICE)
        gpu.fail(call, nth=nth, times=1)
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        gpu.fail(call, nth=1, times=0)
        assert _native.check_invariants(DEVICE) == ""
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        assert run(model, stagehand_alloc.pool(high=14 * MIB), optimizer, steps=1) == then
        del model, optimizer, weights, state, loss
        gc.collect()


def test_host_memory_that_cannot_be_pinned_leaves_the_state_on_the_gpu(gpu: Any) -> None:
    expected = run(build(full))
    model = offloaded()
    optimizer = in_chunks(model)
    gpu.fail("cuMemHostRegister", nth=3, times=1)
    with pytest.warns(stagehand_alloc.StagehandWarning, match="to pin for what AdamW keeps"):
        assert run(model, None, optimizer) == expected


def test_parameters_that_come_later_and_models_that_are_restored_are_stepped() -> None:
    def changed(model: Any, optimizer: torch.optim.Optimizer, restore: Any) -> Any:
        found = [run(model, None, optimizer, steps=2)]
        model.layers[0].up.requires_grad_(True)
        restore(model)
        optimizer.add_param_group({"params": list(model.layers[0].up.parameters()), "lr": 1e-3})
        return [*found, run(model, None, optimizer, steps=2)]

    other = build(full)
    expected = changed(other, adamw(other), lambda _: None)
    model = offloaded()
    assert changed(model, in_chunks(model), stagehand_alloc.restore) == expected


def test_what_an_optimizer_keeps_cannot_be_touched_between_steps() -> None:
    model = offloaded()
    optimizer = in_chunks(model)
    run(model, None, optimizer, steps=1)
    state = optimizer.state[model.layers[1].down.weight]
    with pytest.raises(RuntimeError, match="'exp_avg' of an offloaded optimizer is on the host"):
        state["exp_avg"].sum()


def test_a_chunk_that_does_not_fit_is_an_error_with_numbers_before_any_step() -> None:
    model = offloaded()
    optimizer = in_chunks(model)
    run(model, None, optimizer, steps=1)
    with stagehand_alloc.pool(high=1200 << 10):
        loss = model(tokens(0))
    loss.backward()
    before = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(stagehand_alloc.SizeError, match=r"is 1\.\d+ MiB of weights and state"):
        optimizer.step()
    assert {name: digest(tensor) for name, tensor in model.state_dict().items()} == before


def test_optimizers_that_cannot_step_in_chunks_are_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    model = build(full)
    for optimizer in (torch.optim.LBFGS(model.parameters()), Own(model.parameters(), lr=0.1)):
        with pytest.raises(stagehand_alloc.OffloadError, match="cannot run in chunks"):
            stagehand_alloc.offload_optimizer(optimizer)
    with pytest.raises(stagehand_alloc.OffloadError, match="differentiable"):
        stagehand_alloc.offload_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
        )
    with pytest.raises(
        stagehand_alloc.OffloadError, match=r"given a Linear, which is no torch\.optim"
    ):
        stagehand_alloc.offload_optimizer(nn.Linear(1, 1))  # type: ignore[type-var]
    chunks = stagehand_alloc.offload_optimizer(adamw(model))
    assert stagehand_alloc.offload_optimizer(chunks) is chunks


def test_an_optimizer_beside_a_model_that_is_not_offloaded_steps_in_chunks() -> None:
    expected = run(build(full))
    model = build(full)
    assert run(model, stagehand_alloc.pool(), in_chunks(model)) == expected


# --- What writes to weights, and to what an optimizer keeps, in other ways


def few(block: Callable[[], nn.Module] = Block) -> Any:
    """Four blocks, of which all is trained that asks for it."""
    model = Model(4, block)
    return model.requires_grad_(True) if block is Block else model


def away() -> None:
    """All weights leave that nobody holds: what is not on the host is lost."""
    _native.drop_weights(DEVICE)


def trained_by(model: Any, pool: Any, update: Callable[[], Any], steps: int = 3) -> list[Any]:
    """Losses, then weights, where ``update`` follows each backward."""
    found: list[Any] = []
    for step in range(steps):
        with pool or contextlib.nullcontext():
            loss = model(tokens(step))
        loss.backward()
        update()
        found.append(digest(loss))
        model.zero_grad()
        away()
    return [*found, {name: digest(tensor) for name, tensor in model.state_dict().items()}]


def in_place(parameter: Any) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def through_data(parameter: Any) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


@pytest.mark.parametrize("write", [in_place, through_data])
def test_what_hooks_of_gradients_write_in_backward_is_kept(write: Callable[[Any], None]) -> None:
    def stepped(model: Any, pool: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(write)
        return trained_by(model, pool, lambda: None)

    expected = stepped(build(few), None)
    assert stepped(offloaded(few), stagehand_alloc.pool(high=8 * MIB)) == expected


@pytest.mark.parametrize("where", ["node", "once"])
def test_what_hooks_that_no_parameter_has_write_in_backward_is_kept(where: str) -> None:
    def stepped(model: Any, pool: Any) -> Any:
        nodes: list[Any] = []
        handles: dict[int, Any] = {}

        def write(parameter: Any) -> None:
            through_data(parameter)
            if handle := handles.pop(id(parameter), None):
                handle.remove()

        for parameter in model.layers.parameters():
            if where == "node":
                nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(lambda *_, one=parameter: write(one))
            else:
                handle = parameter.register_post_accumulate_grad_hook(write)
                handles[id(parameter)] = handle
        return trained_by(model, pool, lambda: None, 1 if where == "once" else 3)

    expected = stepped(build(few), None)
    assert stepped(offloaded(few), stagehand_alloc.pool(high=8 * MIB)) == expected


def test_a_frozen_weight_that_backward_writes_to_is_kept_and_an_error_is_told_of(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(model: Any, pool: Any, begin: Callable[[], None]) -> Any:
        layer = model.layers[1]

        def write(gradient: Tensor) -> None:
            begin()
            with torch.no_grad():
                layer.up.bias.add_(1.0)

        layer.down.weight.register_hook(write)
        return trained_by(model, pool, lambda: None, 2)

    def some() -> Any:
        model = build(few)
        model.layers[1].up.bias.requires_grad_(False)
        return model

    told: list[str] = []
    expected = stepped(some(), None, lambda: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda one: told.append(str(one.exc_value)))
    model = stagehand_alloc.offload(some(), trained=True)
    pool = stagehand_alloc.pool(high=96 * MIB)
    found = stepped(model, pool, lambda: gpu.fail("cuMemcpyDtoHAsync", nth=1, times=1))
    assert found == expected
    assert len(told) == 2
    assert "the CUDA driver failed" in told[0]


@pytest.mark.parametrize("chunks", [False, True])
def test_an_optimizer_for_each_parameter_steps_in_backward(chunks: bool) -> None:
    def stepped(model: Any, pool: Any, how: Callable[[Any], Any]) -> Any:
        optimizers = {p: how(torch.optim.AdamW([p], lr=1e-2)) for p in model.parameters()}

        def step(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        hooks = [one.register_post_accumulate_grad_hook(step) for one in optimizers]
        found = trained_by(model, pool, lambda: None)
        for hook in hooks:  # torch sees no cycle through them
            hook.remove()
        return [found, [state_of(one) for one in optimizers.values()]]

    expected = stepped(build(few), None, lambda one: one)
    how = stagehand_alloc.offload_optimizer if chunks else lambda one: one
    assert stepped(offloaded(few), stagehand_alloc.pool(high=8 * MIB), how) == expected


class Halves(Block):
    """Two parameters over one storage, the first of which may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        both = torch.randn(2 * WIDTH * 4) * 0.05
        self.first = nn.Parameter(both[: WIDTH * 4].view(WIDTH, 4), requires_grad=not frozen)
        self.second = nn.Parameter(both[WIDTH * 4 :].view(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + (x @ self.first) @ self.second
        return out


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_over_one_storage_are_plain_torchs(frozen: bool, chunks: bool) -> None:
    make = functools.partial(few, functools.partial(Halves, frozen))
    other = build(make)
    expected = trained_by(other, None, adamw(other).step)
    model = offloaded(make)
    optimizer = (in_chunks if chunks else adamw)(model)
    assert trained_by(model, stagehand_alloc.pool(high=8 * MIB), optimizer.step) == expected


def test_a_frozen_weight_that_an_optimizer_writes_to_is_kept() -> None:
    class Decay(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)

    expected = build(parts)
    Decay(expected.parameters(), lr=0.1).step()
    model = offloaded(parts)
    Decay(model.parameters(), lr=0.1).step()
    away()
    found = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    assert found == {name: digest(tensor) for name, tensor in expected.state_dict().items()}


def test_an_interrupt_at_the_end_of_a_backward_is_not_lost() -> None:
    model = offloaded()
    left: list[int] = []

    def interrupted() -> None:
        left.append(1)
        if len(left) == 1:
            signal.raise_signal(signal.SIGINT)

    registry.of(model.layers[3]).native.before_leave = interrupted  # type: ignore[union-attr]
    loss = model(tokens(0))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of tests ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        signal.signal(signal.SIGINT, before)
    assert left


# --- Who calls the step, and its end


@pytest.mark.parametrize("chunks", [False, True])
def test_a_closure_runs_once_and_its_loss_is_returned(chunks: bool) -> None:
    def stepped(model: Any, pool: Any, optimizer: torch.optim.Optimizer) -> Any:
        found: list[Any] = []
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                with pool or contextlib.nullcontext():
                    loss: Tensor = model(tokens(step))
                loss.backward()
                found.append(step)
                return loss

            with torch.no_grad():
                found.append(digest(optimizer.step(closure)))  # type: ignore[arg-type]
        return [found, state_of(optimizer)]

    other = build(few)
    expected = stepped(other, None, adamw(other))
    model = offloaded(few)
    optimizer = (in_chunks if chunks else adamw)(model)
    assert stepped(model, stagehand_alloc.pool(high=12 * MIB), optimizer) == expected


def test_a_step_that_somebody_took_before_says_so_and_changes_nothing() -> None:
    model = offloaded(few)
    optimizer = adamw(model)
    step = optimizer.step
    stagehand_alloc.offload_optimizer(optimizer)
    with stagehand_alloc.pool(high=8 * MIB):
        loss = model(tokens(0))
    loss.backward()
    before = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(stagehand_alloc.OffloadError, match=r"was taken before offload_optimizer"):
        step()
    assert {name: digest(tensor) for name, tensor in model.state_dict().items()} == before
    optimizer.step()


def test_a_compiled_step_in_chunks_is_plain_torchs() -> None:
    other = build(few)
    expected = trained_by(other, None, adamw(other).step)
    model = offloaded(few)
    optimizer = in_chunks(model)
    step = torch.compile(optimizer.step, backend="eager")
    assert trained_by(model, stagehand_alloc.pool(high=8 * MIB), step) == expected
    torch.compiler.reset()  # it keeps what it has compiled


def test_an_optimizer_that_goes_takes_its_host_copies_along() -> None:
    model = offloaded(few)
    before = _native.weights(DEVICE)["bytes"]
    optimizer = in_chunks(model)
    trained_by(model, None, optimizer.step, 1)
    gc.collect()
    gc.disable()
    try:
        assert _native.weights(DEVICE)["bytes"] > before
        del optimizer
        assert _native.weights(DEVICE)["bytes"] == before
    finally:
        gc.enable()


def test_a_restored_optimizer_goes_on_bit_by_bit_and_may_be_offloaded_again() -> None:
    def stepped(model: Any, pool: Any, optimizer: Any, end: Any, again: Any) -> Any:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        found = trained_by(model, pool, optimizer.step, 2)
        taken = optimizer.step
        end(optimizer)
        kept = [digest(one) for one in optimizer.state[model.layers[2].down.weight].values()]
        found += trained_by(model, pool, optimizer.step, 1)
        schedule.step()
        found += trained_by(model, pool, taken, 1)
        again(optimizer)
        found += trained_by(model, pool, taken, 2)
        return [found, kept, state_of(optimizer)]

    def end(optimizer: Any) -> None:
        for _ in range(2):  # the second does nothing
            stagehand_alloc.restore(optimizer)
            assert _native.weights(DEVICE)["bytes"] == before

    other = build(few)
    expected = stepped(other, None, adamw(other), lambda _: None, lambda _: None)
    model = offloaded(few)
    before = _native.weights(DEVICE)["bytes"]
    again = stagehand_alloc.offload_optimizer
    pool = stagehand_alloc.pool(high=32 * MIB)
    assert stepped(model, pool, in_chunks(model), end, again) == expected


def test_an_optimizer_cannot_be_restored_in_the_middle_of_its_step() -> None:
    def stepped(model: Any, optimizer: Any, restore: Callable[[], None]) -> Any:
        trained_by(model, None, optimizer.step, 1)
        groups = optimizer.param_groups
        found = optimizer._init_group

        def in_the_middle(*args: Any) -> Any:
            restore()
            return found(*args)

        optimizer._init_group = in_the_middle
        found_then = trained_by(model, None, optimizer.step, 1)
        del optimizer._init_group
        return [found_then, trained_by(model, None, optimizer.step, 1), groups[0]["lr"]]

    other = build(few)
    expected = stepped(other, adamw(other), lambda: None)
    model = offloaded(few)
    optimizer = in_chunks(model)

    def restore() -> None:
        with pytest.raises(stagehand_alloc.OffloadError, match="in the middle of a step"):
            stagehand_alloc.restore(optimizer)

    assert stepped(model, optimizer, restore) == expected


def test_what_cannot_come_back_at_its_end_stays_offloaded_and_steps(gpu: Any) -> None:
    other = build(few)
    plain = adamw(other)
    expected = [trained_by(other, None, plain.step, 1), trained_by(other, None, plain.step, 1)]
    model = offloaded(few)
    optimizer = in_chunks(model)
    found = [trained_by(model, None, optimizer.step, 1)]
    gpu.fail("cuMemcpyHtoDAsync", nth=3, times=1)
    with pytest.raises(RuntimeError, match="the CUDA driver failed"):
        stagehand_alloc.restore(optimizer)
    assert [*found, trained_by(model, None, optimizer.step, 1)] == expected
    stagehand_alloc.restore(optimizer)
    assert state_of(optimizer) == state_of(plain)


def test_a_load_that_fails_half_way_is_not_trained_on() -> None:
    other = build(few)
    plain = adamw(other)
    expected = trained_by(other, None, plain.step, 1)
    model = offloaded(few)
    optimizer = in_chunks(model)
    assert trained_by(model, None, optimizer.step, 1) == expected
    saved = optimizer.state_dict()
    broken = copy.deepcopy(saved)
    broken["state"][len(broken["state"]) // 2]["exp_avg"] = torch.empty(2, device="meta")
    with pytest.raises(NotImplementedError):
        optimizer.load_state_dict(broken)
    for use in (optimizer.step, optimizer.state_dict, lambda: stagehand_alloc.restore(optimizer)):
        with pytest.raises(stagehand_alloc.OffloadError, match=r"AdamW failed half-way"):
            use()
    with pytest.raises(ValueError, match="parameter group"):  # torch's own, before all
        optimizer.load_state_dict({**saved, "param_groups": []})
    optimizer.load_state_dict(saved)
    found = trained_by(model, None, optimizer.step, 1)
    assert found == trained_by(other, None, plain.step, 1)
    assert state_of(optimizer) == state_of(plain)


# --- Autocast


def cast(model: Any, **how: Any) -> list[str]:
    """What two steps under autocast warned of."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        patch.setattr(warn_once, "said", set())
        warnings.simplefilter("always")
        for step in range(2):
            with torch.autocast("cpu", **{"dtype": torch.bfloat16, **how}):
                loss = model(tokens(step))
            loss.backward()
    return [str(one.message) for one in seen if one.category is StagehandWarning]


def test_copies_that_autocast_keeps_of_trained_weights_are_told_of_once() -> None:
    (told,) = cast(offloaded(few))
    assert "autocast keeps 1.01 MiB of torch.bfloat16 copies of trained weights" in told
    assert "cache_enabled=False" in told


def test_autocast_is_not_told_of_where_it_keeps_no_copies() -> None:
    assert cast(offloaded(few), cache_enabled=False) == []
    assert cast(offloaded(few), enabled=False) == []
    assert cast(stagehand_alloc.offload(build())) == []


@pytest.mark.parametrize("where", ["closure", "hook"])
def test_what_is_kept_is_not_restored_inside_of_a_step(where: str) -> None:
    model = offloaded()
    optimizer = stagehand_alloc.offload_optimizer(adamw(model))
    with stagehand_alloc.pool(high=30 * MIB):
        model(tokens(0)).backward()
    optimizer.step()

    def end(*_: Any) -> None:
        stagehand_alloc.restore(optimizer)

    hook = optimizer.register_step_pre_hook(end) if where == "hook" else None
    with pytest.raises(OffloadError, match="in the middle of a step"):
        optimizer.step(end if where == "closure" else None)  # type: ignore[arg-type]
    if hook is not None:
        hook.remove()
    optimizer.step()
    stagehand_alloc.restore(optimizer)
    optimizer.step()
