"""Quiet steps: while steps have far more room than they use, a pool leaves saved tensors alone.

torch's hooks cost a step of thousands of small saved tensors 5 %, even where they do nothing, and
ours as much again (docs/decisions/0072). Where nothing has to leave that is for nothing. So after
some calm steps the pool's hooks are not on torch's stack. The engine has an alarm: once more than
half of the room is in use, they are put there, at the next call, return or loop of Python on the
main thread, and what is saved from then on can leave.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from stagehand_alloc._extension import native
from stagehand_alloc._step.entry import in_this_thread

if TYPE_CHECKING:
    from stagehand_alloc._step.entry import Entry

FEW = 4  # calm steps, before the first quiet one
_MOST = 256  # as many, once alarms in quiet steps have doubled that
_ENTRIES = 64  # whose budgets and begins are remembered
_LATER = 16  # a part of the room: where hooks cannot be pushed, the alarm rings again so much later


class Quiet:
    """Which steps of one device are quiet. For the thread whose pool is inside."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if no step had been, so that what follows depends on nothing earlier; for tests."""
        self._highs: deque[int] = deque(maxlen=_ENTRIES)  # of the newest entries
        self._begins: deque[int] = deque(maxlen=_ENTRIES)  # bytes in use then
        self._calm = 0  # steps in a row in which all was well
        self._needed = FEW
        self._open = False  # there is a step that may be calm: its backward may be yet to come
        self._quiet = False  # it began so
        self._rang = False  # its alarm, which was set again since
        self._pressed = 0  # of the engine's counts, when it began
        self._never = False

    def refuse(self) -> None:
        """No step is quiet from here on: regions are called, which want hooks around them."""
        self._never = True

    def begin(self, device: int, high: int, gradients: bool, may: bool) -> bool:
        """Whether the step that begins is quiet; its alarm is set.

        An entry without gradients is no step: one that is open goes on, and so does its alarm.

        Args:
            device: its number.
            high: bytes, of the pool that is entered.
            gradients: something may be saved.
            may: the pool can do with saved tensors that nobody follows.
        """
        rang, in_use, pressed, shown = native.read_alarm(device)
        if gradients:
            self._end(rang, pressed)
        self._calm = self._calm if high in self._highs else 0
        self._highs.append(high)
        self._begins.append(in_use)
        if not gradients:
            return False
        mark = mark_of(min(self._begins), min(self._highs))
        quiet = may and not shown and not self._never and self._calm >= self._needed
        if quiet:  # others may have taken what the device had
            mark = min(mark, in_use + native.available(device) // 2)
            quiet = in_use < mark
        self._open, self._quiet, self._rang, self._pressed = True, quiet, False, pressed
        native.set_alarm(device, mark, quiet)
        return quiet

    def _end(self, rang: bool, pressed: int) -> None:
        """The open step is over: it was calm if nothing had to leave, and there was room for it."""
        if not self._open:
            return
        rang = rang or self._rang
        calm = not rang and pressed == self._pressed
        self._calm = self._calm + 1 if calm else 0
        # What is not followed in time costs one step: so less and less often.
        self._needed = min(2 * self._needed, _MOST) if self._quiet and not calm else self._needed

    def again_later(self, device: int) -> None:
        """The alarm of the open step rang, and nothing could be done: it will ring once more."""
        self._rang = True
        in_use = native.read_alarm(device)[1]
        room = max(0, self._highs[-1] - in_use)
        native.set_alarm(device, in_use + max(1, room // _LATER), True)


def mark_of(begin: int, high: int) -> int:
    """Bytes in use at which the alarm of a step rings, where ``begin`` are in use before it."""
    return begin + max(0, high - begin) // 2


def hooks_can_be_pushed() -> bool:
    """Not inside a functorch transform, nor where a program has turned hooks off."""
    from torch._C import _autograd

    asked: Any = _autograd
    return bool(asked._saved_tensors_hooks_is_enabled())


def wake(device: int) -> None:
    """The alarm of a quiet step rang: called on the main thread, in the middle of the program."""
    entry = in_this_thread.entry
    if entry is not None and entry.device.index == device:
        follow(entry)


def follow(entry: Entry) -> None:
    """What is saved inside ``entry`` from here on is followed, where it was not."""
    import torch

    if not entry.quiet or entry.left:
        return
    # Inside a backward the engine puts the stack back after each node.
    if not hooks_can_be_pushed() or torch._C._current_graph_task_id() != -1:
        entry.device.quiet.again_later(entry.device.index)
        return
    entry.quiet = False  # first: the alarm may ring in the middle of this
    entry.pool._push_hooks(entry, late=True)
