"""What is counted: the public statistics, and torch's own names for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stagehand_alloc import _driver
from stagehand_alloc._books.markup import escaped, table
from stagehand_alloc._books.proposal import Proposal, propose_classes
from stagehand_alloc._errors import ConfigError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.config import DeviceLike
from stagehand_alloc._settings.sizes import UNLIMITED, format_bytes, plain_number, shown

_MOST_DEVICES = 64  # native/entry/registry.hpp
# By the number of core/plan.hpp's PlanState.
PLAN_STATES = ("none", "learning", "following", "diverged", "declined")


def _now(default: Any = 0) -> Any:
    return field(default=default, metadata={"kind": "now"})


def _peak() -> Any:
    return field(default=0, metadata={"kind": "peak"})


@dataclass(frozen=True)
class PoolStats:
    """The books of one device. Sizes in bytes; counters since the start of what was asked.

    ``mapped`` is what the driver sees, ``occupied`` = ``live`` + ``retained`` the part that holds
    something. Peaks are since `reset_peak_stats`, and in `StepStats` of the step.
    """

    device: int = 0
    mode: str = ""  # "allocator", "mempool" or "native"; of a Pool that was entered
    trigger: str = ""  # "loaded", or why room is made at packs and unpacks; see the doctor
    # now
    mapped: int = _now()
    occupied: int = _now()
    live: int = _now()
    retained: int = _now()
    evicted: int = _now()
    dropped: int = _now()  # has no copy, and is made again when backward asks for it
    high: int = _now()
    low: int = _now()
    limit: int = _now()
    plan_follows: int = (
        _now()
    )  # 1 while the step repeats an earlier one, or is like it in all but sizes
    plan_state: str = _now("none")  # or "learning", "following", "diverged", "declined"
    records: int = _now()
    handles: int = _now()
    aliases: int = _now()
    pinned_bytes: int = _now()
    pinned_used_bytes: int = _now()
    pageable_bytes: int = _now()
    pinned_waste_bytes: int = _now()  # of slabs in use: what their copies leave empty
    weights_bytes: int = _now()  # of `offload`: all of them, in pinned memory of their own
    weights_home: int = _now()  # of them, on the GPU: a part of live
    weights_pinned_bytes: int = _now()  # host copies, also those that a state_dict keeps
    host_limit: int = _now()  # of these and pinned_bytes together; 0: none was set
    d2h_rate: int = _now()  # bytes per second of each lane, as measured last; 0: not yet
    h2d_rate: int = _now()
    # settings with which the pinned pool would have had no miss and least waste; empty: not known
    proposed_classes_mb: tuple[int, ...] = _now(())
    proposed_slabs_per_class: tuple[int, ...] = _now(())
    # the largest so far
    mapped_peak: int = _peak()
    occupied_peak: int = _peak()
    retained_peak: int = _peak()
    evicted_peak: int = _peak()
    weights_home_peak: int = _peak()  # as blocks were entered
    live_peak: int = _peak()  # a budget below this, plus fragmentation, cannot be held
    overshoot_live: int = _peak()  # live with the request, at the worst overshoot
    overshoot_saved: int = _peak()  # of it, saved activations still in use
    # counted bytes
    overshoot_bytes: int = 0  # mapped beyond high
    evicted_bytes: int = 0  # copied to the host or already there
    freed_bytes: int = 0  # device bytes really released by evicting
    restored_bytes: int = 0
    dropped_bytes: int = 0
    recomputed_bytes: int = 0
    weights_loaded_bytes: int = 0  # a part of h2d_bytes; what is frozen leaves without a copy
    weights_written_bytes: int = 0  # of what is trained, and of optimizers: a part of d2h_bytes
    d2h_bytes: int = 0  # moved by each lane
    h2d_bytes: int = 0  # the express lane's too
    express_bytes: int = 0
    # counted events
    host_waits: int = 0
    pinning_wait_ns: int = 0  # of those, for pinned memory that was not there yet
    copy_wait_ns: int = 0  # for a copy, such as one through pageable memory
    gpu_wait_ns: int = 0  # for all work of the GPU
    stall_count: int = 0  # the GPU waited for a copy
    stall_ns: int = 0
    weights_wait_ns: int = 0  # of stall_ns, for weights
    clean_evictions: int = 0
    dirty_evictions: int = 0
    write_backs: int = 0  # copied out ahead of need, as planned
    restores: int = 0
    drops: int = 0
    recomputes: int = 0
    reruns: int = 0  # of regions, to make again what they had saved
    weights_loads: int = 0  # a block's weights came to the GPU
    weights_late: int = 0  # of those, not before the block was reached
    weights_left: int = 0  # and left it
    prefetches: int = 0
    prefetch_hits: int = 0
    prefetch_lates: int = 0
    alias_hits: int = 0
    activations_saved: int = 0
    allocations: int = 0
    frees: int = 0
    hits: int = 0
    grows: int = 0
    gathers: int = 0  # free physical memory moved to where it was needed
    map_calls: int = 0  # of the driver, to map memory, open access to it or unmap it
    out_of_memory: int = 0
    pool_hits: int = 0
    pool_misses: int = 0
    pageable_copies: int = 0
    misses: int = 0  # of torch's own cache while a budget was armed
    # saved tensors that autograd was handed back as they are, by reason
    passed_through: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        size = format_bytes
        evictions = self.clean_evictions + self.dirty_evictions
        passed = sum(self.passed_through.values())
        acts = "" if self.trigger in ("", "not needed") else f", trigger library {self.trigger}"
        way_in = f" ({self.mode}{acts})" if self.mode else ""
        memory = f"mapped {size(self.mapped)} (peak {size(self.mapped_peak)})"
        budget = f"high {size(self.high)}, low {size(self.low)}, limit {size(self.limit)}"
        occupied = f"occupied {size(self.occupied)} (peak {size(self.occupied_peak)})"
        parts = f"live {size(self.live)}, retained {size(self.retained)}"
        saved = f"saved {self.activations_saved} tensors, passed through {passed}"
        evicted = f"{evictions} evictions ({size(self.evicted_bytes)})"
        restored = f"{self.restores + self.prefetches} restores ({size(self.restored_bytes)})"
        prefetched = f"{self.prefetch_hits} prefetched in time, {self.prefetch_lates} late"
        dropped = f"{self.drops} dropped ({size(self.dropped_bytes)})"
        pinned = f"pinned {size(self.pinned_used_bytes)} of {size(self.pinned_bytes)} used"
        stalls = f"{self.stall_count} stalls ({self.stall_ns / 1e6:.1f} ms)"
        over = f"{size(self.overshoot_bytes)} over high"
        weights = (
            f"\n  weights {size(self.weights_bytes)}, {size(self.weights_home)} on the GPU (peak "
            f"{size(self.weights_home_peak)}); {self.weights_loads} loads "
            f"({size(self.weights_loaded_bytes)}), {self.weights_late} late, "
            f"{size(self.weights_written_bytes)} written back; of the stalls "
            f"{self.weights_wait_ns / 1e6:.1f} ms for them"
            if self.weights_bytes or self.weights_loads
            else ""
        )
        return (
            f"device {self.device}{way_in}: {memory}; {budget}\n"
            f"  {occupied}: {parts}; {over}\n"
            f"  {saved}; {evicted}, {restored}, {prefetched}; {dropped}; plan {self.plan_state}\n"
            f"  {pinned} ({size(self.pinned_waste_bytes)} of it empty), "
            f"pageable {size(self.pageable_bytes)}; {self.host_waits} host waits, {stalls}{weights}"
        )

    def _repr_html_(self) -> str:
        """In a notebook: a bar of what is mapped against high, and the numbers of `str`."""
        whole = max(self.high if self.high < UNLIMITED else 0, self.mapped, 1)
        weights = min(self.weights_home, self.live)
        parts = (
            *([("weights", weights, "#7a4fb5")] if self.weights_bytes else []),
            ("in use", self.live - weights, "#1f6feb"),
            ("retained", self.retained, "#8fb8f6"),
            ("mapped, free", max(0, self.mapped - self.occupied), "#c9ced6"),
        )
        bar = "".join(
            f"<span title='{name} {format_bytes(size)}' style='display:inline-block;height:14px;"
            f"width:{100 * size / whole:.2f}%;background:{colour}'></span>"
            for name, size, colour in parts
        )
        rows = [[escaped(name), format_bytes(size)] for name, size, _ in parts]
        rows += [["high", format_bytes(self.high)], ["moved", format_bytes(self.evicted_bytes)]]
        return (
            f"<div style='max-width:480px;background:#eef0f3;line-height:0'>{bar}</div>"
            f"{table(('device ' + str(self.device), 'bytes'), rows)}<pre>{escaped(str(self))}</pre>"
        )

    def since(self, start: PoolStats) -> PoolStats:
        """These statistics with every counter taken from ``start`` on; gauges and peaks as now."""
        changes: dict[str, Any] = {
            name: getattr(self, name) - getattr(start, name) for name in COUNTERS
        }
        return dataclasses.replace(self, **changes)


# What is subtracted: all that no other kind was said of.
COUNTERS = tuple(
    one.name
    for one in dataclasses.fields(PoolStats)
    if "kind" not in one.metadata and one.type == "int" and one.name != "device"
)
_NATIVE_NAMES = frozenset(f.name for f in dataclasses.fields(PoolStats)) - {"device", "plan_state"}


def device_index(device: DeviceLike) -> int:
    """The CUDA device meant; None is the current one (0 before CUDA is initialised).

    Raises ConfigError for what is none.
    """
    import torch

    if device is None or device == "cuda":
        cuda: Any = torch.cuda
        return int(cuda.current_device()) if cuda.is_initialized() else 0
    device = plain_number(device)
    how = 'Give a number, "cuda:1", a torch.device, or nothing for the current device.'
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise ConfigError(f"device={shown(device)} is a {type(device).__name__}.", how)
    index = device
    if not isinstance(device, int):
        try:
            meant = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"device={shown(device)} is no device torch knows.", how) from error
        if meant.type != "cuda":
            raise ConfigError(f"device={str(device)!r} is no CUDA device.", how)
        index = device_index(None) if meant.index is None else meant.index
    assert isinstance(index, int)
    if 0 <= index < _MOST_DEVICES and _open(index):
        return index
    count = _driver.device_count() if _driver.started() else None
    if index < 0 or (count is not None and index >= count):
        known = "devices are counted from 0" if count is None else f"there are {count}"
        raise ConfigError(f"There is no device {shown(index)}: {known}.", how)
    return index


def stats(device: DeviceLike = None) -> PoolStats:
    """The books of ``device`` since the process started; all zero where nothing was allocated.

    Takes the device's lock for a moment; waits for no GPU work.
    """
    return with_proposal(read(device_index(device)))


def reset_peak_stats(device: DeviceLike = None) -> None:
    """Let every peak of ``device`` start again from what is there now."""
    index = device_index(device)
    if _open(index):
        native.reset_peaks(index)


def read(device: int) -> PoolStats:
    """The native books as they are."""
    return of_native(device, native.stats(device) if _open(device) else {})


def end_step(device: int) -> dict[str, int]:
    """What was counted since the last call, and the peaks since then; the next step begins.

    By native's names, for `of_native`: making a PoolStats takes longer than all the rest.
    """
    return native.end_step(device) if _open(device) else {}


def records(device: int) -> int:
    """How many saved storages the device has in its books."""
    return native.records(device) if _open(device) else 0


def of_native(device: int, raw: Mapping[str, int]) -> PoolStats:
    """What native says, as people read it."""
    known: dict[str, Any] = {n: value for n, value in raw.items() if n in _NATIVE_NAMES}
    return PoolStats(device=device, plan_state=PLAN_STATES[raw.get("plan_state", 0)], **known)


def with_proposal(found: PoolStats) -> PoolStats:
    """``found``, with the settings proposed for the pinned pool by what was asked of it."""
    if not _open(found.device):
        return found
    proposal = proposal_of(found.device)
    return dataclasses.replace(
        found,
        proposed_classes_mb=proposal.classes_mb,
        proposed_slabs_per_class=proposal.slabs_per_class,
    )


def proposal_of(device: int) -> Proposal:
    """What would have served what was asked of ``device``'s pinned pool."""
    return _proposal(tuple(native.pinned_demand(device) if _open(device) else ()))


