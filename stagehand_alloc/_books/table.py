"""The table of a run: its first and last steps, and a line of totals."""

from __future__ import annotations

from collections.abc import Sequence

from stagehand_alloc._books.runs import Line, Run, number, numbers
from stagehand_alloc._settings.sizes import MIB, format_bytes

_ROWS = 12
_WEIGHTS = (
    ("weights MiB", "weights_loaded_bytes", MIB),
    ("loads", "weights_loads", 1),
    ("late", "weights_late", 1),
)


def table(run: Run) -> str:
    """At most 12 steps, the totals, and what the last step says of the pinned pool."""
    columns = (
        ("step", "step", 1),
        ("peak MiB", "vram_peak_mb", 1),
        ("saved", "activations_saved", 1),
        ("spilled", "activations_spilled", 1),
        ("spill MiB", "spill_bytes", MIB),
        ("restored", "activations_restored", 1),
        ("restore MiB", "restore_bytes", MIB),
        ("dropped MiB", "dropped_bytes", MIB),
        *(_WEIGHTS if run.has_weights() else ()),
        ("stall ms", "stall_time_ms", 1),
        ("over high MiB", "overshoot_bytes", MIB),
        ("host waits", "host_waits", 1),
        ("plan", "plan_state", 1),
    )
    rows = [[title for title, _, _ in columns]]
    shown = _ends(run.steps)
    rows += [[_cell(step, key, unit) for _, key, unit in columns] for step in shown]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    if len(shown) < len(run.steps):
        lines.insert(1 + (_ROWS + 1) // 2, f"... {len(run.steps) - _ROWS} more steps ...")
    return "\n".join([*lines, "", _totals(run), *weights_lines(run), *pinned_lines(run)])


def weights_lines(run: Run) -> list[str]:
    """What a settled step does with offloaded weights; nothing without any."""
    if not run.has_weights():
        return []
    all_of, at_home, loaded = (
        format_bytes(int(of(name)))
        for of, name in (
            (run.most, "weights_bytes"),
            (run.most, "weights_home_peak"),
            (run.typical, "weights_loaded_bytes"),
        )
    )
    loads, late = run.typical("weights_loads"), run.typical("weights_late")
    waits = f"the GPU waits {run.typical('weights_wait_ms'):.3g} ms for them"
    home = f"weights {all_of}, at most {at_home} of them on the GPU"
    return [f"{home}: {loaded} come a step in {loads:.0f} loads, {late:.0f} late, and {waits}"]


def pinned_lines(run: Run) -> list[str]:
    """What the last step says of the pinned pool; nothing where it says nothing."""
    lines = []
    if pinned := run.last("pinned_bytes"):
        lines.append(
            f"pinned {format_bytes(int(pinned))}, "
            f"{format_bytes(int(run.last('pinned_waste_bytes')))} of what is used empty"
        )
    if settings := proposed(run):
        lines.append(f"no miss and least waste with {settings}")
    return lines


def proposed(run: Run) -> str:
    """The settings that would have suited the pinned pool; empty where nothing is known."""
    classes = numbers(run.steps[-1].get("proposed_classes_mb"))
    slabs = numbers(run.steps[-1].get("proposed_slabs_per_class"))
    return f"pinned_pool_classes_mb={classes}, slabs_per_class={slabs}" if classes else ""


def _ends(steps: Sequence[Line]) -> Sequence[Line]:
    if len(steps) <= _ROWS:
        return steps
    return [*steps[: (_ROWS + 1) // 2], *steps[len(steps) - _ROWS // 2 :]]


def _cell(step: Line, key: str, unit: int) -> str:
    value = step.get(key, 0)
    if isinstance(value, str):
        return value
    told = number(step, key) / unit
    return str(value) if unit == 1 and isinstance(value, int) else f"{told:.1f}"


def _totals(run: Run) -> str:
    return (
        f"{len(run.steps)} steps: peak {run.most('vram_peak_mb'):.1f} MiB, "
        f"spilled {run.total('spill_bytes') / MIB:.1f} MiB, "
        f"restored {run.total('restore_bytes') / MIB:.1f} MiB, "
        f"dropped {run.total('dropped_bytes') / MIB:.1f} MiB, "
        f"stalled {run.total('stall_time_ms'):.1f} ms"
    )
