"""benchmarks/workloads.py: what it claims and what it watches; and one workload, whole."""

from __future__ import annotations

import ctypes
import json
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(FOLDER))  # last: its models.py is not the tests' own

import driver_calls  # noqa: E402
import gaps  # noqa: E402
import workload_rows  # noqa: E402
import workloads  # noqa: E402
from foreign import compiled  # noqa: E402
from measures import Budget, Link  # noqa: E402
from workload_cases import CASES, FREE, OURS, SHARES, Bar, Case  # noqa: E402
from workload_run import CaseRun, Measured  # noqa: E402
from workload_worker import Settings, WorkloadWorker  # noqa: E402

LINK = Link(d2h=50e9, h2d=25e9)
FIRST_MS = {"first": 117.0, "later": 90.0, "cold": 100.0}
ALONE = Case("", "gpt", {}, {}, {"75": Bar(1.02)})


def steps(*ms: float, **more: float) -> list[dict[str, float]]:
    """A third of each is forward."""
    found = [{"ms": one, "forward_ms": one / 3, "backward_ms": one * 2 / 3} for one in ms]
    return [{**one, "host_ms": one["ms"], **more} for one in found]


def turn(*ms: float, **more: float) -> dict[str, Any]:
    gained = {"overshoot_bytes": 0, "map_calls": 0, "stall_ns": 0}
    told = {"plan_state": "", "quiet": 0}
    return {"steps": steps(*ms, **more), "gained": gained, "mapped_peak": 900, **told}


def measured(mine: float = 90, peak: int = 8 * 10**9) -> Measured:
    """4 GB do not fit: 80 ms out, 160 ms in, of a forward of 30 ms and a backward of 60."""
    found = Measured(memory={"start": 0, "peak": peak}, links=dict.fromkeys(range(3), LINK))
    found.budgets["75"] = Budget(4 * 10**9, 3 * 10**9)
    found.turns["plain"] = {0: turn(80, 90, 100), 1: turn(90, 90, 900), 2: turn(90, 90, 90)}
    for mode in OURS:
        found.turns[f"{mode} 75"] = {at: turn(mine, mine, mine) for at in range(3)}
        seen = {"calls": 0, "ms": 0.0}
        found.calls[f"{mode} 75"] = {"seen": True, "mapping": seen, "mapping_elsewhere": seen}
        walls = {name: {"wall_ms": ms} for name, ms in FIRST_MS.items()}
        found.first[f"{mode} 75"] = walls
        found.digests[f"{mode} 75"] = {"steps": [[1.0, "a"]]}
    found.digests["plain"] = {"steps": [[1.0, "a"]]}
    return found


def claims(case: Case, of: Measured, text: str) -> dict[str, bool]:
    rows = workload_rows.rows_of("gpt", case, of)
    return {row.claim: row.holds for row in rows if text in row.claim}


def test_at_its_bars_a_workload_misses_none() -> None:
    rows = workload_rows.rows_of("gpt", ALONE, measured(91.8))
    assert [row.claim for row in rows if not row.holds] == []
    assert sum(row.bar != "reported" for row in rows) == 6  # time, first step, calls; both modes


def test_a_pause_of_the_host_in_one_round_of_three_changes_no_ratio() -> None:
    (row,) = (
        row
        for row in workload_rows.rows_of("gpt", ALONE, measured(91.8))
        if row.claim == "gpt, 75 %, process allocator: step time / plain torch"
    )
    assert row.value == pytest.approx(1.02)


def test_how_far_plain_torchs_own_turns_differ_is_told_beside_the_ratios() -> None:
    of = measured()
    of.turns["plain"][2] = turn(99, 99, 99)
    (row,) = (row for row in workload_rows.rows_of("gpt", ALONE, of) if "slowest" in row.claim)
    assert row.value == pytest.approx(1.1)
    assert workload_rows.turn_medians(of, "plain") == [90, 90, 99]


def test_a_steps_loss_is_kept_until_the_next_ones_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # in this process: for all tests
    case = CASES["unet"]
    worker = WorkloadWorker(Settings(False, case.model, case.tiny, simulated=True))
    worker.build()
    kept = weakref.ref(worker._run("plain", 0, lambda _: None))
    assert kept() is not None
    worker._lead("plain", 1, 1)
    assert kept() is None
    kept = weakref.ref(worker._run("plain", 2, lambda _: None))
    worker._enter("checkpoint")
    assert kept() is None


