"""`timeline`: a trace of what the engine did, on the profiler's clock and in its file."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BY_NAME
from training import MIB, footprint, train

import stagehand_alloc
from stagehand_alloc import PoolError, TelemetryError
from stagehand_alloc._pictures import timeline as _timeline

pytestmark = pytest.mark.usefixtures("gpu")


def names(events: list[dict[str, Any]], kind: str) -> list[str]:
    return [one["name"] for one in events if one["ph"] == kind]


def pressed() -> None:
    """Three steps that have to move something."""
    recipe = BY_NAME["gpt"]
    train(recipe, footprint(recipe).pool(0.5))


def test_steps_records_and_lanes_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = stagehand_alloc.stats()
    began = time.time_ns()
    with stagehand_alloc.timeline(path) as found:
        pressed()
    ended = time.time_ns()
    gained = stagehand_alloc.stats().since(before)
    events = json.loads(path.read_text())["traceEvents"]
    assert events == found.events
    spans = [one for one in events if one["ph"] == "X"]
    assert sum("pool, step" in one["name"] for one in spans) >= 3
    instants = names(events, "i")
    assert instants.count("restored") == gained.restores
    assert instants.count("prefetched") == gained.prefetches
    assert gained.restores + gained.prefetches > 0
    assert instants.count("evicted") == gained.clean_evictions + gained.dirty_evictions > 0
    copies = [one for one in spans if one["name"].startswith("copy")]
    moved = {way: sum(one["args"]["bytes"] for one in copies if way in one["name"])
             for way in ("to the host", "back")}  # fmt: skip
    assert moved == {"to the host": gained.d2h_bytes, "back": gained.h2d_bytes}
    assert all(one["dur"] > 0 for one in copies)
    on_host = [one for one in events if one["ph"] in "iC"]
    assert all(began <= one["ts"] * 1e3 <= ended + 1e6 for one in on_host)
    rows = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in spans} <= rows


def test_what_is_off_notes_nothing() -> None:
    with stagehand_alloc.timeline() as found:
        pass
    pressed()
    with stagehand_alloc.timeline() as after:
        pass
    assert names(found.events, "i") == names(after.events, "i") == []


def test_it_goes_into_the_profiler_s_own_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        stagehand_alloc.timeline() as ours,
        torch.profiler.profile(activities=activities) as theirs,
    ):
        pressed()
    ours.export(path, theirs)
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    ops = [one for one in events if one.get("cat") == "cpu_op"]
    evictions = [one for one in events if one["name"] == "evicted" and one["ph"] == "i"]
    assert ops
    assert evictions
    first, last = min(one["ts"] for one in ops), max(one["ts"] + one["dur"] for one in ops)
    assert all(first <= one["ts"] <= last for one in evictions)
    # Ours stand where they belong: something that saves was running when a block was let go of.
    spans = [(one["ts"], one["ts"] + one["dur"]) for one in ops]
    inside = sum(any(a <= one["ts"] <= b for a, b in spans) for one in evictions)
    assert inside > 0.9 * len(evictions)
    with pytest.raises(TelemetryError, match="export it once"):
        ours.export(path, theirs)


def test_an_error_inside_writes_no_file_and_a_timeline_serves_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = stagehand_alloc.timeline(path)
    with pytest.raises(PoolError, match="has not ended"):
        _ = found.events
    with pytest.raises(ZeroDivisionError), found:
        _ = 1 // 0
    assert not path.exists()
    with pytest.raises(PoolError, match="twice"), found:
        pass
    with pytest.raises(TelemetryError, match="cannot be written"):
        found.export(tmp_path / "no" / "trace.json")


def test_a_path_that_cannot_be_written_is_told_before_anything_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "no" / "trace.json", tmp_path):
        with pytest.raises(TelemetryError, match="cannot be written"):
            stagehand_alloc.timeline(path)
    for name in ("", f"{tmp_path}/new/", f"{tmp_path}/new/."):
        with pytest.raises(TelemetryError, match="cannot be written: It names no file"):
            stagehand_alloc.timeline(name)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))  # root may write
    with pytest.raises(TelemetryError, match="Permission denied"):
        stagehand_alloc.timeline(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_a_link_to_where_nothing_can_be_written_is_told_at_once(tmp_path: Path) -> None:
    link, there = tmp_path / "trace.json", tmp_path / "there"
    link.symlink_to(there / "trace.json")
    with pytest.raises(TelemetryError, match=f"There is no folder {there}"):
        stagehand_alloc.timeline(link)
    there.mkdir()
    stagehand_alloc.timeline(link)


def test_a_copy_says_its_rate_and_how_long_it_was_queued() -> None:
    (copy,) = (
        one
        for one in _timeline.events([], [(1, 3 * MIB, 1_000, 5_000, 105_000)], 0)
        if one["ph"] == "X"
    )
    assert (copy["ts"], copy["dur"]) == (5.0, 100.0)
    assert copy["args"] == {
        "bytes": 3 * MIB,
        "GB/s": round(3 * MIB / 100_000, 3),
        "us from the host's call": 4.0,
    }
