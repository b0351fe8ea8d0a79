"""Custom autograd Functions, changes in place and anomaly mode: as torch has them, in a pool."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from budgets import Budget, SavesAll, leaf, released
from judge import Around
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# --- Custom Functions


@pytest.mark.parametrize("second", [False, True], ids=["once", "twice"])
def test_a_function_that_saves_inputs_outputs_and_intermediates(
    budget: Budget, second: bool
) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            result, middle = SavesAll.apply(a * 2, 3.0)
            loss = (result * middle).sum()
            del result, middle
            (first,) = torch.autograd.grad(loss, a, create_graph=second, retain_graph=True)
            slope = first.pow(2).sum() if second else loss
        slope.backward()
        return first, a.grad

    budget.same_as_plain(program)


class WithContextSetUpApart(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, y, output = ctx.saved_tensors
        return grad * y.exp(), grad * output


class ChangesItsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class PicksOneOfMany(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        values, places = x.max(dim=1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.width = x.shape[1]
        return values, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, none: Any) -> Tensor:
        assert none is None
        (places,) = ctx.saved_tensors
        return torch.nn.functional.one_hot(places, ctx.width) * grad.unsqueeze(1)


@pytest.mark.parametrize("kind", ["setup-context", "dirty", "non-differentiable"])
def test_functions_of_every_kind_have_their_gradients(budget: Budget, kind: str) -> None:
    calls = {
        "setup-context": lambda h: WithContextSetUpApart.apply(h.sin(), h.cos()),
        "dirty": lambda h: ChangesItsInput.apply(h * 1),
        "non-differentiable": lambda h: PicksOneOfMany.apply(h.sin())[0],
    }

    def program(around: Around) -> Any:
        a = leaf()
        with around:
            loss = calls[kind](a * 2).cos().exp().sum()
        loss.backward()
        return a.grad

    budget.same_as_plain(program)


def test_a_function_that_runs_autograd_within_its_own_backward(budget: Budget) -> None:
    class Recomputes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin().exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad(x.sin().exp(), x, grad)[0]

    def program(around: Around) -> Any:
        a = leaf()
        with around:
            loss = Recomputes.apply(Recomputes.apply(a * 2)).sum()
        loss.backward()
        return a.grad

    budget.same_as_plain(program)


def test_a_functions_own_error_in_backward_reaches_the_user_and_leaves_nothing(
    budget: Budget,
) -> None:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert ctx.saved_tensors[0].shape == grad.shape
            raise KeyError("mine")

    a = leaf()
    with budget.pressed(), budget.pool():
        loss = Fails.apply(a * 2).sin().cos().sum()
        with pytest.raises(KeyError, match="mine"):
            loss.backward()
        del loss


class GivesBackWhatItSaved(Function):
    """Its gradient was computed in forward, as in fused losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return (x * gradient).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("held", [True, False], ids=["held-by-the-user", "only-in-the-graph"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_saved_tensor_returned_as_a_gradient_is_not_added_to(
    budget: Budget, held: bool, times: int
) -> None:
    """Another consumer's gradient is added to it: to a copy, where anybody else may look."""

    def program(around: Around) -> Any:
        x = leaf()
        kept = []
        with around:
            h = x * 1
            other = (h * 5).sum()
            gradient = leaf(seed=9).detach() + 1
            loss = other + GivesBackWhatItSaved.apply(h, gradient)
            kept = [gradient] if held else []
            del h, gradient
        released()
        grads = [
            torch.autograd.grad(loss, x, retain_graph=at + 1 < times)[0] for at in range(times)
        ]
        return grads, [one.clone() for one in kept] or [0]  # type: ignore[list-item]

    budget.same_as_plain(program, saves=not held)


@pytest.mark.parametrize("held", [True, False], ids=["held-by-the-user", "only-in-the-graph"])
def test_two_nodes_that_saved_a_tensor_which_one_returns_as_a_gradient(
    budget: Budget, held: bool
) -> None:
    def program(around: Around) -> Any:
        x = leaf()
        kept = []
        with around:
            h = x * 1
            gradient = leaf(seed=9).detach() + 1
            first = (h * gradient).sum() + (h * 5).sum()  # runs last in backward
            loss = first + GivesBackWhatItSaved.apply(h, gradient)
            kept = [gradient] if held else []
            del h, gradient
        released()
        loss.backward()
        return x.grad, [one.clone() for one in kept] or [0]  # type: ignore[list-item]

    budget.same_as_plain(program, saves=not held)


# --- Changes in place


@pytest.mark.parametrize("hold", [True, False], ids=["held", "only-in-the-graph"])
@pytest.mark.parametrize("through", ["the tensor", "a view", "a base", "detach", "out="])
def test_a_change_after_saving_is_found_whichever_name_it_went_through(
    budget: Budget, through: str, hold: bool
) -> None:
    a = leaf()
    with budget.pressed(saves=not hold):
        with budget.pool():
            base = a.exp()
            h = base[:16] if through == "a base" else base
            loss = (h.sin() * 2).sum()
            with torch.no_grad():
                match through:
                    case "a view":
                        h[3:5].zero_()
                    case "a base":
                        base.mul_(2)
                    case "detach":
                        h.detach().add_(1)
                    case "out=":
                        torch.ones(h.shape, dtype=h.dtype).add(1)
                        torch.add(h, 1, out=h)
                    case _:
                        h.add_(1)
            kept = [base, h] if hold else []
            del base, h
        released()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss, kept


def test_a_change_before_saving_and_of_a_copy_is_none(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            h = a * 2
            h.mul_(3).add_(1)
            twin = h.clone()
            loss = h.sin().exp().sum() + twin.mul_(2).sum()
            twin.detach().zero_()
            del h, twin
        loss.backward()
        return a.grad

    budget.same_as_plain(program)


def test_a_change_between_two_backwards_of_a_retained_graph_is_found(budget: Budget) -> None:
    a = leaf()
    with budget.pressed():
        with budget.pool():
            h = a * 2
            loss = h.sin().exp().sum()
        loss.backward(retain_graph=True)
        h.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


def test_what_has_been_unpacked_counts_changes_apart_from_other_graphs(budget: Budget) -> None:
    """A change of one saved tensor says nothing about another one."""

    def program(around: Around) -> Any:
        a, b = leaf(), leaf(seed=6)
        with around:
            one, other = a * 2, b * 2
            first, second = one.sin().exp().sum(), other.sin().exp().sum()
            one.detach().add_(1)
            del one, other
        second.backward()
        del first
        return b.grad

    budget.same_as_plain(program)


# --- Anomaly mode


@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_mode_with_nothing_anomalous_changes_nothing(
    budget: Budget, check_nan: bool
) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with torch.autograd.set_detect_anomaly(True, check_nan=check_nan):
            with around:
                loss = (a * 2).exp().sin().pow(2).sum()
            loss.backward()
        return a.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that anomaly mode is slow
        budget.same_as_plain(program)


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_names_the_function_that_made_a_nan(budget: Budget) -> None:
    a = leaf()
    with budget.pressed(), torch.autograd.set_detect_anomaly(True):
        with budget.pool():
            loss = (a * 0).sqrt().exp().sum() * 0
        with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
            loss.backward()
        del loss


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_shows_where_forward_saved_what_was_changed(budget: Budget) -> None:
    a = leaf()
    with budget.pressed(), torch.autograd.set_detect_anomaly(True):
        with budget.pool():
            h = a.exp()
            loss = h.sin().sum()
            h.detach().zero_()
            del h
        released()
        with (
            pytest.raises(RuntimeError, match="modified by an inplace operation"),
            pytest.warns(UserWarning, match=r"h\.sin"),
        ):
            loss.backward()
        del loss
