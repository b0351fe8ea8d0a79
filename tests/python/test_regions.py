"""Checkpointed regions that run again only where what they saved was dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import BY_NAME, Recipe
from regions import (
    Apply,
    Block,
    backward,
    batch,
    dropping,
    gradient,
    made,
    nothing_dropped,
    plainly,
    same_as_plain_torch,
    scaled_block,
    short_pool,
    trained,
    when_needed,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from training import Around, digest, footprint, gradients, leaves_nothing, train

import stagehand_alloc
from stagehand_alloc import _native
from stagehand_alloc._step import proofs as _recompute
from stagehand_alloc._step import regions as _regions
from stagehand_alloc._tell import warn_once

pytestmark = pytest.mark.usefixtures("gpu")

# --- Whole models


def in_regions(recipe: Recipe, *, region: Apply = when_needed) -> Recipe:
    """The model with every child that has parameters in a region, blocks of lists each in one."""

    def build() -> nn.Module:
        model = recipe.build()
        for child in model.children():
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                if any(True for _ in part.parameters()) and not isinstance(part, nn.LSTM):
                    part.forward = functools.partial(region, part.forward)
        return model

    return dataclasses.replace(recipe, build=build)


MODELS = ("gpt", "gpt_dropout", "conv_batchnorm")


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_plain_torch_and_runs_nothing_twice_with_room(name: str) -> None:
    expected = train(BY_NAME[name])
    with leaves_nothing(), nothing_dropped():
        assert train(in_regions(BY_NAME[name]), stagehand_alloc.pool()) == expected


@pytest.mark.parametrize("nodes", [False, True], ids=["regions", "regions_and_nodes"])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_plain_torch_with_all_dropped_that_can_be(name: str, nodes: bool) -> None:
    assert not nodes or _recompute.load() == "loaded"
    expected = train(BY_NAME[name])
    with leaves_nothing(), dropping():  # the pool goes: it has a byte for each open proof
        pool = stagehand_alloc.pool("300MiB", recompute="nodes" if nodes else False)
        assert train(in_regions(BY_NAME[name]), pool) == expected
        del pool


@pytest.mark.parametrize("share", [0.75, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_plain_torch_inside_a_budget(name: str, share: float) -> None:
    expected = train(BY_NAME[name])
    high = footprint(BY_NAME[name]).high(share)
    before = stagehand_alloc.stats()
    with leaves_nothing():
        pool = stagehand_alloc.pool(high=high)
        assert train(in_regions(BY_NAME[name]), pool) == expected
    assert stagehand_alloc.stats().since(before).drops > 0


def test_the_torch_wrapper_takes_it() -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    def program(around: Around, region: Apply) -> Any:
        model = made(lambda: nn.Sequential(Block(), Block(), Block()))
        if region is not plainly:
            wrapper.apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=functools.partial(
                    wrapper.checkpoint_wrapper,
                    checkpoint_impl=wrapper.CheckpointImpl.NO_REENTRANT,
                    context_fn=stagehand_alloc.when_needed,
                ),
                check_fn=lambda module: isinstance(module, Block),
            )
        x = batch()
        found = trained(model, lambda: model(x).square().mean(), around)
        return [found[0], list(found[1].values()), found[2], list(found[3].values())]

    same_as_plain_torch(program, reruns=6)


def test_a_function_of_torchs_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "said", set())
    same_as_plain_torch(scaled_block, reruns=2, region=stagehand_alloc.checkpoint)
    x = batch().requires_grad_()
    with pytest.warns(stagehand_alloc.StagehandWarning, match="runs as with"):
        y = stagehand_alloc.checkpoint(torch.sin, x, use_reentrant=True)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


# --- What a region may be


def test_one_module_called_three_times_and_nested_regions() -> None:
    def program(around: Around, region: Apply) -> Any:
        model = nn.Sequential(made(Block), made(Block))
        x = batch()

        def outer(x: Tensor) -> Any:
            y = F.gelu(region(model[0], x)).sin()
            return region(model[1], y, scale=0.3).tanh() * y

        def forward() -> Tensor:
            y = x
            for _ in range(3):
                y = region(outer, y)
            return y.square().mean()

        return trained(model, forward, around)

    same_as_plain_torch(program)


def test_autocast() -> None:
    def program(around: Around, region: Apply) -> Any:
        model = nn.Sequential(made(Block), made(Block))
        x = batch()

        def forward() -> Tensor:
            y = x
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for block in model:
                    y = region(block, y)
            return y.float().square().mean()

        return trained(model, forward, around)

    same_as_plain_torch(program, reruns=4)


def test_backward_twice_and_a_gradient_of_gradients() -> None:
    def program(around: Around, region: Apply) -> Any:
        model = made(Block)
        x = batch().requires_grad_()
        with around:
            loss = region(model, x).tanh().square().mean()
        backward(loss, retain_graph=True)
        backward(loss, retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        backward(slope.square().sum())
        return [digest(loss), gradient(x), gradients(model)]

    same_as_plain_torch(program)


def test_a_gradient_inside_a_region() -> None:
    def program(around: Around, region: Apply) -> Any:
        model = nn.Sequential(made(Block), made(Block))
        x = batch().requires_grad_()

        def penalized(x: Tensor) -> Tensor:
            y = region(model[0], x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            z: Tensor = (region(model[1], y) * slope).sin()
            return z

        return trained(model, lambda: region(penalized, x * 2).square().mean(), around)

    same_as_plain_torch(program)


def test_views_and_several_outputs_and_things_that_are_no_tensors() -> None:
    def several(x: Tensor, words: dict[str, Any], none: None) -> tuple[Any, ...]:
        wide = (x * words["by"]).sin()
        left, right = wide.chunk(2, dim=1)
        return left.exp(), right.t().cos(), none, wide, "word"

    def program(around: Around, region: Apply) -> Any:
        x = batch().requires_grad_()
        with around:
            a, b, _, c, word = region(several, x, {"by": 3.0}, None)
            loss = (a.t() * b).sum() + c.square().sum()
        assert word == "word"
        backward(loss)
        return [digest(loss), gradient(x)]

    same_as_plain_torch(program, reruns=1)


def test_in_place_changes_inside() -> None:
    def changing(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(2.0)
        z = y.exp()
        y[:, :8].add_(z[:, :8].detach())
        return (F.relu(y.cos(), inplace=True) * z).tanh()

    def program(around: Around, region: Apply) -> Any:
        x = batch().requires_grad_()
        with around:
            loss = region(changing, x).square().sum()
        backward(loss)
        return [digest(loss), gradient(x)]

    same_as_plain_torch(program, reruns=1)


def test_a_storage_saved_before_and_after_a_change() -> None:
    def changing(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = (x * 0.5).tanh()
        y = x * 1.5
        unused = y.square()  # saves what is not asked for any more
        return first, unused, y.mul_(2.0).cos()

    def program(around: Around, region: Apply) -> Any:
        x = batch().requires_grad_()
        with around:
            first, unused, last = region(changing, x)
            first, last = first.sum(), last.sum()
        backward(first)
        backward(last)
        del unused
        return [digest(last), gradient(x)]

    same_as_plain_torch(program)


def test_an_output_changed_in_place_afterwards() -> None:
    """Autograd allows that of torch's checkpoint, which saves nothing of the region's."""

    def program(around: Around, region: Apply) -> Any:
        x = batch().requires_grad_()
        with around:
            y = region(lambda x: x.sin().exp().sigmoid(), x)  # run for twice in one backward
            y.add_(1.0)
            loss = y.square().sum()
        backward(loss)
        return [digest(loss), gradient(x)]

    expected = program(
        contextlib.nullcontext(), functools.partial(torch_checkpoint, use_reentrant=False)
    )
    with leaves_nothing():
        assert program(stagehand_alloc.pool(), when_needed) == expected
    _native.set_debug(evict_everything=True, poison=True)
    try:
        with leaves_nothing():
            assert program(short_pool(), when_needed) == expected
    finally:
        _native.set_debug(evict_everything=False, poison=False)


def test_an_input_changed_in_place_is_not_run_again_for() -> None:
    model = made(Block)

    def changing(x: Tensor) -> Tensor:
        y: Tensor = model(x.mul_(2.0)).tanh()
        return y

    def program(around: Around, region: Apply, evicting: Around) -> Any:
        model.zero_grad(set_to_none=True)
        with around:
            y = region(changing, batch(192, 128).requires_grad_() * 3)
            with evicting:
                loss = y.square().sum()
        backward(loss)
        return [digest(loss), gradients(model)]

    expected = program(contextlib.nullcontext(), plainly, contextlib.nullcontext())
    model.zero_grad(set_to_none=True)
    with leaves_nothing():
        assert program(stagehand_alloc.pool(), when_needed, dropping(reruns=0)) == expected
        model.zero_grad(set_to_none=True)


# --- What is a region's, and what is not


def test_what_is_older_than_the_call_is_never_dropped() -> None:
    def program(around: Around, region: Apply) -> Any:
        x = batch().requires_grad_()
        with around:
            once = [x.detach().cos()]  # not there for a second run
            loss = region(lambda x: x * once.pop(), x).sum()
        backward(loss)
        return gradient(x)

    same_as_plain_torch(program, reruns=0)


@pytest.mark.parametrize("nodes", [False, True], ids=["regions", "regions_and_nodes"])
def test_what_two_regions_save_never_makes_one_run_for_the_other(nodes: bool) -> None:
    runs: list[str] = []

    def first(x: Tensor) -> Tensor:
        runs.append("first")
        return x.exp() * x.tanh()  # whose node could make it of what the region saves

    def second(weight: Tensor, y: Tensor) -> Tensor:
        runs.append("second")
        return (weight * y).sin()

    def program(around: Around, region: Apply) -> Any:
        x, weight = batch().requires_grad_(), batch().requires_grad_()
        with around:
            loss = region(second, weight, region(first, x)).sum()
        runs.clear()
        (of_weight,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert "first" not in runs
        (of_x,) = torch.autograd.grad(loss, x)
        return [digest(of_weight), digest(of_x)]

    assert not nodes or _recompute.load() == "loaded"
    same_as_plain_torch(program, nodes=nodes)


def test_a_call_holds_no_memory_of_its_rerun() -> None:
    """Without waiting for Python's collector, whose turn may come late."""
    model = made(Block)
    gc.collect()
    gc.disable()
    try:
        before = stagehand_alloc.stats()
        with dropping(reruns=1), short_pool():
            y = when_needed(model, batch())
            loss = y.square().sum()
            del y
            backward(loss)
            model.zero_grad(set_to_none=True)
            del loss
        after = stagehand_alloc.stats()
        assert (after.live, after.records) == (before.live, before.records)
    finally:
        gc.enable()


