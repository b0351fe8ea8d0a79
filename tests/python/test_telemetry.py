"""The per-step file: v0's fields, differences per step, peaks per step, and the report of it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stagehand_alloc
from stagehand_alloc import SizeError, StepStats, TelemetryError, _driver, _native
from stagehand_alloc.__main__ import main
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books import steps as _steps
from stagehand_alloc._books import telemetry as _telemetry
from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._books.table import table
from stagehand_alloc._cli import doctor as _doctor

MIB = 1 << 20
V0_FIELDS = {
    *("step", "activations_saved", "activations_kept", "activations_spilled"),
    *("activations_restored", "spill_bytes", "restore_bytes", "stall_time_ms", "stall_count"),
    *("pool_hits", "pool_misses", "vram_peak_mb"),
}
OURS = {
    *("mapped_peak", "occupied_peak", "retained_peak", "freed_bytes", "overshoot_bytes"),
    *("host_waits", "clean_evictions", "dirty_evictions", "prefetch_hits", "prefetch_lates"),
    *("alias_hits", "passed_through", "plan", "plan_state", "pinned_bytes", "pinned_waste_bytes"),
    *("proposed_classes_mb", "proposed_slabs_per_class"),
}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    _telemetry.close()


def lines_of(path: Path) -> list[dict[str, Any]]:
    _telemetry.flush()
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(pool: stagehand_alloc.Pool, megabytes: int) -> None:
    """One training step that saves `megabytes` MiB for backward, in four tensors."""
    x = torch.ones(megabytes * MIB // 16, requires_grad=True)
    with pool:
        y = x
        for _ in range(4):
            y = torch.sin(y)
    y.sum().backward()


def fields(step: int = 1, **found: int) -> dict[str, Any]:
    return _steps.step_fields(step, PoolStats(**found), {})  # type: ignore[arg-type]


def test_a_line_has_v0_s_fields_and_ours() -> None:
    line = fields()
    assert set(line) >= V0_FIELDS | OURS


def test_fields_are_in_the_units_their_names_say() -> None:
    found = PoolStats(
        activations_saved=10,
        clean_evictions=3,
        dirty_evictions=4,
        mapped_peak=5 * MIB,
        stall_ns=1_500_000,
        evicted_bytes=77,
        restored_bytes=66,
    )
    line = _steps.step_fields(9, found, {"leaf": 2})
    assert (line["step"], line["vram_peak_mb"], line["stall_time_ms"]) == (9, 5.0, 1.5)
    assert (line["activations_spilled"], line["activations_kept"]) == (7, 3)
    assert (line["spill_bytes"], line["restore_bytes"]) == (77, 66)
    assert line["passed_through"] == {"leaf": 2}


@pytest.mark.usefixtures("gpu")
def test_a_step_s_line_is_written_when_the_next_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    pool = stagehand_alloc.pool(telemetry=path)
    step(pool, 1)
    assert lines_of(path) == []
    step(pool, 1)
    assert [line["step"] for line in lines_of(path)] == [1]
    _telemetry.close()
    assert [line["step"] for line in lines_of(path)] == [1, 2]


@pytest.mark.usefixtures("gpu")
def test_counters_are_of_the_step_alone(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    pool = stagehand_alloc.pool(telemetry=path)
    for _ in range(4):
        step(pool, 1)
    _telemetry.close()
    saved = [line["activations_saved"] for line in lines_of(path)]
    assert saved[0] > 0
    assert len(set(saved)) == 1
    # The first may follow a step of an earlier pool in this process.
    assert [line["plan"] for line in lines_of(path)][1:] == ["followed"] * 3


@pytest.mark.usefixtures("gpu")
def test_peaks_are_of_the_step_alone_and_stats_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    stagehand_alloc.reset_peak_stats()
    pool = stagehand_alloc.pool(telemetry=path)
    for megabytes in (1, 64, 1, 1):
        step(pool, megabytes)
    _telemetry.close()
    peaks = [line["occupied_peak"] for line in lines_of(path)]
    assert peaks[1] > 60 * MIB > peaks[3]
    assert stagehand_alloc.stats().occupied_peak == max(peaks)
    stagehand_alloc.reset_peak_stats()
    assert stagehand_alloc.stats().occupied_peak < 60 * MIB


@pytest.mark.usefixtures("gpu")
def test_new_pools_on_one_file_go_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(3):
        step(stagehand_alloc.pool(telemetry=path), 1)
    _telemetry.close()
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3]


@pytest.mark.usefixtures("gpu")
def test_the_config_names_the_file_and_the_argument_wins(tmp_path: Path) -> None:
    named, other = tmp_path / "named.jsonl", tmp_path / "other.jsonl"
    config = {"telemetry_enabled": True, "telemetry_file": str(named)}
    step(stagehand_alloc.pool(config=config), 1)
    step(stagehand_alloc.pool(config=config, telemetry=other), 1)
    step(stagehand_alloc.pool(config=config, telemetry=False), 1)
    _telemetry.close()
    assert (len(lines_of(named)), len(lines_of(other))) == (1, 1)


@pytest.mark.usefixtures("gpu")
def test_a_file_that_cannot_be_opened_stops_the_first_step_only(tmp_path: Path) -> None:
    pool = stagehand_alloc.pool(telemetry=tmp_path / "no" / "such" / "folder.jsonl")
    with pytest.raises(TelemetryError, match="cannot be written"), pool:
        pass
    step(stagehand_alloc.pool(), 1)  # nothing is left half open


@pytest.mark.usefixtures("gpu")
def test_a_full_disk_warns_once_and_training_goes_on() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    pool = stagehand_alloc.pool(telemetry=full)
    for _ in range(2):
        step(pool, 1)
    _telemetry.flush()
    with pytest.warns(stagehand_alloc.StagehandWarning, match="Telemetry stopped"):
        step(pool, 1)
    step(pool, 1)


@pytest.mark.usefixtures("gpu")
def test_a_line_that_cannot_be_made_warns_once_and_other_files_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    pool = stagehand_alloc.pool(telemetry=bad)
    with monkeypatch.context() as patched:
        patched.setattr(_telemetry, "_PAUSE", 0.01)
        patched.setattr(_telemetry, "_line", lambda *_: 1 / 0)
        step(pool, 1)
        step(pool, 1)
        _telemetry.flush()
    with pytest.warns(stagehand_alloc.StagehandWarning, match="division by zero"):
        step(pool, 1)
    other = stagehand_alloc.pool(telemetry=good)
    for _ in range(2):
        step(other, 1)
    other.step_stats()
    deadline = time.monotonic() + 60
    while good.read_text().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread alone writes
    assert good.read_text().count("\n") == 2
    assert bad.read_text() == ""


@pytest.mark.usefixtures("gpu")
def test_a_step_that_ends_after_its_file_was_closed_is_written_to_that_file(
    tmp_path: Path,
) -> None:
    path, other = tmp_path / "steps.jsonl", tmp_path / "other"
    writer = _telemetry.writer_of(path)
    _telemetry.close()
    with other.open("wb"):  # takes the number that the file had, if it had one
        writer.listen(StepStats(1, 0))
    assert [line["step"] for line in lines_of(path)] == [1]
    assert other.read_text() == ""


def test_lines_stay_whole_where_the_system_writes_them_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    write, parts = os.write, 0

    def in_parts(file: int, data: bytes) -> int:
        nonlocal parts
        parts += 1
        if parts == 1:
            ready.start()  # another one who wants to write now
            assert not done.wait(0.2)
        return write(file, data[:7])

    def another() -> None:
        _telemetry._append(path, b"another\n")
        done.set()

    done = threading.Event()
    ready = threading.Thread(target=another)
    monkeypatch.setattr(os, "write", in_parts)
    _telemetry._append(path, b"the first line\nthe second\n")
    ready.join()
    assert path.read_text() == "the first line\nthe second\nanother\n"


def write(path: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_the_report_is_of_the_last_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [fields(step=n, mapped_peak=900 * MIB) for n in range(1, 4)]
    last = [fields(step=n, mapped_peak=7 * MIB, evicted_bytes=3 * MIB) for n in range(1, 31)]
    path = write(tmp_path / "steps.jsonl", [*first, *last])
    assert main(["report", "--no-html", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "30 steps: peak 7.0 MiB, spilled 90.0 MiB" in printed
    assert "... 18 more steps ..." in printed
    assert "900" not in printed


def test_ranks_and_devices_in_one_file_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**fields(step=n, device=device, evicted_bytes=(1 + device + rank) * MIB), "rank": rank}
        for n in (1, 2)
        for rank in (0, 1)
        for device in (0, 1)
    ]
    path = write(tmp_path / "steps.jsonl", rows)
    assert main(["report", "--no-html", str(path)]) == 0
    printed = capsys.readouterr().out
    for rank, device, spilled in ((0, 0, 2), (0, 1, 4), (1, 0, 4), (1, 1, 6)):
        part = printed.split(f"rank {rank}, device {device}\n")[1].split("\n\nrank")[0]
        assert f"2 steps: peak 0.0 MiB, spilled {spilled}.0 MiB" in part


def test_a_line_says_of_which_rank_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    writer = _telemetry.Writer(tmp_path / "steps.jsonl")
    writer.listen(StepStats(1, 0, _steps.rank()))
    writer.close()
    (line,) = lines_of(tmp_path / "steps.jsonl")
    assert (line["rank"], line["device"], line["pid"]) == (3, 0, os.getpid())
    assert line["drops"] == line["dropped_bytes"] == line["reruns"] == 0


def test_the_report_says_the_plan_and_what_would_suit_the_pinned_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = PoolStats(
        plan_state="diverged",
        pinned_bytes=64 * MIB,
        pinned_waste_bytes=3 * MIB,
        proposed_classes_mb=(2, 5),
        proposed_slabs_per_class=(7, 9),
    )
    path = write(tmp_path / "steps.jsonl", [_steps.step_fields(1, found, {})])
    for command in ("report", "doctor"):
        main([command, str(path), *(["--no-html"] if command == "report" else [])])
        printed = capsys.readouterr().out
        assert "pinned 64.00 MiB, 3.00 MiB of what is used empty" in printed
        assert "pinned_pool_classes_mb=[2, 5], slabs_per_class=[7, 9]" in printed
        assert ("diverged" in printed) == (command == "report")


def test_the_report_reads_files_of_before_these_fields(tmp_path: Path) -> None:
    old = {name: value for name, value in fields().items() if name in V0_FIELDS}
    path = write(tmp_path / "steps.jsonl", [old])
    assert "1 steps: peak" in table(_runs.read([path]).runs[0])


@pytest.mark.usefixtures("gpu")
def test_the_proposal_is_of_what_was_asked_of_the_pinned_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step(stagehand_alloc.pool(), 1)
    monkeypatch.setattr(_native, "pinned_demand", lambda device: [(3 * MIB, 4)])
    found = stagehand_alloc.stats()
    assert (found.proposed_classes_mb, found.proposed_slabs_per_class) == ((3,), (4,))


@pytest.mark.usefixtures("gpu")
def test_the_plan_s_state_follows_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    pool = stagehand_alloc.pool(telemetry=path)
    for megabytes in (5, 5, 5, 7):  # sizes that no other test's steps begin with
        step(pool, megabytes)
    _telemetry.close()
    states = [line["plan_state"] for line in lines_of(path)]
    assert states[1:] == ["following", "following", "following"]  # the last has a kin
    assert str(pool.stats()).count("plan following") == 1


def test_numa_says_which_node_each_device_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "meminfo").write_text(
            f"Node {node} MemTotal: 9 kB\nNode {node} MemFree:  {(node + 1) << 20} kB\n"
        )
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    answers = {
        "cuDeviceGet": 7,
        "cuDeviceGetAttribute": -1,  # as of a driver that does not know
        "cuDeviceGetPCIBusId": b"0000:3B:00.0\0\0",
    }
    monkeypatch.setattr(_driver, "call", lambda function, *arguments: answers[function])
    monkeypatch.setattr(_driver, "device_count", lambda: 1)
    monkeypatch.setattr(_driver, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(_driver, "NODES", tmp_path)
    nodes = "2 nodes (0: 1.00 GiB free, 1: 2.00 GiB free); "
    assert _doctor._numa() == nodes + "device 0 is near node 1"
    answers["cuDeviceGetAttribute"] = 0
    assert _doctor._numa() == nodes + "device 0 is near node 0"
    answers.update({"cuDeviceGetAttribute": -1, "cuDeviceGetPCIBusId": b"elsewhere"})
    assert _doctor._numa() == nodes + "device 0 is near no known node"
    monkeypatch.setattr(_driver, "NODES", tmp_path / "none")
    assert "one node" in _doctor._numa()


@pytest.mark.parametrize(("mode", "good"), [("always [madvise] never", True), ("[never]", False)])
def test_pinning_without_huge_pages_is_named(tmp_path: Path, mode: str, good: bool) -> None:
    path = tmp_path / "enabled"
    path.write_text(mode)
    assert ("in huge pages" in _doctor._pinned_memory(path)) == good
    assert (_doctor._no_huge_pages(_doctor.Findings(), path) == []) == good


@pytest.mark.usefixtures("gpu")
def test_pinned_memory_is_given_back_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def release(device: int, keep: int) -> int:
        calls.append((device, keep))
        return 5 * MIB

    monkeypatch.setattr(_native, "release_pinned", release, raising=False)
    pool = stagehand_alloc.pool()
    step(pool, 1)
    assert pool.release_pinned() == 5 * MIB
    assert pool.release_pinned(keep="1GiB") == 5 * MIB
    assert calls == [(0, 0), (0, 1 << 30)]
    for keep in (-1, True, "some", 0.5):
        with pytest.raises(SizeError, match="keep="):
            pool.release_pinned(keep=keep)  # type: ignore[arg-type]


@pytest.mark.usefixtures("gpu")
def test_steps_numbered_by_powers_of_two_and_the_last_say_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    pool = stagehand_alloc.pool(telemetry=path)
    for _ in range(7):
        step(pool, 3)
    _telemetry.close()
    lines = lines_of(path)
    told = [line["step"] for line in lines if "shape" in line]
    assert told[-3:] == [2, 4, 7]  # 1 only where something was learned before it
    (run,) = _runs.read([path]).runs
    assert run.shape is not None
    assert sum(line.storages for line in run.shape.plan.lines) == 3
    assert max(run.shape.curve.full) >= 3 * MIB
    assert run.shape.known is not None
    assert len(run.shape.known.records) == 3
