"""Telemetry as the tests of what reads it write it: lines, and one kind of step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagehand_alloc._books import shape as _shape
from stagehand_alloc._books import steps as _steps
from stagehand_alloc._books.plan import PlanLine, StepPlan
from stagehand_alloc._books.shape import KnownStep, StepShape
from stagehand_alloc._books.stats import PoolStats

MIB = 1 << 20
GIB = 1 << 30


def line(step: int = 1, **fields: Any) -> dict[str, Any]:
    """A line of telemetry: of a step that saved ten tensors inside 20 GiB and moved 3 GiB."""
    usual: dict[str, Any] = {
        **_steps.step_fields(step, PoolStats(), {}),
        "activations_saved": 10,
        "spill_bytes": 3 * GIB,
        "restore_bytes": 3 * GIB,
        "high": 20 * GIB,
        "low": 18 * GIB,
        "limit": 80 * GIB,
        "mapped_peak": 20 * GIB,
        "plan_state": "following",
        "wall_time_ms": 400.0,
        "rank": 0,
    }
    return {**usual, **fields}


def known_step(layers: int = 8, layer: int = GIB, ms: int = 10) -> KnownStep:
    """Each layer saves one record of that size; backward uses them in reverse."""
    moments = 2 * layers + 1
    records = tuple(
        (layer, i + 2 if i + 1 < layers else i + 1, moments - 1 - i, 0, 0, 0, -1, -1, -1, 0)
        for i in range(layers)
    )
    full = [4 * GIB + min(m, moments - 1 - m) * layer for m in range(moments)]
    return KnownStep(records, tuple(full), tuple(m * ms * 1_000_000 for m in range(moments)))


def shape(known: KnownStep | None = None, **fields: Any) -> StepShape:
    """One kind of step: half of what it saves moves, and some is made again."""
    known = known or known_step()
    mapped = [min(one, 8 * GIB) for one in known.full]
    usual: dict[str, Any] = {
        "kind": 3,
        "high": 20 * GIB,
        "curve": _shape.curve(known, mapped, [one - 256 * MIB for one in mapped]),
        "plan": StepPlan(
            (
                PlanLine("Block", "GeluBackward0", 6, 0, 3 * GIB, GIB, 4.0),
                PlanLine("", "AddmmBackward0", 2, 2 * GIB, 0, 0, 0.0),
            ),
            step_ms=160.0,
            best_ms=170.0,
            late_ms=4.0,
            again_ms=4.0,
        ),
        "all_ms": 180.0,
        "waited_ms": 6.0,
        "again_ms": 4.0,
        "d2h_rate": 25 * 10**9,
        "h2d_rate": 24 * 10**9,
        "known": known,
    }
    return StepShape(**{**usual, **fields})


def write(path: Path, lines: list[dict[str, Any]], tail: str = "") -> Path:
    """A telemetry file."""
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + tail)
    return path


def with_shape(one: dict[str, Any], of: StepShape) -> dict[str, Any]:
    """A line that says what kind of step it is of."""
    return {**one, "shape": _shape.to_json(of)}
