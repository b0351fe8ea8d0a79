"""A pool in the place of a context manager that moves every activation to the host."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from stagehand_alloc._settings.sizes import Size
from stagehand_alloc._step.pool import Pool
from stagehand_alloc._tell import warn
from stagehand_alloc.integrations._training import PoolOfTraining

# The defaults of what torchtune's and TRL's classes take, and why there is nothing to choose here.
_INSTEAD: dict[str, tuple[object, str]] = {
    "use_pin_memory": (True, "host memory is always pinned, host_limit bytes at most"),
    "use_streams": (True, "copies always have streams of their own"),
    "max_fwd_stash_size": (5, "high says how much stays on the GPU"),
    "min_offload_size": (1024, "what is under 64 KiB stays, and high decides about the rest"),
}


class OffloadActivations:
    """A pool in the place of torchtune's and TRL's class of this name.

    Around forward, as torchtune's recipes have it, or around forward and backward, as TRL's
    trainers have it. Every `with` is a step.

    ``high``, ``low`` and the rest are the arguments of `stagehand_alloc.pool`. The others are
    torchtune's and TRL's, and choose nothing here: a warning says why where one is given.

    The output layer needs no exception, as it has there: what backward needs first leaves last.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        *,
        max_fwd_stash_size: int = 5,  # the order of these two is not the same in both
        min_offload_size: int = 1024,
        high: Size | None = None,
        low: Size | None = None,
        **arguments: Any,
    ) -> None:
        self._training = PoolOfTraining(high, low, arguments)
        given = {
            "use_pin_memory": use_pin_memory,
            "use_streams": use_streams,
            "max_fwd_stash_size": max_fwd_stash_size,
            "min_offload_size": min_offload_size,
        }
        for name, (default, reason) in _INSTEAD.items():
            if given[name] != default:
                warn(f"{name}={given[name]!r} has no effect on a pool: {reason}.")

    @property
    def pool(self) -> Pool | None:
        """The pool; None before it was entered first."""
        return self._training.pool

    def __enter__(self) -> OffloadActivations:
        """Enter the pool, which the first entry makes: the device is chosen by then.

        Raises what `stagehand_alloc.pool` and its `with` raise.
        """
        (self.pool or self._training.begin()).__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.pool is not None
        self.pool.__exit__(kind, error, trace)
