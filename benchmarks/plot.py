"""Plots results of suite.py: step time against peak memory, one panel per model. Or one result of
workloads.py: step time by workload. Or one of weights.py: step time against the budget.

    python benchmarks/plot.py benchmarks/results/suite.json... [--out OUT.svg]

Several results, of models run in several calls on one device, give one plot; of a model that is in
more than one the last is drawn.
Needs matplotlib: pip install 'stagehand_alloc[plot]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

Point = dict[str, Any]

# Of each series: which modes, its label, its style.
SERIES: tuple[tuple[Callable[[str], bool], str, dict[str, Any]], ...] = (
    (lambda m: m.startswith("ours:"), "stagehand_alloc", {"color": "#0b6e99", "marker": "o"}),
    (lambda m: m.startswith("checkpoint:"), "checkpoint", {"color": "#d98200", "marker": "s"}),
    (lambda m: m == "save_on_cpu", "save_on_cpu", {"color": "#b03060", "marker": "^"}),
    (lambda m: m in ("torchtune", "trl"), "OffloadActivations", {"color": "#777", "marker": "v"}),
)


BUDGETS = (12, 10, 8)  # GB, of weights.py
TICKS = (1, 1.1, 1.25, 1.5, 2, 3, 5, 8)  # of step time / plain torch, on a logarithmic axis


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result with the models of all, the last of each. ValueError: they cannot share a plot."""
    if any("models" not in one for one in results):
        if len(results) > 1:
            raise ValueError("only results of suite.py can share a plot")
        return results[0]
    places = sorted({f"{one['device']}, torch {one['torch']}" for one in results})
    if len(places) > 1:
        raise ValueError(f"these are of different places: {' and '.join(places)}")
    return {**results[0], "models": {k: v for one in results for k, v in one["models"].items()}}


def series(points: list[Point], chosen: Callable[[str], bool]) -> tuple[list[float], list[float]]:
    """Peaks in GiB and times over plain torch's of the chosen modes, from plain torch's on."""
    native = [p for p in points if p["mode"] == "native"]
    base = native[0]["step_ms"]
    mine = sorted((p for p in points if chosen(p["mode"])), key=lambda p: -p["peak_gib"])
    drawn = [*native, *mine] if len(mine) > 1 else mine
    return [p["peak_gib"] for p in drawn], [p["step_ms"] / base for p in drawn]


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
    """Write the plot of `result` to `path`; its suffix says the format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = result["models"]
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(models) :]:
        panel.set_visible(False)
    for panel, model in zip(panels.flat, models.values(), strict=False):
        _draw_model(panel, model)
    figure.suptitle(f"Step time against peak memory, {result['device']}, torch {result['torch']}")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"written: {path}")


def _draw_model(panel: Any, model: dict[str, Any]) -> None:
    points = model["points"]
    for chosen, label, style in SERIES:
        peaks, times = series(points, chosen)
        if peaks:
            panel.plot(peaks, times, label=label, linewidth=1.2, markersize=5, **style)
    native = next(p for p in points if p["mode"] == "native")
    base = native["step_ms"]
    panel.plot(native["peak_gib"], 1, "k*", markersize=11, label=f"plain torch ({base:.0f} ms)")
    bounds = sorted((p["high_gib"], p["bound_ms"] / base) for p in points if "bound_ms" in p)
    if bounds:
        panel.plot(*zip(*bounds, strict=True), "k:", linewidth=1, label="bound")
    panel.set_title(model["title"], fontsize=9)
    panel.set_xlabel("peak memory, GiB")
    panel.set_ylabel("step / plain torch's")
    panel.set_yscale("log")
    panel.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    panel.minorticks_off()
    slowest = max(p["step_ms"] for p in points) / base
    panel.set_ylim(0.95, max(1.3, slowest * 1.1))
    panel.grid(alpha=0.25)
    panel.legend(fontsize=7)


def draw_workloads(result: dict[str, Any], path: pathlib.Path) -> None:
    """Write the plot of a result of workloads.py: step time over plain torch's, by workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [
        (f"{name}, {budget if budget == 'free' else budget + ' %'}", budget, one["summary"])
        for name, one in result["workloads"].items()
        for budget in dict.fromkeys(key.split()[1] for key in one["summary"] if " " in key)
    ]
    if not lines:
        return
    figure, panel = plt.subplots(figsize=(8, 1.2 + 0.55 * len(lines)), layout="constrained")
    labelled = set()
    for row, (_, budget, summary) in enumerate(lines):
        for place, (key, label, colour) in enumerate(
            (
                (f"allocator {budget}", "process allocator", "#0b6e99"),
                (f"native {budget}", "native", "#7db9d3"),
                ("checkpoint", "checkpoint", "#d98200"),
            )
        ):
            if key in summary:
                shown = None if label in labelled else label
                labelled.add(label)
                slower = summary[key]["to_plain"]
                panel.barh(row + (place - 1) * 0.26, slower, 0.24, color=colour, label=shown)
        bounds = [summary[k]["bound_to_plain"] for k in summary if k.endswith(f" {budget}")]
        shown = None if "bound" in labelled else "bound"
        labelled.add("bound")
        panel.plot([bounds[0]] * 2, [row - 0.4, row + 0.4], "k:", linewidth=1.5, label=shown)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_yticks(range(len(lines)), [name for name, _, _ in lines], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(left=0.8)
    panel.set_xlabel("step / plain torch's")
    panel.grid(axis="x", alpha=0.25)
    panel.legend(fontsize=7)
    panel.set_title(f"Step time under budgets, {result['device']}, torch {result['torch']}")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"written: {path}")