def test_what_a_rerun_takes_is_known_of_the_region() -> None:
    """torch asks for a function's inputs first: what that takes, or makes run, is not of it."""
    blocks = [made(Block) for _ in range(3)]
    pool = short_pool()
    for _ in range(3):
        y = batch()
        with dropping(), pool:
            for block in blocks:
                y = when_needed(block, y)
            loss = y.square().sum()
            del y
            backward(loss)
            del loss
        for block in blocks:
            block.zero_grad(set_to_none=True)
    with pool:  # the step before is over
        pass
    took = {row[4]: row[-1] for row in _native.step_shape(0)["records"] if row[-1] > 0}
    assert len(took) == len(blocks)
    assert max(took.values()) > 1


# --- Modules that a region reaches in other ways, and threads


class _Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, x: Tensor) -> Tensor:
        return self.module(x).sin().exp()  # type: ignore[no-any-return]


_named: nn.Module | None = None


def _through_a_name(x: Tensor) -> Tensor:
    assert _named is not None
    return _named(x).sin().exp()  # type: ignore[no-any-return]


def _given(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sin().exp()  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["closure", "argument", "name", "attribute", "dict"])
def test_statistics_count_once_however_the_module_is_reached(way: str) -> None:
    def run(around: Around, region: Apply) -> tuple[str, int]:
        global _named
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
        _named, held = model, {"model": model}
        x = torch.randn(512, 256)
        with around:
            y = {
                "closure": lambda: region(lambda x: model(x).sin().exp(), x),
                "argument": lambda: region(_given, model, x),
                "name": lambda: region(_through_a_name, x),
                "attribute": lambda: region(_Holder(model).run, x),
                "dict": lambda: region(lambda x: held["model"](x).sin().exp(), x),
            }[way]()
            loss = y.square().mean()
        backward(loss)
        _named = None
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        return digest(norm.running_mean), int(norm.num_batches_tracked)

    expected = run(contextlib.nullcontext(), plainly)
    with dropping():
        assert run(short_pool(), when_needed) == expected


