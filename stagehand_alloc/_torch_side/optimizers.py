"""The first step of each optimizer in torch's cache: what it makes there stays for good."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stagehand_alloc._extension import native

if TYPE_CHECKING:
    from torch.optim import Optimizer


def around_every_step(begin: Callable[..., Any], end: Callable[..., Any]) -> list[Any]:
    """Torch's hooks around every optimizer's step from here on, of one that is compiled, too."""
    import torch
    from torch.optim import optimizer

    uncompiled: Any = torch.compiler.disable
    return [
        optimizer.register_optimizer_step_pre_hook(uncompiled(begin)),
        optimizer.register_optimizer_step_post_hook(uncompiled(end)),
    ]


class FirstSteps:
    """Tells the core when what an optimizer keeps is made, on devices that pools are entered on.

    And when it steps: what is asked for then is no gradient that stays. By torch's own hooks around
    every optimizer's step: they stay for good, and cost a look into a dict and a call of the core.
    What a closure runs is none of it. An optimizer that is no `torch.optim.Optimizer` is not seen.
    In a forked child nothing is told.
    """

    def __init__(self) -> None:
        self._watched: list[Any] = []  # torch's hooks, for good
        self._devices: set[int] = set()
        # Those that have, by id: who compares optimizers by value may not hash them.
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], set[int]]] = {}
        os.register_at_fork(after_in_child=self._devices.clear)

    def __len__(self) -> int:
        """How many optimizers are there that have stepped."""
        return len(self._stepped)

    def watch(self) -> None:
        """From here on; before a step whose closure enters the first pool."""
        self._watched = self._watched or around_every_step(self._begin, self._end)

    def await_on(self, device: int) -> None:
        """A pool is entered there. Where no optimizer that has stepped is left, one may come."""
        self.watch()
        self._devices.add(device)
        stepped = list(self._stepped.values())
        native.await_optimizer(device, not any(device in devices for _, devices in stepped))

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if (known := self._stepped.get(id(optimizer))) is not None:
            for device in known[1] & self._devices:
                native.optimizer_steps(device)
            return None
        self._makes(optimizer)
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._aside(optimizer, args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._aside(optimizer, kwargs["closure"])}
        return None

    def _makes(self, optimizer: Optimizer) -> None:
        for device in _devices_of(optimizer) & self._devices:
            import torch

            native.optimizer_makes(device, torch.cuda.current_stream(device).cuda_stream)

    def _aside(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """``closure``, which runs a forward and a backward: what those ask for does not stay."""

        def evaluated(*args: Any, **kwargs: Any) -> Any:
            self._made(optimizer)
            result = closure(*args, **kwargs)
            self._makes(optimizer)
            return result

        return evaluated

    def _made(self, optimizer: Optimizer) -> None:
        for device in _devices_of(optimizer) & self._devices:
            native.optimizer_made(device)

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        key = id(optimizer)
        if key not in self._stepped:
            gone = weakref.ref(optimizer, lambda _: self._stepped.pop(key, None))
            self._stepped[key] = (gone, _devices_of(optimizer))
            self._made(optimizer)


def _devices_of(optimizer: Optimizer) -> set[int]:
    groups = optimizer.param_groups
    return {p.device.index for group in groups for p in group["params"] if p.is_cuda}
