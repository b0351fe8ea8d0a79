"""What is claimed of the workloads, and a summary of each."""

from __future__ import annotations

import math
import statistics
from typing import Any

from harness import Row
from measures import GIB
from workload_cases import FREE, Bar, Case
from workload_run import Measured, ratio

FIRST_STEP = 1.3  # of a later one, at most
MAPPING_MS = 3  # of a step with other shapes, at most
AROUND = {"allocator": "process allocator", "native": "native"}
TO = {
    "plain": "plain torch",
    "bound": "the bound",
    "larger": "plain torch or the bound, the larger",
}
COUNTERS = ("evicted_bytes", "restored_bytes", "dropped_bytes")
EVENTS = (
    *("stall_count", "prefetch_lates", "host_waits", "gathers", "map_calls", "misses"),
    *("recomputes", "reruns"),
)
WAITS = ("stall", "pinning_wait", "copy_wait", "gpu_wait")


def rows_of(name: str, case: Case, measured: Measured) -> list[Row]:
    """The rows that the measured configurations allow."""
    if "plain" not in measured.turns:
        return []
    rows = []
    for key in measured.ours():
        mode, budget = key.split()
        segments = ", expandable segments" if mode == "native" and case.expandable else ""
        label = f"{name}, {label_of(budget)}, {AROUND[mode]}{segments}"
        rows += time_rows(case, measured, key, label)
        if key in measured.first:
            first, later = (measured.first[key][one]["wall_ms"] for one in ("first", "later"))
            claim = f"{label}: first step / a later one"
            rows.append(Row(claim, first / later, at_most=FIRST_STEP))
            cold = measured.first[key]["cold"]["wall_ms"]
            claim = f"{label}: a step without a budget, no memory mapped either, / that later one"
            rows.append(Row(claim, cold / later))
        rows += mapping_rows(case, measured, key, label)
        if budget != FREE:
            rows.append(Row(f"{label}: bytes over high", over_high(measured, key)))
    plain = turn_medians(measured, "plain")
    claim = f"{name}, plain torch: its slowest turn / its quickest"
    rows.append(Row(claim, max(plain) / min(plain)))
    if "checkpoint" in measured.turns:
        value = ratio(measured.step_ms(case, "checkpoint"), measured.step_ms(case, "plain"))
        rows.append(Row(f"{name}, checkpoints: step time / plain torch", value))
    for budget in case.same_budget:
        rows += same_budget_rows(name, measured, budget)
    return rows


def turn_medians(measured: Measured, key: str) -> list[float]:
    """The median step of each turn, ms: where plain torch's differ, the machine did not rest.

    Not the means that ratios are of (Measured.step_ms): one pause is no other machine.
    """
    turns = measured.turns[key].values()
    return [statistics.median(step["ms"] for step in turn["steps"]) for turn in turns]


def label_of(budget: str) -> str:
    return "no pressure" if budget == FREE else f"{budget} %"


def time_rows(case: Case, measured: Measured, key: str, label: str) -> list[Row]:
    """Against what the case's bar is of; to plain torch in any case."""
    mode, budget = key.split()
    bar = case.bars[budget]
    if mode not in bar.modes:
        bar = Bar()
    mine = measured.step_ms(case, key)
    bases = {
        "plain": measured.step_ms(case, "plain"),
        "bound": measured.bounds_ms(case, budget),
        "larger": measured.larger_ms(case, budget),
    }
    shown = ["plain", *([bar.to] if bar.to != "plain" else [])]
    return [
        Row(
            f"{label}: step time / {TO[to]}",
            ratio(mine, bases[to]),
            at_most=bar.at_most if to == bar.to else None,
        )
        for to in shown
    ]


def mapping_rows(case: Case, measured: Measured, key: str, label: str) -> list[Row]:
    """Of the step in which calls were seen, torch's own included; of ours in all timed steps."""
    found, ours = measured.calls.get(key, {}), per_step(measured, key, "map_calls")
    seen = found.get("seen", False)
    calls = int(found["mapping"]["calls"] + found["mapping_elsewhere"]["calls"]) if seen else 0
    if case.varying:
        claim = f"{label}: ms of a step's {calls} map, access and unmap calls"
        return [Row(claim, found["mapping"]["ms"], at_most=MAPPING_MS)] if seen else []
    if not seen and not key.startswith("allocator"):
        return []
    claim = f"{label}: map, access and unmap calls in a learned step"
    return [Row(claim, max(calls, ours), at_most=0)]


def per_step(measured: Measured, key: str, counter: str, rank: int = 0) -> float:
    """How much a counter of that rank's rose per timed step."""
    turns = [_ranks(one)[rank] for one in measured.turns[key].values()]
    steps = sum(len(one["steps"]) for one in turns)
    return float(sum(one["gained"].get(counter, 0) for one in turns) / steps)


