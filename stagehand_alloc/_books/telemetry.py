"""One JSON line per step: Activation Stagehand v0's fields, and ours beside them.

`_books.steps` says what a step is and what a line holds. The step's own thread puts it into a list;
a thread of ours writes the list half a second later, and whatever is left is written at exit. Lines
are appended whole, by one call, so that several processes may write to one file.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagehand_alloc._books import stats as _stats
from stagehand_alloc._books import steps as _steps
from stagehand_alloc._books.proposal import Proposal
from stagehand_alloc._books.steps import StepStats
from stagehand_alloc._errors import TelemetryError
from stagehand_alloc._settings.sizes import MIB, format_bytes, shown
from stagehand_alloc._tell import warn

V0_FIELDS = (
    *("step", "activations_saved", "activations_kept", "activations_spilled"),
    *("activations_restored", "spill_bytes", "restore_bytes", "stall_time_ms", "stall_count"),
    *("pool_hits", "pool_misses", "vram_peak_mb"),
)

_BEGINS = '{"step": '  # how a line of ours does
_TEXTS = ("plan", "plan_state", "mode")
_LISTS = ("proposed_classes_mb", "proposed_slabs_per_class")
_OTHERS = ("passed_through",)
_LARGEST_NUMBER = 1 << 63
_PAUSE = 0.5  # seconds that a line waits for others at most
_MOST_WAITING = 1024  # lines; then the step's own thread writes


class Writer:
    """Appends the lines of steps to one file. A failed write warns once and ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: Counter[int] = Counter()  # device -> lines so far
        self._waiting: deque[tuple[int, StepStats]] = deque()
        self._lock = threading.Lock()  # held while lines are written, so that they stay in order
        self._failure: str | None = None
        self._told = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise TelemetryError(
                f"The telemetry file {path} cannot be written: {error.strerror}.",
                "Give a path in a folder that exists and can be written.",
            ) from error

    def listen(self, step: StepStats) -> None:
        """Take a step; it is written soon. Steps are numbered by the file, from 1 on."""
        self._warn_of_failure()
        self._numbers[step.device] += 1
        self._waiting.append((self._numbers[step.device], step))
        if len(self._waiting) >= _MOST_WAITING or not _wake_writer():
            self.write()

    def write(self) -> None:
        """Write what waits."""
        with self._lock:
            lines = b""
            proposals: dict[int, Proposal] = {}
            while self._waiting:
                number, step = self._waiting.popleft()
                if step.device not in proposals:
                    proposals[step.device] = _stats.proposal_of(step.device)
                lines += _line(number, step, proposals[step.device])
            try:
                while lines and self._failure is None:
                    lines = lines[os.write(self._file, lines) :]
            except OSError as error:
                self._failure = error.strerror

    def close(self) -> None:
        """Write what waits and close the file."""
        self.write()
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._warn_of_failure()

    def _warn_of_failure(self) -> None:
        if self._failure is not None and not self._told:
            self._told = True
            warn(
                f"Telemetry stopped: {self._path} cannot be written ({self._failure}). "
                "Training goes on."
            )


def _line(number: int, step: StepStats, proposal: Proposal) -> bytes:
    fields = {
        **step.fields(),
        "step": number,
        "proposed_classes_mb": proposal.classes_mb,
        "proposed_slabs_per_class": proposal.slabs_per_class,
    }
    return json.dumps(fields).encode() + b"\n"


_lock = threading.Lock()  # the table of writers, and the thread
_writers: dict[str, Writer] = {}
_due = threading.Event()  # lines wait
_thread: threading.Thread | None = None


def writer_of(path: str | Path) -> Writer:
    """What appends to ``path``. Raises TelemetryError where that cannot be opened."""
    key = os.path.abspath(path)  # a third of the time that Path takes
    with _lock:
        writer = _writers.get(key)
        if writer is None:
            from multiprocessing import util

            writer = _writers[key] = Writer(Path(key))
            util.Finalize(None, close, exitpriority=0)  # its children skip atexit
        return writer


def flush() -> None:
    """Write the lines of all steps that have ended."""
    for writer in list(_writers.values()):
        writer.write()


def close() -> None:
    """End the steps that are open, write their lines, and close every file."""
    try:
        _steps.end_all()
    finally:
        with _lock:
            writers = list(_writers.values())
            _writers.clear()
        for writer in writers:
            writer.close()


def _wake_writer() -> bool:
    """False where there can be no thread: while the interpreter shuts down."""
    global _thread
    if not _due.is_set():
        _due.set()
    if _thread is not None:
        return True
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_write_on, name="stagehand-telemetry", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            _thread = thread
    return True


def _write_on() -> None:
    while True:
        _due.wait()
        time.sleep(_PAUSE)
        _due.clear()
        flush()


def _begin_child() -> None:
    """After a fork: files, lines and locks are the parent's."""
    global _lock, _due, _thread
    _lock, _due, _thread = threading.Lock(), threading.Event(), None
    _writers.clear()
    _steps.forget()


os.register_at_fork(after_in_child=_begin_child)
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
