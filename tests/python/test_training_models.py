"""Whole models on CPU torch over the simulated GPU: the results of plain torch, bit by bit."""

from __future__ import annotations

import pytest
import torch
from models import BY_NAME, RECIPES, Recipe
from training import Trace, evicting_everything, footprint, leaves_nothing, train

import stagehand_alloc

pytestmark = pytest.mark.usefixtures("gpu")

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
_plain: dict[str, Trace] = {}


def plain(recipe: Recipe) -> Trace:
    """The trace without a pool, computed once per model."""
    if recipe.name not in _plain:
        _plain[recipe.name] = train(recipe)
    return _plain[recipe.name]


# --- Equality


@every_recipe
def test_plain_training_repeats_bit_by_bit(recipe: Recipe) -> None:
    """Without this the comparisons below would prove nothing."""
    assert train(recipe) == plain(recipe)


@every_recipe
def test_every_loss_and_gradient_equals_plain_torch_with_everything_evicted(recipe: Recipe) -> None:
    expected = plain(recipe)
    with leaves_nothing(), evicting_everything():
        actual = train(recipe, stagehand_alloc.pool())
    assert actual.losses == expected.losses
    assert actual.gradients == expected.gradients
    assert actual.state == expected.state


@pytest.mark.parametrize("share", [0.75, 0.5])
@every_recipe
def test_every_loss_and_gradient_equals_plain_torch_inside_a_budget(
    recipe: Recipe, share: float
) -> None:
    expected = plain(recipe)
    pool = footprint(recipe).pool(share)
    with leaves_nothing():
        assert train(recipe, pool) == expected


# --- The budget


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_mapped_memory_never_goes_over_high_in_forward_and_backward(share: float) -> None:
    """Backward runs after the `with` has ended: the watermarks hold as long as a record lives."""
    recipe = BY_NAME["gpt"]
    pool = footprint(recipe).pool(share)
    torch.manual_seed(3)
    model = recipe.build()
    before = stagehand_alloc.stats()
    for _ in range(3):
        model.zero_grad()
        with pool:
            high = stagehand_alloc.stats().high
            loss = model(*recipe.batch())
        loss.backward()
    after = stagehand_alloc.stats()
    assert after.mapped_peak <= high
    assert after.overshoot_bytes == before.overshoot_bytes
    assert after.evicted_bytes > before.evicted_bytes
    assert after.restored_bytes > before.restored_bytes


def test_nothing_is_evicted_where_the_model_fits() -> None:
    # The first step of a budget may follow what steps of a smaller one taught.
    train(BY_NAME["gpt"], stagehand_alloc.pool("700MiB"))
    before = stagehand_alloc.stats()
    train(BY_NAME["gpt"], stagehand_alloc.pool("700MiB"))
    after = stagehand_alloc.stats()
    assert after.evicted_bytes == before.evicted_bytes
    assert after.host_waits == before.host_waits


# --- Weights


@every_recipe
def test_weights_are_never_evicted(recipe: Recipe) -> None:
    """Weights stay where they are: their addresses and bytes last through the whole step."""
    torch.manual_seed(5)
    model = recipe.build()
    batch = recipe.batch()
    with evicting_everything():
        with stagehand_alloc.pool():
            loss = model(*batch)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        loss.backward()
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == weights


def test_frozen_weights_leave_no_record() -> None:
    """A frozen layer saves only its weight, transposed: a view of a leaf, never tagged."""
    frozen = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    x = torch.randn(8, 64, requires_grad=True)
    with stagehand_alloc.pool():
        y = frozen(frozen(x))
        assert stagehand_alloc.stats().records == 0
    y.sum().backward()
    assert x.grad is not None


def test_buffers_leave_no_record() -> None:
    """BatchNorm in eval mode saves its running statistics beside its input."""
    norm = torch.nn.BatchNorm1d(64).eval().requires_grad_(False)
    x = torch.randn(32, 64, requires_grad=True)
    with stagehand_alloc.pool():
        y = norm(x)
        assert stagehand_alloc.stats().records == 0
    y.sum().backward()
