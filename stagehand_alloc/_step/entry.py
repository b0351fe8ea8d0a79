"""That a pool was entered: what a `with` leaves behind, however it ends, and how it is undone."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from stagehand_alloc._extension import native

if TYPE_CHECKING:
    from stagehand_alloc._step.device import Device
    from stagehand_alloc._step.pool import Pool


class _Thread(threading.local):
    """What is so on one thread."""

    entry: Entry | None = None  # of the pool it is inside
    exit: weakref.ref[Any] | None = None  # to what `Exit` gave out last


in_this_thread = _Thread()


@dataclasses.dataclass(eq=False)
class Entry:
    """A pool that was entered, and what has to be undone.

    A KeyboardInterrupt may come between any two steps of entering and leaving, `__exit__`'s first
    included. So whatever is there may have been left half done: undoing is right at any moment and
    any number of times, and the next entry undoes what it finds `over`.
    """

    pool: Pool
    device: Device
    thread: int
    lasts: weakref.ref[Any] | None  # dead once the `with` is over; None: not entered by a `with`
    entered: bool = False
    left: bool = False
    quiet: bool = False  # its hooks are pushed once the alarm rings (quiet.py)
    above: int = 0  # so many pairs that are on torch's stack
    hooked: bool = False
    allocating: Generator[None, None, None] | None = None

    def over(self) -> bool:
        """Whether nobody is inside any more, though nobody may have said so."""
        if self.lasts is not None and self.lasts() is None:
            return True
        return self.thread == threading.get_ident() and (self.left or not self.entered)

    def surely_inside(self) -> bool:
        """Not over, and no uncollected traceback makes it look so: what an ExitStack leaves."""
        if not self.over():
            gc.collect()
        return not self.over()


class Exit:
    """``Pool.__exit__``, of which every `with` has an object of its own.

    A `with` holds it until it is over, however it ends: interrupted, it leaves no other trace.
    """

    def __get__(self, pool: Pool | None, owner: type[Pool]) -> Callable[..., None]:
        made = (
            functools.partial(owner._exit) if pool is None else functools.partial(owner._exit, pool)
        )
        in_this_thread.exit = weakref.ref(made)
        return made


def taken_exit(pool: Pool) -> weakref.ref[Any] | None:
    """What the `with` that is entering ``pool`` on this thread holds; None where none is."""
    found = in_this_thread.exit
    in_this_thread.exit = None
    made = None if found is None else found()
    return found if made is not None and made.args in ((), (pool,)) else None


def remove_hooks(inner: bool) -> None:
    """Take our hooks off this thread's stack, also from below those of others.

    ``inner``: those of torch's checkpoint above ours go too. A region that is interrupted between
    any two steps may leave one pair of hooks too many, and each exit takes whichever is on top.
    """
    from torch._C import _autograd

    hooks = native.Hooks
    others = []
    found = False
    while not found and (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        found = isinstance(getattr(top[0], "__self__", None), hooks)
        if not found:
            others.append(top)
    if found and inner:  # without ours, which were not pushed yet, nothing is above them
        others = [
            one
            for one in others
            if not getattr(one[0], "__qualname__", "").startswith("_checkpoint_hook.")
        ]
    for pack, unpack in reversed(others):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
