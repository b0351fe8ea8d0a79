"""The control plane: the one module that touches cuda-python.

Nothing here runs at import. `start` loads the driver, initialises it, and gives the extension its
table of driver functions; torch's own CUDA state is not touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from stagehand_alloc._errors import (
    DriverError,
    DriverNotFoundError,
    DriverTooOldError,
    ForkedError,
    VirtualMemoryError,
)
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Once

MINIMUM_VERSION = 12000  # as cuDriverGetVersion counts: 1000 * major + 10 * minor
_ATTRIBUTE_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_ATTRIBUTE_HOST_NUMA_ID = 134  # CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, of CUDA 12.2 and later
NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM: a null stream is the legacy default one
_UPDATE = "Install an NVIDIA driver for CUDA 12 or newer (525 or later)."
_NO_DEVICE = (
    "Run on a machine with an NVIDIA GPU and its driver; without one, begin the script with: "
    "from stagehand_alloc import testing; testing.simulated_gpu()"
)


_table = Once[int]()  # the process that filled the extension's table of driver functions


@dataclass(frozen=True)
class Device:
    """What the driver says of one device; sizes in bytes."""

    index: int
    name: str
    total: int
    virtual_memory: bool


def start() -> None:
    """Load and initialise the driver and fill the extension's table; once per process.

    Raises DriverNotFoundError, DriverTooOldError, ForkedError, or DriverError.
    """
    _table.get(_fill_table)


def _fill_table() -> int:
    version = _initialise()
    native.install_driver([_address(symbol, version) for symbol in native.driver_symbols()])
    return os.getpid()


def started() -> bool:
    """Whether `start` has succeeded, here or in the process this one was forked from."""
    return _table.found is not None


def check_process() -> None:
    """Raises ForkedError in a child of a process that already used the driver."""
    if _table.found not in (None, os.getpid()):
        raise ForkedError(
            f"Process {os.getpid()} was forked from {_table.found}, which already uses CUDA.",
            'Start worker processes with torch.multiprocessing.set_start_method("spawn").',
        )


def driver_version() -> int:
    """The CUDA version of the driver, as 1000 * major + 10 * minor."""
    return int(call("cuDriverGetVersion"))


def device_count() -> int:
    """How many devices the driver shows (CUDA_VISIBLE_DEVICES applies)."""
    _initialise()
    return int(call("cuDeviceGetCount"))


def device(index: int) -> Device:
    """Name, size and abilities of device ``index``."""
    _initialise()
    handle = call("cuDeviceGet", index)
    name = call("cuDeviceGetName", 256, handle).split(b"\0", 1)[0].decode(errors="replace")
    total = int(call("cuDeviceTotalMem", handle))
    attribute = _bindings().CUdevice_attribute(_ATTRIBUTE_VIRTUAL_MEMORY)
    return Device(index, name, total, bool(call("cuDeviceGetAttribute", attribute, handle)))


def require_virtual_memory(index: int) -> Device:
    """Device ``index``. Raises VirtualMemoryError where the core could not map memory on it."""
    found = device(index)
    if not found.virtual_memory:
        raise VirtualMemoryError(
            f"Device {index} ({found.name}) has no virtual memory management.",
            "Use a GPU of the Pascal generation or newer, outside of WDDM and vGPU modes.",
        )
    return found


def synchronize(index: int) -> None:
    """Wait for all work of device ``index``. Raises DriverError."""
    handle = call("cuDeviceGet", index)
    # Never given up, as the engine does where it opens a device: torch uses it to the end.
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", handle))
    try:
        call("cuCtxSynchronize")
    finally:
        call("cuCtxPopCurrent")


def host_nodes() -> list[int]:
    """The host's memory nodes."""
    return sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))


def numa_nodes() -> list[int]:
    """The host's memory node nearest to each device, -1 where unknown; empty with one node only."""
    if len(host_nodes()) < 2:
        return []
    return [_numa_node(index) for index in range(device_count())]


def _numa_node(index: int) -> int:
    driver = _bindings()
    try:
        handle = call("cuDeviceGet", index)
        attribute = driver.CUdevice_attribute(_ATTRIBUTE_HOST_NUMA_ID)
        node = int(call("cuDeviceGetAttribute", attribute, handle))
        if node >= 0:
            return node
    except (DriverError, RuntimeError, ValueError):  # an older driver, or older bindings
        pass
    try:
        address = call("cuDeviceGetPCIBusId", 32, call("cuDeviceGet", index))
        name = address.split(b"\0", 1)[0].decode().lower()
        return int((_PCI_DEVICES / name / "numa_node").read_text())
    except (DriverError, RuntimeError, OSError, ValueError):
        return -1


def _initialise() -> int:
    """cuInit and the checks on it; returns the driver's version."""
    check_process()
    driver = _bindings()
    try:
        result = driver.cuInit(0)[0]
    except Exception as error:  # cuda-python's own types, which differ from version to version
        raise DriverNotFoundError(
            f"No CUDA driver was found: libcuda.so.1 cannot be loaded ({type(error).__name__}).",
            _NO_DEVICE,
        ) from error
    if int(result) != 0:
        raise DriverNotFoundError(
            f"The CUDA driver cannot be initialised: {_name(result)} ({int(result)}).", _NO_DEVICE
        )
    version = driver_version()
    if version < MINIMUM_VERSION:
        raise DriverTooOldError(
            f"The driver supports CUDA {_dotted(version)}; {_dotted(MINIMUM_VERSION)} is needed.",
            _UPDATE,
        )
    if int(call("cuDeviceGetCount")) == 0:
        raise DriverNotFoundError("The CUDA driver shows 0 devices.", _NO_DEVICE)
    return version


def _address(symbol: str, version: int) -> int:
    """Where a driver of ``version`` keeps ``symbol``; 0 where it lacks an optional one.

    Each is asked for in one form: that of CUDA 12.0, or of the version an optional one came with.
    An older driver is not asked for those: it might know them with other parameters.
    """
    since = native.optional_driver_symbols().get(symbol)
    if since is not None and version < since:
        return 0
    result, address, *_ = _bindings().cuGetProcAddress(
        symbol.encode(), since or MINIMUM_VERSION, _LEGACY_STREAM
    )
    if int(result) != 0 or not address:
        if since is not None:
            return 0
        raise DriverTooOldError(
            f"The driver (CUDA {_dotted(version)}) has no function {symbol}.", _UPDATE
        )
    return int(address)


def call(function: str, *arguments: Any) -> Any:
    """One driver call through cuda-python. Raises DriverError naming the function and result."""
    result, *values = getattr(_bindings(), function)(*arguments)
    if int(result) != 0:
        raise DriverError(
            f"{function} failed: {_name(result)} ({int(result)}).",
            "Run `python -m stagehand_alloc doctor`, and check that other CUDA programs work.",
        )
    return values[0] if len(values) == 1 else tuple(values)


def _bindings() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(
            f"cuda-python cannot be imported: {error}.", "Install it: pip install cuda-python"
        ) from error
    return driver  # type: ignore[no-any-return]


def _name(result: Any) -> str:
    return str(getattr(result, "name", result))


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
