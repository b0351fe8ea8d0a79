"""Checkpointed regions that run again only where what they saved was dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from models import BY_NAME, Recipe
from test_training_threads import in_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from training import (
    Around,
    digest,
    footprint,
    gradients,
    leaves_nothing,
    train,
)

import stagehand_alloc
from stagehand_alloc import _native, _recompute, _regions

pytestmark = pytest.mark.usefixtures("gpu")

Apply: TypeAlias = Callable[..., Any]  # runs a function as a region, or just runs it
Program: TypeAlias = Callable[[Around, Apply], Any]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def when_needed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=stagehand_alloc.when_needed, **kwargs
    )


@contextlib.contextmanager
def dropping(reruns: int | None = None) -> Iterator[None]:
    """Drop or evict every retained block at every allocation, poison it, and count."""
    before = stagehand_alloc.stats()
    _native.set_debug(evict_everything=True, poison=True)
    try:
        yield
    finally:
        _native.set_debug(evict_everything=False, poison=False)
    found = stagehand_alloc.stats().since(before)
    assert found.drops > 0 if reruns != 0 else found.drops == 0
    assert found.reruns > 0 if reruns is None else found.reruns == reruns


def short_pool() -> stagehand_alloc.Pool:
    """Of another budget than the pools with room: a plan holds for its own."""
    return stagehand_alloc.pool(high="300MiB")


@contextlib.contextmanager
def nothing_dropped() -> Iterator[None]:
    before = stagehand_alloc.stats()
    yield
    found = stagehand_alloc.stats().since(before)
    assert (found.drops, found.reruns) == (0, 0)


def same_as_plain_torch(
    program: Program, reruns: int | None = None, region: Apply = when_needed
) -> None:
    """Run `program` without regions or a pool, then with both: with room, and with all dropped."""
    expected = program(contextlib.nullcontext(), plainly)
    with leaves_nothing(), nothing_dropped():
        assert program(stagehand_alloc.pool(), region) == expected
    with leaves_nothing(), dropping(reruns):
        assert program(short_pool(), region) == expected


def trained(model: nn.Module, forward: Callable[[], Tensor], around: Around) -> list[Any]:
    """Two steps; the loss and all gradients of each, and what the model is left with."""
    found: list[Any] = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with around:
            loss = forward()
        loss.backward()
        found += [digest(loss), gradients(model)]
    model.zero_grad(set_to_none=True)
    return [*found, {name: digest(value) for name, value in model.state_dict().items()}]


class Block(nn.Module):
    """A few things to save, of enough bytes to be worth evicting."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        inner = F.gelu(self.up(x)).sin() * scale
        return x + F.dropout(self.down(inner), 0.1, self.training)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


def batch(*shape: int) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape or (256, 128))


# --- Whole models


def in_regions(recipe: Recipe, *, region: Apply = when_needed) -> Recipe:
    """The model with every child that has parameters in a region, blocks of lists each in one."""

    def build() -> nn.Module:
        model = recipe.build()
        for child in model.children():
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                if any(True for _ in part.parameters()) and not isinstance(part, nn.LSTM):
                    part.forward = functools.partial(region, part.forward)  # type: ignore[method-assign]
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
    pool = stagehand_alloc.pool("300MiB", config={"recompute": nodes})
    with leaves_nothing(), dropping():
        assert train(in_regions(BY_NAME[name]), pool) == expected


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


def scaled_block(around: Around, region: Apply) -> Any:
    model = made(Block)
    x = batch()
    return trained(model, lambda: region(model, x, scale=0.5).square().mean(), around)


def the_next_step_is_right() -> None:
    same_as_plain_torch(scaled_block, reruns=2)


def test_a_function_of_torchs_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_regions, "_warned", set())
    same_as_plain_torch(scaled_block, reruns=2, region=stagehand_alloc.checkpoint)
    with pytest.warns(UserWarning, match="runs as with"):
        x = batch().requires_grad_()
        stagehand_alloc.checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


# --- What a region may be


def test_one_module_called_three_times_and_nested_regions() -> None:
    def program(around: Around, region: Apply) -> Any:
        model = made(lambda: nn.ModuleList([Block(), Block()]))
        x = batch()

        def outer(x: Tensor) -> Tensor:
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
        model = made(lambda: nn.Sequential(Block(), Block()))
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
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        return [digest(loss), digest(x.grad), gradients(model)]

    same_as_plain_torch(program)


