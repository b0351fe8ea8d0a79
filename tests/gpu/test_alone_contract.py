"""The seam's contract on the real driver."""

from __future__ import annotations

import ctypes

import native_suites
import pytest

pytestmark = pytest.mark.usefixtures("cuda")


def test_the_real_driver_keeps_the_contract() -> None:
    text = ctypes.create_string_buffer(native_suites.TEXT_BYTES)
    broken = native_suites.load().stagehand_run_contract(
        native_suites.driver_addresses(), text, ctypes.c_size_t(native_suites.TEXT_BYTES)
    )
    assert broken == 0, text.value.decode()
