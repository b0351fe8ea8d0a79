"""The pictures of a run, by matplotlib: SVG with text as text, in colours that the page names.

Each is drawn for a given width in pixels, so that text has its size on a desktop and on a phone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stagehand_alloc._books.plan import PlanLine
from stagehand_alloc._books.runs import Run, number
from stagehand_alloc._books.shape import Curve
from stagehand_alloc._errors import InstallError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 1040, 340  # pixels: a desktop, a phone
_FONT = 13  # pixels
_MOST_STEPS = 400  # points of a run
_MOST_BARS = 10

# Drawn in these. The page shows each in its own light or dark colour of that name.
COLOURS = {
    "ink": "#1b1f24",
    "faint": "#8a929c",
    "grid": "#e3e6ea",
    "stays": "#6b7f99",
    "moves": "#1f6feb",
    "again": "#d9730d",
    "weights": "#7a4fb5",
    "waits": "#c4314b",
    "limit": "#b02a37",
    "area": "#cfe0fb",
}


def require() -> None:
    """Raises InstallError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InstallError(
            "The page and the plots are drawn by matplotlib, which is not here.",
            "pip install 'stagehand_alloc[plot]'",
        ) from None


def unit_of(most: float) -> tuple[float, str]:
    """The unit that so many bytes are told in, and its name."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if most >= unit:
            return float(unit), name
    return 1.0, "bytes"


# ---- memory --------------------------------------------------------------------------------------


def memory(curve: Curve, high: int, low: int, limit: int, width: int) -> Figure:
    """One step: what was mapped and occupied, and what would have been if nothing had left."""
    figure, axes = _axes(width, 300 if width > NARROW else 260)
    draw_memory(axes, curve, high, low, limit)
    return figure


def draw_memory(axes: Axes, curve: Curve, high: int, low: int, limit: int) -> None:
    """`memory` into axes that are there."""
    most = max(*curve.full, *curve.mapped, high if high <= 2 * max(curve.full) else 0)
    scale, unit = unit_of(most)
    ms = curve.ms
    occupied, mapped, full = ([one / scale for one in row] for row in _rows(curve))
    axes.fill_between(ms, occupied, step="post", color=COLOURS["area"], linewidth=0)
    axes.plot(ms, full, drawstyle="steps-post", color=COLOURS["faint"], linewidth=1.4, ls="--")
    axes.plot(ms, mapped, drawstyle="steps-post", color=COLOURS["moves"], linewidth=1.8)
    top = most / scale * 1.14
    for name, mark, colour in (
        ("high", high, "ink"),
        ("low", low, "faint"),
        ("limit", limit, "limit"),
    ):
        if 0 < mark / scale <= top:
            axes.axhline(mark / scale, color=COLOURS[colour], linewidth=1.2)
            _mark(axes, mark / scale, f"{name} {mark / scale:.4g} {unit}", colour, name == "low")
    axes.axvline(curve.backward_ms, color=COLOURS["faint"], linewidth=0.9, ls=":")
    where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    at = (curve.backward_ms, 0)
    style = {"color": COLOURS["faint"], "va": "bottom"}
    for text, away, side in (("forward", -4, "right"), ("backward", 4, "left")):
        told = axes.annotate(text, at, (away, 4), ha=side, **where, **style)  # type: ignore[arg-type]
        told.set_in_layout(False)
    axes.set_ylim(0, top)
    axes.set_xlim(ms[0], ms[-1] if len(ms) > 1 else ms[0] + 1)
    axes.set_ylabel(unit)
    axes.set_xlabel("ms of computing" if curve.timed else "tensors saved, then used")


def _rows(curve: Curve) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Occupied, mapped and full; where nothing was told of a moment, as in the one before."""
    filled = []
    for row in (curve.occupied, curve.mapped, curve.full):
        last, values = 0, []
        for one in row:
            last = one or last
            values.append(last)
        filled.append(tuple(values))
    return filled[0], filled[1], filled[2]


