"""Fixtures of the tests that need no GPU. Importing this loads neither torch nor a driver."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stagehand_alloc.testing import SimulatedGpu

ROOT = Path(__file__).parents[1]
DEVICE = 0
SEED = 1  # of each test's schedule: it does not depend on which tests ran before


@pytest.fixture(scope="module", autouse=True)
def _old_objects_stay() -> None:
    """A collection walks what a module's tests made, not what was there before: torch and what else
    was imported are half a million objects, and tests collect often."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)  # pytest keeps what the last failed test had there
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _simulated() -> SimulatedGpu:
    from stagehand_alloc import testing

    found = testing.simulated_gpu(memory="1GiB", seed=SEED)
    found.close()
    return found


@pytest.fixture
def gpu(_simulated: SimulatedGpu) -> Iterator[SimulatedGpu]:
    """torch's CPU tensors on the simulated GPU for one test, with no ordering mistake in it."""
    import torch
    from proofs import read_proofs

    import stagehand_alloc
    from stagehand_alloc import _native
    from stagehand_alloc._step.device import process

    _simulated.set_seed(SEED)
    _simulated.clear_hazards()
    torch.manual_seed(SEED)
    with _simulated:
        # What other tests left, and what was learned of them: budgets here are a few pieces of
        # memory, and which fate a tensor has, and so which hole a request finds, followed from it.
        gc.collect()
        read_proofs()
        _native.empty_cache()
        _native.forget_steps(DEVICE)
        process.device(DEVICE).quiet.forget()
        stagehand_alloc.reset_peak_stats()
        yield _simulated
        if _native.stats(DEVICE)["host_limit"]:  # else it is the next test's, until its first pool
            with stagehand_alloc.pool(high="1GiB"):
                pass
    for symbol in _native.driver_symbols():
        _simulated.fail(symbol, times=0)  # a planned fault that never came is no other test's
    _simulated.drain()
    assert _simulated.hazards() == []
    assert _native.check_invariants(DEVICE) == ""


@pytest.fixture
def leaves_no_weights(gpu: SimulatedGpu) -> Iterator[None]:
    """A test's offloaded weights are gone with it, and it sees no pool of another's."""
    from stagehand_alloc import _native
    from stagehand_alloc._weights.groups import registry

    registry.high.clear()
    yield
    gc.collect()
    assert _native.weights(DEVICE)["bytes"] == 0
    assert _native.check_invariants(DEVICE) == ""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models come from the CPU, and move."""
    import torch

    from stagehand_alloc._weights import offload

    monkeypatch.setattr(offload, "target_of", lambda index: torch.device("cpu", index))


@pytest.fixture
def run_fresh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in an interpreter of its own, and assert that it exits with 0."""

    def run(code: str, *, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path[1:]))}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
            env=environment,
            check=False,
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done

    return run
