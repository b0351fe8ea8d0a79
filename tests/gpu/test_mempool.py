"""Mode "mempool" around forward alone: whose memory the MemPool is, and what it reserves.

Every test that trains compares each loss and gradient with a step without a pool, bit by bit.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from steps import MIB, SLEEP_CYCLES, budget_on_torch, mlp, one_step, rows, settled
from torch import Tensor, nn

DEFAULT = (0, 0)
STEPS = 3  # one to learn the plan, two that follow it


def pool_of(tensor: Tensor) -> tuple[int, int]:
    """The memory pool of torch's that the tensor's memory is in."""
    for segment in torch.cuda.memory_snapshot():
        inside = tensor.data_ptr() - segment["address"]
        if 0 <= inside < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("torch has no segment there")


def fresh() -> tuple[int, int]:
    """The pool that this thread's next large allocation comes from."""
    return pool_of(torch.empty(4 * MIB, dtype=torch.uint8, device="cuda"))


def on_a_thread(job: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(job()))
    thread.start()
    thread.join(timeout=60)
    return found[0]


def small_step(pool: Any, x: Tensor) -> None:
    with pool:
        y = x * 2
        for _ in range(3):
            y = y.sin()
        loss = y.sum()
    loss.backward()
    x.grad = None


@functools.cache
def pressed() -> None:
    """A step in which something has to leave: from the next one on a MemPool serves."""
    pool = budget_on_torch("mempool", 192 * MIB)
    small_step(pool, torch.ones(16 * MIB, device="cuda", requires_grad=True))
    assert pool.stats().evicted_bytes > 0


def mem_pool(**settings: Any) -> Any:
    """A pool that serves."""
    import stagehand_alloc

    pressed()
    pool = stagehand_alloc.pool(mode="mempool", **settings)
    x = torch.ones(MIB, device="cuda", requires_grad=True)
    for _ in range(2):
        small_step(pool, x)
    return pool


class Probe(torch.autograd.Function):
    """Saves its input, and looks in backward which pool serves what."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _ = ctx.saved_tensors
        Probe.seen.append((fresh(), on_a_thread(fresh)))
        return gradient * 2


# --- What is reserved


def peak_of(model: nn.Module, x: Tensor, pool: Any = None) -> int:
    settled()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        one_step(model, x, pool)
    return torch.cuda.max_memory_reserved()


def test_without_pressure_the_process_reserves_what_it_does_without_a_pool(
    torch_books: None,
) -> None:
    model, x = mlp(1024, 12), rows(8192, 1024)
    expected = one_step(model, x)
    plain = peak_of(model, x)
    pool = mem_pool()
    assert peak_of(model, x, pool) <= 1.05 * plain
    assert one_step(model, x, pool) == expected


def test_until_something_has_to_leave_the_mem_pool_serves_nobody(torch_books: None) -> None:
    import stagehand_alloc

    model, x = mlp(1024, 12), rows(8192, 1024)
    expected = one_step(model, x)
    plain = peak_of(model, x)
    pool = stagehand_alloc.pool(mode="mempool")
    assert peak_of(model, x, pool) <= 1.03 * plain
    with pool:
        assert fresh() == DEFAULT
    assert one_step(model, x, pool) == expected


def test_what_was_free_before_the_first_entry_goes_back(torch_books: None) -> None:
    model, x = mlp(1024, 12), rows(8192, 1024)
    plain = peak_of(model, x)
    settled()
    pressed()
    torch.cuda.reset_peak_memory_stats()
    torch.empty(plain // 2, dtype=torch.uint8, device="cuda")
    pool = mem_pool()
    for _ in range(STEPS):
        one_step(model, x, pool)
    assert torch.cuda.max_memory_reserved() <= 1.05 * plain


def test_a_budget_around_forward_alone_holds_in_planned_steps(torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("mempool")
    assert one_step(model, x, pool) == expected
    before = pool.stats()
    for _ in range(STEPS):
        assert one_step(model, x, pool) == expected
    after = pool.stats()
    assert after.evicted_bytes > before.evicted_bytes
    assert after.overshoot_bytes == before.overshoot_bytes


# --- Whose the MemPool is


def test_backward_is_served_and_what_follows_it_is_not(torch_books: None) -> None:
    pool = mem_pool()
    x = rows().requires_grad_()
    for _ in range(STEPS):
        Probe.seen.clear()
        with pool:
            ours = fresh()
            assert ours == tuple(pool.mem_pool.id) != DEFAULT
            assert on_a_thread(fresh) == DEFAULT
            loss = Probe.apply(x).sum()
        assert fresh() == DEFAULT
        loss.backward()
        assert Probe.seen == [(ours, DEFAULT)]
        assert fresh() == DEFAULT
        assert x.grad is not None
        assert pool_of(x.grad) == ours
        x.grad = None


def test_what_a_library_does_as_a_backward_ends_is_served_too(torch_books: None) -> None:
    """FSDP2 reduces the first layers' gradients there, DDP writes them back."""

    class Queues(Probe):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: Probe.seen.append(fresh()))
            return gradient * 2

    pool = mem_pool()
    x = rows().requires_grad_()
    for _ in range(STEPS):
        Probe.seen.clear()
        with pool:
            ours = fresh()
            loss = Queues.apply(x).sum()
        loss.backward()
        assert Probe.seen == [ours]
        assert fresh() == DEFAULT
        x.grad = None