def test_a_gradient_inside_a_region() -> None:
    def program(around: Around, region: Apply) -> Any:
        model = made(lambda: nn.Sequential(Block(), Block()))
        x = batch().requires_grad_()

        def penalized(x: Tensor) -> Tensor:
            y = region(model[0], x).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return (region(model[1], y) * slope).sin()

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
        loss.backward()
        return [digest(loss), digest(x.grad)]

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
        loss.backward()
        return [digest(loss), digest(x.grad)]

    same_as_plain_torch(program, reruns=1)


def test_an_output_changed_in_place_afterwards() -> None:
    """Autograd allows that of torch's checkpoint, which saves nothing of the region's."""

    def program(around: Around, region: Apply) -> Any:
        x = batch().requires_grad_()
        with around:
            y = region(lambda x: (x.sin() * 2).sigmoid(), x)
            y.add_(1.0)
            loss = y.square().sum()
        loss.backward()
        return [digest(loss), digest(x.grad)]

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
        return model(x.mul_(2.0)).tanh()

    def program(around: Around, region: Apply, evicting: Around) -> Any:
        model.zero_grad(set_to_none=True)
        with around:
            y = region(changing, batch(192, 128).requires_grad_() * 3)
            with evicting:
                loss = y.square().sum()
        loss.backward()
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
        loss.backward()
        return digest(x.grad)

    same_as_plain_torch(program, reruns=0)


def test_what_two_regions_save_never_makes_one_run_for_the_other() -> None:
    runs: list[str] = []

    def first(x: Tensor) -> Tensor:
        runs.append("first")
        return x.sin().exp()  # saves what it returns

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

    same_as_plain_torch(program)


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
            loss.backward()
            model.zero_grad(set_to_none=True)
            del loss
        after = stagehand_alloc.stats()
        assert (after.live, after.records) == (before.live, before.records)
    finally:
        gc.enable()


# --- Where torch's checkpoint is left as it is


def count_runs(region: Apply) -> int:
    runs: list[int] = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin().cos()

    x = batch().requires_grad_()
    region(function, x).sum().backward()
    torch.testing.assert_close(x.grad, -x.detach().sin().sin() * x.detach().cos())
    return len(runs)


def test_outside_of_a_pool_it_is_torchs_checkpoint() -> None:
    assert count_runs(when_needed) == 2
    assert count_runs(stagehand_alloc.checkpoint) == 2
    with stagehand_alloc.pool():
        assert count_runs(when_needed) == 1
        assert count_runs(functools.partial(stagehand_alloc.checkpoint, context_fn=_nothing)) == 2


def _nothing() -> Any:
    return contextlib.nullcontext(), contextlib.nullcontext()


def test_of_an_unknown_torch_it_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(tried: Callable[[], str]) -> None:
        monkeypatch.setattr(_regions, "_try_out", tried)
        monkeypatch.setattr(_regions, "_fault", None)
        monkeypatch.setattr(_regions, "_warned", set())

    known(lambda: "it told nothing")
    with stagehand_alloc.pool(), pytest.warns(UserWarning, match="it told nothing") as warned:
        assert [count_runs(when_needed) for _ in range(3)] == [2, 2, 2]
    assert len(warned) == 1
    known(lambda: [][1])
    with stagehand_alloc.pool(), pytest.warns(UserWarning, match="list index out of range"):
        assert count_runs(when_needed) == 2


def test_settings_of_torchs_checkpoint() -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    x = batch().requires_grad_()
    expected = torch.autograd.grad(Block.forward(made(Block).eval(), x).sum(), x)[0]
    model = made(Block).eval()
    for settings in ({"preserve_rng_state": False}, {"determinism_check": "none"}):
        with leaves_nothing(), dropping(reruns=1):
            with short_pool():
                loss = when_needed(model, x, **settings).sum()
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
            del loss
    with leaves_nothing(), dropping(reruns=1):
        with short_pool(), set_checkpoint_early_stop(False):
            loss = when_needed(model, x).sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        del loss


# --- What goes wrong


