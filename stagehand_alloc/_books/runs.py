"""Telemetry files as runs: of each file, rank and device the steps of the run that began last.

A run is of one process, and its steps have rising numbers: the first line of one may be broken, and
two processes may write at once. A line that is broken or cut off is left out and counted. A file
without one step is another file.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stagehand_alloc._books import shape as _shape
from stagehand_alloc._books.shape import StepShape
from stagehand_alloc._errors import TelemetryError

V0_FIELDS = (
    *("step", "activations_saved", "activations_kept", "activations_spilled"),
    *("activations_restored", "spill_bytes", "restore_bytes", "stall_time_ms", "stall_count"),
    *("pool_hits", "pool_misses", "vram_peak_mb"),
)
_TEXTS = ("plan", "plan_state", "mode")
_WHO = ("rank", "device", "pid")
_LARGEST = 1 << 63
_HOW = "Give the file that pool(telemetry=...) wrote."
_SETTLED = 0.5  # the later part of a run, where its plans are made

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Lines of one file that are no steps."""

    file: str
    lines: int
    first: int
    """The number of the first one."""

    def __str__(self) -> str:
        lines = "1 line is" if self.lines == 1 else f"{self.lines} lines are"
        at = "" if self.lines == 1 else ", the first one"
        return f"{self.file}: {lines} broken and left out{at} at line {self.first}."


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Runs of one file that are not shown."""

    file: str
    runs: int
    """That it holds of one rank and device, the one that is shown included."""

    def __str__(self) -> str:
        return f"{self.file} holds {self.runs} runs of a device; the one that began last is shown."


@dataclasses.dataclass(frozen=True)
class Run:
    """The steps of one device of one rank, from one file. At least one."""

    file: str
    rank: int
    device: int
    steps: tuple[Line, ...]
    shape: StepShape | None
    """What is known of the newest kind of step; None where no line says."""

    @property
    def name(self) -> str:
        return f"rank {self.rank}, device {self.device}"

    def settled(self) -> tuple[Line, ...]:
        """The later steps: without those that a run learns from, and whose plans are tried."""
        return self.steps[int(len(self.steps) * _SETTLED) :]

    def total(self, field: str) -> float:
        """Of all steps."""
        return sum(number(step, field) for step in self.steps)

    def most(self, field: str) -> float:
        """Of all steps."""
        return max(number(step, field) for step in self.steps)

    def typical(self, field: str) -> float:
        """The median of the settled steps."""
        return statistics.median(number(step, field) for step in self.settled())

    def last(self, field: str) -> float:
        """Of the last step."""
        return number(self.steps[-1], field)

    def has_weights(self) -> bool:
        """Whether any were offloaded in it."""
        return self.most("weights_bytes") > 0

    def step_ms(self) -> float:
        """A settled step from one entry of the pool to the next; 0 where lines do not say."""
        # The last line ends where the process did, or the next epoch began.
        timed = self.settled()[:-1] or self.settled()
        return statistics.median(number(step, "wall_time_ms") for step in timed)


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """What some files say, by file, rank and device."""

    runs: tuple[Run, ...]
    skipped: tuple[Skipped, ...]
    left_out: tuple[LeftOut, ...]

    def notes(self) -> list[str]:
        """What of the files is not in the runs, a sentence each."""
        return [*map(str, self.left_out), *map(str, self.skipped)]


@dataclasses.dataclass
class _Reading:
    """A run as far as it was read."""

    steps: list[Line] = dataclasses.field(default_factory=list)
    shape: StepShape | None = None


def read(paths: Iterable[str | Path]) -> Telemetry:
    """The last run of each rank and device of each file. Raises TelemetryError."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    left_out: list[LeftOut] = []
    for path in paths:
        found, broken, others = _read_file(Path(path))
        runs += found
        skipped += broken
        left_out += others
    return Telemetry(tuple(runs), tuple(skipped), tuple(left_out))


def _read_file(path: Path) -> tuple[list[Run], list[Skipped], list[LeftOut]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TelemetryError(
            f"The telemetry file {path} cannot be read: {error.strerror}.", _HOW
        ) from error
    newest: dict[tuple[int, int, int], _Reading] = {}  # of each process
    shown: dict[tuple[int, int], _Reading] = {}
    seen: Counter[tuple[int, int]] = Counter()
    broken: list[int] = []
    for number, row in enumerate(text.splitlines(), 1):
        line = _step_of(row)
        if line is None:
            broken.append(number)
            continue
        source = (line.get("rank", 0), line.get("device", 0))
        process = (*source, line.get("pid", 0))
        run = newest.get(process)
        if run is None or line["step"] <= run.steps[-1]["step"]:
            run = newest[process] = shown[source] = _Reading()
            seen[source] += 1
        run.shape = _shape.from_json(line.pop("shape", None)) or run.shape
        run.steps.append(line)
    if not shown:
        what = "is empty" if not text.strip() else f"has no step in its {len(broken)} lines"
        raise TelemetryError(f"The telemetry file {path} {what}.", _HOW)
    most = max(seen.values())
    return (
        [Run(path.name, *source, tuple(r.steps), r.shape) for source, r in sorted(shown.items())],
        [Skipped(path.name, len(broken), broken[0])] if broken else [],
        [LeftOut(path.name, most)] if most > 1 else [],
    )


def _step_of(row: str) -> Line | None:
    """The step that a line is of; None where it is broken, or of something else."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not all(name in line for name in V0_FIELDS):
        return None
    return line if all(_fits(name, value) for name, value in line.items()) else None


def _fits(name: str, value: object) -> bool:
    if name in _TEXTS:
        return isinstance(value, str) and value.isprintable()
    if name in _WHO:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return name not in V0_FIELDS  # later versions may add what this one does not know
    return _is_number(value)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < _LARGEST  # nor NaN, nor what a float cannot be
    )


def number(step: Line, field: str) -> float:
    """A field of a step; 0 where it does not say, or says what is no number."""
    value = step.get(field, 0)
    return float(value) if _is_number(value) else 0.0


def numbers(value: Any) -> list[int]:
    """A list of numbers as some fields are; empty for anything else."""
    return [int(one) for one in value if _is_number(one)] if isinstance(value, list) else []


def counts(value: Any) -> dict[str, int]:
    """A field that counts by name, such as "passed_through"; empty for anything else."""
    if not isinstance(value, dict):
        return {}
    return {str(name): int(count) for name, count in value.items() if _is_number(count)}


def by_name(runs: Sequence[Run]) -> list[tuple[str, Run]]:
    """Each with a name that tells it from the others: none for a single one."""
    if len(runs) == 1:
        return [("", runs[0])]
    names = [run.name for run in runs]
    clash = len(set(names)) < len(names)
    return [(f"{run.file}, {run.name}" if clash else run.name, run) for run in runs]
