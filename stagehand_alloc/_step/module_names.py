"""Which module's forward is running: for the ``keep`` predicate, and in the first steps of a pool
with ``recompute=True``, which looks for blocks.

torch calls two functions of ours around the forward of every module, from the entry of the first
pool that asks to the exit of the last. torch.compile guards on what is installed by number and
function: new ones at every entry would make it compile again every step, so they stay the same.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from stagehand_alloc._guarded import Guarded

if TYPE_CHECKING:
    from torch import nn


class ModuleWatch:
    """Names the innermost module whose forward runs on the thread that entered this."""

    def __init__(self) -> None:
        self._running: list[nn.Module] = []  # outermost first
        self._names: dict[nn.Module, str] = {}  # of every root so far, and all inside it
        self._roots: list[nn.Module] = []  # called by no other, in this step

    def enter(self) -> None:
        """Begin. Interrupted, it is right to enter again, or to leave."""
        self._forget()
        _hooks.add(self)
        _in_this_thread.watch = self

    def leave(self) -> None:
        """End; nothing where it was not entered, or left before."""
        if self.entered():
            _in_this_thread.watch = None
        self._forget()  # modules may come, go and be renamed between steps
        _hooks.discard(self)

    def entered(self) -> bool:
        """Whether it is, on this thread."""
        return _in_this_thread.watch is self

    def _forget(self) -> None:
        self._running.clear()
        self._names.clear()
        self._roots.clear()

    def roots(self) -> list[nn.Module]:
        """The modules that were called since it was entered, and by no other module."""
        return list(self._roots)

    def current(self) -> str | None:
        """As in ``root.named_modules()``; of a module that is not in there, the one around it."""
        for module in reversed(self._running):
            if module in self._names:
                return self._names[module]
        return None

    def began(self, module: nn.Module) -> None:
        """Forward of ``module`` begins."""
        if not self._running and module not in self._names:
            self._names.update((inner, name) for name, inner in module.named_modules())
            self._roots.append(module)
        self._running.append(module)

    def ended(self, module: nn.Module) -> None:
        """It ended. What began after it was left without a word, as by a KeyboardInterrupt."""
        for at in range(len(self._running) - 1, -1, -1):
            if self._running[at] is module:
                del self._running[at:]
                return


class _Thread(threading.local):
    """What is so on one thread."""

    watch: ModuleWatch | None = None  # that is entered


_in_this_thread = _Thread()


def _watch() -> ModuleWatch | None:
    """This thread's; none inside torch.compile, for which our list is no part of the program."""
    import torch

    return None if torch.compiler.is_compiling() else _in_this_thread.watch


def _before(module: nn.Module, arguments: Any) -> None:
    if (watch := _watch()) is not None:
        watch.began(module)


def _after(module: nn.Module, arguments: Any, result: Any) -> None:
    if (watch := _watch()) is not None:
        watch.ended(module)


class _Hooks(Guarded):
    """The two that torch has, while there are watches that they serve."""

    def __init__(self) -> None:
        super().__init__()
        # Guarded by the lock:
        self._entered: set[ModuleWatch] = set()
        self._before_number: int | None = None  # what torch calls them
        self._after_number: int | None = None

    def add(self, watch: ModuleWatch) -> None:
        """It is entered."""
        with self.lock:
            self._entered.add(watch)
            self._install()

    def discard(self, watch: ModuleWatch) -> None:
        """It is left, or was not entered."""
        with self.lock:
            self._entered.discard(watch)
            if not self._entered:
                self._remove()

    def _install(self) -> None:
        """As torch's own register functions, with the numbers they gave the first time."""
        from torch.nn.modules import module

        before, after = module._global_forward_pre_hooks, module._global_forward_hooks
        # Torch's dicts tell what is done already: an interrupt may come between any two steps.
        if _number(before, _before) is None:
            if self._before_number is None:
                module.register_module_forward_pre_hook(_before)
            else:
                before[self._before_number] = _before
        if _number(after, _after) is None:
            if self._after_number is None:
                module.register_module_forward_hook(_after, always_call=True)
            else:
                after[self._after_number] = _after
        self._before_number, self._after_number = _number(before, _before), _number(after, _after)
        assert self._after_number is not None
        module._global_forward_hooks_always_called[self._after_number] = True

    def _remove(self) -> None:
        from torch.nn.modules import module

        if (number := _number(module._global_forward_pre_hooks, _before)) is not None:
            del module._global_forward_pre_hooks[number]
        if (number := _number(module._global_forward_hooks, _after)) is not None:
            module._global_forward_hooks_always_called.pop(number, None)
            del module._global_forward_hooks[number]


_hooks = _Hooks()


def _number(hooks: dict[int, Any], ours: Any) -> int | None:
    for number, hook in hooks.items():
        if hook is ours:
            return number
    return None
