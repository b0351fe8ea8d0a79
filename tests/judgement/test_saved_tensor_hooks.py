"""What torch asks of saved-tensor hooks and of `save_on_cpu`, asked of the pool at two budgets."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import judge
import pytest
import torch
from budgets import Budget, leaf, released
from judge import Around
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrize

import stagehand_alloc

# --- What is saved comes back


def test_an_input_and_an_output_that_were_saved_have_their_values_on_the_node(
    budget: Budget,
) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            h = a + 1
            product, power = h * h, (a * 1).exp()
        del h
        released()
        node, output = product.grad_fn, power.grad_fn
        seen = [node._saved_self.clone(), node._saved_other.clone(), output._saved_result.clone()]  # type: ignore[attr-defined]
        (product.sum() + power.sum()).backward()
        return seen, a.grad

    budget.same_as_plain(program)


def test_one_tensor_saved_by_many_nodes_and_twice_by_one(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            h = a.sin()
            loss = (h * h).sum() + (h * h.cos()).sum() + h.pow(3).sum() + (h @ h.t()).sum()
            del h
        released()
        loss.backward()
        return loss, a.grad

    budget.same_as_plain(program)


@pytest.mark.parametrize("cut", ["transpose", "slice", "expand", "diagonal", "overlapping", "conj"])
def test_views_come_back_with_their_values_and_layout(budget: Budget, cut: str) -> None:
    cuts = {
        "transpose": lambda h: h.t(),
        "slice": lambda h: h[3:17:2, 1:],
        "expand": lambda h: h[:1].expand(16, 8),
        "diagonal": lambda h: h.diagonal(),
        "overlapping": lambda h: h.flatten().unfold(0, 16, 5),
        "conj": lambda h: torch.complex(h, h + 1).conj(),
    }

    def program(around: Around) -> Any:
        a = leaf()
        with around:
            h = a.exp()
            view = cuts[cut](h)
            product = view * view.sin()
            loss = torch.view_as_real(product).sum() if product.is_complex() else product.sum()
        node = product.grad_fn
        del h, view, product
        released()
        strides = node._saved_self.stride(), node._saved_self.is_conj()
        loss.backward()
        return loss, a.grad, strides

    budget.same_as_plain(program)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
def test_every_floating_dtype_comes_back_as_itself(budget: Budget, dtype: torch.dtype) -> None:
    def program(around: Around) -> Any:
        a = leaf(16, 16, dtype=dtype)
        with around:
            product = (a * 3) * (a + 2)
            loss = product.abs().sum()
        saved = product.grad_fn._saved_self.dtype  # type: ignore[attr-defined]
        del product
        loss.backward()
        return a.grad, str(saved)

    budget.same_as_plain(program)


def test_sparse_tensors_that_are_saved_have_their_gradients(budget: Budget) -> None:
    def program(around: Around) -> Any:
        dense = leaf(8, 8)
        index = torch.tensor([[0, 1, 1, 7], [2, 0, 5, 7]])
        values = leaf(4, seed=5)
        with around:
            sparse = torch.sparse_coo_tensor(index, values * 2, (8, 8))
            loss = torch.sparse.mm(sparse, dense * 3).pow(2).sum()
            del sparse
        released()
        loss.backward()
        return values.grad, dense.grad

    budget.same_as_plain(program)


def test_a_tensor_saved_without_elements_or_without_dimensions_comes_back(budget: Budget) -> None:
    def program(around: Around) -> Any:
        empty, scalar = leaf(0, 5), leaf(1).detach().squeeze().requires_grad_()
        with around:
            loss = (empty.exp() * empty.sin()).sum() + (scalar * 2).exp().sin() * (scalar + 1)
        released()
        loss.backward()
        return empty.grad, scalar.grad

    budget.same_as_plain(program)


def test_a_leaf_and_a_parameter_that_were_saved_come_back_as_themselves(budget: Budget) -> None:
    a = leaf()
    with budget.pressed(saves=False), budget.pool():
        product = a * a
        assert product.grad_fn is not None
        assert product.grad_fn._saved_self.data_ptr() == a.data_ptr()  # type: ignore[attr-defined]
        product.sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, 2 * a.detach())


def test_what_was_read_from_a_node_keeps_its_graph(budget: Budget) -> None:
    """A saved tensor read from its node can be differentiated like the tensor that was saved."""

    def program(around: Around) -> Any:
        a = leaf()
        with around:
            h = a * 2
            product = h * h.sin()
        del h
        released()
        saved = product.grad_fn._saved_self  # type: ignore[attr-defined]
        (through,) = torch.autograd.grad(saved.pow(2).sum(), a, retain_graph=True)
        product.sum().backward()
        return saved.requires_grad, through, a.grad

    budget.same_as_plain(program)


# --- When hooks apply


def test_only_what_is_saved_inside_is_moved(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        before = (a * 2).exp().sin()
        with around:
            inside = before.cos().exp().tanh().cos().exp()
        packed = stagehand_alloc.stats().activations_saved
        after = inside.sin().exp()
        assert stagehand_alloc.stats().activations_saved == packed
        del before, inside
        after.sum().backward()
        return after, a.grad

    budget.same_as_plain(program)


def test_an_error_inside_ends_the_pool_and_leaves_no_hooks(budget: Budget) -> None:
    a = leaf()
    with budget.pressed(saves=False):
        with pytest.raises(KeyError, match="mine"), budget.pool():
            ((a * 2).exp(), {}["mine"])  # type: ignore[index]
        packed = stagehand_alloc.stats().activations_saved
        (a * 2).exp().sin().sum().backward()
        assert stagehand_alloc.stats().activations_saved == packed


def test_hooks_of_a_user_inside_win_and_the_pools_come_back_after_them(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a, packed = leaf(), []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tuple(tensor.shape))
            return tensor * 2

        with around:
            h = (a * 2).exp()
            with saved_tensors_hooks(pack, lambda tensor: tensor / 2):
                h = h.sin().cos()
            loss = h.tanh().exp().sum()
            del h
        loss.backward()
        return len(packed), a.grad

    budget.same_as_plain(program)


def test_a_pool_cannot_be_entered_where_hooks_are_disabled(budget: Budget) -> None:
    with (
        disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        budget.pool(),
    ):
        pass
    with budget.pressed():
        a = leaf()
        with budget.pool():
            loss = (a * 2).exp().sin().sum()
        loss.backward()


def test_another_thread_does_not_see_the_pools_hooks(budget: Budget) -> None:
    seen: list[int] = []

    def work() -> None:
        before = stagehand_alloc.stats().activations_saved
        (leaf() * 2).exp().sin().sum().backward()
        seen.append(stagehand_alloc.stats().activations_saved - before)

    with budget.pool():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [0]


def test_a_graph_made_in_the_pool_may_run_backward_on_another_thread(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            loss = (a * 2).exp().sin().cos().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return a.grad

    budget.same_as_plain(program)


def test_entering_and_leaving_a_pool_within_backward(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x.exp()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                with torch.enable_grad(), around:
                    again = x.detach().requires_grad_()
                    value = (again * 1).exp().sin().sum()
                value.backward()
                assert again.grad is not None
                return grad * again.grad

        Inner.apply(a * 2).sin().sum().backward()
        return a.grad

    budget.same_as_plain(program)


# --- Together with save_on_cpu


@pytest.mark.parametrize("outside", [True, False], ids=["save_on_cpu-outside", "pool-outside"])
def test_save_on_cpu_and_the_pool_may_be_nested_either_way(budget: Budget, outside: bool) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with contextlib.ExitStack() as stack:
            stack.enter_context(save_on_cpu() if outside else around)
            h = (a * 2).exp().sin()
            with around if outside else save_on_cpu():
                h = h.cos().exp().tanh()
            loss = h.sin().sum()
            del h
        loss.backward()
        return a.grad

    budget.same_as_plain(program)


def test_the_pool_gives_what_save_on_cpu_gives(budget: Budget) -> None:
    def gradient(around: Around) -> Tensor:
        a = leaf()
        with around:
            h = (a * 2).exp()
            loss = (h * h).sum() + h.t().contiguous().sin().sum()
            del h
        loss.backward()
        assert a.grad is not None
        return a.grad

    expected = gradient(save_on_cpu())
    with budget.pressed():
        assert torch.equal(judge.bits(gradient(budget.pool())), judge.bits(expected))


# --- Graphs used more than once


def test_a_retained_graph_answers_many_times(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with around:
            loss = (a * 2).exp().sin().cos().pow(2).sum()
        grads = [torch.autograd.grad(loss, a, retain_graph=True)[0] for _ in range(4)]
        return grads, torch.autograd.grad(loss, a)[0]

    budget.same_as_plain(program)


def test_a_graph_that_is_gone_says_so(budget: Budget) -> None:
    a = leaf()
    with budget.pressed():
        with budget.pool():
            product = (a * 2).exp() * a.sin()
        node = product.grad_fn
        product.sum().backward()
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            node._saved_self  # type: ignore[attr-defined, union-attr]  # noqa: B018
        with pytest.raises(RuntimeError, match="second time"):
            product.sum().backward()


def test_part_of_a_graph_first_then_the_rest(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a, b = leaf(), leaf(seed=4)
        with around:
            h = (a * b).exp()
            loss = (h.sin() * b).sum()
        partial = torch.autograd.grad(loss, [h, b], retain_graph=True)
        del h
        loss.backward(inputs=[a])
        return partial, a.grad, b.grad is None

    budget.same_as_plain(program)


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
def test_gradients_of_gradients_of_gradients(budget: Budget, inside: bool) -> None:
    def program(around: Around) -> Any:
        a = leaf()
        with contextlib.ExitStack() as stack:
            stack.enter_context(around)
            y = (a * 2).sin().exp().sum()
            if not inside:
                stack.close()
            grads = []
            for _ in range(3):
                (y,) = torch.autograd.grad(y, a, create_graph=True)
                grads.append(y.detach().clone())
                y = (y * y.cos()).sum()
        y.backward()
        return grads, a.grad

    budget.same_as_plain(program)


def test_hessians_jacobians_and_products_with_vectors(budget: Budget) -> None:
    def function(x: Tensor) -> Tensor:
        return ((x * 2).exp().sin() * x).sum()

    def program(around: Around) -> Any:
        x, v = leaf(6).detach(), leaf(6, seed=8).detach()
        with around:
            return (
                torch.autograd.functional.hessian(function, x),
                torch.autograd.functional.jacobian(lambda x: (x * 2).exp().sin().outer(x), x),
                torch.autograd.functional.hvp(function, x, v),
                torch.autograd.functional.vjp(function, x)[1],
            )

    budget.same_as_plain(program)


def test_batched_gradients(budget: Budget) -> None:
    def program(around: Around) -> Any:
        a = leaf(5)
        with around:
            y = (a * 2).exp() * a.sin()
        return torch.autograd.grad(y, a, torch.eye(5, dtype=a.dtype), is_grads_batched=True)

    budget.same_as_plain(program)


# --- The modules' ways to see backward


def test_hooks_of_tensors_modules_and_parameters_see_the_same(budget: Budget) -> None:
    def program(around: Around) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
        seen: list[Tensor] = []
        model[1].register_full_backward_hook(lambda _, given, got: seen.extend((*given, *got)))
        model[0].weight.register_post_accumulate_grad_hook(  # type: ignore[operator]
            lambda weight: seen.append(weight.grad.clone())
        )
        a = leaf()
        with around:
            h = model(a * 2)
            h.register_hook(lambda grad: grad * 2)
            loss = (h.exp() * h).sum()
            del h
        loss.backward()
        return seen, a.grad, [one.grad for one in model.parameters()]

    budget.same_as_plain(program)


def test_weights_computed_from_parameters_in_forward(budget: Budget) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).t()

    def program(around: Around) -> Any:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        nn.utils.parametrizations.weight_norm(model[2])
        with around:
            loss = model(leaf().detach()).pow(2).sum()
        loss.backward()
        return [one.grad for one in model.parameters()]

    budget.same_as_plain(program)
