"""Saved tensors that their autograd node makes again: bit by bit what plain torch trains with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from models import RECIPES, Recipe
from training import (
    evicting_everything,
    footprint,
    leaves_nothing,
    train,
)

import stagehand_alloc
from stagehand_alloc import PoolStats, _native, _recompute

pytestmark = pytest.mark.usefixtures("gpu")

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
SOME = 1 << 18  # floats: 1 MiB


def recomputing(**sizes: Any) -> stagehand_alloc.Pool:
    assert _recompute.load() == "loaded"
    return stagehand_alloc.pool(config={"recompute": True}, **sizes)


@contextlib.contextmanager
def dropping_everything() -> Iterator[None]:
    """Evict every retained block at every allocation, and poison what leaves."""
    _native.set_debug(evict_everything=True, poison=True)
    try:
        yield
    finally:
        _native.set_debug(evict_everything=False, poison=False)


def counted(before: PoolStats) -> PoolStats:
    return stagehand_alloc.stats().since(before)


# --- Whole models


@every_recipe
def test_training_equals_plain_torch_with_all_dropped_that_can_be(recipe: Recipe) -> None:
    expected = train(recipe)
    with leaves_nothing(), evicting_everything():
        assert train(recipe, recomputing()) == expected


@pytest.mark.parametrize("share", [0.75, 0.5])
@every_recipe
def test_training_equals_plain_torch_inside_a_budget(recipe: Recipe, share: float) -> None:
    expected = train(recipe)
    high = footprint(recipe).high(share)
    with leaves_nothing():
        assert train(recipe, recomputing(high=high), steps=3) == expected
