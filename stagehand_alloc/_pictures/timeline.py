"""`timeline`: what the engine did and when, as a trace that Perfetto and chrome://tracing open.

The clock is that of `torch.profiler` (nanoseconds since the epoch), so that a profiler's own trace
and ours fit together: `Timeline.export` with the profiler writes both into one file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stagehand_alloc import _driver
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._errors import DriverError, PoolError, TelemetryError
from stagehand_alloc._extension import native
from stagehand_alloc._pictures.paths import require_writable
from stagehand_alloc._settings.config import DeviceLike
from stagehand_alloc._tell import warn

if TYPE_CHECKING:
    import torch

# By the numbers of native/core/timeline.hpp.
_WHATS = ("entered", "left", "evicted", "dropped", "made again", "restored", "prefetched")
_LANES = ("to the host", "back to the GPU", "back, express")
_ENTERED, _LEFT = 0, 1
# Rows of the trace. Numbers that no process has.
_PROCESS = 1 << 30
_HOST, _FIRST_LANE = 1, 2

Event = dict[str, Any]


class Timeline:
    """Made by `timeline`: a `with` whose steps are noted."""

    def __init__(self, path: str | Path | None, device: DeviceLike) -> None:
        if path is not None:
            require_writable("trace", path)
        self._path = path
        self._device_asked = device
        self._device: int | None = None
        self._events: list[Event] | None = None

    def __enter__(self) -> Timeline:
        """Begin. Waits for the GPU, once."""
        if self._device is not None:
            raise PoolError(
                "A timeline was entered inside itself, or twice.", "Make another one: timeline()."
            )
        self._device = _stats.device_index(self._device_asked)
        _driver.check_process()
        native.open_device(self._device)
        self._wait()
        _stats.stats(self._device)  # a device that was only just opened has no context yet
        if not native.start_timeline(self._device):
            raise DriverError(
                f"The driver refused an event on device {self._device}.",
                "Run `python -m stagehand_alloc doctor`.",
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End, and write the file that `timeline` was given. Waits for the GPU, once."""
        assert self._device is not None
        self._wait()
        notes, copies, missed = native.stop_timeline(self._device)
        if missed:
            warn(f"The timeline left {missed} events out: a million and 65,536 copies are kept.")
        self._events = events(notes, copies, self._device)
        if self._path is not None and kind is None:
            self.export(self._path)

    def _wait(self) -> None:
        _driver.synchronize(self._device or 0)

    @property
    def events(self) -> list[Event]:
        """In the trace event format; "ts" and "dur" in microseconds since the epoch."""
        if self._events is None:
            raise PoolError("The timeline has not ended.", "Leave its `with` first.")
        return self._events

    def export(self, path: str | Path, profiler: torch.profiler.profile | None = None) -> None:
        """Write the trace, with that of a profiler that has stopped. Raises TelemetryError.

        ``path`` may end with .gz. A profiler's trace can be exported once.
        """
        base: Event = {"traceEvents": []} if profiler is None else _exported(profiler)
        write(merged(base, self.events), path)


def timeline(path: str | Path | None = None, *, device: DeviceLike = None) -> Timeline:
    """Note what the engine does inside a `with`: evictions, restores, prefetches, both lanes.

        with stagehand_alloc.timeline("trace.json"):
            train_some_steps()

    Open the file at https://ui.perfetto.dev. With a profiler, both in one file:

        with stagehand_alloc.timeline() as ours, torch.profiler.profile() as theirs:
            train_some_steps()
        ours.export("trace.json", theirs)

    Args:
        path: written when the `with` ends; None: call `Timeline.export`. Ends with .gz to compress.
        device: default: the current CUDA device.

    Inside, each copy costs two events of the driver; outside nothing. Raises ConfigError,
    DriverError, and TelemetryError for a path that cannot be written, before the `with` begins.
    """
    return Timeline(path, device)


def events(
    notes: list[tuple[int, int, int, int, int, int, int]],
    copies: list[tuple[int, int, int, int, int]],
    device: int,
) -> list[Event]:
    """What was noted, as trace events. Pure."""
    found = [_named("process_name", _PROCESS + device, 0, f"stagehand_alloc, device {device}")]
    rows = [(_HOST, "steps and records (host)")]
    rows += [(_FIRST_LANE + lane, f"lane {name}") for lane, name in enumerate(_LANES)]
    found += [_named("thread_name", _PROCESS + device, row, name) for row, name in rows]
    found += _host_events(notes, _PROCESS + device)
    for lane, bytes_, queued, begin, end in copies:
        one = _event("X", f"copy {_LANES[lane]}", begin, _PROCESS + device, _FIRST_LANE + lane)
        waited = round((begin - queued) / 1e3, 3)
        rate = round(bytes_ / max(1, end - begin), 3)
        one["dur"] = (end - begin) / 1e3
        one["args"] = {"bytes": bytes_, "GB/s": rate, "us from the host's call": waited}
        found.append(one)
    return found


def _host_events(
    notes: list[tuple[int, int, int, int, int, int, int]], process: int
) -> list[Event]:
    found = []
    entered = 0
    steps = 0
    for what, ns, bytes_, record, occupied, mapped, evicted in notes:
        if what == _ENTERED:
            entered = ns
            steps += 1
        elif what == _LEFT:
            if entered:
                one = _event("X", f"pool, step {steps}", entered, process, _HOST)
                one["dur"] = (ns - entered) / 1e3
                found.append(one)
            entered = 0
        else:
            one = _event("i", _WHATS[what], ns, process, _HOST)
            found.append({**one, "s": "t", "args": {"bytes": bytes_, "record": record}})
        counter = _event("C", "memory", ns, process, 0)
        held = {"occupied": occupied, "mapped, not occupied": max(0, mapped - occupied)}
        found.append({**counter, "args": held})
        found.append({**_event("C", "evicted", ns, process, 0), "args": {"bytes": evicted}})
    return found


def _event(kind: str, name: str, ns: int, process: int, row: int) -> Event:
    return {
        "ph": kind,
        "cat": "stagehand",
        "name": name,
        "ts": ns / 1e3,
        "pid": process,
        "tid": row,
    }


def _named(what: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}


def merged(base: Event, ours: list[Event]) -> Event:
    """A profiler's trace with ours in it: its times are from "baseTimeNanoseconds" on. Pure."""
    begin_us = float(base.get("baseTimeNanoseconds", 0)) / 1e3
    moved = [{**one, "ts": one["ts"] - begin_us} if "ts" in one else one for one in ours]
    return {**base, "traceEvents": [*base.get("traceEvents", []), *moved]}


def _exported(profiler: torch.profiler.profile) -> Event:
    """What the profiler would write itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        try:
            profiler.export_chrome_trace(path)
            found: Event = json.loads(Path(path).read_text(encoding="utf-8"))
        except (RuntimeError, AssertionError, OSError, ValueError) as error:
            raise TelemetryError(
                f"The profiler's trace cannot be had: {error}.",
                "Leave the profiler's `with` first, and export it once.",
            ) from error
    return found


def write(trace: Event, path: str | Path) -> None:
    """As JSON; raises TelemetryError."""
    try:
        with contextlib.ExitStack() as stack:
            if str(path).endswith(".gz"):
                file: Any = stack.enter_context(gzip.open(path, "wt", encoding="utf-8"))
            else:
                file = stack.enter_context(open(path, "w", encoding="utf-8"))
            json.dump(trace, file)
    except OSError as error:
        raise TelemetryError(
            f"The trace {path} cannot be written: {error.strerror}.",
            "Give a path in a folder that exists and can be written.",
        ) from error