def test_a_pool_without_a_budget_is_timed_as_in_a_process_that_has_no_other(
    run_fresh: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    run_fresh(
        f"""
        import sys
        sys.path.insert(0, {str(FOLDER)!r})
        from workload_cases import CASES, FREE
        from workload_worker import Settings, WorkloadWorker

        case = CASES["small"]
        worker = WorkloadWorker(Settings(True, case.model, case.tiny, simulated=True))
        worker.build()
        worker.budgets({{FREE: None, "75": (8 << 20, 7 << 20)}})
        worker.single("75", 0)
        first = worker.single(FREE, 0)  # its first one, not one after some that lead
        assert first["gained"]["activations_saved"] > 0
        for _ in range(2):
            assert worker.turn("75", 10, 1, 1)["quiet"] == 0
            assert worker.turn(FREE, 10, 1, 1)["quiet"] == 1
        """
    )


def test_the_bound_is_of_what_does_not_fit() -> None:
    assert measured().bounds_ms(ALONE, "75")[0] == pytest.approx(80 + 160)
    assert measured(peak=4 * 10**9).bounds_ms(ALONE, "75")[0] == pytest.approx(90)


def test_copies_that_may_overlap_with_all_the_rest_bound_by_the_slower_direction() -> None:
    case = Case("", "gpt", {}, {}, {"75": Bar()}, peaks=3, both_ways=True)
    assert measured().bounds_ms(case, "75")[0] == pytest.approx(3 * 160)


def test_where_shapes_vary_times_and_bounds_are_of_all_steps_of_a_turn() -> None:
    case = Case("", "gpt", {}, {}, {"75": Bar()}, varying=True)
    found = measured()
    found.turns["plain"] = {0: {**turn(90), "steps": steps(90, peak=8e9) + steps(30, peak=3e9)}}
    assert found.step_ms(case, "plain") == {0: 120}
    assert found.bounds_ms(case, "75") == {0: pytest.approx(80 + 160 + 30)}


def test_without_pressure_the_bound_is_plain_torch() -> None:
    assert measured().bounds_ms(ALONE, FREE)[0] == pytest.approx(90)


def test_one_call_that_maps_is_missed_wherever_it_was_counted() -> None:
    counted, seen = measured(), measured()
    counted.turns["allocator 75"][0]["gained"]["map_calls"] = 1
    seen.calls["allocator 75"]["mapping_elsewhere"] = {"calls": 1, "ms": 0.1}
    for found in (counted, seen):
        missed = [
            claim for claim, holds in claims(ALONE, found, "map, access").items() if not holds
        ]
        assert [claim.split(",")[2].strip() for claim in missed] == ["process allocator: map"], (
            missed
        )


def test_nothing_is_claimed_of_calls_that_were_not_seen() -> None:
    found = measured()
    found.calls = {key: {"seen": False, "why": "no CUPTI"} for key in found.calls}
    assert list(claims(ALONE, found, "map, access")) == [
        "gpt, 75 %, process allocator: map, access and unmap calls in a learned step"
    ]  # by our own count


def test_a_gradient_unlike_plain_torchs_is_named() -> None:
    found = measured()
    found.digests["native 75"] = {"steps": [[1.0, "b"]]}
    assert workload_rows.unlike_torch("gpt", found)[0].startswith("gpt native 75: losses")


def test_what_another_rank_does_counts_as_what_the_first_one_does() -> None:
    found = measured()
    for key, digests in found.digests.items():
        digests["others"] = [{"steps": [[1.0, "b" if key == "native 75" else "a"]]}]
    for key in ("plain", "native 75"):
        for one in found.turns[key].values():
            one["others"] = [turn(90, 90, 90)]
    theirs = found.turns["native 75"][0]["others"][0]
    theirs["gained"] = {**theirs["gained"], "overshoot_bytes": 7, "misses": 9}
    assert len(workload_rows.unlike_torch("gpt", found)) == 1
    assert workload_rows.over_high(found, "native 75") == 7
    found.first.clear()
    found.calls.clear()
    ranks = workload_rows.summary_of(ALONE, found)["native 75"]
    assert [one["misses_per_step"] for one in (ranks, *ranks["other_ranks"])] == [0, 1]


@pytest.mark.parametrize(
    ("name", "marked"), [("lengths", "checkpoints"), ("lstm_blocks", "blocks")]
)
def test_what_is_marked_runs_again_under_a_budget_bit_by_bit_and_not_without(
    run_fresh: Callable[..., subprocess.CompletedProcess[str]], name: str, marked: str
) -> None:
    run_fresh(
        f"""
        import sys
        sys.path.insert(0, {str(FOLDER)!r})
        from workload_cases import CASES
        from workload_worker import Settings, WorkloadWorker

        case = CASES[{name!r}]
        assert case.marked == {marked!r}
        of = Settings(True, case.model, case.tiny, simulated=True, marked=case.marked)
        worker = WorkloadWorker(of)
        worker.build()
        held = worker.memory("plain")
        high = held["start"] + (held["peak"] - held["start"]) // 2
        worker.budgets({{"50": (high, high * 9 // 10)}})
        assert worker.turn("plain", 3, 2, 1)["gained"]["reruns"] == 0
        assert worker.turn("50", 3, 4, 12)["gained"]["reruns"] >= 4
        plain, ours = worker.digests("plain", 2), worker.digests("50", 2)
        assert ours["gained"]["reruns"] > 0
        assert ours["steps"] == plain["steps"]
        """
    )


def test_every_budget_of_a_case_is_known() -> None:
    for case in CASES.values():
        assert set(case.bars) <= {*SHARES, FREE}
        assert set(case.same_budget) <= set(case.bars)


# --- What is watched


def span(name: str, stream: int, start_us: float, end_us: float) -> gaps.Span:
    return gaps.Span(name, stream, int(start_us * 1e3), int(end_us * 1e3))


def test_a_gap_says_what_came_after_it_and_what_ran_meanwhile() -> None:
    found = gaps.described(
        gaps.Recorded(
            [
                span("gemm", 7, 0, 100),
                span("gemm", 7, 101, 200),  # queued already
                span("softmax", 7, 1200, 1300),
                span("Memcpy HtoD (Pinned -> Device)", 20, 150, 1190),
                span("nccl_AllGather", 21, 0, 900),  # waits for others
            ]
        )
    )
    assert (found["gaps"], found["idle_ms"], found["span_ms"]) == (1, 1.0, 1.3)
    (gap,) = found["longest"]
    assert (gap["before"], gap["at_ms"], gap["ms"]) == ("softmax", 0.2, 1.0)
    assert gap["meanwhile"] == {
        "stream 20: Memcpy HtoD (Pinned -> Device)": 0.99,
        "stream 21: nccl_AllGather": 0.7,
    }


def test_without_kernels_there_is_no_compute_stream() -> None:
    assert not gaps.described(gaps.Recorded([span("Memset", 7, 0, 1)]))["seen"]


class Data(ctypes.Structure):
    """How CUPTI's CUpti_CallbackData begins."""

    _fields_ = (("leaving", ctypes.c_int), ("function", ctypes.c_char_p))


def test_calls_inside_calls_count_to_the_outer_one_and_to_their_thread() -> None:
    library = compiled(driver_calls.SOURCE)

    def call(domain: int, function: bytes, inside: tuple[int, bytes] | None = None) -> None:
        library.on_call(None, domain, 5, ctypes.byref(Data(0, function)))
        if inside is not None:
            call(*inside)
        library.on_call(None, domain, 5, ctypes.byref(Data(1, function)))

    library.start()
    call(2, b"cudaLaunchKernel", (1, b"cuLaunchKernel"))
    call(1, b"cuMemSetAccess_v2")
    other = threading.Thread(target=call, args=(1, b"cuMemUnmap"))
    other.start()
    other.join()
    rows = (driver_calls.Row * 16)()
    count = library.rows(ctypes.byref(rows), ctypes.c_long(16))
    found = [(driver_calls.plain_name(row.function.decode()), row.calls) for row in rows[:count]]
    assert sorted(found) == [("cuMemSetAccess", 1), ("cuMemUnmap", 1), ("cudaLaunchKernel", 1)]
    assert len({row.thread for row in rows[:count]}) == 2


def test_calls_are_told_apart_by_whether_their_thread_trains() -> None:
    rows = [
        {"function": "cuMemMap", "thread": thread, "calls": 2, "ms": 0.5, "longest_ms": 0.4}
        for thread in ("main", "backward", "pinner")
    ]
    training = driver_calls.summed(rows, training=True)
    assert training == {"cuMemMap": {"calls": 4, "ms": 1.0, "longest_ms": 0.4}}
    assert driver_calls.mapping(driver_calls.summed(rows, training=False)) == {
        "calls": 2,
        "ms": 0.5,
    }


# --- The program


def test_results_of_other_sources_are_not_joined(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "workloads.json"
    place = {"sources": "a", "device": "H200", "torch": "2.13", "driver": "580"}
    path.write_text(json.dumps({**place, "workloads": {"gpt": 1}}))
    assert workloads.kept(path, place) == {"gpt": 1}
    assert workloads.kept(path, {**place, "sources": "b"}) == {}
    assert workloads.kept(tmp_path / "none.json", place) == {}


def test_a_model_that_found_no_room_beside_the_workload_before_is_built_again() -> None:
    run = CaseRun("gpt", CASES["gpt"], workloads.QUICK, simulated=True)
    try:
        for worker in run._workers.values():
            worker.send("build", unknown=1)  # fails, and the process lives
        for worker in run._workers.values():
            run._receive_place(worker)
        assert run.place["device"] == "CPU"
        assert all(
            worker.ask("single", mode="plain", number=0)["wall_ms"] > 0
            for worker in run._workers.values()
        )
    finally:
        run.close()


def test_a_workload_is_measured_at_all_its_budgets(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "workloads.json"
    program = [sys.executable, str(FOLDER / "workloads.py"), "--simulated", "--only", "lstm"]
    done = subprocess.run(
        [*program, "--out", str(out)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (result["wrong"], result["not_run"]) == ([], {})
    lstm = result["workloads"]["lstm"]
    assert lstm["failed"] == {}
    assert set(lstm["summary"]) == {"plain", "allocator 75", "allocator 50"}
    assert lstm["summary"]["allocator 50"]["evicted_gib_per_step"] > 0
    assert set(result["rows"][0]) == {"claim", "value", "bar", "holds"}
