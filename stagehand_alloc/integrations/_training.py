"""What the callbacks share: the pool of one training, and what it did as flat numbers."""

from __future__ import annotations

import inspect
from typing import Any

from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._errors import InstallError
from stagehand_alloc._settings.sizes import Size
from stagehand_alloc._step.pool import Pool, pool

_PREFIX = "stagehand/"
_SUMS = ("evicted_bytes", "restored_bytes", "dropped_bytes", "overshoot_bytes")


class PoolOfTraining:
    """Makes the pool of a training when it begins: only then is the device chosen.

    Raises TypeError for an argument that `pool` does not have, at once.
    """

    def __init__(self, high: Size | None, low: Size | None, arguments: dict[str, Any]) -> None:
        self._asked = inspect.signature(pool).bind(high, low, **arguments)
        self._told = PoolStats()
        self.pool: Pool | None = None

    def begin(self) -> Pool:
        """A new pool. Raises what `pool` raises."""
        self.pool = pool(*self._asked.args, **self._asked.kwargs)
        self._told = PoolStats()
        return self.pool

    def numbers(self) -> dict[str, int]:
        """Bytes moved, dropped and over ``high`` since the last call; the most ever mapped."""
        if self.pool is None:
            return {}
        found = self.pool.stats()
        since, self._told = found.since(self._told), found
        told = {_PREFIX + name: int(getattr(since, name)) for name in _SUMS}
        return {**told, _PREFIX + "mapped_peak": found.mapped_peak}


def missing(library: str, package: str) -> InstallError:
    """The error for an integration whose library cannot be imported."""
    return InstallError(
        f"stagehand_alloc.integrations.{library} needs {library}, which cannot be imported.",
        f"Install it: pip install {package}, or pip install 'stagehand_alloc[{library}]'.",
    )
