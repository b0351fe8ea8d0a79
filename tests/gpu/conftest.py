"""Fixtures of the GPU tests. Importing this starts no CUDA: the allocator must come first."""

from __future__ import annotations

import gc
import os
import pathlib
import time
from collections.abc import Iterator

import pytest
import torch

SHARED = "STAGEHAND_GPU_TESTS_SHARED"  # set by run.py


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skips where there is no GPU; starts no CUDA in this process."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that all tests of one run have in common; this test's own without run.py."""
    return pathlib.Path(os.environ.get(SHARED) or tmp_path)


@pytest.fixture(scope="session")
def installed(cuda: None) -> None:
    """The process allocator, installed in this process."""
    import stagehand_alloc

    torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())


@pytest.fixture
def books(installed: None) -> Iterator[None]:
    """After the test nothing is retained and the books are whole."""
    yield
    check_books()


@pytest.fixture
def torch_books(cuda: None) -> Iterator[None]:
    """The same with nothing installed: on torch's own caching allocator."""
    yield
    check_books()


def check_books() -> None:
    import stagehand_alloc
    from stagehand_alloc import _native
    from stagehand_alloc._step.device import process

    process.device(0).quiet.forget()
    gc.collect()
    torch.cuda.synchronize()
    after = stagehand_alloc.stats()
    # autograd's thread still holds the node it was at when backward raises here.
    for _ in range(100):
        if after.records == 0:
            break
        time.sleep(0.05)
        after = stagehand_alloc.stats()
    assert (after.records, after.handles, after.retained) == (0, 0, 0)
    assert _native.check_invariants(0) == ""
