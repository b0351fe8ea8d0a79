"""The first step of each optimizer in torch's cache: what it makes there stays for good."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from stagehand_alloc._extension import native

if TYPE_CHECKING:
    from torch.optim import Optimizer


class FirstSteps:
    """Tells the core when they begin and end, on the devices added, by torch's own hooks.

    They stay for good, and cost a look into a set in later steps. An optimizer that is no
    `torch.optim.Optimizer` is not seen.
    """

    def __init__(self) -> None:
        self._devices: set[int] = set()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def watch(self) -> None:
        """Once."""
        import torch
        from torch.optim import optimizer

        apart: Any = torch.compiler.disable  # of a step that is compiled, too
        optimizer.register_optimizer_step_pre_hook(apart(self._begin))
        optimizer.register_optimizer_step_post_hook(apart(self._end))

    def await_on(self, device: int) -> None:
        """A pool is entered there. Where no optimizer that has stepped is left, one may come."""
        self._devices.add(device)
        if not self._stepped:
            native.await_optimizer()

    def _begin(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._stepped:
            import torch

            for device in list(self._devices):
                native.optimizer_begins(device, torch.cuda.current_stream(device).cuda_stream)

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            for device in list(self._devices):
                native.optimizer_ended(device)
