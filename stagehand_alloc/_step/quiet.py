"""Quiet steps: while its steps had far more room than they used, a pool leaves saved tensors alone.

torch's hooks cost a step of thousands of small saved tensors 5 %, even where they do nothing, and
ours as much again (docs/decisions/0072). Where nothing has to leave that is for nothing. So after
some calm steps the pool's hooks are not on torch's stack. The engine has an alarm: once a request
takes more than half of the room, they are put there before Python's next instruction but one, and
what is saved from then on can leave. That is enough: what must leave is what is above `high`, and
all of it was asked for, or made room for, after the alarm.
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
_BEGINS = 64  # steps whose begin is remembered
_BUDGETS = 8  # that take turns
_LATER = 16  # a part of the room: where hooks are turned off, the alarm rings again that much later


class _Budget:
    """What is known of the steps inside one."""

    def __init__(self, high: int) -> None:
        self.high = high
        self.calm = 0  # steps in a row that saw no alarm, and may have saved something
        self.needed = FEW
        self._begins: deque[int] = deque(maxlen=_BEGINS)  # bytes in use then

    def begun(self, in_use: int) -> int:
        """A step begins with so many bytes; at how many its alarm rings."""
        self._begins.append(in_use)
        return mark_of(min(self._begins), self.high)

    def ended(self, rang: bool, quiet: bool) -> None:
        """One that may have saved something is over; it was ``quiet`` as it began."""
        self.calm = 0 if rang else self.calm + 1
        # What is not followed in time costs one step: so less and less often.
        self.needed = min(2 * self.needed, _MOST) if rang and quiet else self.needed


class Quiet:
    """Which steps of one device are quiet. For the thread whose pool is inside."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if no step had been, so that what follows depends on nothing earlier; for tests."""
        self._budgets: dict[int, _Budget] = {}  # by `high`; the oldest first
        self._open: tuple[_Budget, bool] | None = None  # of the newest step, if it may save; quiet
        self._never = False

    def refuse(self) -> None:
        """No step is quiet from here on: regions are called, which want hooks around them."""
        self._never = True

    def begin(self, device: int, high: int, gradients: bool, may: bool) -> bool:
        """Whether the step that begins is quiet; its alarm is set.

        Args:
            device: its number.
            high: bytes, of the pool that is entered.
            gradients: something may be saved.
            may: the pool can do with saved tensors that nobody follows.
        """
        rang, in_use = native.read_alarm(device)
        if self._open is not None:
            budget, quiet = self._open
            budget.ended(rang, quiet)
        budget = self._budgets.pop(high) if high in self._budgets else _Budget(high)
        self._budgets[high] = budget
        if len(self._budgets) > _BUDGETS:
            del self._budgets[next(iter(self._budgets))]
        mark = budget.begun(in_use)
        quiet = may and gradients and not self._never
        quiet = quiet and budget.calm >= budget.needed and in_use < mark
        self._open = (budget, quiet) if gradients else None
        native.set_alarm(device, mark, quiet)
        return quiet

    def again_later(self, device: int) -> None:
        """The alarm of the open step rang, and nothing could be done: it will ring once more."""
        high = next(reversed(self._budgets))
        in_use = native.read_alarm(device)[1]
        native.set_alarm(device, in_use + max(1, max(0, high - in_use) // _LATER), True)


def mark_of(begin: int, high: int) -> int:
    """Bytes in use at which the alarm of a step rings that ``begin`` are in use before."""
    return begin + max(0, high - begin) // 2


def wake(device: int) -> None:
    """The alarm of a quiet step rang: called between two instructions of the main thread."""
    entry = in_this_thread.entry
    if entry is not None and entry.device.index == device:
        follow(entry)


def follow(entry: Entry) -> None:
    """What is saved inside ``entry`` from here on is followed, where it was not."""
    from torch._C import _autograd

    asked: Any = _autograd
    if not entry.quiet or entry.left or entry.hooked:
        return
    if not asked._saved_tensors_hooks_is_enabled():  # a functorch transform, or a user's own wish
        entry.device.quiet.again_later(device=entry.device.index)
        return
    entry.pool._follow(entry)
