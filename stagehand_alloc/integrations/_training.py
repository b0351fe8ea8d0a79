"""What the integrations share: the pool of one training, and what its loggers are told."""

from __future__ import annotations

import inspect
from typing import Any

from stagehand_alloc._errors import InstallError
from stagehand_alloc._settings.sizes import Size
from stagehand_alloc._step.pool import Pool, pool

_PREFIX = "stagehand/"
_LOGGED = (
    *("spill_bytes", "restore_bytes", "dropped_bytes", "overshoot_bytes", "mapped_peak"),
    *("stall_time_ms", "wall_time_ms"),
)


class PoolOfTraining:
    """Makes the pool of a training when it begins: only then is the device chosen.

    Raises TypeError for an argument that `pool` does not have, at once.
    """

    def __init__(self, high: Size | None, low: Size | None, arguments: dict[str, Any]) -> None:
        self._asked = inspect.signature(pool).bind(high, low, **arguments)
        self.pool: Pool | None = None

    def begin(self) -> Pool:
        """A new pool. Raises what `pool` raises."""
        self.pool = pool(*self._asked.args, **self._asked.kwargs)
        return self.pool

    def numbers(self) -> dict[str, float]:
        """What a log says of the newest step: a few of `Pool.step_stats`; nothing before it."""
        found = {} if self.pool is None else self.pool.step_stats()
        return {_PREFIX + name: found[name] for name in _LOGGED if name in found}


def missing(library: str, package: str) -> InstallError:
    """The error for an integration whose library cannot be imported."""
    return InstallError(
        f"stagehand_alloc.integrations.{library} needs {library}, which cannot be imported.",
        f"Install it: pip install {package}, or pip install 'stagehand_alloc[{library}]'.",
    )
