"""How torch's own features behave over the process allocator, on the real GPU."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import MIB, Captures, in_threads, mlp, one_step, rows
from torch.utils.data import DataLoader, TensorDataset


def budget(room: int, limit: bool = False) -> Any:
    """A pool that may map `room` bytes over what is in use."""
    import stagehand_alloc

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    high = stagehand_alloc.stats().mapped + room
    return stagehand_alloc.pool(high=high, low=int(0.9 * high), limit=high if limit else None)


# --- Out of memory


def test_after_a_caught_out_of_memory_a_smaller_step_trains_right(books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), torch.randn(1024, 512, device="cuda")
    expected = one_step(model, x)
    pool = budget(64 * MIB, limit=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        one_step(model, x.repeat(64, 1), pool)
    message = str(caught.value)
    assert all(word in message for word in ("mapped", "occupied", "retained", "high", "limit"))
    del caught
    gc.collect()
    assert one_step(model, x, pool) == expected
    assert stagehand_alloc.stats().mapped_peak <= stagehand_alloc.stats().limit


def test_more_than_the_device_has_is_torchs_own_error(books: None) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_no_error_is_left_behind_in_the_cuda_runtime(books: None) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    # Every kernel launch of torch asks the runtime for its last error, and raises it.
    assert (torch.ones(4, device="cuda") + 1).sum().item() == 8
    torch.cuda.synchronize()


# --- Memory functions


def test_torchs_memory_functions_work(books: None) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + held.nbytes
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    del held
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 64 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    torch.cuda.reset_accumulated_memory_stats()
    assert "allocated_bytes.all.current" in torch.cuda.memory_stats()
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()


def test_empty_cache_gives_memory_back_to_the_device(books: None) -> None:
    import stagehand_alloc

    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    mapped = stagehand_alloc.stats().mapped
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert stagehand_alloc.stats().mapped <= mapped - 512 * MIB


# --- CUDA graphs


def test_a_replayed_graph_is_right_after_later_allocations(books: None) -> None:
    """Memory freed inside a capture belongs to the graph: nothing later may land on it."""
    model = mlp(256, 4)
    x = torch.randn(256, 256, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        model(x)  # warms up cuBLAS outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    others = [torch.full((256, 256), float(n), device="cuda") for n in range(64)]
    with torch.no_grad():
        x.copy_(torch.randn(256, 256, device="cuda"))
        graph.replay()
        expected = model(x)
    assert torch.equal(y, expected)
    for n, other in enumerate(others):
        assert bool((other == n).all()), "a replay wrote into memory that was handed out"


def test_training_in_a_budget_goes_on_beside_a_captured_graph(books: None) -> None:
    import stagehand_alloc

    x = torch.randn(128, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    (x * 2).sin()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = (x * 2).sin() + 1
    model, batch = mlp(), torch.randn(8192, 512, device="cuda")
    expected = one_step(model, batch)
    pool = budget(100 * MIB)
    before = stagehand_alloc.stats().evicted_bytes
    for _ in range(3):
        assert one_step(model, batch, pool) == expected
        graph.replay()
        assert torch.equal(y, (x * 2).sin() + 1)
    assert stagehand_alloc.stats().evicted_bytes > before
    del graph, y


# --- Streams and threads


def test_record_stream_keeps_a_block_until_the_other_stream_is_done(books: None) -> None:
    side = torch.cuda.Stream()
    for trial in range(20):
        source = torch.full((4 << 20,), trial, dtype=torch.int32, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # cycles: the read below comes late
            copy = source.clone()
        source.record_stream(side)
        del source
        over = torch.full((4 << 20,), -1, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert bool((copy == trial).all())
        del over, copy


def test_training_on_a_side_stream_in_a_budget(books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), torch.randn(8192, 512, device="cuda")
    expected = one_step(model, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    before = stagehand_alloc.stats().evicted_bytes
    with torch.cuda.stream(side):
        pool = budget(100 * MIB)
        for _ in range(3):
            assert one_step(model, x, pool) == expected
    torch.cuda.current_stream().wait_stream(side)
    assert stagehand_alloc.stats().evicted_bytes > before


def test_threads_beside_a_budgeted_training(books: None) -> None:
    """One thread trains in a budget, others allocate, compute and free on their own streams."""
    model, x = mlp(), torch.randn(8192, 512, device="cuda")
    expected = one_step(model, x)
    pool = budget(256 * MIB)

    def train() -> None:
        for _ in range(10):
            assert one_step(model, x, pool) == expected

    def compute(seed: int) -> Callable[[], None]:
        def run() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(200):
                    size = 1 + (seed * 7919 + n * 104729) % (1 << 18)
                    assert int(torch.full((size,), n, device="cuda").sum()) == size * n

        return run

    in_threads(train, compute(1), compute(2), compute(3))


# --- Processes


def test_steps_are_right_while_another_thread_captures_graphs(books: None) -> None:
    captures = Captures()
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget(150 * MIB)

    def train() -> None:
        evicted = pool.stats().evicted_bytes
        for _ in range(10):
            assert one_step(model, x, pool) == expected
        assert pool.stats().evicted_bytes > evicted

    with captures:
        before = captures.count
        train()
        assert captures.count > before
    train()


def test_a_forked_child_ends_cleanly(books: None) -> None:
    held = torch.ones(MIB, device="cuda")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del held  # the child's free callback: must do nothing
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert held.sum().item() == MIB


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_with_forked_data_loader_workers(books: None) -> None:
    model = mlp(64, 2)
    rows = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / 4096
    pool = budget(64 * MIB)
    for (x,) in DataLoader(TensorDataset(rows), batch_size=16, num_workers=2, pin_memory=True):
        batch = x.cuda()
        expected = one_step(model, batch)
        assert one_step(model, batch, pool) == expected
