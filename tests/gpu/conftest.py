"""Fixtures of the GPU tests. Importing this starts no CUDA: the allocator must come first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skips where there is no GPU; starts no CUDA in this process."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def installed(cuda: None) -> None:
    """The process allocator, installed in this process."""
    import stagehand_alloc

    torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())


@pytest.fixture
def books(installed: None) -> Iterator[None]:
    """After the test nothing is retained and the books are whole."""
    import gc

    import stagehand_alloc
    from stagehand_alloc import _native

    yield
    gc.collect()
    torch.cuda.synchronize()
    after = stagehand_alloc.stats()
    assert (after.records, after.handles, after.retained) == (0, 0, 0)
    assert _native.check_invariants(0) == ""
