"""One JSON line per step: Activation Stagehand v0's fields, and ours beside them.

A step is one outermost ``with``. Backward runs after it, so the line of step n is written when step
n + 1 begins, or at `close`, which also runs at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from stagehand_alloc._books import stats as _stats
from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._errors import TelemetryError
from stagehand_alloc._settings.config import MIB, format_bytes, shown
from stagehand_alloc._tell import warn

V0_FIELDS = (
    *("step", "activations_saved", "activations_kept", "activations_spilled"),
    *("activations_restored", "spill_bytes", "restore_bytes", "stall_time_ms", "stall_count"),
    *("pool_hits", "pool_misses", "vram_peak_mb"),
)

_BEGINS = '{"step": '  # how a line of ours does
_TEXTS = ("plan", "plan_state")
_LISTS = ("proposed_classes_mb", "proposed_slabs_per_class")
_OTHERS = ("passed_through",)
_LARGEST_NUMBER = 1 << 63

PassedThrough = Callable[[], dict[str, int]]


class Writer:
    """Appends the lines of one device to one file. A failed write warns once and ends it."""

    def __init__(self, path: Path, device: int) -> None:
        self._path = path
        self._device = device
        self._step = 0
        self._start: tuple[PoolStats, PassedThrough, dict[str, int], float] | None = None
        self._pid = os.getpid()
        try:
            self._file: TextIO | None = path.open("a", encoding="utf-8")
        except OSError as error:
            raise TelemetryError(
                f"The telemetry file {path} cannot be written: {error.strerror}.",
                "Give a path in a folder that exists and can be written.",
            ) from error

    def begin_step(self, passed_through: PassedThrough) -> None:
        """Write the line of the step before, and start the counts of a new one."""
        self.end_step()
        self._step += 1
        _stats.start_step_peaks(self._device)
        now = _stats.read(self._device)
        self._start = (now, passed_through, passed_through(), time.perf_counter())

    def end_step(self) -> None:
        """Write the line of the step that is open, if one is."""
        if self._start is None or self._file is None or self._pid != os.getpid():
            return
        start, passed_through, passed_before, began = self._start
        self._start = None
        found = _stats.with_proposal(_stats.read(self._device)).since(start)
        passed = {
            reason: count - passed_before.get(reason, 0)
            for reason, count in passed_through().items()
            if count != passed_before.get(reason, 0)
        }
        line = step_fields(self._step, found, passed)
        line["wall_time_ms"] = round((time.perf_counter() - began) * 1e3, 3)
        line["time"] = round(time.time(), 3)
        line["rank"] = _rank()
        line["pid"] = self._pid
        self._write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write what is open and close the file."""
        self.end_step()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries to write once more
                self._file.close()
            self._file = None
            warn(
                f"Telemetry stopped: {self._path} cannot be written ({error.strerror}). "
                "Training goes on."
            )


