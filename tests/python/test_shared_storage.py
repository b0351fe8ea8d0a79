"""What unpack hands out looks as shared as with plain torch, so that autograd adds up elsewhere.

autograd adds to a gradient in place where it has the only tensor over the only reference to its
storage. A saved tensor that backward returns as a gradient must not look so while anybody needs it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import MIB, Around, digest, evicting_everything, gradients, leaves_nothing

import stagehand_alloc

pytestmark = pytest.mark.usefixtures("gpu")

Form = Callable[[Tensor], Tensor]

FORMS: dict[str, Form] = {
    "itself": lambda g: g,
    "view": lambda g: g.view(-1).view(g.shape),
    "reshape": lambda g: g.reshape(-1).reshape(g.shape),
    "expand": lambda g: g.expand(g.shape),
    "detach": lambda g: g.detach(),
    "twice transposed": lambda g: g.t().t(),
    "slice": lambda g: g[:],
}


class Fixed(torch.autograd.Function):
    """Its gradient was computed in forward and saved, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, form: Form = FORMS["itself"]) -> Tensor:
        ctx.save_for_backward(g)
        ctx.form = form
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        (g,) = ctx.saved_tensors
        form, _ = ctx.form, g
        del g, _
        return form(ctx.saved_tensors[0]), None, None


def owners(tensor: Tensor) -> int:
    """How many references the tensor's storage has; makes no Python object of it."""
    return int(torch._C._storage_Use_Count(torch._C._storage_address(tensor)))  # type: ignore[attr-defined]


def situation(name: str) -> contextlib.AbstractContextManager[None]:
    return evicting_everything() if name == "evicted" else contextlib.nullcontext()


def compare(program: Callable[[Around], Any], where: str = "retained") -> None:
    expected = program(contextlib.nullcontext())
    with leaves_nothing():
        with situation(where):
            actual = program(stagehand_alloc.pool())
        with stagehand_alloc.pool():
            pass  # where a backward left something over, the next step takes it
    assert actual == expected


# --- Whoever else needs the bytes keeps them


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_users_own_tensor_is_not_changed_by_backward(form: Form) -> None:
    def program(around: Around) -> Any:
        x = torch.zeros(64, 64, requires_grad=True)
        with around:
            g = torch.ones(64, 64) * 2
            y = x * 5 + Fixed.apply(x, g, form)
        y.sum().backward()
        return digest(g), digest(x.grad)

    compare(program)


