"""The budgets as a fixture. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from budgets import Budget

    from stagehand_alloc.testing import SimulatedGpu


@pytest.fixture(params=[True, False], ids=["everything-leaves", "nothing-leaves"])
def budget(request: pytest.FixtureRequest, gpu: SimulatedGpu) -> Iterator[Budget]:
    """Both budgets in turn, on the simulated GPU, with whole books at the end."""
    import budgets
    import judge

    yield budgets.Budget(evicts=request.param)
    assert judge.books_are_whole() == []
