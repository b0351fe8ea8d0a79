"""What the plan does with the saved tensors of a step, for people: `Pool.plan`."""

from __future__ import annotations

import dataclasses

from stagehand_alloc._books.markup import escaped
from stagehand_alloc._books.markup import table as markup_table
from stagehand_alloc._extension import native
from stagehand_alloc._settings.sizes import format_bytes as size


@dataclasses.dataclass(frozen=True)
class PlanLine:
    """What one kind of autograd node made, and one kind of region saved. Sizes in bytes."""

    region: str
    """The class of the module that they were saved in, or the function; "" for what is in none."""
    op: str
    """The node, such as "GeluBackward0"; "" for what has no graph, or where nobody saw."""
    storages: int
    stays: int
    moves: int
    dropped: int
    again_ms: float
    """To make again what is dropped; of a region all of it stands where it is asked for first."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What steps like the newest do with what they save; `str()` of it is a table."""

    lines: tuple[PlanLine, ...]
    """Those of most bytes that move or are dropped first."""
    step_ms: float
    """Computing alone, from the first save to the last use; 0 where no step was measured."""
    best_ms: float
    """The quickest such step with all its waits, where several plans are tried; else 0."""
    late_ms: float
    """Forecast: the GPU waits for the link."""
    again_ms: float
    """Forecast: it makes again what was dropped."""
    settled: bool = False
    """Whether no other plan will be tried, as long as steps cost what they do. False as long as no
    step has been learned."""

    def __str__(self) -> str:
        if not self.lines:
            return (
                "No step has been learned: a plan is made of the first step whose backward ended."
            )
        rows = [_HEAD, *map(_row, self.lines)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        aligned = [str.ljust, str.ljust, *[str.rjust] * (len(widths) - 2)]
        table = [
            "  ".join(
                align(text, width) for align, text, width in zip(aligned, row, widths, strict=True)
            )
            for row in rows
        ]
        return "\n".join([*table, self._forecast()])

    def _repr_html_(self) -> str:
        """In a notebook."""
        if not self.lines:
            return f"<p>{escaped(str(self))}</p>"
        rows = [[escaped(cell) for cell in _row(line)] for line in self.lines]
        return f"{markup_table(_HEAD, rows)}<p>{escaped(self._forecast())}</p>"

    def _forecast(self) -> str:
        if self.step_ms == 0:
            return "No step has been measured yet."
        told = f"Computing {self.step_ms:.1f} ms; forecast: {self.late_ms:.1f} ms late on the link"
        told += f", {self.again_ms:.1f} ms made again"
        if self.best_ms > 0:
            told += f"; best so far {self.best_ms:.1f} ms in all"
        if not self.settled:
            told += "; other plans are still tried"
        return told + "."


_HEAD = ("in", "made by", "storages", "stay", "move", "dropped", "again")


def _row(line: PlanLine) -> tuple[str, ...]:
    sizes = (size(line.stays), size(line.moves), size(line.dropped))
    names = (line.region or "-", line.op or "(no graph)")
    return (*names, str(line.storages), *sizes, f"{line.again_ms:.1f} ms")


def read(device: int) -> StepPlan:
    """Of a device that is open, or an empty one."""
    step, best, late, again, settled, ops = native.plan(device)
    lines = [
        PlanLine(region, op, storages, stays, moves, dropped, ns / 1e6)
        for region, op, storages, stays, moves, dropped, ns in ops
    ]
    lines.sort(key=lambda line: (-line.moves - line.dropped, -line.stays, line.region, line.op))
    return StepPlan(tuple(lines), step / 1e6, best / 1e6, late / 1e6, again / 1e6, settled)
