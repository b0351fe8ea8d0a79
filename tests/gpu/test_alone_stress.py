"""The allocator's stress test on the real driver.

Alone on the device: it takes most of its memory, and expects what is free to be had.
"""

from __future__ import annotations

import ctypes
import os

import native_suites
import pytest

pytestmark = pytest.mark.usefixtures("cuda")

SECONDS = float(os.environ.get("STAGEHAND_STRESS_SECONDS", "8"))  # of each seed


@pytest.mark.parametrize("seed", range(4))
def test_the_allocator_survives_a_stress_program(seed: int) -> None:
    text = ctypes.create_string_buffer(native_suites.TEXT_BYTES)
    failed = native_suites.load().stagehand_run_stress(
        native_suites.driver_addresses(),
        0,
        ctypes.c_uint64(seed * 1_000_000),
        ctypes.c_double(SECONDS),
        text,
        ctypes.c_size_t(native_suites.TEXT_BYTES),
    )
    assert failed == 0, text.value.decode()
