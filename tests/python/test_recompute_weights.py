"""What is made again of offloaded weights is plain torch's bit by bit, wherever these are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lora import DEVICE, MIB, TOKENS, WIDTH, Model, build, plain, tokens, trained, watched
from torch import Tensor, nn
from training import digest, evicting_everything, gradients, leaves_nothing

import stagehand_alloc
from stagehand_alloc import _native

pytestmark = pytest.mark.usefixtures("gpu", "leaves_no_weights")


class Products(nn.Module):
    """Saves a product with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.randn(TOKENS, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin() * self.scale


class Spans(Model):
    """Regions that span several blocks."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.together = together

    def run(self) -> Any:
        layers, together = list(self.layers), self.together

        def run(some: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
            for layer in some:
                x = layer(x)
            return x

        return [
            functools.partial(
                stagehand_alloc.checkpoint, functools.partial(run, layers[i : i + together])
            )
            for i in range(0, len(layers), together)
        ]


def products() -> Any:
    return Model(6, Products).requires_grad_(True)


def steps(model: Any, around: Any) -> list[Any]:
    """Loss and gradients of each step, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        with around:
            loss = model(tokens(step))
        loss.backward()
        found.append((digest(loss), gradients(model)))
        optimizer.step()
    optimizer.zero_grad()
    found.append({name: digest(tensor) for name, tensor in model.state_dict().items()})
    return found


def test_what_a_blocks_own_weights_made_is_made_again() -> None:
    expected = steps(build(products), contextlib.nullcontext())
    model = stagehand_alloc.offload(build(products), trained=True)
    before = stagehand_alloc.stats()
    with leaves_nothing(), evicting_everything():
        assert steps(model, stagehand_alloc.pool()) == expected
        _native.drop_weights(DEVICE)
    found = stagehand_alloc.stats().since(before)
    assert found.drops >= 2 * 6
    assert found.weights_loads > 6  # they left meanwhile
    assert _native.weights(DEVICE)["home"] == 0  # nobody holds any


@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize("high", [10, 6])
def test_regions_of_several_blocks_bring_the_weights_of_each(together: int, high: int) -> None:
    make = functools.partial(Spans, together)
    expected = plain(make)
    model = stagehand_alloc.offload(build(make))
    before = stagehand_alloc.stats()
    with watched() as seen, leaves_nothing():
        assert trained(model, stagehand_alloc.pool(high=high * MIB)) == expected
        _native.drop_weights(DEVICE)
    assert stagehand_alloc.stats().since(before).reruns > 0
    assert _native.weights(DEVICE)["home"] == 0  # nobody holds any
    assert seen.overshoot == 0