def _ranks(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Each rank's: the reply is the first one's, and has the others'."""
    return [reply, *reply.get("others", [])]


def same_budget_rows(name: str, measured: Measured, budget: str) -> list[Row]:
    peaks = [peak_of(measured, f"{mode} {budget}") for mode in ("allocator", "native")]
    if not all(peaks):
        return []
    claim = f"{name}, {label_of(budget)}: mapped by ours / reserved in native mode"
    return [Row(claim, peaks[0] / peaks[1], at_most=1)]


def peak_of(measured: Measured, key: str) -> int:
    """Mapped or reserved at most by any rank, in timed steps."""
    turns = measured.turns.get(key, {})
    return max(
        (int(one["mapped_peak"]) for turn in turns.values() for one in _ranks(turn)), default=0
    )


def over_high(measured: Measured, key: str) -> int:
    """Counted or seen in timed steps."""
    turns = measured.turns[key].values()
    counted = sum(int(one["gained"]["overshoot_bytes"]) for turn in turns for one in _ranks(turn))
    return max(0, counted, peak_of(measured, key) - measured.budgets[key.split()[1]].high)


def unlike_torch(name: str, measured: Measured) -> list[str]:
    """Configurations with a step whose loss or gradients are not plain torch's, bit by bit."""
    if "plain" not in measured.digests:
        return []
    base = measured.digests["plain"]
    return [
        f"{name} {key}: losses or gradients differ: {mine['steps']}, plain torch's {plain['steps']}"
        for key, found in measured.digests.items()
        for mine, plain in zip(_ranks(found), _ranks(base), strict=True)
        if mine["steps"] != plain["steps"]
        or not all(math.isfinite(loss) for loss, _ in mine["steps"])
    ]


def summary_of(case: Case, measured: Measured) -> dict[str, dict[str, Any]]:
    """Medians over all timed steps, peaks, what moved per step, what was waited for."""
    found: dict[str, dict[str, Any]] = {}
    for key, turns in measured.turns.items():
        steps = [step for turn in turns.values() for step in turn["steps"]]
        one: dict[str, Any] = {
            "step_ms": round(statistics.median(step["ms"] for step in steps), 2),
            "host_ms": round(
                statistics.median(turn["steps"][0]["host_ms"] for turn in turns.values()), 2
            ),
            "turns_ms": [round(ms, 1) for ms in turn_medians(measured, key)],
            "peak_gib": round(peak_of(measured, key) / GIB, 3),
        }
        if key != "plain" and "plain" in measured.turns:
            mine = measured.step_ms(case, key)
            one["to_plain"] = round(ratio(mine, measured.step_ms(case, "plain")), 4)
        if " " in key and "plain" in measured.turns:
            one.update(_of_ours(case, measured, key))
        one.update(_waits(measured, key))
        found[key] = one
    return found


def _of_ours(case: Case, measured: Measured, key: str) -> dict[str, Any]:
    budget, mine = key.split()[1], measured.step_ms(case, key)
    bounds = measured.bounds_ms(case, budget)
    one: dict[str, Any] = {"to_bound": round(ratio(mine, bounds), 4)}
    one["bound_to_plain"] = round(ratio(bounds, measured.step_ms(case, "plain")), 4)
    one.update(_counted(measured, key, 0))
    if not case.varying:
        need = measured.need(case, budget, measured.memory["peak"])
        one["need_gib"] = round(need / GIB, 3)
    if budget != FREE:
        one["high_gib"] = round(measured.budgets[budget].high / GIB, 3)
        one["over_high_bytes"] = over_high(measured, key)
    else:
        one["quiet_turns"] = sum(turn["quiet"] for turn in measured.turns[key].values())
    if key in measured.first:
        first = measured.first[key]["first"]
        one["first_ms"] = round(first["wall_ms"], 1)
        one["first_over_high_bytes"] = first["gained"]["overshoot_bytes"]
        for wait in WAITS[1:]:
            one[f"first_{wait}_ms"] = round(first["gained"].get(f"{wait}_ns", 0) / 1e6, 1)
    last = _ranks(list(measured.turns[key].values())[-1])
    one["plan_state"] = last[0]["plan_state"]
    if len(last) > 1:
        one["other_ranks"] = [
            {**_counted(measured, key, rank), "plan_state": last[rank]["plan_state"]}
            for rank in range(1, len(last))
        ]
    return one


def _counted(measured: Measured, key: str, rank: int) -> dict[str, Any]:
    """What one rank moved in a step, and what it waited for."""
    one: dict[str, Any] = {}
    for counter in (*COUNTERS, *EVENTS):
        total = per_step(measured, key, counter, rank)
        if counter in COUNTERS:
            one[counter.replace("bytes", "gib_per_step")] = round(total / GIB, 3)
        else:
            one[f"{counter}_per_step"] = round(total, 2)
    for wait in WAITS:
        one[f"{wait}_ms_per_step"] = round(per_step(measured, key, f"{wait}_ns", rank) / 1e6, 2)
    return one


def _waits(measured: Measured, key: str) -> dict[str, Any]:
    """The dearest calls to CUDA of a step, those that map, whose code runs, and the GPU's gaps."""
    one: dict[str, Any] = {}
    calls, gaps = measured.calls.get(key, {}), measured.gaps.get(key, {})
    if calls.get("seen"):
        one["calls_ms"] = round(sum(each["ms"] for each in calls["training"].values()), 2)
        one["map_calls"] = int(calls["mapping"]["calls"] + calls["mapping_elsewhere"]["calls"])
        one["map_ms"] = round(calls["mapping"]["ms"], 3)
        dearest = list(calls["training"].items())[:5]
        one["dearest"] = {
            f"{name} x{int(each['calls'])}": round(each["ms"], 2) for name, each in dearest
        }
    if (samples := measured.samples.get(key, {})).get("seen"):
        one["host_libraries"] = dict(list(samples["libraries"].items())[:6])
    if gaps.get("seen"):
        one["idle_ms"] = gaps["idle_ms"]
        one["longest_gaps_ms"] = [each["ms"] for each in gaps["longest"]]
        if others := gaps.get("others"):
            one["other_ranks_idle_ms"] = [each.get("idle_ms") for each in others]
    return one
