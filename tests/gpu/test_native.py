"""The native suites on the real driver: the seam's contract, and the allocator's stress test."""

from __future__ import annotations

import os

import pytest

SECONDS = int(os.environ.get("STAGEHAND_STRESS_SECONDS", "60"))  # of each seed


def test_the_real_driver_keeps_the_contract(installed: None) -> None:
    """run_contract() returns one line per broken promise."""
    from stagehand_alloc import _native

    if not hasattr(_native, "run_contract"):
        pytest.skip("this build has no contract suite")
    assert not _native.run_contract()


@pytest.mark.parametrize("seed", range(4))
def test_the_allocator_survives_a_stress_program(seed: int, installed: None) -> None:
    """run_stress() returns the failing program as text; the seed replays it."""
    from stagehand_alloc import _native

    if not hasattr(_native, "run_stress"):
        pytest.skip("this build has no stress test")
    assert not _native.run_stress(seed, SECONDS)
