"""Pools that a model's own forward enters and leaves: of one model, or of whichever is called."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.config import shown

if TYPE_CHECKING:
    from torch import nn

    from stagehand_alloc._step.pool import Pool


class _Around:
    """Enters a pool before a module's forward and leaves it behind: two module hooks of torch's."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._running: tuple[nn.Module, int] | None = None  # and the thread of its forward
        self._handles: list[Any] = []

    def remove(self) -> None:
        """No forward enters the pool any more. Any number of times."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        here = (module, threading.get_ident())
        if self._running == here:  # its forward was interrupted, which no hook is told
            self._leave(module)
        if self._running is not None or not self._wants():
            return
        self._running = here  # first: an interrupt from here on is mended by the next forward
        try:
            self._pool.__enter__()
        except BaseException:
            self._running = None
            raise
        if self._pool._watch.entered():  # too late for torch to call it of this module
            self._pool._watch.began(module)

    def _wants(self) -> bool:
        """Something may be saved, and no backward is running something again."""
        import torch

        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._running != (module, threading.get_ident()):
            return
        if self._pool._entry is not None:  # else another entry found it left already
            self._pool.__exit__(*sys.exc_info())
        self._running = None


class Attached(_Around):
    """What `Pool.attach` returns. It is copied and pickled with the model."""

    def __init__(self, pool: Pool, model: nn.Module) -> None:
        from torch import nn

        super().__init__(pool)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"attach({shown(model)}): that is no module.",
                "Give the model whose forward the pool is to be around.",
            )
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, prepend=True, always_call=True),
        ]


class Everywhere(_Around):
    """Around each module that no other module calls, where gradients are on: for whole scripts."""

    def __init__(self, pool: Pool) -> None:
        from torch.nn.modules import module

        super().__init__(pool)
        self.entered = False
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _wants(self) -> bool:
        import torch

        wants = not torch.compiler.is_compiling() and super()._wants()
        self.entered |= wants
        return wants
