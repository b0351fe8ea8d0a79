"""Installing the process allocator, and making torch's memory statistics work with it."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from stagehand_alloc import _driver
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._errors import (
    AllocatorTooLateError,
    AlreadyInstalledError,
    InstallError,
    NoCudaBuildError,
    TorchTooOldError,
)
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Guarded

if TYPE_CHECKING:
    from torch.cuda.memory import _CUDAAllocator

TWO_LINES = (
    "import torch, stagehand_alloc\n"
    "torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())"
)

OLDEST_TORCH = (2, 11)  # the first with tensors that are exchanged without a capsule

# torch's setter, and the entry point it takes.
_SETTERS = {
    "set_init_fn": "init",
    "set_reset_fn": "empty_cache",
    "set_memory_fraction_fn": "memory_fraction",
    "set_base_alloc_fn": "base_allocation",
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "end_allocate_to_pool",
    "set_release_pool": "release_pool",
}


class _Installed(Guarded):
    """What torch was given of ours: once for the process."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: Any = None  # torch's allocator object around our entry points, once built
        self.wrapped: _CUDAAllocator | None = None  # what change_current_allocator takes
        self.simulated = False  # CPU torch is on the simulated GPU


_installed = _Installed()


def allocator() -> _CUDAAllocator:
    """The process allocator, for ``torch.cuda.memory.change_current_allocator``.

    Call it before anything initialises CUDA. Loads the CUDA driver; allocates nothing.
    Raises NoCudaBuildError, AlreadyInstalledError, AllocatorTooLateError, TorchTooOldError, or a
    DriverError.
    """
    import torch

    with _installed.lock:
        require_torch(torch)
        _check_installable(torch)
        if _installed.wrapped is None:
            _driver.start()
            for index in range(_driver.device_count()):
                _driver.require_virtual_memory(index)
            _installed.ours = _build(torch)
            _installed.wrapped = torch.cuda.memory._CUDAAllocator(_installed.ours)
            _replace_statistics(torch)
        return _installed.wrapped


def require_torch(torch: Any) -> None:
    """Raises TorchTooOldError for one that has no way in for us."""
    version = str(torch.__version__)
    if _numbers(version) < OLDEST_TORCH:
        raise TorchTooOldError(
            f"This torch is {version}; stagehand_alloc needs {'.'.join(map(str, OLDEST_TORCH))} or "
            "later.",
            "Install a newer torch, or leave out stagehand_alloc.pool().",
        )


@functools.cache  # asked at each entry of a pool
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def is_installed() -> bool:
    """Whether torch allocates through us: the process allocator, or CPU torch on the simulator."""
    if _installed.simulated:
        return True
    if _installed.ours is None:
        return False
    import torch

    return _current(torch) is _installed.ours


def set_simulated(on: bool) -> None:
    """CPU torch on the simulated GPU counts as installed; the testing module says so here."""
    _installed.simulated = on


def is_simulated() -> bool:
    """Whether torch's CPU tensors live on the simulated GPU now."""
    return _installed.simulated


def _check_installable(torch: Any) -> None:
    if _installed.simulated:
        raise InstallError(
            "torch's CPU tensors are on the simulated GPU: nothing is left to install.",
            "Leave out change_current_allocator; stagehand_alloc.pool() works as it is.",
        )
    if torch.version.cuda is None or not hasattr(torch._C, "_cuda_customAllocator"):
        raise NoCudaBuildError(
            f"torch {torch.__version__} was built without CUDA.",
            "Install a CUDA build of torch; without a GPU, use "
            "stagehand_alloc.testing.simulated_gpu().",
        )
    if _installed.ours is not None and _current(torch) is _installed.ours:
        raise AlreadyInstalledError(
            "The process allocator is installed already.",
            "Call change_current_allocator once per process: remove the second call.",
        )
    if torch.cuda.memory.get_allocator_backend() == "pluggable":
        raise AlreadyInstalledError(
            "Another pluggable CUDA allocator is installed already.",
            "torch takes one per process: remove the other change_current_allocator call.",
        )
    if torch.cuda.is_initialized():
        raise AllocatorTooLateError(
            "CUDA was initialised before the allocator was installed.",
            "Move change_current_allocator before the first CUDA tensor, and before any of: "
            "pin_memory(), torch.cuda.set_device, get_device_capability, mem_get_info, "
            "current_stream, is_bf16_supported. (is_available, device_count and manual_seed "
            "may stay.)",
        )


def _current(torch: Any) -> Any:
    """The custom allocator torch uses, or None for its own."""
    getter = getattr(torch._C, "_cuda_getAllocator", None)
    return None if getter is None else getter()


def _build(torch: Any) -> Any:
    points = native.entry_points()
    built = torch._C._cuda_customAllocator(points["alloc"], points["free"])
    for setter, point in _SETTERS.items():
        getattr(built, setter)(points[point])
    return built


def _replace_statistics(torch: Any) -> None:
    """torch's own functions raise under a custom allocator; ours answer while it is current."""
    replacements = {
        "_cuda_memoryStats": _stats.torch_memory_stats,
        "_cuda_resetPeakMemoryStats": _stats.reset_peak_stats,
        "_cuda_resetAccumulatedMemoryStats": _stats.reset_accumulated_stats,
    }
    for name, ours in replacements.items():
        setattr(torch._C, name, _when_current(torch, ours, getattr(torch._C, name)))


def _when_current(torch: Any, ours: Any, original: Any) -> Any:
    def call(device: int) -> Any:
        return (ours if _current(torch) is _installed.ours else original)(device)

    return call