def _mark(axes: Axes, at: float, text: str, colour: str, below: bool) -> None:
    told = axes.annotate(
        text,
        (0, at),
        (4, -3 if below else 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="top" if below else "bottom",
        color=COLOURS[colour],
    )
    told.set_in_layout(False)


# ---- the run -------------------------------------------------------------------------------------


def over_the_run(run: Run, width: int) -> Figure:
    """Each step's peak against high, and how long it took."""
    figure = _figure(width, 330 if width > NARROW else 300)
    peaks, times = figure.subplots(2, 1, sharex=True)
    steps = [number(step, "step") for step in run.steps]
    bytes_ = [
        number(step, "mapped_peak") or number(step, "vram_peak_mb") * (1 << 20)
        for step in run.steps
    ]
    high = [number(step, "high") for step in run.steps]
    scale, unit = unit_of(max(bytes_))
    x, y = thinned(steps, [one / scale for one in bytes_])
    peaks.plot(x, y, color=COLOURS["moves"], linewidth=1.6)
    if 0 < max(high) <= 2 * max(bytes_):
        x, y = thinned(steps, [one / scale for one in high])
        peaks.plot(x, y, color=COLOURS["ink"], linewidth=1.2)
        _mark(peaks, y[0], "high", "ink", False)
    peaks.set_ylim(0, 1.2 * max(*bytes_, *(h for h in high if h <= 2 * max(bytes_)), 1) / scale)
    peaks.set_ylabel(f"peak, {unit}")
    wall = [number(step, "wall_time_ms") for step in run.steps]
    stall = [number(step, "stall_time_ms") for step in run.steps]
    x, y = thinned(steps, wall)
    times.plot(x, y, color=COLOURS["ink"], linewidth=1.4)
    x, y = thinned(steps, stall)
    times.fill_between(x, y, color=COLOURS["waits"], linewidth=0)
    # A first step may take a hundred times as long as the others: they are what is looked at.
    usual = sorted(wall)[int(0.95 * (len(wall) - 1))]
    times.set_ylim(0, max(1.25 * usual, 1e-3))
    times.set_ylabel("ms")
    times.set_xlabel("step")
    _style(peaks)
    _style(times)
    return figure


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `_MOST_STEPS` points: the largest of each stretch."""
    every = -(-len(x) // _MOST_STEPS)
    parts = range(0, len(x), every)
    return [x[i] for i in parts], [max(y[i : i + every]) for i in parts]


# ---- bars ----------------------------------------------------------------------------------------

Part = tuple[float, str]  # how much, and its colour


def lanes(rows: Sequence[tuple[str, float, float, float]], width: int) -> Figure:
    """Bytes that each lane moves in a step, over what it could carry meanwhile (0: not known), and
    those that are weights."""
    scale, unit = unit_of(max(max(moved, could) for _, moved, could, _ in rows))
    figure, axes = _axes(width, 62 * len(rows) + 48)
    for at, (name, moved, could, weights) in enumerate(rows):
        if could > 0:
            _bar(axes, at, could / scale, "grid")
        _bar(axes, at, moved / scale, "moves")
        if weights > 0:
            _bar(axes, at, weights / scale, "weights")
        _label(axes, at, name)
    axes.set_xlabel(f"{unit} in one step")
    _as_bars(axes, len(rows))
    return figure


def by_op(lines: Sequence[PlanLine], width: int) -> Figure:
    """What stays, moves and is made again, by module and op: those of most bytes."""
    shown = largest(lines)
    scale, unit = unit_of(max(of(line) for line in shown))
    figure, axes = _axes(width, 46 * len(shown) + 48)
    for at, line in enumerate(shown):
        begin = 0.0
        for bytes_, colour in (
            (line.stays, "stays"),
            (line.moves, "moves"),
            (line.dropped, "again"),
        ):
            _bar(axes, at, bytes_ / scale, colour, begin)
            begin += bytes_ / scale
        _label(axes, at, name_of(line))
    axes.set_xlabel(unit)
    _as_bars(axes, len(shown))
    return figure


def of(line: PlanLine) -> int:
    """All bytes of a line."""
    return line.stays + line.moves + line.dropped


def largest(lines: Sequence[PlanLine]) -> list[PlanLine]:
    """Those that are drawn; the others together as the last one."""
    ordered = sorted(lines, key=lambda line: -of(line))
    shown, rest = ordered[:_MOST_BARS], ordered[_MOST_BARS:]
    if rest:
        sums = [
            sum(getattr(line, name) for line in rest)
            for name in ("storages", "stays", "moves", "dropped", "again_ms")
        ]
        shown.append(PlanLine("", f"{len(rest)} others", *sums))
    return shown


def name_of(line: PlanLine) -> str:
    """A line's module and op, as people read them."""
    op = re.sub(r"Backward\d*$", "", line.op) or "no graph"
    return f"{line.region} · {op}" if line.region else op


def times(parts: Sequence[Part], width: int) -> Figure:
    """One bar: where the milliseconds of a step go."""
    figure, axes = _axes(width, 92)
    begin = 0.0
    for ms, colour in parts:
        _bar(axes, 0, ms, colour, begin)
        begin += ms
    axes.set_xlabel("ms of one step")
    _as_bars(axes, 1)
    return figure


def _bar(axes: Axes, at: int, length: float, colour: str, begin: float = 0) -> None:
    axes.barh(at, length, 0.42, begin, color=COLOURS[colour], linewidth=0)


def _label(axes: Axes, at: int, text: str) -> None:
    told = axes.annotate(
        text, (0, at - 0.26), xycoords=("axes fraction", "data"), va="bottom", color=COLOURS["ink"]
    )
    told.set_in_layout(False)


def _as_bars(axes: Axes, count: int) -> None:
    axes.set_ylim(count - 0.5, -0.72 if count > 1 else -0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=COLOURS["grid"], linewidth=0.8)
    axes.set_xlim(left=0)


# ---- matplotlib ----------------------------------------------------------------------------------


def _figure(width: int, height: int) -> Figure:
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows by itself, without pyplot."""

        def _repr_svg_(self) -> str:
            from matplotlib import rc_context

            text = io.StringIO()
            with rc_context(_SETTINGS):
                self.savefig(text, format="svg")
            return text.getvalue()

    return Shown(figsize=(width / 72, height / 72), dpi=72, layout="constrained", facecolor="none")


def _axes(width: int, height: int) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    axes = figure.subplots()
    _style(axes)
    axes.locator_params(axis="x", nbins=max(3, width // 90))
    return figure, axes


def _style(axes: Axes) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(COLOURS["faint"])
    axes.tick_params(colors=COLOURS["faint"], length=3)
    axes.xaxis.label.set_color(COLOURS["faint"])
    axes.yaxis.label.set_color(COLOURS["faint"])
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)


_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: sharp, small, and in the page's font
    "font.size": _FONT,
    "font.family": "sans-serif",
    "axes.unicode_minus": False,
}


def svg(draw: Callable[[int], Figure], width: int, name: str) -> str:
    """The SVG element of a picture for that width. `name` keeps its ids apart from others'."""
    import matplotlib

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": f"{name}-{width}"}):
        text = io.StringIO()
        draw(width).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = text.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>\s*", "", found, flags=re.DOTALL)
    found = re.sub(r' (?:width|height)="[\d.]+pt"', "", found, count=2)
    found = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", found, flags=re.DOTALL)
    found = re.sub(r"font-family: [^;]*; ", "", found)
    found = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-{width}-", found)
    found = re.sub(r"\n\s*", "\n", found)
    found = re.sub(r"(\d\.\d\d)\d+", r"\1", found)
    for colour, value in COLOURS.items():
        found = found.replace(value, f"var(--{colour})")
    return found
