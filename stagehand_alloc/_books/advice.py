"""What other budgets would cost: the planner itself, on the step that a run recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from stagehand_alloc._books.runs import Run
from stagehand_alloc._books.shape import KnownStep
from stagehand_alloc._errors import TelemetryError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.sizes import format_bytes as size

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)  # of what a step needs with everything on the GPU
_ROUND = 1 << 20
_DROP = 2  # of native/core/planner.hpp
_AGAIN_NS, _CALL = 3, 4  # of a record's fields


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes a second that the two directions carry."""

    d2h: float
    h2d: float
    said: str = dataclasses.field(default="as was given", compare=False)
    """By whom, for people."""


@dataclasses.dataclass(frozen=True)
class Advised:
    """What steps like the recorded one are expected to do inside ``high``. Sizes in bytes."""

    high: int
    fits: bool
    """False: more is in use at one moment than any moving can hold below high."""
    step_ms: float
    """With all waits, and what is outside of forward and backward."""
    slower: float
    """Over a step that moves nothing: 1.05 takes 5 % longer."""
    moved: int
    """To the host, and back again."""
    dropped: int
    """And made again; only where the run measured how long that takes."""
    late_ms: float
    """The GPU waits for copies."""
    again_ms: float
    host: int
    """Pinned memory that the copies are in at once."""

    weights: int = 0
    """Offloaded ones, that leave for nothing and come again."""
    runs_again: bool = False
    """Some of what is dropped may come by a module that runs again."""

    def settings(self) -> str:
        """The pool that does this."""
        recompute = ", recompute=model" if self.runs_again else ""
        return f'pool(high="{round(self.high / _ROUND)}MiB"{recompute})'


@dataclasses.dataclass(frozen=True)
class Advice:
    """Of one run. Sizes in bytes."""

    needs: int
    """What a step needs with everything on the GPU."""
    least: int
    """In use at one moment whatever moves: no budget below it can be held."""
    plain_ms: float
    """A step that moves nothing."""
    link: Link
    measured_link: bool
    """By the run itself."""
    budgets: tuple[Advised, ...]
    may_drop: bool
    """The run measured what can be made again; else all that leaves is moved, in the forecast."""
    has_weights: bool = False
    """Some are offloaded: what a step needs has them in it."""


def advise(run: Run, highs: Sequence[int] = (), link: Link | None = None) -> Advice:
    """What each budget would cost this run. Raises TelemetryError where it says too little.

    Args:
        run: with a recorded step: of a run without a budget, or of any.
        highs: in bytes; empty: 90 % to 50 % of what a step needs.
        link: what its lanes carry; None: as the run measured.

    How: a step settles on what `native/core/planner` chooses, so that is asked, on the recorded
    sizes and times, with the link's rates (`native/core/step_shape`, which also says how far off
    that was). What a step takes outside of forward and backward is added as it was.
    """
    known = None if run.shape is None else run.shape.known
    if run.shape is None or known is None or not known.at_ns:
        raise TelemetryError(
            f"{run.file} has no measured step of {run.name}: "
            + ("it is too large a step" if known is None and run.shape else "the run was too short")
            + ".",
            "Train at least 8 steps of one kind with pool(telemetry=...), and end them.",
        )
    if run.has_weights():
        _check_weights(run, known, run.shape.dirty)
    measured = Link(run.shape.d2h_rate, run.shape.h2d_rate, "as this run measured")
    if link is None and measured.d2h > 0:
        link = measured
    if link is None:
        raise TelemetryError(
            f"{run.file} says nothing of the link: the run moved nothing.",
            "Say what it carries: --link 25GB/s (PCIe 3: 12, PCIe 4: 25, PCIe 5: 55), or a file "
            "of `python -m stagehand_alloc doctor --json`.",
        )
    whole = _ask(known, 1 << 62, link)
    needs, least = int(whole["fullest"]), int(whole["least"])
    wanted = highs or [round(share * needs / _ROUND) * _ROUND for share in _SHARES]
    plain_ms = _plain_ms(run, known)
    return Advice(
        needs=needs,
        least=least,
        plain_ms=plain_ms,
        link=link,
        measured_link=link == measured,
        budgets=tuple(_advised(known, high, link, plain_ms, least) for high in wanted),
        may_drop=any(row[_AGAIN_NS] or row[_CALL] for row in known.records),
        has_weights=run.has_weights(),
    )