@pytest.mark.parametrize("where", ["retained", "evicted"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_retained_graph_gives_the_same_gradient_every_time(form: Form, where: str) -> None:
    def program(around: Around) -> Any:
        x = torch.zeros(64, 64, requires_grad=True)
        with around:
            y = (x * 5 + Fixed.apply(x, torch.ones(64, 64) * 2, form)).sum()
        found = []
        for again in (True, True, False):
            torch.empty(1)
            y.backward(retain_graph=again)
            found.append(digest(x.grad))
            x.grad = None
        return found

    compare(program, where)


@pytest.mark.parametrize("where", ["live", "retained", "evicted"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_another_node_that_saved_the_same_tensor_gets_it_as_it_was(form: Form, where: str) -> None:
    def program(around: Around) -> Any:
        x = torch.zeros(64, 64, requires_grad=True)
        w = torch.ones(64, 64, requires_grad=True)
        with around:
            g = torch.ones(64, 64) * 2
            first = w * g  # saves g, and its backward runs last
            y = (first * 5 + Fixed.apply(first, g, form) + x).sum()
            kept = g if where == "live" else None
            del g, first
        torch.empty(1)
        y.backward()
        return digest(w.grad), None if kept is None else digest(kept)

    compare(program, where)


def test_two_tensors_made_over_one_block_do_not_change_each_other() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
            ctx.save_for_backward(g)
            return x + w

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            return ctx.saved_tensors[0], ctx.saved_tensors[0], None

    def program(around: Around) -> Any:
        x = torch.zeros(64, requires_grad=True)
        w = torch.zeros(64, requires_grad=True)
        with around:
            a, b = x * 1, w * 1
            y = (Both.apply(a, b, torch.ones(64) * 2) + a * 3 + b * 7).sum()
        y.backward()
        return digest(x.grad), digest(w.grad)

    for where in ("retained", "evicted"):
        compare(program, where)


def test_what_was_prefetched_looks_shared_too() -> None:
    layers, size = 24, 1 << 18

    def program(around: Around) -> Any:
        x = torch.ones(size, requires_grad=True)
        with around:
            h = x * 1
            for at in range(layers):
                g = torch.full((size,), 1 + at / 64)
                first = h * g  # saves g, and its backward runs after the other's
                h = first * 0.5 + Fixed.apply(first, g)
            y = h.sum()
            del h, g, first
        y.backward()
        return digest(x.grad)

    expected = program(contextlib.nullcontext())
    with leaves_nothing():
        live = stagehand_alloc.stats().live
        pool = stagehand_alloc.pool(high=live + 16 * MIB, low=live + 12 * MIB)
        actual = [program(pool) for _ in range(3)]
        found = pool.stats()
        del pool
    assert actual == [expected] * 3
    assert found.prefetches > 0


def test_tied_weights_with_a_fused_loss_that_saved_the_gradient_of_the_weight() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
            ones = torch.ones(h.shape[0], w.shape[0])
            ctx.save_for_backward(ones @ w, ones.t() @ h)
            return (h @ w.t()).sum()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            return ctx.saved_tensors

    def program(around: Around) -> Any:
        torch.manual_seed(0)
        w = torch.randn(6, 4, requires_grad=True)
        with around:
            h = nn.functional.embedding(torch.tensor([1, 2, 3]), w)
            loss = Fused.apply(h.tanh(), w)
        loss.backward()
        return digest(w.grad)

    for where in ("retained", "evicted"):
        compare(program, where)


def test_training_with_a_hand_written_gradient_that_is_used_again_is_plain_torchs() -> None:
    class Weighted(torch.autograd.Function):
        """(x * w).sum(), whose gradient is w itself."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return (x * w).sum()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            return ctx.saved_tensors[0], None

    def program(around: Around) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 8)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            with around:
                y = model(x)
                w = torch.softmax(x.sum(1, keepdim=True).expand(16, 8) + 0, 0)
                loss = y.pow(2).mean() + Weighted.apply(y, w)
            loss.backward()
            with torch.no_grad():
                model.bias -= 0.01 * w.mean(0)  # type: ignore[misc]
            optimizer.step()
            found.append((gradients(model), digest(w), digest(model.weight), digest(model.bias)))
        return found

    compare(program)


@pytest.mark.parametrize("where", ["live", "retained", "evicted"])
def test_a_storage_is_shared_while_its_node_may_run_again_and_no_longer(where: str) -> None:
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
            ctx.save_for_backward(g)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            seen.append(owners(ctx.saved_tensors[0]))
            return grad, None

    x = torch.zeros(1 << 16, requires_grad=True)
    with leaves_nothing(), situation(where):
        with stagehand_alloc.pool():
            g = torch.ones(1 << 16) * 2
            y = Looks.apply(x, g).sum()
            z = g if where == "live" else None
            del g
        torch.empty(1)
        y.backward(retain_graph=True)
        first = y.grad_fn.next_functions[0][0].saved_tensors[0]
        assert owners(first) > 1
        y.backward()
        x.grad = None
        del y, z
        with stagehand_alloc.pool():
            pass
        assert owners(first) == 1
        del first
    assert len(seen) == 2
    assert min(seen) > 1


# --- And nothing is kept for longer than that


def test_what_a_node_returns_is_its_only_owners_once_the_node_is_done() -> None:
    """So autograd adds up in place, in no more memory than with plain torch."""
    counts = []
    x = torch.zeros(1 << 16, requires_grad=True)
    with leaves_nothing():
        with stagehand_alloc.pool():
            h = x * 1
            h.register_hook(lambda grad: counts.append(owners(grad)))
            y = Fixed.apply(h, torch.ones(1 << 16) * 2).sum()
            del h
        y.backward()
        x.grad = None
        assert stagehand_alloc.stats().aliases == 0
        del y
    assert counts == [1]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_budget_holds_through_backwards_of_a_retained_graph(threads: int) -> None:
    """What a node has used can leave again before the next ones run, on whichever thread."""
    chain, size = 24, 1 << 18

    def step(found: list[Any], around: Around, turns: threading.Barrier) -> None:
        x = torch.linspace(0.0, 1.0, size, requires_grad=True)
        for turn in range(threads):  # one pool, on one thread at a time
            if turn == int(threading.current_thread().name):
                with around:
                    h = x * 1
                    for _ in range(chain):
                        h = h.sin()
                    y = h.sum()
                    del h
            turns.wait()
        for again in (True, False):
            y.backward(retain_graph=again)
            found.append(digest(x.grad))
            x.grad = None

    def run(around: Around) -> list[Any]:
        found: list[list[Any]] = [[] for _ in range(threads)]
        turns = threading.Barrier(threads)
        workers = [
            threading.Thread(target=step, args=(found[at], around, turns), name=str(at))
            for at in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return found

    expected = run(contextlib.nullcontext())
    with leaves_nothing():
        live = stagehand_alloc.stats().live
        pool = stagehand_alloc.pool(
            high=live + (4 + 8 * threads) * MIB, low=live + (3 + 7 * threads) * MIB
        )
        actual = run(pool)
        found = pool.stats()
        del pool
        with stagehand_alloc.pool():
            pass
        assert stagehand_alloc.stats().aliases == 0
    assert actual == expected
    assert found.overshoot_bytes == 0
    assert found.restores + found.prefetches > chain * threads
