"""The native suites on the real driver, as the tests call them."""

from __future__ import annotations

import ctypes
import pathlib

LIBRARY = (
    pathlib.Path(__file__).parents[2]
    / "build"
    / "gpu"
    / "gpu_stress"
    / "libstagehand_gpu_stress.so"
)
TEXT_BYTES = 1 << 16


def load() -> ctypes.CDLL:
    """The library that `make gpu-test` builds beside the extension."""
    return ctypes.CDLL(str(LIBRARY))


def driver_addresses() -> ctypes.Array[ctypes.c_void_p]:
    from stagehand_alloc import _driver
    from stagehand_alloc._extension import native

    _driver.start()
    symbols = native.driver_symbols()
    version = _driver.driver_version()
    return (ctypes.c_void_p * len(symbols))(*[_driver._address(s, version) for s in symbols])
