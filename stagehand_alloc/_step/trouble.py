"""What a run is warned of once: a budget nothing can hold, and pinned memory that ran out."""

from __future__ import annotations

from stagehand_alloc._books import stats as _stats
from stagehand_alloc._extension import native
from stagehand_alloc._settings.config import format_bytes
from stagehand_alloc._tell import warn

_told_budgets: set[tuple[int, int]] = set()  # device, high
_told_pinned: set[tuple[int, int]] = set()  # device, bytes that were pinned
_pageable_seen: dict[int, int] = {}  # device -> pageable copies, those told of included


def look(device: int) -> None:
    """Warn of what has gone wrong on ``device`` under the budget set there now, once each."""
    found = _stats.read(device)
    if found.overshoot_live > found.high and (device, found.high) not in _told_budgets:
        _told_budgets.add((device, found.high))
        warn(_budget_text(found))
    copies = found.pageable_copies
    before = _pageable_seen.get(device, 0)
    _pageable_seen[device] = copies
    if copies > before and (device, found.pinned_bytes) not in _told_pinned:
        _told_pinned.add((device, found.pinned_bytes))
        warn(_pinned_text(found))


def begin(device: int, high: int) -> None:
    """A pool with this budget is entered: what overshot another one's is not held against it."""
    if native.device_open(device) and _stats.read(device).high != high:
        _stats.start_step_peaks(device)


def _budget_text(found: _stats.PoolStats) -> str:
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


def _pinned_text(found: _stats.PoolStats) -> str:
    size = format_bytes
    return (
        f"Pinned host memory ran out on device {found.device} at {size(found.pinned_bytes)}: "
        f"{found.pageable_copies} saved tensors went to pageable memory instead. Results are "
        "right, but the host waits for each of these copies.\n"
        'Raise host_limit (config={"host_limit": ...}), raise high, or free host memory.'
    )
