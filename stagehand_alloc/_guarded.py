"""State of the process, and its lock, of which a forked child has a new one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Guarded:
    """Owns state that outlives every pool, and ``lock``, held for moments.

    A thread may take a lock it has: a signal handler runs on whichever line its thread is.
    """

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """At first, and in a forked child: who may have held the lock is its parent's thread."""
        self.lock = threading.RLock()


class Once(Guarded, Generic[T]):
    """What is found out or set up at the first call. It stays, in a forked child too."""

    found: T | None = None  # so far

    def get(self, find: Callable[[], T]) -> T:
        """What was found, now where it is the first call. After ``find`` raised, the next tries."""
        if self.found is None:
            with self.lock:
                if self.found is None:
                    self.found = find()
        return self.found
