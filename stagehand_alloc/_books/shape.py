"""What is known of one kind of step: its memory over time, its records, what the plan does.

It is read from the engine now and then, written into telemetry as the field "shape" of a step's
line, and read back by `report` and `advise`.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import dataclasses
import json
import zlib
from typing import Any

from stagehand_alloc._books import plan as _plan
from stagehand_alloc._books.plan import PlanLine, StepPlan
from stagehand_alloc._extension import native

POINTS = 128  # of the curves, at most
_MOST_MOMENTS = 65536  # of a step whose records are kept: a line stays below some MB
_RECORD_FIELDS, _IDLE_FIELDS = 10, 3  # native/entry/shapes.cpp
_LARGEST = 1 << 62

Row = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class KnownStep:
    """A step as the planner looks at it (native/core/planner.hpp). Bytes and nanoseconds."""

    records: tuple[Row, ...]
    """bytes, retained, used (moments; -1: never), again, call, rerun, three places it is made of,
    and the bytes that a rerun takes"""
    full: tuple[int, ...]
    """Of each moment: what would be occupied if nothing had left."""
    at_ns: tuple[int, ...]
    """When each begins, of computing alone; empty: such a step was not measured."""
    idle: tuple[Row, ...] = ()
    """Offloaded weights that nobody holds: bytes, from, until (moments; -1: to the end)"""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Memory over one step. Bytes; `ms` is the time since the first save, of computing alone."""

    ms: tuple[float, ...]
    mapped: tuple[int, ...]
    occupied: tuple[int, ...]
    full: tuple[int, ...]
    """What would be occupied if nothing had left."""
    backward_ms: float
    """When the first saved tensor was asked for."""
    timed: bool
    """False: no step was measured yet, and `ms` counts moments."""


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One kind of step, as last seen."""

    kind: int
    high: int
    curve: Curve
    plan: StepPlan
    all_ms: float
    """From the first save to the last use with all waits, of one measured step; 0: none was."""
    waited_ms: float
    """Of that, the GPU waited for copies."""
    again_ms: float
    """Of that, it made again what was dropped."""
    d2h_rate: int
    """Bytes a second that the lane to the host carries, as measured; 0: nothing was copied yet."""
    h2d_rate: int
    known: KnownStep | None
    """None: too large a step to be kept."""
    dirty: int = 0
    """Of offloaded weights, newer than their host copies: what is trained."""


def kind_of(device: int) -> int:
    """The number of the kind of step that was learned last; 0 before the first."""
    return int(native.step_kind(device))


def read(device: int) -> StepShape | None:
    """The kind of step that was learned last on a device that is open; None before the first.

    Takes milliseconds of the host, and of the device's lock as long as copying its records does.
    """
    raw = native.step_shape(device)
    if not raw:
        return None
    rows = (raw[name] for name in ("records", "full", "at_ns", "idle"))
    known = KnownStep(*map(tuple, rows))
    return StepShape(
        kind=raw["id"],
        high=raw["high"],
        curve=curve(known, raw["mapped"], raw["occupied"]),
        plan=_plan.read(device),
        all_ms=raw["all_ns"] / 1e6,
        waited_ms=raw["waited_ns"] / 1e6,
        again_ms=raw["again_ns"] / 1e6,
        d2h_rate=int(raw["out_bytes_per_ns"] * 1e9),
        h2d_rate=int(raw["in_bytes_per_ns"] * 1e9),
        known=known if len(known.full) <= _MOST_MOMENTS else None,
        dirty=raw["dirty"],
    )


def curve(known: KnownStep, mapped: list[int], occupied: list[int]) -> Curve:
    """At most `POINTS` points of a step: the largest of each stretch of equal time."""
    timed = bool(known.at_ns)
    at = known.at_ns if timed else tuple(i * 1_000_000 for i in range(len(known.full)))
    uses = [row[2] for row in known.records if row[2] >= 0]
    backward = at[min(uses)] if uses and min(uses) < len(at) else at[-1]
    wide = max(1, -(-(at[-1] + 1) // POINTS))
    rows: list[tuple[int, int, int, int]] = []
    at_end = [bisect.bisect_left(at, (i + 1) * wide) for i in range(POINTS)]
    first = 0
    for i, end in enumerate(at_end):
        if first >= len(at):
            break
        # Without a moment in it, a stretch holds what the moment before it does.
        part = slice(first, end) if end > first else slice(max(0, first - 1), max(1, first))
        rows.append((i * wide, max(mapped[part]), max(occupied[part]), max(known.full[part])))
        first = max(first, end)
    ms, some_mapped, some_occupied, full = zip(*rows, strict=True)
    return Curve(
        tuple(round(ns / 1e6, 4) for ns in ms),
        some_mapped,
        some_occupied,
        full,
        round(backward / 1e6, 4),
        timed,
    )


# ---- as a field of a telemetry line --------------------------------------------------------------


def to_json(shape: StepShape) -> dict[str, Any]:
    """What `from_json` reads. Records are packed: JSON in zlib in base64."""
    found = dataclasses.asdict(shape)
    known = found.pop("known")
    if known is not None:
        text = json.dumps(list(known.values()), separators=(",", ":"))
        found["packed"] = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    return found


def from_json(found: Any) -> StepShape | None:
    """What a line says of its kind of step; None for what is none, or broken."""
    try:
        plan = found["plan"]
        lines = tuple(_line(one) for one in plan["lines"])
        times = {
            name: _number(plan[name]) for name in ("step_ms", "best_ms", "late_ms", "again_ms")
        }
        names = ("all_ms", "waited_ms", "again_ms", "d2h_rate", "h2d_rate", "kind", "high")
        return StepShape(
            curve=_curve(found["curve"]),
            plan=StepPlan(lines, **times, settled=bool(plan.get("settled", True))),
            known=_unpacked(found["packed"]) if "packed" in found else None,
            dirty=_number(found.get("dirty", 0)),  # an older version wrote none
            **{name: _number(found[name]) for name in names},
        )
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error, RecursionError):
        return None


def _line(found: dict[str, Any]) -> PlanLine:
    names = ("storages", "stays", "moves", "dropped", "again_ms")
    numbers = {name: _number(found[name]) for name in names}
    return PlanLine(_text(found["region"]), _text(found["op"]), **numbers)


def _curve(found: dict[str, Any]) -> Curve:
    rows = {
        name: tuple(_number(one) for one in found[name])
        for name in ("ms", "mapped", "occupied", "full")
    }
    if len({len(row) for row in rows.values()}) != 1 or not rows["ms"]:
        raise ValueError("a curve has as many sizes as times")
    return Curve(**rows, backward_ms=_number(found["backward_ms"]), timed=bool(found["timed"]))


def _unpacked(text: str) -> KnownStep:
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 1 << 28)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    records, full, at_ns, *rest = json.loads(raw)
    idle = rest[0] if rest else []  # an older version wrote none
    older = _RECORD_FIELDS - 1  # an older version wrote nothing of what a rerun takes
    records = [[*row, 0] if len(row) == older else row for row in records]
    if not full or (at_ns and len(at_ns) != len(full)):
        raise ValueError("a step has as many times as moments")
    if any(len(row) != _RECORD_FIELDS for row in records):
        raise ValueError("a record has other fields")
    if any(len(row) != _IDLE_FIELDS for row in idle):
        raise ValueError("idle weights have other fields")
    numbers = [*full, *at_ns, *(one for row in (*records, *idle) for one in row)]
    if not all(isinstance(one, int) and -1 <= one < _LARGEST for one in numbers):
        raise ValueError("a record has a field that is no number")
    return KnownStep(tuple(map(tuple, records)), tuple(full), tuple(at_ns), tuple(map(tuple, idle)))


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} is no number of a step")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("no name")
    return value
