"""Pools that a model's own forward enters and leaves: of one model, or of whichever is called."""

from __future__ import annotations

import dataclasses
import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.sizes import shown

if TYPE_CHECKING:
    from torch import nn

    from stagehand_alloc._step.pool import Pool


@dataclasses.dataclass(eq=False)
class _Running:
    """A forward that the pool is around."""

    module: nn.Module
    thread: int
    frame: int  # of torch's call of it, by its address: the frame itself would keep all it names
    code: CodeType
    inside: int = 0  # calls of the same module from inside of it

    @classmethod
    def of(cls, module: nn.Module, frame: FrameType) -> _Running:
        """The call of ``module`` in ``frame``, on this thread."""
        return cls(module, threading.get_ident(), id(frame), frame.f_code)

    def over(self, frame: FrameType | None) -> bool:
        """Whether it was interrupted: no hook is told of a KeyboardInterrupt.

        ``frame`` is where this thread is. The newest call may have the address of one that is over,
        so it is not asked; one further out that has it, and calls the module, would have been asked
        when it began.
        """
        frame = None if frame is None else frame.f_back
        while frame is not None:
            if id(frame) == self.frame and frame.f_code is self.code:
                return frame.f_locals.get("self", self.module) is not self.module
            frame = frame.f_back
        return True


class _Around:
    """Enters a pool before a module's forward and leaves it behind: two module hooks of torch's."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._running: _Running | None = None
        self._handles: list[Any] = []
        self.entered = False  # ever

    def __getstate__(self) -> dict[str, Any]:
        """A copy that is made while forward runs is around nothing."""
        return {**self.__dict__, "_running": None}

    def remove(self) -> None:
        """No forward enters the pool any more. Any number of times."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        running, frame = self._running, sys._getframe(1)
        if running is not None and running.thread == threading.get_ident():
            if running.over(frame):
                self._end()
            elif running.module is module:
                running.inside += 1
        if self._running is not None or not self._wants():
            return
        # First: an interrupt from here on is mended by the next forward.
        self._running = _Running.of(module, frame)
        try:
            self._pool.__enter__()
        except BaseException:
            self._running = None
            raise
        self.entered = True
        if self._pool._watch.entered():  # too late for torch to call it of this module
            self._pool._watch.began(module)

    def _wants(self) -> bool:
        """Something may be saved, and no backward is running something again."""
        import torch

        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def _leave(self, module: nn.Module, *_: Any) -> None:
        running = self._running
        if running is None or (running.module, running.thread) != (module, threading.get_ident()):
            return
        if running.inside:
            running.inside -= 1
        else:
            self._end()

    def _end(self) -> None:
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
        pool.around_script = True
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _wants(self) -> bool:
        import torch

        return not torch.compiler.is_compiling() and super()._wants()
