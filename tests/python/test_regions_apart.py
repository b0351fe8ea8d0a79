"""Regions that go wrong, that end early, and that are left to torch's own checkpoint."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from regions import (
    Apply,
    Block,
    backward,
    batch,
    dropping,
    gradient,
    made,
    plainly,
    same_as_plain_torch,
    short_pool,
    the_next_step_is_right,
    when_needed,
)
from test_training_threads import in_threads
from torch import Tensor, nn
from training import Around, digest, leaves_nothing

import stagehand_alloc
from stagehand_alloc import StagehandWarning
from stagehand_alloc._step import regions as _regions
from stagehand_alloc._tell import warn_once

pytestmark = pytest.mark.usefixtures("gpu")


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
        monkeypatch.setattr(_regions._fault, "found", None)
        monkeypatch.setattr(warn_once, "said", set())

    known(lambda: "it told nothing")
    with stagehand_alloc.pool(), pytest.warns(StagehandWarning, match="it told nothing") as warned:
        assert [count_runs(when_needed) for _ in range(3)] == [2, 2, 2]
    assert len(warned) == 1
    known(lambda: [][1])
    with stagehand_alloc.pool(), pytest.warns(StagehandWarning, match="list index out of range"):
        assert count_runs(when_needed) == 2


def test_settings_of_torchs_checkpoint() -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    x = batch().requires_grad_()
    expected = torch.autograd.grad(made(Block).eval()(x).sum(), x)[0]
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
    backward(loss)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (lambda y: y.sin().cos(), lambda y: y.sin(), r"saved \d+ tensors .* in its first run"),
        (lambda y: y.sin().cos(), lambda y: y.cos().sin(), "CosBackward0; it was .*SinBackward0"),
        (
            lambda y: y.sin().cos(),
            lambda y: y[:, :8].sin().cos(),
            r"\[256, 8\].* was .*\[256, 128\]",
        ),
        (lambda y: y.sin().cos(), lambda y: y.double().sin().cos(), "float64 .* was float32"),
        (
            lambda y: y.sin().cos(),
            lambda y: y.t().contiguous().t().sin().cos(),
            r"strides \[1, 256\]",
        ),
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
            assert re.search(
                r"test_regions_apart.py:\d+, in <lambda> of Fickle\)", str(raised.value)
            )
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
            except BaseException:  # noqa: PERF203
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
            backward(loss)
            return gradient(x)

        same_as_plain_torch(program, reruns=1)


def test_an_error_in_the_second_run() -> None:
    def failing(y: Tensor) -> Tensor:
        raise KeyError("the user's")

    with leaves_nothing():
        model = made(lambda: Fickle(lambda y: F.dropout(y.sin(), 0.5).exp(), failing))
        with dropping(), pytest.raises(KeyError, match="the user's"):
            backward_of(model)
        del model
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
    failing_later: Callable[..., Tensor] = Failing.apply

    def failing(x: Tensor) -> Tensor:
        model(model(x))
        raise KeyError("in forward")

    with leaves_nothing():
        with dropping(), short_pool():
            with pytest.raises(KeyError, match="in forward"):
                when_needed(failing, when_needed(model, x))
            after = when_needed(model, x).square().sum()
            backward(after)
            del after
        with dropping():
            with short_pool():
                loss = when_needed(lambda x: failing_later(model(x).tanh()) * 2, x).sum()
            with pytest.raises(KeyError, match="in backward"):
                backward(loss)
            with short_pool():
                loss = when_needed(model, when_needed(model, x).tanh()).sum()
            backward(loss + 0)
            with short_pool():
                loss = when_needed(model, when_needed(model, x).tanh()).sum()
            del loss
        model.zero_grad(set_to_none=True)
    the_next_step_is_right()


def test_two_threads_want_what_one_call_made() -> None:
    x = batch().requires_grad_()

    def of_x(loss: Tensor) -> str:
        return digest(torch.autograd.grad(loss, x, retain_graph=True)[0])

    def slowly(x: Tensor) -> Any:
        time.sleep(0.02)  # the others come meanwhile
        return x.sin().exp(), x.cos().tanh()

    def losses(region: Apply) -> list[Tensor]:
        outputs = region(slowly, x)
        return [(outputs[i % 2] * (i + 1)).sum() for i in range(4)]

    expected = [of_x(loss) for loss in losses(plainly)]
    with leaves_nothing():
        for _ in range(5):
            with dropping(reruns=1):
                with short_pool():
                    tried = losses(when_needed)
                found = [""] * len(tried)

                def run(i: int, tried: list[Tensor] = tried, found: list[str] = found) -> None:
                    found[i] = of_x(tried[i])

                in_threads(*(functools.partial(run, i) for i in range(len(tried))))
                assert found == expected
                del tried, run
            gc.collect()
