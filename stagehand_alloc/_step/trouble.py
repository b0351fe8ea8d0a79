"""What a run is warned of once: a budget nothing can hold, and pinned memory that ran out."""

from __future__ import annotations

from collections.abc import Callable

from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._books.steps import StepStats
from stagehand_alloc._settings.config import format_bytes
from stagehand_alloc._tell import warn

_told: set[tuple[str, int, int]] = set()  # what, device, and the setting or size it is of


def look(step: StepStats) -> None:
    """Warn of what went wrong in a step, once each."""
    found = step.native
    if found.get("overshoot_live", 0) > found.get("high", 0):
        _once(("budget", step.device, found["high"]), _budget_text, step)
    if found.get("pageable_copies", 0):
        _once(("pinned", step.device, found["pinned_bytes"]), _pinned_text, step)


def _once(what: tuple[str, int, int], text: Callable[[PoolStats], str], step: StepStats) -> None:
    if what not in _told:
        _told.add(what)
        warn(text(step.counted))


def _budget_text(found: PoolStats) -> str:
    size = format_bytes
    live, saved = found.overshoot_live, min(found.overshoot_saved, found.overshoot_live)
    return (
        f"No eviction can hold high={size(found.high)} on device {found.device}: at the worst "
        f"moment so far {size(live)} were in use by torch, {size(saved)} of it saved activations "
        f"in use and {size(live - saved)} parameters, gradients, optimizer state and temporaries. "
        f"Memory went over high, up to {size(found.mapped_peak)}.\n"
        f"Raise high above {size(live)}, or lower what is in use at once: a smaller batch or "
        "sequence, gradients set to None, a sharded or fused optimizer."
    )


def _pinned_text(found: PoolStats) -> str:
    size = format_bytes
    return (
        f"Pinned host memory ran out on device {found.device} at {size(found.pinned_bytes)}: "
        f"{found.pageable_copies} saved tensors went to pageable memory instead. Results are "
        "right, but the host waits for each of these copies.\n"
        'Raise host_limit (config={"host_limit": ...}), raise high, or free host memory.'
    )