def draw_weights(result: dict[str, Any], path: pathlib.Path) -> None:
    """Write the plot of a result of weights.py: step time over plain torch's, by the budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = {name: one for name, one in result["cases"].items() if one["to_plain"]}
    plain = result["cases"].get("plain 8192")
    if plain is None or not plain["step"]:
        return
    figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
    bounds: dict[float, float] = {}
    for words, label, style in (
        ("allocator", "process allocator", {"color": "#0b6e99", "marker": "o"}),
        ("native", "native", {"color": "#7db9d3", "marker": "o"}),
        ("allocator activations", "activations alone", {"color": "#b03060", "marker": "^"}),
        ("native activations", "activations alone, native", {"color": "#d9a0b4", "marker": "^"}),
    ):
        mine = [cases[f"{words} {high}"] for high in BUDGETS if f"{words} {high}" in cases]
        points = [(one["high"] / 1e9, one["to_plain"]) for one in mine]
        bounds.update((one["high"] / 1e9, one["bound_to_plain"]) for one in mine)
        if points:
            panel.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **style)
    drawn = sorted((high, to_plain) for high, to_plain in bounds.items() if to_plain)
    if drawn:
        panel.plot(*zip(*drawn, strict=True), "k:", linewidth=1.5, label="bound")
    if ring := cases.get("ring checkpoint"):
        at = (ring["reserved"] / 1e9, ring["to_plain"])
        panel.plot(*at, color="#d98200", marker="s", linestyle="", label="ring of two, checkpoints")
    label = f"plain torch ({plain['step']:.0f} ms)"
    panel.plot(plain["reserved"] / 1e9, 1, "k*", markersize=11, label=label)
    panel.set_xlabel("high, or what was reserved, GB")
    panel.set_ylabel("step / plain torch's")
    panel.set_ylim(bottom=0.95)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=7)
    place = f"{result['device']}, torch {result['torch']}"
    panel.set_title(f"LoRA on a frozen GPT, weights in the budget, {place}", fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"written: {path}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+", metavar="RESULT")
    parser.add_argument("--out", type=pathlib.Path, help="default: the first RESULT with .svg")
    options = parser.parse_args(argv)
    if not available():
        print("plot: matplotlib is missing: pip install 'stagehand_alloc[plot]'", file=sys.stderr)
        return 1
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    try:
        result = together(results)
    except ValueError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 1
    out = options.out or options.results[0].with_suffix(".svg")
    kinds = {"models": draw, "workloads": draw_workloads, "cases": draw_weights}
    next(drawing for key, drawing in kinds.items() if key in result)(result, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
