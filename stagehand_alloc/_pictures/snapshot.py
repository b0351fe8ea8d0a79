"""`snapshot`: what memory holds now, in the format of torch's memory visualiser.

Blocks that only the engine holds are named "retained", with the op and the module that saved them;
records that have left the GPU are named "evicted" and "dropped".
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from stagehand_alloc import _driver
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._errors import TelemetryError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.config import DeviceLike

# By native/core/states.hpp.
_HOLE, _FORMER, _FREE, _EVICTING, _LIVE, _RETAINED = range(6)
_TORCH_STATES = {
    _FREE: "inactive",
    _EVICTING: "active_awaiting_free",
    _LIVE: "active_allocated",
    _RETAINED: "active_allocated",
}
_RECORD_STATES = ("on the device", "evicted", "dropped")
_NOWHERE, _APART = 1 << 60, 1 << 34  # addresses of what has none
_STREAM = 0

Record: TypeAlias = "tuple[int, int, int, int, int, bool, str, str]"
Arena: TypeAlias = "tuple[int, int, bool, list[tuple[int, int, int]]]"
Part: TypeAlias = "dict[str, Any]"


def snapshot(path: str | Path | None = None, *, device: DeviceLike = None) -> Part:
    """What the memory of ``device`` holds now; written to ``path`` where one is given.

        stagehand_alloc.snapshot("memory.pickle")  # drop it on https://pytorch.org/memory_viz

    As ``torch.cuda.memory._snapshot()`` returns it, for all that reads those. In the modes on
    torch's own allocator it is torch's snapshot, with ours named in it. Names stand where torch has
    the innermost frame. The trace of the device ends with what is there: one "alloc" for each
    block, and an "alloc" and a "free" for each record that has left, so that the timeline shows it.

    Takes the device's lock for milliseconds; waits for no GPU work. Raises ConfigError, and
    TelemetryError where the file cannot be written.
    """
    index = _stats.device_index(device)
    found: tuple[list[Record], list[Arena]] = ([], [])
    if _driver.started() and native.device_open(index):
        found = native.contents(index)
    records, arenas = found
    base = _of_torch(index) if not any(blocks for *_, blocks in arenas) else None
    made = of_contents(records, arenas, index, base)
    if path is not None:
        try:
            Path(path).write_bytes(pickle.dumps(made))
        except OSError as error:
            raise TelemetryError(
                f"The snapshot {path} cannot be written: {error.strerror}.",
                "Give a path in a folder that exists and can be written.",
            ) from error
    return made


def _of_torch(device: int) -> Part | None:
    """torch's own, where its allocator cuts the blocks; None where it has none."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return None
    found: Part = cuda.memory._snapshot()
    found["segments"] = [one for one in found["segments"] if one.get("device", device) == device]
    return found


def of_contents(
    records: list[Record], arenas: list[Arena], device: int, base: Part | None = None
) -> Part:
    """The snapshot of those; ``base``: torch's own, whose blocks they are. Pure."""
    by_address = {record[3]: record for record in records if record[3]}
    made: Part = {"segments": [], "device_traces": []} if base is None else base
    if base is None:
        made["segments"] = [part for arena in arenas for part in _segments(arena, by_address)]
    for segment in made["segments"]:
        segment.setdefault("device", device)
        for block in segment["blocks"]:
            if (record := by_address.get(block["address"])) is not None:
                block["frames"] = [_frame(record), *block.get("frames", [])]
    traces = made["device_traces"]
    traces += [[] for _ in range(device + 1 - len(traces))]
    traces[device] = [*traces[device], *_trace(made["segments"], records)]
    return made


def _segments(arena: Arena, by_address: dict[int, Record]) -> Iterator[Part]:
    """The stretches of an arena that memory is mapped to."""
    _, stream, small, blocks = arena
    run: list[Part] = []
    for address, size, state in [*blocks, (0, 0, _HOLE)]:
        if state not in (_HOLE, _FORMER):
            record = by_address.get(address)
            run.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": size if record is None else min(size, record[1]),
                    "state": _TORCH_STATES[state],
                    "frames": [],
                }
            )
        elif run:
            yield _segment(run, stream, small)
            run = []


def _segment(blocks: list[Part], stream: int, small: bool) -> Part:
    allocated = [one for one in blocks if one["state"] == "active_allocated"]
    active = [one for one in blocks if one["state"] != "inactive"]
    return {
        "address": blocks[0]["address"],
        "total_size": sum(one["size"] for one in blocks),
        "allocated_size": sum(one["size"] for one in allocated),
        "active_size": sum(one["size"] for one in active),
        "requested_size": sum(one["requested_size"] for one in allocated),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }


def _frame(record: Record) -> Part:
    order, _, state, _, _, retained, op, region = record
    what = "retained" if retained else _RECORD_STATES[state] if state else "saved, in use"
    by = f", {op}" if op else ""
    return {
        "filename": region or "stagehand_alloc",
        "line": order,
        "name": f"{what}: saved tensor {order}{by}",
    }


def _trace(segments: list[Part], records: list[Record]) -> list[Part]:
    """What is there as if it came now; what has left came first, and went."""
    found = []
    for record in records:
        order, size, state, *_ = record
        if state:
            address = _NOWHERE + order * _APART
            found += [
                _entry(action, address, size, _STREAM, [_frame(record)])
                for action in ("alloc", "free_requested", "free_completed")
            ]
    for segment in segments:
        found.append(
            _entry("segment_alloc", segment["address"], segment["total_size"], segment["stream"])
        )
        found += [
            _entry("alloc", block["address"], block["size"], segment["stream"], block["frames"])
            for block in segment["blocks"]
            if block["state"] != "inactive"
        ]
    return found


def _entry(
    action: str, address: int, size: int, stream: int, frames: list[Part] | None = None
) -> Part:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "frames": frames or [],
        "time_us": 0,
    }
