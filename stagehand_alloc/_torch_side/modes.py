"""The ways in: the process allocator, or torch's own caching allocator ("native", "mempool").

docs/decisions/0011-modes.md says when to use which, and by what figures the default was chosen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator
from typing import Any

from stagehand_alloc._built import trigger as _trigger
from stagehand_alloc._built.trigger import Trigger
from stagehand_alloc._errors import DriverError, ModeError, NoCudaBuildError
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Guarded
from stagehand_alloc._settings.config import Config, Mode
from stagehand_alloc._tell import warn_once
from stagehand_alloc._torch_side import install as _install
from stagehand_alloc._torch_side.optimizers import FirstSteps

WITHOUT_INSTALLING: Mode = "native"  # what is used where nothing is installed


class _Reached(Guarded):
    """What was set up to reach torch's own allocator: once for the process."""

    def __init__(self) -> None:
        super().__init__()
        self.trigger: Trigger | None = None  # by which it was reached
        self.segments: Any = None  # torch's allocator object, of entry points for MemPool segments
        self.first_steps = FirstSteps()


_reached = _Reached()


def resolve(asked: Mode | None) -> Mode:
    """The mode of a pool entered now. Raises ModeError where the one asked for is not there."""
    if _install.is_installed():
        if asked in ("mempool", "native"):
            raise ModeError(
                f"mode={asked!r} was asked for, but the process allocator is installed: torch's "
                "own caching allocator is out of use, and MemPools are refused.",
                'Leave out change_current_allocator, or use mode="allocator".',
            )
        return "allocator"
    if asked == "allocator":
        raise ModeError(
            'mode="allocator" was asked for, but the process allocator is not installed.',
            f"Put these two lines before the first use of CUDA:\n{_install.TWO_LINES}",
        )
    _check_torch()
    return asked or WITHOUT_INSTALLING


def trigger() -> Trigger:
    """By what the engine learns that torch's cache has run out."""
    return _reached.trigger or _trigger.NOT_NEEDED


def watch_optimizers() -> None:
    """Pools of torch's own allocator want to know of optimizers' first steps, from now on."""
    with _reached.lock:
        _reached.first_steps.watch()


def reach_torch(device: int, config: Config) -> None:
    """Make ``device``'s saved tensors torch's own storages from here on.

    The first call of the process loads the trigger library, which it may have to build.
    """
    with _reached.lock:
        if _reached.trigger is None:
            found = _trigger.load(
                config, use=lambda address: str(native.use_torch_side(address, device))
            )
            if found.state != "loaded":
                native.use_python_side()
            _reached.trigger = found
        native.enter_torch(device)
        _reached.first_steps.await_on(device)


def make_mem_pool(device: int, *, use_on_oom: bool = False) -> Any:
    """A torch.cuda.MemPool of ``device`` whose segments come from the core.

    What torch has free elsewhere cannot serve it, and goes back to the driver first.
    ``use_on_oom``: as torch has it.
    """
    import torch

    with _reached.lock:
        if _reached.segments is None:
            points = native.entry_points()
            _reached.segments = torch._C._cuda_customAllocator(
                points["segment_alloc"], points["segment_free"]
            )
    # torch ties our entry points to the pool on the current device, whichever enters it.
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
        return torch.cuda.MemPool(_reached.segments, use_on_oom=use_on_oom)


def fill(held: list[Any], owner: object, device: int) -> None:
    """Put a MemPool into ``held``, unless one is there; it goes with ``owner`` at the latest."""
    if not held:
        held.append(make_mem_pool(device))
        weakref.finalize(owner, give_up, held, device).atexit = False


def outgrown(mem_pool: Any, device: int, high: int) -> bool:
    """Whether another MemPool should take the place of this one in a step that may use ``high``."""
    first, second = mem_pool.id
    return native.outgrown(device, first, second, high)


def give_up(held: list[Any], device: int) -> None:
    """Drop the MemPools in ``held``, whoever is served by another one now.

    A torch.cuda.MemPool whose last reference goes meanwhile ends the process (before torch 2.13),
    where it is not kept.
    """
    while held:
        mem_pool = held.pop()
        name = mem_pool.id
        kept = native.keep_mem_pool(device, *name)
        del mem_pool
        if kept:
            native.let_mem_pool_go(device, *name)


def allocating_from(mem_pool: Any, device: int) -> Generator[None, None, None]:
    """What this thread allocates comes from ``mem_pool`` until it is closed.

    With the trigger library also what the backwards allocate that use what was saved meanwhile.
    """
    import torch

    by_thread: Any = contextlib.nullcontext()
    if not native.can_route():
        by_thread = torch.cuda.use_mem_pool(mem_pool, device=device)
        _warn_of_forward_only()
    with by_thread:
        if not native.set_torch_pool(device, *mem_pool.id):
            raise DriverError(
                f"The driver refused to open the MemPool's memory on device {device} for another "
                "device in use.",
                'Use mode="native", or hide the other devices with CUDA_VISIBLE_DEVICES.',
            )
        try:
            yield
        finally:
            native.set_torch_pool(device, 0, 0)


def _warn_of_forward_only() -> None:
    """Not where the trigger library's own warning says what is amiss."""
    if trigger().state == "loaded":
        warn_once(
            "This torch does not let a MemPool serve backward: it takes memory of its own, and the "
            "process goes over `high`.\n"
            'Use mode="native", or run backward inside the pool with '
            "torch.autograd.set_multithreading_enabled(False)."
        )


def _check_torch() -> None:
    import torch

    if torch.version.cuda is None:
        raise NoCudaBuildError(
            f"pool() was entered, but torch {torch.__version__} was built without CUDA.",
            "Install a CUDA build of torch; without a GPU, use "
            "stagehand_alloc.testing.simulated_gpu().",
        )
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        raise ModeError(
            f"pool() was entered, but torch allocates through its {backend!r} backend.",
            "Leave that out of PYTORCH_ALLOC_CONF or change_current_allocator, or install the "
            f"process allocator:\n{_install.TWO_LINES}",
        )