def _rank() -> int:
    """As torchrun and most launchers say; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def step_fields(step: int, found: PoolStats, passed_through: dict[str, int]) -> dict[str, Any]:
    """The fields of one line. ``found`` holds the step's own counters and peaks; sizes in bytes.

    An activation that was evicted twice counts twice as spilled; kept is the rest of the saved.
    """
    spilled = found.clean_evictions + found.dirty_evictions
    return {
        "step": step,
        "activations_saved": found.activations_saved,
        "activations_kept": max(0, found.activations_saved - spilled),
        "activations_spilled": spilled,
        "activations_restored": found.restores + found.prefetches,
        "spill_bytes": found.evicted_bytes,
        "restore_bytes": found.restored_bytes,
        "stall_time_ms": round(found.stall_ns / 1e6, 3),
        "stall_count": found.stall_count,
        "pool_hits": found.pool_hits,
        "pool_misses": found.pool_misses,
        "vram_peak_mb": round(found.mapped_peak / MIB, 3),
        "device": found.device,
        "high": found.high,
        "low": found.low,
        "mapped_peak": found.mapped_peak,
        "occupied_peak": found.occupied_peak,
        "retained_peak": found.retained_peak,
        "freed_bytes": found.freed_bytes,
        "overshoot_bytes": found.overshoot_bytes,
        "host_waits": found.host_waits,
        "clean_evictions": found.clean_evictions,
        "dirty_evictions": found.dirty_evictions,
        "prefetches": found.prefetches,
        "prefetch_hits": found.prefetch_hits,
        "prefetch_lates": found.prefetch_lates,
        "alias_hits": found.alias_hits,
        "pageable_bytes": found.pageable_bytes,
        "passed_through": passed_through,
        "write_backs": found.write_backs,
        "plan": "followed" if found.plan_follows else "reactive",
        "plan_state": found.plan_state,
        "pinned_bytes": found.pinned_bytes,
        "pinned_waste_bytes": found.pinned_waste_bytes,
        "proposed_classes_mb": list(found.proposed_classes_mb),
        "proposed_slabs_per_class": list(found.proposed_slabs_per_class),
        "drops": found.drops,
        "dropped_bytes": found.dropped_bytes,
        "recomputes": found.recomputes,
        "recomputed_bytes": found.recomputed_bytes,
        "reruns": found.reruns,
    }


_lock = threading.Lock()
_writers: dict[tuple[Path, int], Writer] = {}


def begin_step(path: str | Path, device: int, passed_through: PassedThrough) -> None:
    """Begin a step on ``device``, reported to ``path``. Raises TelemetryError at the first one."""
    key = (Path(path).absolute(), device)
    with _lock:
        writer = _writers.get(key)
        if writer is None:
            writer = _writers[key] = Writer(*key)
        writer.begin_step(passed_through)


def close() -> None:
    """Write the lines of the steps that are open, and close every file."""
    with _lock:
        for writer in _writers.values():
            writer.close()
        _writers.clear()


atexit.register(close)


# ---- reading it back -----------------------------------------------------------------------------


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """The steps of the last run in a file, of each rank and device. Raises TelemetryError.

    Of each, a run begins at step 1.
    """
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in _lines(Path(path)):
        run = runs.setdefault(_source(line), [])
        if line["step"] == 1:
            run.clear()
        run.append(line)
    return [line for _, run in sorted(runs.items()) for line in run]


def _source(line: dict[str, Any]) -> tuple[int, int]:
    return int(line.get("rank", 0)), int(line.get("device", 0))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TelemetryError(
            f"The telemetry file {path} cannot be read: {error}.",
            "Give the file that pool(telemetry=...) wrote.",
        ) from error
    rows = text.splitlines()
    for number, row in enumerate(rows, 1):
        try:
            line = json.loads(row)
            valid = isinstance(line, dict) and all(name in line for name in V0_FIELDS)
        except (ValueError, RecursionError):
            valid = False
        if valid:
            _check_types(path, number, line)
            yield line
        # A last line may be cut off, where a process was killed.
        elif number < len(rows) or not row.startswith(_BEGINS[: len(row)]):
            raise TelemetryError(
                f"{path}, line {number}, is not a step of telemetry.",
                "Give the file that pool(telemetry=...) wrote.",
            )


def _check_types(path: Path, number: int, line: dict[str, Any]) -> None:
    for name, value in line.items():
        if name in _TEXTS:
            right = isinstance(value, str) and value.isprintable()
        elif name in _LISTS:
            right = isinstance(value, list) and all(_is_number(one) for one in value)
        else:
            right = name in _OTHERS or _is_number(value)
        if not right:
            raise TelemetryError(
                f"{path}, line {number}: {name} is {shown(value)}, which no step has.",
                "Give the file that pool(telemetry=...) wrote.",
            )


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < _LARGEST_NUMBER  # nor NaN, nor what a float cannot be
    )


def report(steps: list[dict[str, Any]], rows: int = 12) -> str:
    """A short table: the first and last steps, and a line of totals; of each rank and device."""
    runs = {source: list(run) for source, run in itertools.groupby(steps, _source)}
    if len(runs) <= 1:
        return _report_of_one(steps, rows)
    return "\n\n".join(
        f"rank {rank}, device {device}\n{_report_of_one(run, rows)}"
        for (rank, device), run in runs.items()
    )


def _report_of_one(steps: list[dict[str, Any]], rows: int) -> str:
    columns = (
        ("step", "step", 1),
        ("peak MiB", "vram_peak_mb", 1),
        ("saved", "activations_saved", 1),
        ("spilled", "activations_spilled", 1),
        ("spill MiB", "spill_bytes", MIB),
        ("restored", "activations_restored", 1),
        ("restore MiB", "restore_bytes", MIB),
        ("dropped MiB", "dropped_bytes", MIB),
        ("stall ms", "stall_time_ms", 1),
        ("over high MiB", "overshoot_bytes", MIB),
        ("host waits", "host_waits", 1),
        ("plan", "plan_state", 1),
    )
    table = [[title for title, _, _ in columns]]
    table += [[_cell(step, key, unit) for _, key, unit in columns] for step in _ends(steps, rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    if len(steps) > rows:
        lines.insert(1 + (rows + 1) // 2, f"... {len(steps) - rows} more steps ...")
    return "\n".join([*lines, "", _totals(steps), *pinned_lines(steps)])


def pinned_lines(steps: list[dict[str, Any]]) -> list[str]:
    """What the last step says of the pinned pool; nothing where it says nothing."""
    last = steps[-1] if steps else {}
    lines = []
    if last.get("pinned_bytes"):
        lines.append(
            f"pinned {format_bytes(last['pinned_bytes'])}, "
            f"{format_bytes(last.get('pinned_waste_bytes', 0))} of what is used empty"
        )
    if last.get("proposed_classes_mb"):
        lines.append(
            "no miss and least waste with "
            f"pinned_pool_classes_mb={last['proposed_classes_mb']}, "
            f"slabs_per_class={last['proposed_slabs_per_class']}"
        )
    return lines


def _ends(steps: list[dict[str, Any]], rows: int) -> list[dict[str, Any]]:
    if len(steps) <= rows:
        return steps
    return steps[: (rows + 1) // 2] + steps[len(steps) - rows // 2 :]


def _cell(step: dict[str, Any], key: str, unit: int) -> str:
    value = step.get(key, 0)
    if isinstance(value, str):
        return value
    return f"{value / unit:.1f}" if unit != 1 or isinstance(value, float) else str(value)


def _totals(steps: list[dict[str, Any]]) -> str:
    if not steps:
        return "no steps"
    return (
        f"{len(steps)} steps: peak {max(step['vram_peak_mb'] for step in steps):.1f} MiB, "
        f"spilled {sum(step['spill_bytes'] for step in steps) / MIB:.1f} MiB, "
        f"restored {sum(step['restore_bytes'] for step in steps) / MIB:.1f} MiB, "
        f"stalled {sum(step['stall_time_ms'] for step in steps):.1f} ms"
    )
