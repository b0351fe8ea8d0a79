"""A step as an object: `StepStats`, made once when the step ends, and given to its listeners.

A step begins where a pool is entered, and ends where the next one begins; or before, when the pool
was left, nothing that was saved in it is alive, and somebody asks: `Pool.step_stats`, the end of
the `with`, the end of the process. What is between two steps of a pool counts for the later one.

Threads: a device has one open step. Whoever takes it out of the table ends it, under a lock, so
that what it counted is its own; and calls the listeners on its own thread, with no lock held.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

from stagehand_alloc._books import stats as _stats
from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._guarded import Guarded
from stagehand_alloc._settings.sizes import MIB


@dataclass(frozen=True)
class StepStats:
    """What one step did: counters and peaks from the end of the step before it to its own."""

    step: int
    """Of its pool, from 1."""
    device: int
    rank: int = 0
    """As the launcher says it (RANK); 0 without one."""
    mode: str = ""
    """Of its pool: "allocator", "mempool" or "native"."""
    native: Mapping[str, int] = field(default_factory=dict, repr=False, hash=False)
    """What the engine counted, by its own names; `counted` is for people."""
    passed_through: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Saved tensors that autograd was handed back as they are, by reason."""
    gradients: bool = True
    """Whether gradients were on at the entry: something may be saved."""
    quiet: bool = False
    """There was so much room as it began that what it saved was left alone, and is not counted: all
    of it, or what came before memory was used after all."""
    began_ns: int = 0
    """Since the epoch, as ``time.time_ns``: the end of the step before, or the pool's entry."""
    left_ns: int = 0
    """When the pool was left; 0 where it was not, or by an error."""
    ended_ns: int = 0

    @functools.cached_property
    def counted(self) -> PoolStats:
        """Its own counters and peaks, and gauges as they were at its end. Sizes in bytes."""
        found = _stats.of_native(self.device, self.native)
        return replace(found, mode=self.mode, passed_through=self.passed_through)

    @property
    def wall_time_ms(self) -> float:
        """From the end of the step before, so that nothing between two steps is missing."""
        return round((self.ended_ns - self.began_ns) / 1e6, 3)

    def fields(self) -> dict[str, Any]:
        """What a telemetry line says of it."""
        return {
            **step_fields(self.step, self._seen(), dict(self.passed_through)),
            "wall_time_ms": self.wall_time_ms,
            "time": round(self.ended_ns / 1e9, 3),
            "rank": self.rank,
            "pid": os.getpid(),
            "began_ns": self.began_ns,
            "left_ns": self.left_ns,
            "ended_ns": self.ended_ns,
            "gradients": int(self.gradients),
            "quiet": int(self.quiet),
        }

    def _seen(self) -> Any:
        """What `counted` has, without the time that takes."""
        state = _stats.PLAN_STATES[self.native.get("plan_state", 0)]
        texts = {"device": self.device, "mode": self.mode, "plan_state": state}
        return SimpleNamespace(**{**_NOTHING, **self.native, **texts})

    def numbers(self) -> dict[str, float]:
        """The fields that are numbers, flat: as TensorBoard, W&B and Prometheus take them."""
        return {
            name: float(value)
            for name, value in self.fields().items()
            if isinstance(value, int | float) and name not in _NO_METRICS
        }


_NOTHING = dataclasses.asdict(PoolStats())
_NO_METRICS = ("pid", "time", "began_ns", "left_ns", "ended_ns")


def step_fields(step: int, found: PoolStats, passed_through: dict[str, int]) -> dict[str, Any]:
    """What is counted, by the names of telemetry: the one place to add a field. None goes.

    The first 12 are those of Activation Stagehand v0. An activation that was evicted twice counts
    twice as spilled; kept is the rest of the saved.
    """
    spilled = found.clean_evictions + found.dirty_evictions
    return {
        "step": step,
        "activations_saved": found.activations_saved,
        "activations_kept": max(0, found.activations_saved - spilled),
        "activations_spilled": spilled,
        "activations_restored": found.restores + found.prefetches,
        "spill_bytes": found.evicted_bytes,
        "restore_bytes": found.restored_bytes,
        "stall_time_ms": _ms(found.stall_ns),
        "stall_count": found.stall_count,
        "pool_hits": found.pool_hits,
        "pool_misses": found.pool_misses,
        "vram_peak_mb": round(found.mapped_peak / MIB, 3),
        "device": found.device,
        "high": found.high,
        "low": found.low,
        "mapped_peak": found.mapped_peak,
        "occupied_peak": found.occupied_peak,
        "retained_peak": found.retained_peak,
        "freed_bytes": found.freed_bytes,
        "overshoot_bytes": found.overshoot_bytes,
        "host_waits": found.host_waits,
        "clean_evictions": found.clean_evictions,
        "dirty_evictions": found.dirty_evictions,
        "prefetches": found.prefetches,
        "prefetch_hits": found.prefetch_hits,
        "prefetch_lates": found.prefetch_lates,
        "alias_hits": found.alias_hits,
        "pageable_bytes": found.pageable_bytes,
        "passed_through": passed_through,
        "write_backs": found.write_backs,
        "plan": "followed" if found.plan_follows else "reactive",
        "plan_state": found.plan_state,
        "pinned_bytes": found.pinned_bytes,
        "pinned_waste_bytes": found.pinned_waste_bytes,
        "proposed_classes_mb": list(found.proposed_classes_mb),
        "proposed_slabs_per_class": list(found.proposed_slabs_per_class),
        "drops": found.drops,
        "dropped_bytes": found.dropped_bytes,
        "recomputes": found.recomputes,
        "recomputed_bytes": found.recomputed_bytes,
        "reruns": found.reruns,
        # of version 0.1
        "mode": found.mode,
        "limit": found.limit,
        "live_peak": found.live_peak,
        "evicted_peak": found.evicted_peak,
        "overshoot_live": found.overshoot_live,
        "overshoot_saved": found.overshoot_saved,
        "pinned_used_bytes": found.pinned_used_bytes,
        "pageable_copies": found.pageable_copies,
        "d2h_bytes": found.d2h_bytes,
        "h2d_bytes": found.h2d_bytes,
        "express_bytes": found.express_bytes,
        "d2h_rate": found.d2h_rate,
        "h2d_rate": found.h2d_rate,
        "pinning_wait_ms": _ms(found.pinning_wait_ns),
        "copy_wait_ms": _ms(found.copy_wait_ns),
        "gpu_wait_ms": _ms(found.gpu_wait_ns),
        "allocations": found.allocations,
        "misses": found.misses,
        "map_calls": found.map_calls,
        "out_of_memory": found.out_of_memory,
        "weights_bytes": found.weights_bytes,
        "weights_home": found.weights_home,
        "weights_home_peak": found.weights_home_peak,
        "weights_loads": found.weights_loads,
        "weights_late": found.weights_late,
        "weights_loaded_bytes": found.weights_loaded_bytes,
        "weights_left": found.weights_left,
        "weights_written_bytes": found.weights_written_bytes,
        "weights_wait_ms": _ms(found.weights_wait_ns),
        "weights_pinned_bytes": found.weights_pinned_bytes,
        "host_limit": found.host_limit,
    }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


