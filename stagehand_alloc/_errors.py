"""Every error the package raises itself: line one says what happened, line two what to do."""

from __future__ import annotations


class StagehandError(Exception):
    """Base of all. ``what`` happened, with numbers, and what ``todo`` about it."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(what, todo)
        self.what = what
        self.todo = todo

    def __str__(self) -> str:
        return f"{self.what}\n{self.todo}"


class ConfigError(StagehandError, ValueError):
    """A setting that cannot be: unknown key, wrong type, contradiction."""


class SizeError(ConfigError):
    """A size that cannot be read, or that does not fit the device or its neighbours."""


class DriverError(StagehandError, RuntimeError):
    """The CUDA driver cannot do what the package needs."""


class DriverNotFoundError(DriverError):
    """No driver library, or a driver without a device."""


class DriverTooOldError(DriverError):
    """The driver is older than CUDA 12, or lacks a function the package calls."""


class VirtualMemoryError(DriverError):
    """The device has no virtual memory management."""


class ForkedError(DriverError):
    """The process was forked from one that already used the driver."""


class NotBuiltError(StagehandError, ImportError):
    """The extension module is missing."""


class InstallError(StagehandError, RuntimeError):
    """The process allocator cannot be installed, or an integration's library is missing."""


class AllocatorTooLateError(InstallError):
    """CUDA was initialised before the allocator was installed."""


class AlreadyInstalledError(InstallError):
    """An allocator is installed already: torch takes one per process."""


class NoCudaBuildError(InstallError):
    """This torch was built without CUDA."""


class TorchTooOldError(StagehandError, RuntimeError):
    """torch is older than 2.11."""


class ModeError(StagehandError, RuntimeError):
    """The way in that ``pool()`` was asked for is not there."""


class PoolError(StagehandError, RuntimeError):
    """A pool used in a way it cannot be."""


class NestedPoolError(PoolError):
    """A pool entered inside another."""


class PoolThreadError(PoolError):
    """A pool used from two threads at once."""


class ChecksumError(StagehandError, RuntimeError):
    """A host copy is not what was written to it; found with ``debug_checksums``."""


class RecomputeError(StagehandError, RuntimeError):
    """A saved tensor that was made again for backward is not what was saved."""


class OffloadError(StagehandError, RuntimeError):
    """Weights that cannot be offloaded, or not in this way."""


class TelemetryError(StagehandError, RuntimeError):
    """The telemetry file cannot be written or read."""


class SimulatorError(StagehandError, RuntimeError):
    """The simulated GPU cannot be started."""


class CompilerError(SimulatorError):
    """A library against the installed torch, such as the simulated GPU's, could not be built."""


def in_one_line(error: BaseException) -> str:
    """What somebody else's error says, without its line breaks; its name where it says nothing."""
    try:
        return " ".join(str(error).splitlines()) or type(error).__name__
    except Exception:  # of its own __str__
        return type(error).__name__
