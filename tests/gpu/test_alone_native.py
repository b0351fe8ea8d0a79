"""The native suites on the real driver: the seam's contract, and the allocator's stress test.

Alone on the device: the stress test takes most of its memory, and expects what is free to be had.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

import pytest

SECONDS = float(os.environ.get("STAGEHAND_STRESS_SECONDS", "25"))  # of each seed
LIBRARY = (
    pathlib.Path(__file__).parents[2]
    / "build"
    / "gpu"
    / "gpu_stress"
    / "libstagehand_gpu_stress.so"
)
TEXT_BYTES = 1 << 16


@pytest.fixture(scope="module")
def suites(cuda: None) -> ctypes.CDLL:
    """The library that `make gpu-test` builds beside the extension."""
    return ctypes.CDLL(str(LIBRARY))


def driver_addresses() -> ctypes.Array[ctypes.c_void_p]:
    from stagehand_alloc import _driver

    _driver.start()
    symbols = _driver.native().driver_symbols()
    version = _driver.driver_version()
    return (ctypes.c_void_p * len(symbols))(*[_driver._address(s, version) for s in symbols])


def test_the_real_driver_keeps_the_contract(suites: ctypes.CDLL) -> None:
    text = ctypes.create_string_buffer(TEXT_BYTES)
    broken = suites.stagehand_run_contract(driver_addresses(), text, ctypes.c_size_t(TEXT_BYTES))
    assert broken == 0, text.value.decode()


@pytest.mark.parametrize("seed", range(4))
def test_the_allocator_survives_a_stress_program(seed: int, suites: ctypes.CDLL) -> None:
    text = ctypes.create_string_buffer(TEXT_BYTES)
    failed = suites.stagehand_run_stress(
        driver_addresses(),
        0,
        ctypes.c_uint64(seed * 1_000_000),
        ctypes.c_double(SECONDS),
        text,
        ctypes.c_size_t(TEXT_BYTES),
    )
    assert failed == 0, text.value.decode()
