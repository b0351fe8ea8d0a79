"""What the tests of regions share: running a program with and without them, and counting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from training import Around, digest, gradients, leaves_nothing

import stagehand_alloc
from stagehand_alloc import _native

Apply: TypeAlias = Callable[..., Any]  # runs a function as a region, or just runs it
Program: TypeAlias = Callable[[Around, Apply], Any]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def when_needed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=stagehand_alloc.when_needed, **kwargs
    )


@contextlib.contextmanager
def dropping(reruns: int | None = None) -> Iterator[None]:
    """Drop or evict every retained block at every allocation, poison it, and count."""
    before = stagehand_alloc.stats()
    _native.set_debug(evict_everything=True, poison=True)
    try:
        yield
    finally:
        _native.set_debug(evict_everything=False, poison=False)
    found = stagehand_alloc.stats().since(before)
    assert found.drops > 0 if reruns != 0 else found.drops == 0
    assert found.reruns > 0 if reruns is None else found.reruns == reruns


def short_pool(nodes: bool = False) -> stagehand_alloc.Pool:
    """Of another budget than the pools with room: a plan holds for its own."""
    return stagehand_alloc.pool(high="300MiB", recompute="nodes" if nodes else False)


@contextlib.contextmanager
def nothing_dropped() -> Iterator[None]:
    before = stagehand_alloc.stats()
    yield
    found = stagehand_alloc.stats().since(before)
    assert (found.drops, found.reruns) == (0, 0)


def same_as_plain_torch(
    program: Program,
    reruns: int | None = None,
    region: Apply = when_needed,
    *,
    nodes: bool = False,
) -> None:
    """Run `program` without regions or a pool, then with both: with room, and with all dropped."""
    expected = program(contextlib.nullcontext(), plainly)
    with leaves_nothing(), nothing_dropped():
        assert (
            program(stagehand_alloc.pool(recompute="nodes" if nodes else False), region) == expected
        )
    with leaves_nothing(), dropping(reruns):
        assert program(short_pool(nodes), region) == expected


def trained(model: nn.Module, forward: Callable[[], Tensor], around: Around) -> list[Any]:
    """Two steps; the loss and all gradients of each, and what the model is left with."""
    found: list[Any] = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with around:
            loss = forward()
        backward(loss)
        found += [digest(loss), gradients(model)]
    model.zero_grad(set_to_none=True)
    return [*found, {name: digest(value) for name, value in model.state_dict().items()}]


class Block(nn.Module):
    """A few things to save, of enough bytes to be worth evicting."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        inner = F.gelu(self.up(x)).sin() * scale
        return x + F.dropout(self.down(inner), 0.1, self.training)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


def batch(*shape: int) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(*shape or (256, 128))


def backward(loss: Tensor, **settings: Any) -> None:
    loss.backward(**settings)  # type: ignore[no-untyped-call]


def gradient(leaf: Tensor) -> str:
    assert leaf.grad is not None
    return digest(leaf.grad)


def scaled_block(around: Around, region: Apply) -> Any:
    model = made(Block)
    x = batch()
    return trained(model, lambda: region(model, x, scale=0.5).square().mean(), around)


def the_next_step_is_right() -> None:
    same_as_plain_torch(scaled_block, reruns=2)