def test_an_optimizers_state_is_not_in_the_mem_pool(torch_books: None) -> None:
    model, x = mlp(), rows()
    optimizer = torch.optim.AdamW(model.parameters())
    pool = mem_pool()
    for _ in range(2):
        optimizer.zero_grad()
        with pool:
            loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
    state = optimizer.state[next(iter(model.parameters()))]
    assert pool_of(state["exp_avg"]) == DEFAULT


def test_an_evaluation_pass_leaves_torch_as_it_was(torch_books: None) -> None:
    model, x = mlp(), rows()
    pool = mem_pool()
    for _ in range(2):
        with torch.no_grad(), pool:
            model(x)
        assert fresh() == DEFAULT
        before = torch.cuda.memory_reserved()
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before


def test_a_graph_that_is_kept_leaves_torch_as_it_was(torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = mem_pool()
    with pool:
        kept = model(x).pow(2).mean()
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 64 * MIB
    assert fresh() == DEFAULT
    assert one_step(model, x, pool) == expected
    del kept
    assert one_step(model, x, pool) == expected


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_torch_is_as_it_was_and_steps_are_right(
    where: str, torch_books: None
) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = mem_pool()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
            if where == "forward":
                raise ValueError("mine")
            ctx.save_for_backward(y)
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            _ = ctx.saved_tensors
            raise ValueError("mine")

    def failing(model: nn.Sequential, x: Tensor) -> Tensor:
        return Fails.apply(model[3:](Fails.apply(model[:3](x)))).pow(2).mean()

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            one_step(model, x, pool, failing)
        assert fresh() == DEFAULT
        for _ in range(STEPS):
            assert one_step(model, x, pool) == expected
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 64 * MIB


def test_a_mem_pool_of_the_users_inside_ours_serves_what_is_inside_it(torch_books: None) -> None:
    pool, theirs = mem_pool(), torch.cuda.MemPool()
    with pool:
        with torch.cuda.use_mem_pool(theirs):
            assert fresh() == tuple(theirs.id)
        assert fresh() == tuple(pool.mem_pool.id)


def test_a_pool_may_go_inside_a_mem_pool_of_the_users(torch_books: None) -> None:
    """torch ends the process where a MemPool's last reference goes while another one serves."""
    model, x = mlp(), rows()
    expected = one_step(model, x)
    theirs = torch.cuda.MemPool()
    pressed()
    with torch.cuda.use_mem_pool(theirs):
        pool = mem_pool()
        with torch.no_grad(), pool:
            model(x)
        del pool
        gc.collect()
    assert one_step(model, x, mem_pool()) == expected


def test_forward_and_backward_inside_on_one_thread(torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("mempool")

    def both(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        return loss

    for _ in range(STEPS):
        assert one_step(model, x, pool, both) == expected


def test_a_backward_inside_on_autograds_thread_leaves_the_pool_entered(torch_books: None) -> None:
    x = rows().requires_grad_()
    pool = mem_pool()
    Probe.seen.clear()
    with pool:
        ours = fresh()
        Probe.apply(x).sum().backward()
        assert Probe.seen == [(ours, DEFAULT)]
        assert fresh() == ours
    assert fresh() == DEFAULT


# --- Other streams


def test_memory_that_another_stream_reads_is_not_handed_out_after_the_pool(
    torch_books: None,
) -> None:
    """torch takes a MemPool for a graph capture (before 2.13), and forgets record_stream then."""
    pool, side = mem_pool(), torch.cuda.Stream()
    for _ in range(STEPS):
        with pool:
            read = torch.full((32 * MIB,), 7, dtype=torch.uint8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(5 * SLEEP_CYCLES)
                copy = read.clone()
            read.record_stream(side)
            del read
        with pool:
            torch.full((32 * MIB,), 9, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert bool((copy == 7).all())


def test_the_same_for_memory_that_backward_frees(torch_books: None) -> None:
    pool, side = mem_pool(), torch.cuda.Stream()
    copies: list[Tensor] = []

    class ReadLate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(x * 1)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            _ = ctx.saved_tensors
            read = torch.full((32 * MIB,), 7, dtype=torch.uint8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(5 * SLEEP_CYCLES)
                copies.append(read.clone())
            read.record_stream(side)
            return gradient * 1

    x = rows().requires_grad_()
    for _ in range(STEPS):
        with pool:
            loss = ReadLate.apply(x).sum()
        loss.backward()
        with pool:
            torch.full((32 * MIB,), 9, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert bool((copies.pop() == 7).all())