@functools.lru_cache(maxsize=8)  # the demand changes seldom, and the search takes up to 17 ms
def _proposal(demand: tuple[tuple[int, int], ...]) -> Proposal:
    return propose_classes(demand)


def with_passed_through(found: PoolStats, passed_through: Mapping[str, int]) -> PoolStats:
    """``found``, with the counts of the hooks that made it."""
    return dataclasses.replace(found, passed_through=dict(passed_through))


def _open(device: int) -> bool:
    return _driver.started() and bool(native.device_open(device))


# ---- torch's names -------------------------------------------------------------------------------

_SIZES = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
_COUNTS = ("allocation", "active")
_UNUSED = ("segment", "inactive_split", "inactive_split_bytes")


class _Zeros:
    """Where reset_accumulated_memory_stats put zero."""

    def __init__(self) -> None:
        self._of: dict[int, PoolStats] = {}

    def put(self, found: PoolStats) -> None:
        """``found`` is zero for its device from here on."""
        self._of[found.device] = found

    def since(self, found: PoolStats) -> PoolStats:
        """``found``, counted from there."""
        return found.since(self._of.get(found.device, PoolStats()))


_zeros = _Zeros()


def torch_memory_stats(device: int) -> dict[str, Any]:
    """What ``torch._C._cuda_memoryStats`` returns, of our books.

    "allocated" is occupied (live and retained), "reserved" is mapped. We have one pool where
    torch's allocator has a small and a large one, so those are zero.
    """
    found = read(device)
    since = _zeros.since(found)
    occupied = _stat(found.occupied, found.occupied_peak, 0, 0)
    mapped = _stat(found.mapped, found.mapped_peak, 0, 0)
    blocks = _stat(found.allocations - found.frees, 0, since.allocations, since.frees)
    result: dict[str, Any] = {
        name: _by_pool(mapped if name == "reserved_bytes" else occupied) for name in _SIZES
    }
    result.update({name: _by_pool(blocks) for name in _COUNTS})
    result.update({name: _by_pool(_stat(0, 0, 0, 0)) for name in _UNUSED})
    result.update(
        {name: _stat(0, 0, 0, 0) for name in ("oversize_allocations", "oversize_segments")}
    )
    result.update(num_alloc_retries=0, num_ooms=since.out_of_memory, max_split_size=-1)
    result.update(num_sync_all_streams=since.host_waits, num_device_alloc=since.grows)
    result.update(num_device_free=0)
    return result


def reset_accumulated_stats(device: int) -> None:
    """Let torch's "allocated" and "freed" counters of ``device`` start again from zero."""
    _zeros.put(read(device))


def _stat(current: int, peak: int, allocated: int, freed: int) -> dict[str, int]:
    return {
        "current": current,
        "peak": max(current, peak),
        "allocated": allocated,
        "freed": freed,
    }


def _by_pool(everything: dict[str, int]) -> dict[str, dict[str, int]]:
    zero = _stat(0, 0, 0, 0)
    return {"all": everything, "small_pool": zero, "large_pool": zero}
