"""Saved tensors that their autograd node makes again: bit by bit what plain torch trains with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import RECIPES, Recipe
from torch import Tensor, nn
from training import (
    Around,
    digest,
    evicting_everything,
    footprint,
    gradients,
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
    measured = footprint(recipe)
    high = measured.start + int(share * (measured.peak - measured.start))
    with leaves_nothing():
        assert train(recipe, recomputing(high=high), steps=3) == expected


# --- What a recipe needs to be trusted


class Block(nn.Module):
    """Saves what an elementwise op makes, and what a linear makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 512)
        self.down = nn.Linear(512, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def steps(
    around: Around, count: int = 6, meddle: bool = False, width: int = 256
) -> list[tuple[str, dict[str, str | None], int]]:
    """Loss, gradients and what was dropped of each step.

    `meddle`: some kernel changes a weight in place between forward and backward, and no version
    tells of it. Steps of another `width` are of another plan.
    """
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(6)]
    model = nn.Sequential(*blocks)
    found = []
    for _ in range(count):
        before = stagehand_alloc.stats()
        model.zero_grad()
        with around:
            loss = model(torch.randn(4, 512, width)).square().mean()
        if meddle:
            for block in blocks:
                block.up.weight.data.mul_(1.25)
        loss.backward()
        found.append((digest(loss), gradients(model), counted(before).drops))
    return found


def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What proofs come to, as they do."""
    proofs: list[bool] = []
    tell = _native.proved

    def spy(device: int, what: tuple[int, int, int], same: bool) -> None:
        proofs.append(same)
        tell(device, what, same)

    monkeypatch.setattr(_native, "proved", spy)
    return proofs


def in_little(
    meddle: bool = False, width: int = 256
) -> list[tuple[str, dict[str, str | None], int]]:
    _native.empty_cache()
    return steps(recomputing(high="28MiB", low="24MiB"), meddle=meddle, width=width)


@contextlib.contextmanager
def other(setting: str) -> Iterator[None]:
    """The setting changed, one of kernels that are not used here: no bit changes."""
    settings = torch.backends.cuda.matmul
    before = getattr(settings, setting)
    setattr(settings, setting, not before)
    try:
        yield
    finally:
        setattr(settings, setting, before)


def test_what_is_not_elementwise_is_dropped_once_it_was_seen_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = steps(contextlib.nullcontext())
    proofs = told(monkeypatch)
    with leaves_nothing():
        actual = in_little()
    assert [step[:2] for step in actual] == [step[:2] for step in expected]
    assert proofs
    assert all(proofs)
    assert actual[-1][2] > actual[0][2]


def test_what_does_not_come_back_bit_by_bit_is_moved_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = steps(contextlib.nullcontext(), meddle=True, width=224)
    proofs = told(monkeypatch)
    with leaves_nothing(), pytest.warns(UserWarning, match="output of addmm") as warned:
        actual = in_little(meddle=True, width=224)
    assert [step[:2] for step in actual] == [step[:2] for step in expected]
    assert not all(proofs)
    assert len([one for one in warned if "bit by bit" in str(one.message)]) == 1


def test_a_proof_does_not_outlive_the_settings_it_rests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    in_little(width=240)
    proofs = told(monkeypatch)
    with other("allow_tf32"):
        in_little(width=240)
    assert proofs