def test_two_threads_that_run_one_module_again_leave_it_its_own_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
    statistics = model[1].running_mean
    inside = threading.Barrier(2, timeout=20)
    forward = True

    def slow(x: Tensor) -> Tensor:
        y: Tensor = model(x).sin()
        if not forward:
            with contextlib.suppress(threading.BrokenBarrierError):
                inside.wait()  # both re-runs have their copies
        return y.exp()

    with dropping():
        with short_pool():
            losses = [when_needed(slow, batch(512, 128)).square().sum() for _ in range(2)]
            torch.empty(9)
        forward = False
        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert model[1].running_mean is statistics
    assert int(model[1].num_batches_tracked) == 2  # type: ignore[arg-type]
    assert not _regions._aside.modules


def test_a_nested_checkpoint_with_backwards_inside() -> None:
    def penalized(x: Tensor, w: Tensor) -> Tensor:
        h = torch_checkpoint(lambda x, w: (x * w).sin().exp(), x, w, use_reentrant=False)
        (one,) = torch.autograd.grad(h.sum(), x, create_graph=True, retain_graph=True)
        (two,) = torch.autograd.grad((h * h).sum(), x, create_graph=True)
        y: Tensor = (one * two).tanh() + h
        return y

    def program(around: Around, region: Apply) -> Any:
        x, w = batch().requires_grad_(), batch(256, 128).requires_grad_()
        with around:
            loss = region(penalized, x * 1, w).square().mean()
            torch.empty(9)
        backward(loss)
        return [digest(loss), gradient(x), gradient(w)]

    same_as_plain_torch(program)


def test_what_runs_under_somebodys_mode_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(_regions._fault, "found", None)
    x = batch().requires_grad_()
    with stagehand_alloc.pool(), FlopCounterMode(display=False):
        loss = when_needed(torch.sin, x).sum()
    assert _regions._fault.found is None
    backward(loss)
    torch.testing.assert_close(x.grad, x.detach().cos())
    with stagehand_alloc.pool():
        assert _regions.takes_over()
    assert _regions._fault.found == ""
