"""Nothing installed: pools on torch's own caching allocator, and torch's own features beside them.

Every test that trains compares each loss and gradient with a step without a pool, bit by bit.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import (
    MIB,
    ON_TORCH,
    ROOM,
    SLEEP_CYCLES,
    TIGHT_ROOM,
    Captures,
    LossOf,
    assert_replays,
    budget_on_torch,
    captured,
    digest,
    in_threads,
    mean_square,
    mlp,
    one_step,
    rows,
    settled,
    warmed_up,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

on_torch = pytest.mark.parametrize("mode", ON_TORCH)
STEPS = 3  # one to learn the plan, two that follow it


def assert_trains(pool: Any, model: nn.Module, x: Tensor, expected: list[str]) -> None:
    """STEPS steps in the pool are right, and tensors left and came back."""
    import stagehand_alloc

    before = stagehand_alloc.stats()
    for _ in range(STEPS):
        assert one_step(model, x, pool) == expected
    after = stagehand_alloc.stats()
    assert after.evicted_bytes > before.evicted_bytes
    assert after.restored_bytes > before.restored_bytes


# --- The mode


def test_where_nothing_is_installed_a_pool_is_native_and_trains_right(torch_books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), rows()
    expected = one_step(model, x)
    high = settled() + ROOM
    pool = stagehand_alloc.pool(high=high, low=int(0.9 * high))
    assert_trains(pool, model, x, expected)
    assert (pool.stats().mode, pool.stats().trigger) == ("native", "loaded")
    assert pool.mem_pool is None
    assert pool.stats().misses > 0


def test_no_request_of_a_first_step_goes_over_high_however_large(torch_books: None) -> None:
    def with_a_large_one(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        torch.empty(ROOM // 2, dtype=torch.uint8, device="cuda")  # five times `high - low`
        return loss

    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native")
    assert one_step(model, x, pool, with_a_large_one) == expected
    assert pool.stats().evicted_bytes > 0
    assert pool.stats().overshoot_bytes == 0


class SavesWhatItMakes(torch.autograd.Function):
    """As a compiled block does: what it made is packed after its last request."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        product: Tensor = gradient * made
        return product


def test_what_is_planned_to_leave_is_copied_out_from_the_next_request_on(torch_books: None) -> None:
    x = torch.ones(8 * MIB, device="cuda", requires_grad=True)
    pool = budget_on_torch("native")  # for three of the six that are saved
    copied = []
    for _ in range(STEPS + 1):
        with pool:
            loss: Tensor = SavesWhatItMakes.apply(x)
            before = pool.stats().write_backs
            torch.empty(MIB, device="cuda")
            copied.append(pool.stats().write_backs - before)
            for _ in range(5):
                loss = loss + SavesWhatItMakes.apply(x)
        loss.backward()
        assert x.grad is not None
        assert bool((x.grad == 12).all())
        x.grad = None
    assert (copied[0], copied[-1]) == (0, 1)


def test_a_quiet_step_that_grows_beyond_its_room_keeps_to_it(torch_books: None) -> None:
    import stagehand_alloc

    def gradient(layers: int, around: Any = None) -> Tensor:
        x = torch.linspace(0, 1, MIB, device="cuda", requires_grad=True)
        with around or contextlib.nullcontext():
            y = x
            for _ in range(layers):
                y = y.sin()
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    few, many = gradient(4), gradient(100)
    pool = stagehand_alloc.pool(high=settled() + 256 * MIB, mode="native")
    for _ in range(6):  # of which the last begins quiet
        assert torch.equal(gradient(4, pool), few)
    before = pool.stats()
    assert torch.equal(gradient(4, pool), few)
    assert pool.stats().activations_saved == before.activations_saved > 0
    for _ in range(3):
        assert torch.equal(gradient(100, pool), many)
    assert pool.stats().evicted_bytes > 100 * MIB
    assert pool.stats().overshoot_bytes == 0


