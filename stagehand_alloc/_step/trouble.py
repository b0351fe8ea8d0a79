"""What a run is told once: a budget nothing can hold, pinned memory that ran out or took long, a
pool that is shown nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._books.steps import StepStats
from stagehand_alloc._settings.sizes import format_bytes
from stagehand_alloc._tell import slow, warn

_LONG_NS = 2_000_000_000


class Trouble:
    """What one device was told of: each once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int]] = set()  # what, and the setting or size it is of

    def look(self, step: StepStats) -> None:
        """Tell of what went wrong in a step."""
        found = step.native
        if found.get("overshoot_live", 0) > found.get("high", 0):
            self._warn("budget", found["high"], _budget_text, step)
        if found.get("pageable_copies", 0):
            self._warn("pinned", found["pinned_bytes"], _pinned_text, step)
        shown = step.gradients and step.left_ns and not step.quiet
        if shown and not found.get("activations_saved", 0):
            others = step.passed_through.get("foreign_storage", 0)
            if others and others == sum(step.passed_through.values()):
                self._warn("foreign", 0, _foreign_text, step)
            elif not step.passed_through and found.get("occupied_peak", 0) > found.get("low", 0):
                self._warn("silent", 0, _silent_text, step)
        if found.get("pinning_wait_ns", 0) > _LONG_NS and self._first("slow", 0):
            took = found["pinning_wait_ns"] / 1e9
            slow(
                f"a step waited {took:.0f} s for host memory to be pinned; such steps do not again"
            )

    def _warn(self, what: str, of: int, text: Callable[[PoolStats], str], step: StepStats) -> None:
        if self._first(what, of):
            warn(text(step.counted))

    def _first(self, what: str, of: int) -> bool:
        first = (what, of) not in self._told
        self._told.add((what, of))
        return first


def _silent_text(found: PoolStats) -> str:
    size = format_bytes
    return (
        f"A step used {size(found.occupied_peak)} on device {found.device}, above "
        f"low={size(found.low)}, and the pool was shown no saved tensor: it can move nothing.\n"
        "Turn off what else takes saved tensors inside the pool, such as activation_offloading, "
        "save_on_cpu or a checkpoint around the whole model, and run forward inside the pool."
    )


def _foreign_text(found: PoolStats) -> str:
    count = found.passed_through["foreign_storage"]
    return (
        f"All {count} saved tensors of a step are of another device or allocator than the pool's "
        f"device {found.device}: it can move nothing.\n"
        'Name the device that trains, pool(device="cuda:1"), or enter the pool first after '
        "torch.cuda.set_device."
    )


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
