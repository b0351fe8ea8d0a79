"""What torch asks of activation checkpointing, asked of it inside the pool at two budgets."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from budgets import Budget, SavesAll, leaf, released
from judge import Around
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

REGION = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
EARLY = pytest.mark.parametrize("early", [True, False], ids=["early-stop", "to-the-end"])
rerun = functools.partial(checkpoint, use_reentrant=False)


def layers(count: int = 3, dropout: float = 0.0) -> list[nn.Sequential]:
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)).double()
        for _ in range(count)
    ]


def gradients_of(models: list[nn.Sequential]) -> list[Tensor | None]:
    return [one.grad for model in models for one in model.parameters()]


# --- Regions, random numbers and autocast


@REGION
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_layers_in_regions_of_their_own(budget: Budget, reentrant: bool, dropout: float) -> None:
    """With random numbers: those of the recomputation, and those after it, are the same too."""

    def program(around: Around) -> Any:
        models, a = layers(dropout=dropout), leaf()
        with around:
            h = a * 1
            for model in models:
                h = checkpoint(model, h.sin(), use_reentrant=reentrant)
            loss = h.pow(2).mean()
            del h
        released()
        loss.backward()
        return loss, a.grad, gradients_of(models), torch.rand(4)

    budget.same_as_plain(program)


@REGION
def test_without_keeping_the_random_state_the_numbers_drawn_are_torchs(
    budget: Budget, reentrant: bool
) -> None:
    def program(around: Around) -> Any:
        (model,), a = layers(1, dropout=0.5), leaf()
        with around:
            h = checkpoint(model, a.sin(), use_reentrant=reentrant, preserve_rng_state=False)
            loss = h.exp().sum()
            del h
        loss.backward()
        return loss, a.grad, torch.rand(4)

    budget.same_as_plain(program)


@REGION
def test_a_region_under_autocast_is_computed_again_under_it(
    budget: Budget, reentrant: bool
) -> None:
    def program(around: Around) -> Any:
        models, a = [model.float() for model in layers()], leaf(dtype=torch.float32)
        with around, torch.autocast("cpu", torch.bfloat16):
            h = a * 1
            for model in models:
                h = checkpoint(model, h.sin(), use_reentrant=reentrant)
            loss = h.float().pow(2).sum()
            del h
        loss.backward()
        return loss, a.grad, gradients_of(models)

    budget.same_as_plain(program)


@REGION
def test_a_sequence_cut_into_segments(budget: Budget, reentrant: bool) -> None:
    def program(around: Around) -> Any:
        models, a = layers(6), leaf()
        with around:
            h = checkpoint_sequential(models, 3, a.sin(), use_reentrant=reentrant)
            loss = h.exp().sum()
            del h
        loss.backward()
        return loss, a.grad, gradients_of(models)

    budget.same_as_plain(program)


def test_arguments_and_results_of_every_kind(budget: Budget) -> None:
    def region(pair: tuple[Tensor, list[Tensor]], *, scale: float, none: None, y: Tensor) -> Any:
        one, (two,) = pair
        fixed = (one * two).detach().exp()
        return {"sum": (one * two * scale + fixed).sin(), "none": none, "list": [y.exp(), fixed]}

    def program(around: Around) -> Any:
        a, b, c = leaf(), leaf(seed=4), leaf(seed=5)
        with around:
            out = rerun(region, (a * 2, [b * 3]), scale=0.5, none=None, y=c.cos())
            loss = out["sum"].exp().sum() + out["list"][0].sin().sum()
            assert out["none"] is None
            assert not out["list"][1].requires_grad
            del out
        loss.backward()
        return loss, a.grad, b.grad, c.grad

    budget.same_as_plain(program)


# --- Nesting, stopping early, and backward more than once


@EARLY
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("retain", [False, True], ids=["once", "retained"])
def test_regions_within_regions(budget: Budget, early: bool, depth: int, retain: bool) -> None:
    """And every function is computed again as often as in plain torch."""

    def program(around: Around) -> Any:
        a, calls = leaf(), Counter[int]()

        def nested(level: int, x: Tensor) -> Tensor:
            calls[level] += 1
            inner = rerun(nested, level - 1, x.sin()) if level else x.cos()
            return inner.exp().tanh() * x

        with around, set_checkpoint_early_stop(early):
            loss = rerun(nested, depth, a * 2).sin().sum()
        released()
        if retain:
            torch.autograd.grad(loss, a, retain_graph=True)
        loss.backward()
        return loss, a.grad, sorted(calls.items())

    budget.same_as_plain(program)


@EARLY
def test_recomputation_ends_where_torchs_does(budget: Budget, early: bool) -> None:
    def program(around: Around) -> Any:
        a, reached = leaf(), []

        def region(x: Tensor) -> Tensor:
            y = x.sin().exp()
            reached.append("saved the last")
            z = y + 1
            reached.append("the end")
            return z

        with around, set_checkpoint_early_stop(early):
            loss = rerun(region, a * 2).sum()
        loss.backward()
        assert reached.count("the end") == (1 if early else 2)
        return a.grad, reached

    budget.same_as_plain(program)


def test_double_backward_through_regions(budget: Budget) -> None:
    def program(around: Around) -> Any:
        models, a = layers(2), leaf()
        with around:
            h = rerun(models[1], rerun(models[0], a * 2).sin())
            loss = (h * h.cos()).sum()
            del h
            (slope,) = torch.autograd.grad(loss, a, create_graph=True)
            penalty = slope.pow(2).sum()
            del loss
        penalty.backward()
        return slope, a.grad, gradients_of(models)

    budget.same_as_plain(program)


def test_backward_through_a_part_of_a_region_then_through_all(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a, b = leaf(), leaf(seed=4)
        with around:
            one, two = rerun(lambda x, y: (x.sin() * y.exp(), y.cos().exp()), a * 2, b * 2)
            one, two = one.sum(), two.sin().sum()
        (partial,) = torch.autograd.grad(two, b, retain_graph=True)
        (one + two).backward()
        return partial, a.grad, b.grad

    budget.same_as_plain(program)


def test_saved_tensors_of_a_region_are_read_twice(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            y = rerun(lambda x: (x * x.sin()).exp(), a * 2)
        released()
        first, second = y.grad_fn._saved_result.clone(), y.grad_fn._saved_result.clone()
        y.sum().backward()
        return first, second, a.grad

    budget.same_as_plain(program)


# --- Together with the rest


@REGION
def test_a_custom_function_in_a_region(budget: Budget, reentrant: bool) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            one, two = checkpoint(SavesAll.apply, a * 2, 2.0, use_reentrant=reentrant)
            loss = (one * two).sum()
            del one, two
        loss.backward()
        return a.grad

    budget.same_as_plain(program)


@REGION
def test_save_on_cpu_in_a_region_and_a_region_in_save_on_cpu(
    budget: Budget, reentrant: bool
) -> None:
    def offloaded(x: Tensor) -> Tensor:
        with save_on_cpu():
            return x.sin().exp().cos()

    def program(around: Around) -> Any:
        a = leaf()
        with around:
            h = checkpoint(offloaded, a * 2, use_reentrant=reentrant)
            with save_on_cpu():
                h = checkpoint(lambda x: x.sin().exp(), h * 2, use_reentrant=reentrant)
            loss = h.exp().sin().sum()
            del h
        loss.backward()
        return a.grad

    budget.same_as_plain(program)


@REGION
def test_a_pool_within_a_region(budget: Budget, reentrant: bool) -> None:
    def program(around: Around) -> Any:
        a = leaf()

        def region(x: Tensor) -> Tensor:
            y = x.sin()
            with around:
                y = (y * 2).exp().tanh().cos()
            return y.sin().exp()

        checkpoint(region, a * 2, use_reentrant=reentrant).sum().backward()
        return a.grad

    budget.same_as_plain(program)


def test_a_selective_policy_saves_and_recomputes_what_it_does_in_plain_torch(
    budget: Budget,
) -> None:
    def program(around: Around) -> Any:
        models, a, seen = layers(2), leaf(), Counter[tuple[str, bool]]()

        def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            seen[str(op), ctx.is_recompute] += 1
            save = op in (torch.ops.aten.addmm.default, torch.ops.aten.sin.default)
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        with around:
            h = a * 2
            for model in models:
                h = rerun(lambda x, model=model: model(x).sin(), h, context_fn=contexts)
            loss = h.exp().sum()
            del h
        loss.backward()
        return a.grad, gradients_of(models), sorted(seen.items())

    budget.same_as_plain(program)


# --- Mistakes are found as without a pool


@pytest.mark.parametrize("kind", ["fewer", "more", "shape", "dtype"])
def test_a_region_that_computes_something_else_the_second_time_raises(
    budget: Budget, kind: str
) -> None:
    a, calls = leaf(), []

    def region(x: Tensor) -> Tensor:
        calls.append(kind)
        if len(calls) == 1:
            return x.sin().exp().cos() if kind == "fewer" else x.sin().exp()
        match kind:
            case "fewer":
                return x.sin()
            case "more":
                return x.sin().exp().cos().exp()
            case "shape":
                return x[:4].sin().exp()
            case _:
                return x.float().sin().exp()

    with budget.pressed(), set_checkpoint_early_stop(False):
        with budget.pool():
            loss = rerun(region, a * 2).cos().sum()
        with pytest.raises(CheckpointError):
            loss.backward()
        del loss


def test_a_determinism_check_that_is_off_is_off(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a, calls = leaf(), []

        def region(x: Tensor) -> Tensor:
            calls.append(0)
            return (x if len(calls) == 1 else x[:1]).sin().exp()  # broadcasts in backward

        with around:
            loss = rerun(region, a * 2, determinism_check="none").cos().sum()
        loss.backward()
        return len(calls), a.grad

    budget.same_as_plain(program)


def test_an_error_of_the_recomputation_reaches_the_user(budget: Budget) -> None:
    a, calls = leaf(), []

    def region(x: Tensor) -> Tensor:
        calls.append(0)
        y = x.sin()
        if len(calls) > 1:
            raise KeyError("mine")
        return y.exp()

    with budget.pressed():
        with budget.pool():
            loss = rerun(region, a * 2).cos().sum()
        with pytest.raises(KeyError, match="mine"):
            loss.backward()
        del loss


@REGION
def test_a_change_of_a_regions_input_is_found(budget: Budget, reentrant: bool) -> None:
    a = leaf()
    with budget.pressed():
        with budget.pool():
            h = a * 2
            loss = checkpoint(lambda x: x.sin().exp(), h, use_reentrant=reentrant).cos().sum()
            h.detach().add_(1)
            del h
        released()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


@REGION
def test_regions_that_never_ran_backward_leave_nothing(budget: Budget, reentrant: bool) -> None:
    a = leaf()
    with budget.pressed():
        with budget.pool():
            h = checkpoint(lambda x: x.sin().exp(), a * 2, use_reentrant=reentrant)
            loss = h.cos().sum()
        del h
        released()
        del loss