def stream_of(tensor: Tensor) -> int:
    """Whose blocks torch's cache serves it from; 0 for the default stream's."""
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return int(segment["stream"])
    raise AssertionError("no segment has it")


def test_what_outlives_its_step_is_served_apart_and_keeps_its_bytes(torch_books: None) -> None:
    kept: list[Tensor] = []

    def keeping(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        kept.append(torch.full((320, 1024), float(len(kept)), device="cuda"))
        return loss

    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native", TIGHT_ROOM)
    streams = []
    for step in range(8):
        assert one_step(model, x, pool, keeping) == expected
        streams.append(stream_of(kept[step]))
        if step > 0:  # the loss of the step before, say
            torch.cuda._sleep(SLEEP_CYCLES)
            late = kept[step - 1] + 0
            kept[step - 1] = kept[step][:0]
            torch.cuda.empty_cache()
            assert bool((late == step - 1).all())
    assert streams[0] == 0
    assert streams[-1] != 0
    assert len(set(streams)) == 2
    assert bool((kept[-1] == 7).all())
    assert pool.stats().overshoot_bytes == 0


class Widening(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(x)))
        return x + down


def test_checkpoints_that_run_when_needed_train_right_far_below_what_they_save(
    torch_books: None,
) -> None:
    import stagehand_alloc

    def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
        *blocks, head = model.children()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=stagehand_alloc.when_needed)
        loss: Tensor = head(x).pow(2).mean()  # 512 MiB; a block saves 128
        return loss

    torch.manual_seed(0)
    blocks = (Widening(256, 4096) for _ in range(12))
    model, x = nn.Sequential(*blocks, nn.Linear(256, 16384)).cuda(), rows(width=256)
    expected = one_step(model, x, loss_of=checkpointed)
    pool = budget_on_torch("native", 1800 * MIB)
    for _ in range(8):
        assert one_step(model, x, pool, checkpointed) == expected
    assert pool.stats().dropped_bytes > 0


