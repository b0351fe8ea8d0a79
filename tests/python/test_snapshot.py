"""`snapshot`: what memory holds, as torch's own memory visualiser reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import stagehand_alloc
from stagehand_alloc import TelemetryError, _native
from stagehand_alloc._pictures import snapshot as _snapshot

pytestmark = pytest.mark.usefixtures("gpu")
MIB = 1 << 20


def frames(snapshot: dict[str, Any]) -> list[str]:
    return [
        frame["name"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        for frame in block["frames"]
    ]


def half_way() -> tuple[Any, dict[str, Any], stagehand_alloc.PoolStats]:
    """A graph whose saved tensors are partly away, and that moment's snapshot and statistics."""
    _native.empty_cache()
    start = stagehand_alloc.stats().occupied
    x = torch.ones(4 * MIB // 4, requires_grad=True)
    with stagehand_alloc.pool(high=start + 24 * MIB, low=start + 18 * MIB):
        y = x
        for _ in range(8):
            y = torch.sin(y)
    return y.sum(), stagehand_alloc.snapshot(), stagehand_alloc.stats()


def test_bytes_are_those_of_the_books_and_blocks_tile_their_segments() -> None:
    loss, found, stats = half_way()
    segments = found["segments"]
    assert sum(one["total_size"] for one in segments) == stats.mapped
    assert sum(one["allocated_size"] for one in segments) == stats.occupied
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    loss.backward()


def test_retained_blocks_and_records_that_left_are_named() -> None:
    loss, found, stats = half_way()
    retained = [name for name in frames(found) if name.startswith("retained: saved tensor")]
    assert retained
    assert all("SinBackward0" in name for name in retained)
    left = [one for one in found["device_traces"][0] if one["action"] == "free_completed"]
    assert sum(one["size"] for one in left) == stats.evicted > 0
    assert all(one["frames"][0]["name"].startswith("evicted: ") for one in left)
    loss.backward()


def test_torch_s_own_tools_read_it(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    loss, *_ = half_way()
    stagehand_alloc.snapshot(path)
    found = pickle.loads(path.read_bytes())
    assert "Summary of segments" in _memory_viz.segsum(found)
    assert "evicted: saved tensor" not in _memory_viz.trace(found)
    assert _memory_viz.trace(found).startswith("Device 0")
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(found)
    lines: list[str] = []
    _memory_viz.segments(found, format_flamegraph=lines.append)
    _memory_viz.memory(found, format_flamegraph=lines.append)
    assert "retained: saved tensor" in lines[0]
    _memory_viz.compare(found["segments"], found["segments"], format_flamegraph=lines.append)
    loss.backward()


def test_in_torch_s_modes_ours_are_named_in_torch_s_snapshot() -> None:
    block = {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated"}
    theirs = {"name": "linear", "filename": "nn.py", "line": 7}
    segment = {"address": 4096, "total_size": 1024, "blocks": [{**block, "frames": [theirs]}],
               "stream": 3}  # fmt: skip
    base = {"segments": [segment], "device_traces": [[{"action": "alloc", "addr": 4096}]]}
    records = [(5, 1000, 0, 4096, 1024, True, "GeluBackward0", "Block"),
               (6, 512, 2, 0, 0, False, "", "")]  # fmt: skip
    found = _snapshot.of_contents(records, [], 0, base)
    (block,) = found["segments"][0]["blocks"]
    assert [frame["name"] for frame in block["frames"]] == [
        "retained: saved tensor 5, GeluBackward0",
        "linear",
    ]
    names = [one["frames"][0]["name"] for one in found["device_traces"][0] if one.get("frames")]
    assert names[0] == "dropped: saved tensor 6"


def test_a_path_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match="cannot be written"):
        stagehand_alloc.snapshot(tmp_path / "no" / "memory.pickle")
