"""What the promises are judged at, a budget under which everything leaves and one without any, and
the parts that their programs share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import judge
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import stagehand_alloc


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much of what autograd saves may stay: all of it, or nothing."""

    evicts: bool

    def pool(self) -> stagehand_alloc.Pool:
        """A pool of this budget."""
        return judge.small_pool() if self.evicts else stagehand_alloc.pool(high=1.0, low=1.0)

    @contextlib.contextmanager
    def pressed(self, *, saves: bool = True) -> Iterator[None]:
        """Evict everything or nothing, and assert that it was so.

        `saves` is False where what is saved may be held by somebody, and so have to stay.
        """
        before = judge.evictions()
        with judge.evicting_everything() if self.evicts else contextlib.nullcontext():
            yield
        moved = judge.evictions() - before
        if not self.evicts:
            assert moved == 0
        elif saves:
            assert moved > 0

    def same_as_plain(
        self, program: Callable[[judge.Around], Any], *, saves: bool = True
    ) -> list[Any]:
        """Run `program` plainly and with its forward in a pool; every leaf it returns is equal.

        `program` takes the context manager of its forward pass. Returns the leaves.
        """
        judge.seed_everything()
        expected = _named(program(contextlib.nullcontext()))
        with self.pressed(saves=saves):
            judge.seed_everything()
            actual = _named(program(self.pool()))
        assert judge.differences(expected, actual) == []
        return [leaf for _, leaf in actual]


def _named(tree: Any) -> judge.Results:
    found = [(f"leaf {at}", leaf) for at, leaf in enumerate(tree_leaves(tree))]
    assert found, "a program that returns nothing promises nothing"
    return found


# --- Parts of programs


def leaf(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.randn(shape or (32, 8), dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def released() -> None:
    """An allocation: under the tight budget everything that only the graph holds leaves here."""
    torch.empty(1 << 12)


class SavesAll(torch.autograd.Function):
    """Saves an input, an output, an intermediate and nothing; gives a second derivative too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        middle = x.sin()
        result = middle.exp() * scale
        ctx.save_for_backward(x, None, result, middle)
        ctx.scale = scale
        return result, middle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_middle: Tensor) -> Any:
        x, nothing, result, _ = ctx.saved_tensors
        assert nothing is None
        return (grad * result + grad_middle) * x.cos(), None