def adamw_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, around: Any = None
) -> list[str]:
    """Whole steps; the digests of all weights and of what the optimizer keeps."""
    for _ in range(STEPS):
        with around or contextlib.nullcontext():
            loss = mean_square(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [t for state in optimizer.state.values() for t in state.values()]
    return [digest(tensor) for tensor in [*model.parameters(), *kept]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def test_what_an_optimizer_keeps_lies_apart_and_it_trains_as_without_a_pool(
    torch_books: None,
) -> None:
    x = rows(width=1024)
    model = mlp(width=1024)
    expected = adamw_steps(model, adamw(model), x)
    model = mlp(width=1024)
    optimizer = adamw(model)
    pool = budget_on_torch("native", 300 * MIB)
    for _ in range(STEPS):  # of warming up
        one_step(model, x, pool)
    assert adamw_steps(model, optimizer, x, pool) == expected
    kept = [t for state in optimizer.state.values() for t in state.values() if t.nbytes > MIB]
    assert len(kept) == 12
    assert all(stream_of(tensor) != 0 for tensor in kept)
    assert stream_of(torch.empty(4 * MIB, device="cuda")) == 0
    assert pool.stats().evicted_bytes > 0
    assert pool.stats().overshoot_bytes == 0


def test_gradients_that_accumulate_lie_apart_from_the_second_cycle_on_bit_by_bit(
    torch_books: None,
) -> None:
    x = rows(width=1024)
    batches = (x, -x, x + 1)
    streams: list[set[int]] = []

    def trained(around: Any = None) -> list[str]:
        model = mlp(width=1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        streams.clear()
        for _ in range(STEPS):
            for batch in batches:
                with around or contextlib.nullcontext():
                    loss = mean_square(model, batch)
                loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found += [digest(loss), *(digest(gradient) for gradient in gradients)]
            streams.append({stream_of(one) for one in gradients if one.nbytes > MIB})
            del gradients
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = trained()
    pool = budget_on_torch("native", 300 * MIB)
    assert trained(pool) == expected
    assert streams[0] == {0}
    assert all(0 not in of_cycle for of_cycle in streams[1:])
    assert pool.stats().evicted_bytes > 0
    assert pool.stats().overshoot_bytes == 0


def test_after_an_optimizers_first_step_has_raised_the_next_one_is_as_ever(
    torch_books: None,
) -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("in the step")

    x = rows(width=1024)
    model = mlp(width=1024)
    pool = budget_on_torch("native", 300 * MIB)
    expected = one_step(model, x)
    assert one_step(model, x, pool) == expected
    with pytest.raises(RuntimeError, match="in the step"):
        Raises(model.parameters(), lr=1e-3).step()
    assert stream_of(torch.empty(4 * MIB, device="cuda")) != 0
    with pool:
        assert stream_of(torch.empty(4 * MIB, device="cuda")) == 0
    assert one_step(model, x, pool) == expected
    assert pool.stats().evicted_bytes > 0


def test_what_a_closure_runs_does_not_lie_apart_and_what_it_is_run_for_does(
    torch_books: None,
) -> None:
    x = rows(width=1024)
    streams: list[int] = []

    def trained(around: Any) -> list[str]:
        model = mlp(width=1024)
        optimizer = adamw(model)

        def closure() -> Any:
            optimizer.zero_grad()
            with around:
                loss = mean_square(model, x)
            loss.backward()
            streams.extend(stream_of(p.grad) for p in model.parameters() if p.grad is not None)
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)
        kept = [t for state in optimizer.state.values() for t in state.values()]
        apart = {stream_of(tensor) for tensor in kept if tensor.nbytes > MIB}
        assert (0 in apart) == isinstance(around, contextlib.nullcontext)
        return [digest(tensor) for tensor in [*model.parameters(), *kept]]

    expected = trained(contextlib.nullcontext())
    pool = budget_on_torch("native", 300 * MIB)
    assert trained(pool) == expected
    assert set(streams) == {0}
    assert pool.stats().evicted_bytes > 0


def test_native_and_mempool_pools_take_turns(torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    for mode in ON_TORCH * 2:
        pool = budget_on_torch(mode)
        assert_trains(pool, model, x, expected)
        assert pool.stats().mode == mode
        del pool  # or the next budget would count its segments as in use


def test_allocator_mode_without_the_allocator_says_which_lines_to_add(torch_books: None) -> None:
    import stagehand_alloc

    with (
        pytest.raises(stagehand_alloc.ModeError, match="change_current_allocator"),
        stagehand_alloc.pool(mode="allocator"),
    ):
        pass
    assert torch.ones(8, device="cuda").sum().item() == 8


@on_torch
def test_modes_on_torchs_allocator_are_refused_where_ours_is_installed(
    mode: str, books: None
) -> None:
    import stagehand_alloc

    words = f"mode='{mode}' was asked for, but the process allocator is installed"
    with (
        pytest.raises(stagehand_alloc.ModeError, match=words),
        stagehand_alloc.pool(mode=mode),
    ):
        pass
    model, x = mlp(depth=1), rows(64)
    assert one_step(model, x, stagehand_alloc.pool()) == one_step(model, x)


@on_torch
def test_a_pool_is_made_per_step_or_kept(mode: str, torch_books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), rows()
    expected = one_step(model, x)
    high = settled() + ROOM
    sizes: dict[str, Any] = {"high": high, "low": high - ROOM // 10, "mode": mode}
    kept = stagehand_alloc.pool(**sizes)
    assert_trains(kept, model, x, expected)
    del kept
    mapped = []
    for _ in range(4 * STEPS):
        assert one_step(model, x, stagehand_alloc.pool(**sizes)) == expected
        gc.collect()
        mapped.append(stagehand_alloc.stats().mapped)
    # What is mapped settles in the first few pools, not always in the same one.
    settling, later = mapped[: 2 * STEPS], mapped[2 * STEPS :]
    assert max(later) <= max(settling), "every new pool takes more memory"


# --- torch's own functions


def test_torchs_memory_functions_are_its_own_and_right(torch_books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native")
    assert one_step(model, x, pool) == expected
    stagehand_alloc.reset_peak_stats()
    torch.cuda.reset_peak_memory_stats()
    assert_trains(pool, model, x, expected)
    torch.cuda.synchronize()

    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    segments = torch.cuda.memory_snapshot()
    assert sum(segment["total_size"] for segment in segments) == reserved
    assert sum(segment["allocated_size"] for segment in segments) == allocated
    assert stagehand_alloc.stats().mapped == reserved
    assert stagehand_alloc.stats().mapped_peak == torch.cuda.max_memory_reserved()

    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == allocated + held.nbytes
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    states = {block["address"]: block["state"] for block in blocks}
    assert states[held.data_ptr()] == "active_allocated"
    del held
    assert torch.cuda.memory_allocated() == allocated
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved
    assert stagehand_alloc.stats().mapped == torch.cuda.memory_reserved()


def test_memory_history_is_recorded_beside_the_engine(torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native")
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        assert_trains(pool, model, x, expected)
        traces = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    actions = {entry["action"] for entry in traces}
    assert {"alloc", "free_requested", "free_completed"} <= actions
    assert_trains(pool, model, x, expected)


def test_a_tensor_can_be_shared_with_other_processes(torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native")
    assert_trains(pool, model, x, expected)
    shared = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    handle = shared.untyped_storage()._share_cuda_()
    assert len(handle[1]) > 0
    assert_trains(pool, model, x, expected)


# --- CUDA graphs


@on_torch
def test_a_graph_captured_beside_a_pool_replays_right_after_evictions(
    mode: str, torch_books: None
) -> None:
    small, inputs = mlp(256, 4), rows(256, 256)
    model, x = mlp(), rows()
    expected = one_step(model, x)
    warmed_up(inputs, small)
    pool = budget_on_torch(mode)
    assert_trains(pool, model, x, expected)
    with torch.no_grad():
        graph, y = captured(inputs, small)
    assert_replays(graph, inputs, y, small)
    assert_trains(pool, model, x, expected)
    assert_replays(graph, inputs, y, small)


@on_torch
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "saving"])
def test_a_graph_captured_inside_a_pool_replays_right_after_evictions(
    grad: bool, mode: str, torch_books: None
) -> None:
    """Under pressure: what is allocated in the capture may not make room, and must not."""
    small, inputs = mlp(256, 4), rows(256, 256)
    model, x = mlp(), rows()
    expected = one_step(model, x)
    warmed_up(inputs, small)
    pool = budget_on_torch(mode)
    assert_trains(pool, model, x, expected)
    found: list[Any] = []

    def with_capture(model: nn.Sequential, x: Tensor) -> Tensor:
        hidden = model[:5](x)
        with torch.set_grad_enabled(grad):
            found.append(captured(inputs, small))
        return mean_square(model[5:], hidden)

    assert one_step(model, x, pool, with_capture) == expected
    graph, y = found.pop()
    if grad:
        assert pool.stats().passed_through["graph_capture"] > 0
    assert_replays(graph, inputs, y, small)
    assert_trains(pool, model, x, expected)
    assert_replays(graph, inputs, y, small)


def compiled_with_graphs(model: nn.Module) -> Any:
    """The model in mode "reduce-overhead": Inductor's kernels in cudagraph trees."""
    from torch.utils._triton import has_triton

    if not has_triton():
        pytest.skip("Inductor has no Triton here")
    return torch.compile(model, mode="reduce-overhead")


def test_cudagraph_trees_stay_right_beside_a_pool(torch_books: None) -> None:
    small, inputs = mlp(256, 4), rows(256, 256)
    compiled = compiled_with_graphs(small)
    with torch.no_grad():
        for _ in range(4):  # warms up, then records
            first = digest(compiled(inputs))
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native")
    for _ in range(2):
        assert_trains(pool, model, x, expected)
        with torch.no_grad():
            assert digest(compiled(inputs)) == first


def test_a_model_in_cudagraph_trees_trains_right_in_a_pool(torch_books: None) -> None:
    small, inputs = mlp(256, 4), rows(256, 256)
    compiled = compiled_with_graphs(small)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return mean_square(compiled, x)

    for _ in range(4):
        expected = one_step(small, inputs, loss_of=loss_of)
    model, x = mlp(), rows()
    plain = one_step(model, x)
    pool = budget_on_torch("native")
    for _ in range(4):
        assert one_step(small, inputs, pool, loss_of) == expected
        assert one_step(model, x, pool) == plain


# --- Out of memory, and other errors


@on_torch
def test_after_a_caught_out_of_memory_training_goes_on_right(mode: str, torch_books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), rows()
    expected = one_step(model, x)
    high = settled() + ROOM
    limit = high + ROOM
    pool = stagehand_alloc.pool(high=high, low=high - ROOM // 10, limit=limit, mode=mode)
    assert_trains(pool, model, x, expected)

    def too_much(model: nn.Sequential, x: Tensor) -> Tensor:
        y = model(x)
        torch.empty(4 * ROOM, dtype=torch.uint8, device="cuda")
        return mean_square(nn.Identity(), y)

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            one_step(model, x, pool, too_much)
        del caught
        gc.collect()
        assert_trains(pool, model, x, expected)
    # The limit is the pool's, not the process's.
    assert torch.empty(4 * ROOM, dtype=torch.uint8, device="cuda").nbytes == 4 * ROOM


@on_torch
def test_an_exception_inside_leaves_the_pool_usable(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch(mode)

    def failing(model: nn.Sequential, x: Tensor) -> Tensor:
        model(x)
        raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            one_step(model, x, pool, failing)
        assert_trains(pool, model, x, expected)


@on_torch
def test_a_change_in_place_after_saving_raises_autograds_error(
    mode: str, torch_books: None
) -> None:
    x = rows(64).requires_grad_()
    with budget_on_torch(mode):
        y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*FloatTensor"):
        y.sum().backward()
    del y


# --- More than one backward


@on_torch
def test_a_retained_graph_goes_backward_twice(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()

    def twice(model: nn.Sequential, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        return loss

    expected = one_step(model, x, loss_of=twice)
    assert_trains_with(twice, budget_on_torch(mode), model, x, expected)


@on_torch
def test_the_gradient_of_a_gradient_is_right(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()

    def penalised(model: nn.Sequential, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        return loss + sum(gradient.pow(2).sum() for gradient in gradients)

    expected = one_step(model, x, loss_of=penalised)
    # Backward inside saves as much again.
    pool = budget_on_torch(mode, 3 * ROOM)
    assert_trains_with(penalised, pool, model, x, expected)


def assert_trains_with(
    loss_of: LossOf,
    pool: Any,
    model: nn.Module,
    x: Tensor,
    expected: list[str],
) -> None:
    before = pool.stats().evicted_bytes
    for _ in range(STEPS):
        assert one_step(model, x, pool, loss_of) == expected
    assert pool.stats().evicted_bytes > before


# --- Who else refers to a saved tensor


@on_torch
def test_a_storage_that_the_user_refers_to_stays_where_it_is(mode: str, torch_books: None) -> None:
    """A Python storage object may read and resize its memory at any time."""
    model, x = mlp(), rows()
    expected = one_step(model, x)
    with torch.no_grad():
        hidden_expected = digest(model[:2](x))
    pool = budget_on_torch(mode)
    kept: list[tuple[torch.UntypedStorage, int]] = []

    def keeping(model: nn.Sequential, x: Tensor) -> Tensor:
        hidden = model[:2](x)
        kept.append((hidden.untyped_storage(), hidden.data_ptr()))
        return mean_square(model[2:], hidden)

    for _ in range(STEPS):
        assert one_step(model, x, pool, keeping) == expected
        storage, address = kept.pop()
        assert storage.data_ptr() == address
        content = torch.empty(0, device="cuda").set_(storage).view(x.shape)
        assert digest(content) == hidden_expected
        del storage, content
    assert pool.stats().evicted_bytes > 0


@on_torch
def test_a_kept_tensor_stays_on_the_gpu(mode: str, torch_books: None) -> None:
    import stagehand_alloc

    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch(mode)

    def keeping(model: nn.Sequential, x: Tensor) -> Tensor:
        hidden = stagehand_alloc.keep(model[:2](x))
        return mean_square(model[2:], hidden)

    for _ in range(STEPS):
        assert one_step(model, x, pool, keeping) == expected
    assert pool.stats().passed_through["kept"] == STEPS
    assert pool.stats().evicted_bytes > 0


@on_torch
def test_memory_another_stream_still_reads_is_not_used_again(mode: str, torch_books: None) -> None:
    """A saved tensor with record_stream: evicting it must wait for that stream."""
    model, x = mlp(), rows()
    expected = one_step(model, x)
    with torch.no_grad():
        hidden_expected = digest(model[:2](x))
    pool, side = budget_on_torch(mode, TIGHT_ROOM), torch.cuda.Stream()
    copies: list[Tensor] = []

    def read_late(model: nn.Sequential, x: Tensor) -> Tensor:
        hidden = model[:2](x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            copies.append(hidden.detach().clone())
        hidden.record_stream(side)
        return mean_square(model[2:], hidden)

    for _ in range(2 * STEPS):
        assert one_step(model, x, pool, read_late) == expected
        torch.cuda.synchronize()
        assert digest(copies.pop()) == hidden_expected
    assert pool.stats().evicted_bytes > 0


# --- The user's own MemPools, and the end of ours


@on_torch
def test_a_mem_pool_of_the_users_inside_ours_is_left_alone(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool, theirs = budget_on_torch(mode), torch.cuda.MemPool()

    def partly_theirs(model: nn.Sequential, x: Tensor) -> Tensor:
        with torch.cuda.use_mem_pool(theirs):
            hidden = model[:2](x)
        return mean_square(model[2:], hidden)

    for _ in range(STEPS):
        assert one_step(model, x, pool, partly_theirs) == expected
    if mode == "native":  # of two MemPools torch takes the outer one
        assert pool.stats().passed_through["private_pool"] > 0
    assert_trains(pool, model, x, expected)


@on_torch
def test_ours_inside_a_mem_pool_of_the_users_trains_right(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool, theirs = budget_on_torch(mode), torch.cuda.MemPool()
    for _ in range(STEPS):
        with torch.cuda.use_mem_pool(theirs):
            assert one_step(model, x, pool) == expected
    if mode == "native":  # else ours is the inner pool, and what it holds is ours
        assert pool.stats().passed_through["private_pool"] > 0
    assert_trains(pool, model, x, expected)


@on_torch
def test_backward_is_right_after_its_pool_is_gone(mode: str, torch_books: None) -> None:
    """A MemPool destroyed with live tensors: its segments go back when the last of them is gone."""
    import stagehand_alloc

    model, x = mlp(), rows()
    expected = one_step(model, x)
    before = settled()
    high = before + ROOM
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        # What is proven in backward leaves flags that a later entry reads.
        pool = stagehand_alloc.pool(high=high, low=high - ROOM // 10, mode=mode, recompute=False)
        with pool:
            loss = mean_square(model, x)
        assert pool.stats().records > 0
        del pool
        settled()
        loss.backward()
        found = [digest(loss)] + [digest(p.grad) for p in model.parameters() if p.grad is not None]
        assert found == expected
        model.zero_grad(set_to_none=True)
        del loss
    assert settled() <= before


def convolutions(norm: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Conv2d(64, 64, 3, padding=1, bias=False), norm(), activation()]
    return nn.Sequential(*layers).cuda()


def batch_normalized() -> nn.Module:
    return convolutions(lambda: nn.BatchNorm2d(64), lambda: nn.ReLU(inplace=True))


def group_normalized() -> nn.Module:
    return convolutions(lambda: nn.GroupNorm(8, 64), nn.SiLU)


def in_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return mean_square(model, x)


# By the node that normalizes: torch's own kernels in 16 bits, of either layout and with weights of
# either type, and cuDNN's.
NORMALIZED: dict[str, tuple[Callable[[], nn.Module], torch.memory_format, LossOf, str]] = {
    "bf16": (
        lambda: batch_normalized().bfloat16(),
        torch.contiguous_format,
        mean_square,
        "NativeBatchNorm",
    ),
    "channels_last": (
        lambda: batch_normalized().bfloat16(),
        torch.channels_last,
        mean_square,
        "NativeBatchNorm",
    ),
    "autocast": (batch_normalized, torch.contiguous_format, in_autocast, "NativeBatchNorm"),
    "fp32": (batch_normalized, torch.contiguous_format, mean_square, "CudnnBatchNorm"),
    "groups": (
        lambda: group_normalized().bfloat16(),
        torch.contiguous_format,
        mean_square,
        "NativeGroupNorm",
    ),
}


@pytest.mark.parametrize(
    ("mode", "norms"), [*(("native", norms) for norms in NORMALIZED), ("mempool", "bf16")]
)
def test_what_normalization_makes_is_dropped_and_made_again(
    mode: str, norms: str, torch_books: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stagehand_alloc

    build, layout, loss_of, node = NORMALIZED[norms]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model = build()
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 64, 96, 96, device="cuda", dtype=dtype).to(memory_format=layout)
    assert node in _nodes_of(loss_of(model, x))
    expected = one_step(model, x, None, loss_of)
    start = settled()
    torch.cuda.reset_peak_memory_stats()
    one_step(model, x, None, loss_of)
    activations = torch.cuda.max_memory_allocated() - start
    high = start + int(0.7 * activations)
    low = high - activations // 10
    pool = stagehand_alloc.pool(high=high, low=low, mode=mode, recompute="nodes")
    pool.limits(d2h_bytes_per_second="2GB", h2d_bytes_per_second="2GB")  # dropping is quicker
    for _ in range(12):
        assert one_step(model, x, pool, loss_of) == expected
    assert pool.stats().drops > 0
    assert pool.stats().recomputes > 0


def _nodes_of(loss: Tensor) -> str:
    """The names of the nodes on the way back along first inputs."""
    names = []
    node: Any = loss.grad_fn
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return " ".join(names)


# --- Streams and threads


@on_torch
def test_training_on_a_side_stream(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one_step(model, x)  # cuBLAS's workspace on this stream
        pool = budget_on_torch(mode)
        assert_trains(pool, model, x, expected)
    torch.cuda.current_stream().wait_stream(side)


@on_torch
def test_two_pools_on_two_streams_one_after_the_other(mode: str, torch_books: None) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pools = []
    for stream in streams:
        with torch.cuda.stream(stream):
            one_step(model, x)
            pools.append(budget_on_torch(mode, TIGHT_ROOM))
    for _ in range(STEPS):
        for stream, pool in zip(streams, pools, strict=True):
            with torch.cuda.stream(stream):
                assert one_step(model, x, pool) == expected
    torch.cuda.synchronize()
    assert all(pool.stats().evicted_bytes > 0 for pool in pools)


def trainer(mode: str, steps: int) -> Callable[[], None]:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch(mode, TIGHT_ROOM)

    def train() -> None:
        before = pool.stats().evicted_bytes
        for _ in range(steps):
            assert one_step(model, x, pool) == expected
        assert pool.stats().evicted_bytes > before

    return train


def resizer(size: int, times: int) -> Callable[[], None]:
    """Gives a storage's memory back and takes it again, both with the GIL held."""

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            storage = tensor.untyped_storage()
            for n in range(times):
                storage.resize_(0)
                storage.resize_(size)
                tensor.fill_(n % 251)
                if n % 50 == 0:
                    assert bool((tensor == n % 251).all())

    return run


@on_torch
def test_threads_that_resize_storages_with_the_gil_held_finish(
    mode: str, torch_books: None
) -> None:
    in_threads(
        trainer(mode, 10),
        *(resizer(size * MIB, 1000) for size in (1, 12, 24)),
    )


@on_torch
def test_threads_that_allocate_beside_a_training_finish(mode: str, torch_books: None) -> None:
    def computer(seed: int) -> Callable[[], None]:
        def run() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(200):
                    size = 1 + (seed * 7919 + n * 104729) % (1 << 22)
                    found = torch.full((size,), n % 7, dtype=torch.int32, device="cuda")
                    assert int(found.sum()) == size * (n % 7)

        return run

    in_threads(trainer(mode, 10), computer(1), computer(2), computer(3))


@on_torch
def test_steps_are_right_while_another_thread_captures_graphs(mode: str, torch_books: None) -> None:
    """And the graphs replay right; where pools come and go too, whose segments we keep."""
    captures = Captures()
    trainer(mode, 1)()  # its MemPool is gone
    train = trainer(mode, 10)
    with captures:
        before = captures.count
        train()
        assert captures.count > before
    train()


# --- The trigger library


def trains_without_the_trigger(mode: str) -> Any:
    """Trains right in a pool made here; the pool's statistics."""
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch(mode)
    for _ in range(2 * STEPS):
        assert one_step(model, x, pool) == expected
    return pool.stats()


@on_torch
def test_where_building_is_forbidden_training_is_right(
    mode: str, torch_books: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEHAND_ALLOC_BUILD", "0")
    stats = trains_without_the_trigger(mode)
    assert stats.trigger == "forbidden"
    assert stats.evicted_bytes > 0


def test_a_setting_forbids_to_build_without_a_warning(
    torch_books: None, recwarn: pytest.WarningsRecorder
) -> None:
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native", config={"build_trigger": False})
    for _ in range(STEPS):
        assert one_step(model, x, pool) == expected
    assert pool.stats().trigger == "forbidden"
    assert not [one for one in recwarn if "trigger library" in str(one.message)]


def test_a_compiler_that_fails_is_warned_of_with_its_log_and_training_is_right(
    torch_books: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'error: cannot compile today' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(RuntimeWarning, match="trigger library is not in use") as warned:
        stats = trains_without_the_trigger("native")
    assert stats.trigger == "build failed"
    texts = [str(one.message) for one in warned if "trigger library" in str(one.message)]
    assert len(texts) == 1
    assert "cannot compile today" in texts[0]
    log = re.search(r"log: (\S+\.log)\)", texts[0])
    assert log is not None
    assert "cannot compile today" in pathlib.Path(log[1]).read_text()


def test_a_cache_folder_that_others_may_write_to_is_refused_in_one_line(
    torch_books: None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "stagehand_alloc"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, x = mlp(), rows()
    expected = one_step(model, x)
    pool = budget_on_torch("native", recompute=False)
    assert_trains(pool, model, x, expected)
    assert pool.stats().trigger == "loaded"
    refused = [line for line in caplog.messages if str(folder) in line]
    assert len(refused) == 1
    assert "others may write to" in refused[0]
    assert not list(folder.iterdir())