class Fickle(nn.Module):
    """Does something else in each run."""

    def __init__(self, *ways: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ways = list(ways)
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.ways.pop(0)(y)


def backward_of(model: Callable[..., Tensor], **settings: Any) -> Tensor:
    x = batch().requires_grad_()
    with short_pool():
        loss = when_needed(model, x, **settings).square().sum()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (lambda y: y.sin().cos(), lambda y: y.sin(), r"saved \d+ tensors .* in its first run"),
        (lambda y: y.sin().cos(), lambda y: y.cos().sin(), "CosBackward0; it was .*SinBackward0"),
        (lambda y: y.sin().cos(), lambda y: y[:, :8].sin().cos(), r"\[256, 8\].* was .*\[256, 128\]"),
        (lambda y: y.sin().cos(), lambda y: y.double().sin().cos(), "float64 .* was float32"),
        (lambda y: y.sin().cos(), lambda y: y.t().contiguous().t().sin().cos(), r"strides \[1, 256\]"),
        (lambda y: y.sin().cos(), lambda y: y.mul_(1.0).sin().cos(), "changed in place 1 times"),
        (lambda y: y.sin().cos(), lambda y: y.exp().sin().cos(), "ExpBackward0|SinBackward0"),
    ],
    ids=["fewer", "another_op", "shape", "dtype", "strides", "in_place", "more"],
)
def test_another_run_that_differs_is_told(
    first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], words: str
) -> None:
    with leaves_nothing():
        with dropping(), pytest.raises(stagehand_alloc.RecomputeError, match=words) as raised:
            backward_of(made(lambda: Fickle(first, then)))
        assert "random numbers from torch" in str(raised.value)
        if "its first run" not in words:
            assert re.search(r"test_regions.py:\d+, in <lambda> of Fickle\)", str(raised.value))
        del raised
    the_next_step_is_right()  # and what comes next is right


def test_functions_may_catch_errors() -> None:
    def swallowing(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            y = y.exp()
            y = y.cos()
        except Exception:
            y = y * 0.0
        return y

    def swallowing_all(x: Tensor) -> Tensor:
        y = x.sin()
        for op in (torch.exp, torch.cos):
            try:
                y = op(y)
            except BaseException:
                y = y * 0.0
        return y

    def changing_it(x: Tensor) -> Tensor:
        try:
            return x.sin().exp().cos()
        except BaseException as error:
            raise ValueError from error

    for function in (swallowing, swallowing_all, changing_it):

        def program(
            around: Around, region: Apply, function: Callable[[Tensor], Tensor] = function
        ) -> Any:
            x = batch().requires_grad_()
            with around:
                loss = region(function, x).square().sum()
            loss.backward()
            return digest(x.grad)

        same_as_plain_torch(program, reruns=1)


def test_an_error_in_the_second_run() -> None:
    def failing(y: Tensor) -> Tensor:
        raise KeyError("the user's")

    torch.manual_seed(3)
    state = torch.get_rng_state()
    with leaves_nothing():
        with dropping(), pytest.raises(KeyError, match="the user's") as raised:
            torch.set_rng_state(state)
            backward_of(made(lambda: Fickle(lambda y: F.dropout(y.sin(), 0.5).exp(), failing)))
        del raised
        assert _regions._thread.again == 0
    the_next_step_is_right()


def test_an_error_in_the_first_run_or_in_backward_or_no_backward_at_all() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise KeyError("in backward")

    model = made(Block)
    x = batch()

    def failing(x: Tensor) -> Tensor:
        y = model(model(x))
        raise KeyError("in forward")
        return y

    with leaves_nothing():
        with dropping(), short_pool():
            with pytest.raises(KeyError, match="in forward"):
                when_needed(failing, when_needed(model, x))
            after = when_needed(model, x).square().sum()
            after.backward()
            del after
        with dropping():
            with short_pool():
                loss = when_needed(lambda x: Failing.apply(model(x).tanh()) * 2, x).sum()
            with pytest.raises(KeyError, match="in backward"):
                loss.backward()
            with short_pool():
                loss = when_needed(model, when_needed(model, x).tanh()).sum()
            (loss + 0).backward()
            with short_pool():
                loss = when_needed(model, when_needed(model, x).tanh()).sum()
            del loss
        model.zero_grad(set_to_none=True)
    the_next_step_is_right()


def test_two_threads_want_what_one_call_made() -> None:
    model = made(Block)
    x = batch().requires_grad_()

    def gradient(loss: Tensor) -> str:
        return digest(torch.autograd.grad(loss, x, retain_graph=True)[0])

    def losses(region: Apply) -> list[Tensor]:
        torch.manual_seed(1)
        y = region(model, x).tanh()
        return [(y * scale).square().sum() for scale in (1.0, 2.0, 3.0, 4.0)]

    expected = [gradient(loss) for loss in losses(plainly)]
    with leaves_nothing():
        for _ in range(5):
            with dropping(reruns=1):
                with short_pool():
                    tried = losses(when_needed)
                found = [""] * len(tried)

                def run(i: int, tried: list[Tensor] = tried, found: list[str] = found) -> None:
                    found[i] = gradient(tried[i])

                in_threads(*(functools.partial(run, i) for i in range(len(tried))))
                assert found == expected
                del tried, run
            gc.collect()
