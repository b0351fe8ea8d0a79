"""Which module's forward is running, for the ``keep`` predicate; only watched where one is given.

torch calls two functions of ours around the forward of every module, from the entry of the first
pool that asks to the exit of the last. torch.compile guards on what is installed by number and
function: new ones at every entry would make it compile again every step, so they stay the same.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_lock = threading.Lock()
_users = 0  # watches entered; guarded by _lock
_numbers: tuple[int, int] | None = None  # what torch calls the two hooks; same lock
_in_this_thread = threading.local()  # .watch: the one entered on this thread


class ModuleWatch:
    """Names the innermost module whose forward runs on the thread that entered this."""

    def __init__(self) -> None:
        self._running: list[nn.Module] = []  # outermost first
        self._names: dict[nn.Module, str] = {}  # of every root so far, and all inside it

    def __enter__(self) -> ModuleWatch:
        global _users
        with _lock:
            if _users == 0:
                _install()
            _users += 1
        _in_this_thread.watch = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _users
        _in_this_thread.watch = None
        self._running.clear()
        self._names.clear()  # modules may come, go and be renamed between steps
        with _lock:
            _users -= 1
            if _users == 0:
                _remove()

    def current(self) -> str | None:
        """As in ``root.named_modules()``; of a module that is not in there, the one around it."""
        return next(
            (self._names[module] for module in reversed(self._running) if module in self._names),
            None,
        )

    def began(self, module: nn.Module) -> None:
        """Forward of ``module`` begins."""
        if not self._running and module not in self._names:
            self._names.update((inner, name) for name, inner in module.named_modules())
        self._running.append(module)

    def ended(self, module: nn.Module) -> None:
        """It ended. What began after it was left without a word, as by a KeyboardInterrupt."""
        for at in range(len(self._running) - 1, -1, -1):
            if self._running[at] is module:
                del self._running[at:]
                return


def _watch() -> ModuleWatch | None:
    """This thread's; none inside torch.compile, for which our list is no part of the program."""
    import torch

    if torch.compiler.is_compiling():
        return None
    found: ModuleWatch | None = getattr(_in_this_thread, "watch", None)
    return found


def _before(module: nn.Module, arguments: Any) -> None:
    if (watch := _watch()) is not None:
        watch.began(module)


def _after(module: nn.Module, arguments: Any, result: Any) -> None:
    if (watch := _watch()) is not None:
        watch.ended(module)


def _install() -> None:
    """As torch's own register functions, with the numbers they gave the first time."""
    from torch.nn.modules import module

    global _numbers
    if _numbers is None:
        before = module.register_module_forward_pre_hook(_before)
        after = module.register_module_forward_hook(_after, always_call=True)
        _numbers = (before.id, after.id)
        return
    module._global_forward_pre_hooks[_numbers[0]] = _before
    module._global_forward_hooks[_numbers[1]] = _after
    module._global_forward_hooks_always_called[_numbers[1]] = True


def _remove() -> None:
    from torch.nn.modules import module

    assert _numbers is not None
    module._global_forward_pre_hooks.pop(_numbers[0], None)
    module._global_forward_hooks.pop(_numbers[1], None)
    module._global_forward_hooks_always_called.pop(_numbers[1], None)
