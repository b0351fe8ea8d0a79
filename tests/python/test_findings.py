"""What limited a run, in words: one test for each thing that may be found."""

from __future__ import annotations

from typing import Any

import pytest
from telemetry_lines import GIB, MIB, line, shape

from stagehand_alloc._books import findings
from stagehand_alloc._books.findings import Level
from stagehand_alloc._books.runs import Run


def run(count: int = 8, of: Any = None, rank: int = 0, **fields: Any) -> Run:
    steps = tuple(line(n, rank=rank, **fields) for n in range(1, count + 1))
    return Run("steps.jsonl", rank, 0, steps, of)


def kinds(of: Run) -> set[str]:
    return {found.kind for found in findings.find(of)}


def test_a_run_that_held_its_budget_says_so_and_nothing_else() -> None:
    (found,) = findings.find(run())
    assert (found.kind, found.level) == ("held", Level.GOOD)
    assert "20.00 GiB of 20.00 GiB" in found.what


def test_nothing_saved() -> None:
    assert kinds(run(activations_saved=0)) == {"nothing_saved"}


def test_never_pressed() -> None:
    calm = run(mapped_peak=7 * GIB, spill_bytes=0)
    (found,) = findings.find(calm)
    assert found.kind == "never_pressed"
    assert "7.00 GiB of 20.00 GiB" in found.what
    assert "never_pressed" not in kinds(run(mapped_peak=7 * GIB, spill_bytes=0, dropped_bytes=1))


def test_live_memory_above_high_names_the_least_budget() -> None:
    over = run(overshoot_bytes=GIB, overshoot_live=21 * GIB, mapped_peak=22 * GIB)
    (found,) = (one for one in findings.find(over) if one.kind == "live_above_high")
    assert found.level is Level.PROBLEM
    assert "Raise high above 21.00 GiB" in found.todo
    assert "live_above_high" in kinds(run(overshoot_bytes=GIB, plan_state="declined"))


def test_over_high_in_the_first_steps_only_is_a_hint() -> None:
    steps = [line(1, overshoot_bytes=GIB, mapped_peak=21 * GIB), *(line(n) for n in range(2, 9))]
    found = findings.find(Run("f", 0, 0, tuple(steps), None))
    assert [(one.kind, one.level) for one in found] == [("over_high_at_first", Level.HINT)]


def test_over_high_in_mode_allocator_names_no_other_mode() -> None:
    found = findings.find(run(overshoot_bytes=MIB, mapped_peak=21 * GIB, mode="allocator"))
    (one,) = (one for one in found if one.kind == "over_high")
    assert "mode=" not in one.todo


def test_over_high_for_good() -> None:
    assert "over_high" in kinds(run(overshoot_bytes=MIB, mapped_peak=21 * GIB))


def test_waits_on_a_busy_link_are_the_link_s() -> None:
    full = run(stall_time_ms=90.0, of=shape(d2h_rate=8 * 10**9, h2d_rate=8 * 10**9))
    (found,) = (one for one in findings.find(full) if one.kind == "link_full")
    assert found.level is Level.PROBLEM
    assert "recompute" in found.todo
    dropping = run(stall_time_ms=90.0, drops=4, of=shape(d2h_rate=8 * 10**9))
    assert all("recompute=model" not in one.todo for one in findings.find(dropping))


def test_waits_on_an_idle_link_are_late_copies() -> None:
    assert kinds(run(stall_time_ms=20.0, of=shape())) == {"late_copies"}
    assert kinds(run(stall_time_ms=11.0)) == {"held"}  # below what is worth saying


def test_much_that_is_made_again() -> None:
    assert "much_made_again" in kinds(run(drops=3, of=shape(again_ms=60.0)))


def test_host_waits_name_their_cause() -> None:
    waits = run(host_waits=3, pinning_wait_ms=2.0, gpu_wait_ms=30.0)
    (found,) = findings.find(waits)
    assert found.kind == "host_waits"
    assert "3 times a step, 32 ms in all, most of it for all work of the GPU" in found.what
    assert kinds(run(host_waits=3)) == {"host_waits"}  # of before these were timed
    assert kinds(run(host_waits=3, copy_wait_ms=1.0)) == {"held"}


def test_pageable_memory() -> None:
    (found,) = (one for one in findings.find(run(pageable_bytes=5 * GIB)))
    assert (found.kind, found.level) == ("pageable", Level.PROBLEM)
    assert "host_limit" in found.todo


def test_empty_pinned_memory_proposes_the_settings() -> None:
    wasteful = run(
        pinned_bytes=10 * GIB,
        pinned_waste_bytes=2 * GIB,
        proposed_classes_mb=[4, 16],
        proposed_slabs_per_class=[9, 3],
    )
    (found,) = findings.find(wasteful)
    assert found.kind == "pinned_waste"
    assert "pinned_pool_classes_mb=[4, 16], slabs_per_class=[9, 3]" in found.todo


def test_steps_that_are_like_none_before() -> None:
    assert kinds(run(plan_state="diverged")) == {"unlike_steps"}


@pytest.mark.parametrize("reason", ["foreign_storage", "older_than_pool", "subclass"])
def test_what_is_passed_through_says_why(reason: str) -> None:
    assert kinds(run(passed_through={reason: 30})) == {f"passed_{reason}"}
    assert kinds(run(passed_through={reason: 3, "leaf": 90})) == {"held"}


def test_a_slow_rank_is_named_beside_the_quick_one() -> None:
    slow = run(rank=1, wall_time_ms=600.0, high=10 * GIB)
    found, _ = findings.across([run(), slow])
    assert "rank 1, device 0 takes 600 ms" in found.what
    assert "Its budget is the smaller one" in found.todo
    assert findings.across([run(), run(rank=1, wall_time_ms=410.0)]) == []
    assert findings.across([run()]) == []


def test_ranks_with_different_budgets_are_told() -> None:
    (found,) = findings.across([run(), run(rank=1, high=10 * GIB)])
    assert found.kind == "budgets_apart"
    assert "rank 1, device 0 has 10.00 GiB and rank 0, device 0" in found.what


def test_problems_stand_before_hints() -> None:
    found = findings.find(run(pageable_bytes=GIB, plan_state="diverged", host_waits=4))
    assert [one.level for one in found] == [Level.PROBLEM, Level.HINT, Level.HINT]