Listener: TypeAlias = Callable[[StepStats], None]


class Owner(Protocol):
    """The pool of a step. It may be gone before its last step ends."""

    def _passed_through(self) -> Mapping[str, int]: ...

    def _told(self, step: StepStats) -> None: ...


@dataclass(eq=False)
class OpenStep:
    """A step that has begun. It keeps no pool alive, nor what the pool keeps."""

    number: int
    mode: str
    gradients: bool
    owner: Callable[[], Owner | None]
    listeners: tuple[Listener, ...]
    passed_before: Mapping[str, int]
    began_ns: int = 0
    left_ns: int = 0
    quiet: bool = False
    passed: Mapping[str, int] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)


class Steps(Guarded):
    """The steps of one device: the one that is open, and whose ended last."""

    def __init__(self, device: int) -> None:
        super().__init__()
        self._device = device
        all_steps.add(self)

    def renew(self) -> None:
        """In a forked child the steps are its parent's."""
        super().renew()
        self._open: OpenStep | None = None  # guarded by the lock
        self._last: tuple[Callable[[], Owner | None], int] | None = None  # its pool, and when; same

    def begin(self, step: OpenStep) -> None:
        """It begins; `end` was called before. Its counts go on from those of its pool's last."""
        with self.lock:
            pool, ended_ns = self._last or (None, 0)
            if pool is None or pool() is not step.owner():
                _stats.end_step(self._device)  # what came before the pool is not its own
                ended_ns = time.time_ns()
            step.began_ns = ended_ns
            self._open = step

    def left(self, owner: Owner, by_error: bool) -> None:
        """``owner``'s pool is left: nothing more of its step is passed through."""
        step = self._of(owner)
        if step is None:
            return
        before = step.passed_before
        step.passed = {
            reason: count - before.get(reason, 0)
            for reason, count in owner._passed_through().items()
            if count != before.get(reason, 0)
        }
        step.left_ns = 0 if by_error else time.time_ns()

    def end(self) -> None:
        """End the open step, if there is one, and tell its listeners and its pool."""
        self._end(self._open)

    def end_if_over(self, owner: Owner, asked: bool = True) -> None:
        """The same where it is ``owner``'s, it was left, and nothing that was saved is alive.

        Of a quiet step nobody knows that: it ends where somebody asked for it.
        """
        step = self._of(owner)
        if step is not None and step.quiet and not asked:
            return
        if step is not None and step.left_ns and not _stats.records(self._device):
            self._end(step)

    def _end(self, step: OpenStep | None) -> None:
        """``step`` ends, where it is open still: another may have ended it, and begun its own."""
        with self.lock:
            if step is None or self._open is not step:
                return
            self._open = None
            if step.pid != os.getpid():
                return
            now = time.time_ns()
            native = _stats.end_step(self._device)
            self._last = (step.owner, now)
        found = StepStats(
            *(step.number, self._device, rank(), step.mode, native, step.passed, step.gradients),
            *(step.quiet, step.began_ns, step.left_ns, now),
        )
        for listener in step.listeners:
            listener(found)
        if (owner := step.owner()) is not None:
            owner._told(found)

    def _of(self, owner: Owner) -> OpenStep | None:
        step = self._open
        return step if step is not None and step.owner() is owner else None


class AllSteps:
    """The steps of every device."""

    def __init__(self) -> None:
        self._steps: list[Steps] = []  # only added to

    def add(self, steps: Steps) -> None:
        """There is another device."""
        self._steps.append(steps)

    def end(self) -> None:
        """End every step: the process ends."""
        for steps in self._steps:
            steps.end()


all_steps = AllSteps()


def rank() -> int:
    """As torchrun and most launchers say; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0
