"""The first step of each optimizer in torch's cache: what it makes there stays for good."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stagehand_alloc._extension import native

if TYPE_CHECKING:
    from torch.optim import Optimizer


class FirstSteps:
    """Tells the core when what an optimizer keeps is made, on devices that pools were entered on.

    By torch's own hooks around every optimizer's step: they stay for good, and cost a look into a
    dict in later steps. What a closure runs is none of it. An optimizer that is no
    `torch.optim.Optimizer` is not seen. In a forked child nothing is told.
    """

    def __init__(self) -> None:
        self._devices: set[int] = set()
        # Those that have, by id: who compares optimizers by value may not hash them.
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], set[int]]] = {}
        os.register_at_fork(after_in_child=self._devices.clear)

    def __len__(self) -> int:
        """How many optimizers are there that have stepped."""
        return len(self._stepped)

    def watch(self) -> None:
        """Once."""
        import torch
        from torch.optim import optimizer

        uncompiled: Any = torch.compiler.disable  # of a step that is compiled, too
        optimizer.register_optimizer_step_pre_hook(uncompiled(self._begin))
        optimizer.register_optimizer_step_post_hook(uncompiled(self._end))

    def await_on(self, device: int) -> None:
        """A pool is entered there. Where no optimizer that has stepped is left, one may come."""
        self._devices.add(device)
        stepped = list(self._stepped.values())
        native.await_optimizer(device, not any(device in devices for _, devices in stepped))

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if id(optimizer) in self._stepped:
            return None
        devices = self._devices_of(optimizer)
        _tell_makes(devices)
        if not devices:
            return None
        if len(args) > 1:
            return (args[0], _aside(args[1], devices), *args[2:]), kwargs
        if "closure" in kwargs:
            return args, {**kwargs, "closure": _aside(kwargs["closure"], devices)}
        return None

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in self._stepped:
            return
        devices = self._devices_of(optimizer)
        key = id(optimizer)
        gone = weakref.ref(optimizer, lambda _: self._stepped.pop(key, None))
        self._stepped[key] = (gone, devices)
        for device in devices:
            native.optimizer_made(device)

    def _devices_of(self, optimizer: Optimizer) -> set[int]:
        if not self._devices:
            return set()
        groups = optimizer.param_groups
        of = {p.device.index for group in groups for p in group["params"] if p.is_cuda}
        return of & self._devices


def _tell_makes(devices: set[int]) -> None:
    if devices:
        import torch

        for device in devices:
            native.optimizer_makes(device, torch.cuda.current_stream(device).cuda_stream)


def _aside(closure: Callable[..., Any] | None, devices: set[int]) -> Callable[..., Any] | None:
    """``closure``, which runs a forward and a backward: what those ask for does not stay."""
    if closure is None:
        return None

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        for device in devices:
            native.optimizer_made(device)
        result = closure(*args, **kwargs)
        _tell_makes(devices)
        return result

    return evaluated
