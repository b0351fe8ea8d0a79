"""What the pools of one device share, and what those of the process do.

Locks, each held for moments, in this order: `Process.lock`, `Device.lock`, then the engine's.
docs/concurrency.md says who may wait under which. A thread may take one it has: a signal handler
that asks for `limits` runs on whichever line the main thread is. A forked child has new ones: the
threads that may have held them are its parent's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stagehand_alloc import _driver
from stagehand_alloc._books.steps import Steps
from stagehand_alloc._errors import PoolThreadError
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Guarded
from stagehand_alloc._step.proofs import Proofs
from stagehand_alloc._step.quiet import Quiet
from stagehand_alloc._step.trouble import Trouble

if TYPE_CHECKING:
    from stagehand_alloc._step.entry import Entry
    from stagehand_alloc._step.pool import Pool


class Device(Guarded):
    """One device: which pool is inside, which was last, its steps, and what was told of it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.steps = Steps(index)
        self.proofs = Proofs(index)
        self.quiet = Quiet()
        self.trouble = Trouble()
        # Guarded by the lock, with `Pool._entry` and `Pool._limits` of the pools of this device:
        self.entry: Entry | None = None
        self._latest: weakref.ref[Pool] | None = None
        self._checksums = False

    def take(self, entry: Entry) -> None:
        """``entry``'s pool is inside from here on. Raises PoolThreadError where another one is."""
        with self.lock:
            pool = entry.pool
            if pool._entry is not None:
                raise PoolThreadError(
                    "A pool was entered on two threads at once "
                    f"(thread {pool._entry.thread} is inside).",
                    "Use one pool per device, on the one thread that runs forward there.",
                )
            if self.entry is not None:
                raise PoolThreadError(
                    f"Device {self.index} has a pool entered on another thread "
                    f"({self.entry.thread}) already.",
                    "Use one pool per device, on the one thread that runs forward there.",
                )
            pool._entry = self.entry = entry

    def give_up(self, entry: Entry) -> None:
        """It is not inside any more."""
        with self.lock:
            if self.entry is entry:
                self.entry = None
            if entry.pool._entry is entry:
                entry.pool._entry = None

    def is_latest(self, pool: Pool) -> bool:
        """Whether ``pool`` was entered here last: what runs after its `with` is its still."""
        return self._latest is not None and self._latest() is pool

    def begin(self, pool: Pool, set_limits: Callable[[], None], checksums: bool) -> None:
        """``pool``'s limits and checksums, in place of those of the pool before it."""
        with self.lock:
            self._latest = weakref.ref(pool)  # first: a handler's limits are then in force at once
            set_limits()
            if checksums or self._checksums:
                native.set_checksums(self.index, checksums)
                self._checksums = checksums


class Process(Guarded):
    """All devices, and the host memory that they share."""

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[int, Device] = {}  # guarded by the lock
        self._host_memory: Any = None  # what it was last configured with; same lock
        self._bytes: dict[
            int, int
        ] = {}  # of devices by number; unguarded: whoever asks finds the same

    def device(self, index: int) -> Device:
        """The one of that number."""
        with self.lock:
            if index not in self._devices:
                self._devices[index] = Device(index)
            return self._devices[index]

    def bytes_of(self, index: int) -> int:
        """The memory of device ``index``; the driver is asked once, which takes a dozen calls.

        Raises VirtualMemoryError where the core could not map memory on it.
        """
        if index not in self._bytes:
            self._bytes[index] = _driver.require_virtual_memory(index).total
        return self._bytes[index]

    def devices(self) -> list[Device]:
        """Those that pools were entered on."""
        with self.lock:
            return list(self._devices.values())

    def has_host_memory(self) -> bool:
        """Whether it was configured, by any pool."""
        return self._host_memory is not None

    def configure_host_memory(self, wanted: Any, arguments: Callable[[], tuple[Any, ...]]) -> None:
        """Set up the pinned pool, once for the process and again where ``wanted`` differs.

        With slabs of other sizes that waits for the GPU, under the lock.
        """
        with self.lock:
            if self._host_memory != wanted:
                done = native.configure_pinned(*arguments())
                # While tensors of an earlier step use the slabs: the next entry tries again.
                self._host_memory = wanted if done else None


process = Process()
