"""Budgets nothing can hold, and pinned memory that runs out: right results, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BY_NAME
from training import footprint, leaves_nothing, train

import stagehand_alloc
from stagehand_alloc import ChecksumError, StepStats, _native
from stagehand_alloc._step.device import process
from stagehand_alloc._step.trouble import Trouble
from stagehand_alloc.testing import SimulatedGpu

MIB = 1 << 20
RECIPE = BY_NAME["gpt"]


@pytest.fixture(autouse=True)
def _nothing_told(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process.device(0), "trouble", Trouble())
    stagehand_alloc.reset_peak_stats()
    yield
    with stagehand_alloc.pool():  # the default slabs again
        pass
    stagehand_alloc.reset_peak_stats()


def warned_of(action: Callable[[], Any], words: str) -> list[str]:
    """The warnings with these words while `action` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    found = [w for w in caught if words in str(w.message)]
    assert all(w.category is stagehand_alloc.StagehandWarning for w in found)
    assert all(
        Path(w.filename).parent.name == "python" for w in found
    )  # the line that entered or left
    return [str(w.message) for w in found]


def test_a_budget_nothing_can_hold_is_told_once_with_who_holds_what() -> None:
    held = torch.ones(32 * MIB, dtype=torch.uint8)  # as parameters would be
    pool = stagehand_alloc.pool(high="8MiB", low="4MiB")

    def steps() -> None:
        for _ in range(3):
            x = torch.ones(MIB, requires_grad=True)  # 4 MiB
            with pool:
                y = torch.exp(x)  # saved, and in use
                z = torch.cos(y)
                (y * z).sum().backward()
            del y, z

    said = warned_of(steps, "No eviction can hold")
    assert len(said) == 1
    found = stagehand_alloc.stats()
    assert found.overshoot_live > found.high == 8 * MIB
    assert 0 < found.overshoot_saved <= found.overshoot_live - held.nbytes
    what, _, todo = said[0].partition("\n")
    assert "high=8.00 MiB" in what
    assert "of it saved activations in use and" in what
    assert todo.startswith("Raise high above ")


def test_what_overshoots_after_the_pool_is_told_by_the_next_entry_and_by_no_getter() -> None:
    high = stagehand_alloc.stats().mapped + 4 * MIB
    pool = stagehand_alloc.pool(high=high, low=high)
    with pool:
        y = (torch.ones(8, requires_grad=True) * 1.0).sin()
    held = torch.ones(high, dtype=torch.uint8)  # as backward might need
    del held

    def enter() -> None:
        with pool:
            pass

    assert warned_of(pool.stats, "No eviction can hold") == []
    assert len(warned_of(enter, "No eviction can hold")) == 1
    del y
    _native.empty_cache()


def test_one_budget_s_overshoot_is_not_held_against_another() -> None:
    held = torch.ones(32 * MIB, dtype=torch.uint8)

    def step(pool: stagehand_alloc.Pool) -> None:
        with pool:
            torch.ones(40 * MIB, dtype=torch.uint8)

    tight = stagehand_alloc.pool(high="8MiB")
    assert len(warned_of(lambda: step(tight), "No eviction can hold")) == 1
    assert warned_of(lambda: step(stagehand_alloc.pool()), "No eviction can hold") == []
    assert warned_of(lambda: step(tight), "No eviction can hold") == []  # told already
    del held


def test_where_pinned_memory_runs_out_gradients_are_right_and_it_is_told_once() -> None:
    expected = train(RECIPE)
    room = footprint(RECIPE)
    high = room.start + (room.peak - room.start) // 2
    pool = stagehand_alloc.pool(
        high=high,
        low=int(0.85 * high),
        config={"host_limit": "1MiB", "pinned_pool_classes_mb": [1], "slabs_per_class": 1},
    )
    traces = []
    with leaves_nothing():
        said = warned_of(lambda: traces.append(train(RECIPE, pool)), "Pinned host memory ran out")
    assert traces == [expected]
    found = pool.stats()
    assert found.pinned_bytes == MIB
    assert found.pageable_copies > 0
    assert found.pool_misses > 0
    assert len(said) == 1
    assert "at 1.00 MiB" in said[0]
    assert "Raise host_limit" in said[0].partition("\n")[2]


class Elsewhere:
    """What TRL's and Hugging Face's own offloading are: hooks inside of the pool."""

    def __enter__(self) -> None:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)
        self.hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self.hooks.__exit__()


def test_a_pool_inside_which_other_hooks_take_all_is_told_of_once() -> None:
    x = torch.ones(4 * MIB, requires_grad=True)
    pool = stagehand_alloc.pool(high="64MiB", low="8MiB")

    def steps(gradients: bool = True) -> None:
        for _ in range(3):
            with torch.set_grad_enabled(gradients), pool, Elsewhere():
                y = torch.exp(x).sum()
            if gradients:
                y.backward()
        pool.step_stats()

    assert warned_of(lambda: steps(gradients=False), "no saved tensor") == []
    (told,) = warned_of(steps, "no saved tensor")
    assert "above low=8.00 MiB" in told.partition("\n")[0]
    assert "Turn off what else takes saved tensors" in told.partition("\n")[2]


def test_a_pool_of_another_device_than_the_tensors_is_told_of_once(gpu: SimulatedGpu) -> None:
    gpu.close()
    x = torch.ones(4 * MIB, requires_grad=True)  # as on a device that is not the pool's
    gpu.open()
    pool = stagehand_alloc.pool()

    def step() -> None:
        with pool:
            gpu.close()
            y = torch.exp(x)
            gpu.open()
        y.sum().backward()
        pool.step_stats()

    def steps() -> None:
        for _ in range(2):
            step()

    (told,) = warned_of(steps, "another device or allocator")
    assert told.startswith("All ")


def test_waiting_long_for_pinned_memory_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble()
    for _ in range(2):
        trouble.look(StepStats(1, 0, native={"pinning_wait_ns": 3_200_000_000}))
    assert caplog.messages == [
        "stagehand_alloc: a step waited 3 s for host memory to be pinned; such steps do not again."
    ]


def test_a_checksum_error_is_a_stagehand_error_that_training_may_catch() -> None:
    error = ChecksumError("what", "todo")
    assert isinstance(error, stagehand_alloc.StagehandError)
    assert isinstance(error, RuntimeError)
    assert str(error) == "what\ntodo"