def _check_weights(run: Run, known: KnownStep, dirty: int) -> None:
    weights = size(int(run.most("weights_bytes")))
    if not known.idle:
        raise TelemetryError(
            f"{run.file}: {run.name} had {weights} of offloaded weights, and does not say when "
            "they were used: an older version wrote it, or the last step used none.",
            "Train at least 8 steps of one kind with pool(telemetry=...), and end them.",
        )
    if dirty > 0 or run.total("weights_written_bytes") > 0:
        raise TelemetryError(
            f"{run.file}: {run.name} trained some of its {weights} of offloaded weights and "
            "optimizer state. The forecast knows of weights that only come.",
            "Train some steps with each budget, and read their reports.",
        )


_COLUMNS: dict[str, Callable[[Advised], str]] = {
    "high": lambda one: size(one.high),
    "step": lambda one: f"{one.step_ms:.4g} ms",
    "against plain": lambda one: f"{one.slower:.2f}",
    "moved": lambda one: size(one.moved),
    "dropped": lambda one: size(one.dropped) if one.dropped else "-",
    "weights": lambda one: size(one.weights) if one.weights else "-",
    "late": lambda one: f"{one.late_ms:.3g} ms",
    "pinned memory": lambda one: size(one.host),
    "": lambda one: "" if one.fits else "cannot be held",
}


def _advised(known: KnownStep, high: int, link: Link, plain_ms: float, least: int) -> Advised:
    found = _ask(known, high, link)
    late_ms, again_ms = found["late_ns"] / 1e6, found["again_ns"] / 1e6
    step_ms = plain_ms + late_ms + again_ms
    return Advised(
        high=high,
        fits=least <= high,
        step_ms=step_ms,
        slower=step_ms / plain_ms if plain_ms > 0 else 1.0,
        moved=int(found["moved"]),
        dropped=int(found["dropped"]),
        late_ms=late_ms,
        again_ms=again_ms,
        host=int(found["host"]),
        weights=int(found["weights"]),
        runs_again=any(
            fate == _DROP and row[_CALL] != 0
            for fate, row in zip(found["fates"], known.records, strict=True)
        ),
    )


def _ask(known: KnownStep, high: int, link: Link) -> dict[str, Any]:
    rates = link.d2h / 1e9, link.h2d / 1e9
    try:
        return native.advise(known.records, known.full, known.at_ns, known.idle, high, *rates)
    except ValueError as error:
        raise TelemetryError(
            f"The telemetry has a step that cannot be: {error}.",
            "Its file is broken. Train 8 steps of one kind or more with pool(telemetry=...) again.",
        ) from error


def _plain_ms(run: Run, known: KnownStep) -> float:
    """A step of that run without its waits and without what it made again."""
    assert run.shape is not None
    computing = known.at_ns[-1] / 1e6
    outside = max(0.0, run.step_ms() - run.shape.all_ms) if run.shape.all_ms > 0 else 0.0
    return computing + outside


def text(advice: Advice) -> str:
    """A table of the budgets, and what it rests on."""
    columns = [name for name in _COLUMNS if name != "weights" or advice.has_weights]
    rows = [columns, *([_COLUMNS[name](one) for name in columns] for one in advice.budgets)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    best = max(
        (one for one in advice.budgets if one.fits and one.slower <= 1.05),
        key=lambda one: -one.high,
        default=None,
    )
    needs = (
        f"A step needs {size(advice.needs)} with everything on the GPU, and "
        f"{size(advice.least)} whatever moves. Plain, it takes {advice.plain_ms:.4g} ms."
    )
    carries = (
        f"The link: {advice.link.d2h / 1e9:.3g} GB/s to the host and "
        f"{advice.link.h2d / 1e9:.3g} GB/s back, {advice.link.said}."
    )
    told = [needs, carries, "", *table]
    if best is not None:
        told += ["", f"The smallest here that costs at most 5 %: {best.settings()}"]
    if not advice.may_drop:
        told += [
            "",
            "Of moving alone: this run did not measure what can be made again.",
            "A pool drops that where it costs less, unless recompute=False: steps may be quicker.",
        ]
    return "\n".join(told)
