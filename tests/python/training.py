"""What the end-to-end tests share: training with a trace, digests, and a check of what is left."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from models import Recipe
from proofs import read_proofs
from torch import Tensor, nn

import stagehand_alloc
from stagehand_alloc import _native, testing

Around = AbstractContextManager[Any]
DEVICE = 0
MIB = 1 << 20

torch.set_num_threads(1)  # the models are small: threads would wait for each other, not compute


def digest(tensor: Tensor) -> str:
    """Names a tensor's exact contents: dtype, shape, and sha256 of its bytes in logical order."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
    return f"{host.dtype} {tuple(host.shape)} {hashlib.sha256(raw).hexdigest()}"


def gradients(model: nn.Module) -> dict[str, str | None]:
    """Every parameter's gradient, by name."""
    return {
        name: None if parameter.grad is None else digest(parameter.grad)
        for name, parameter in model.named_parameters()
    }


@dataclasses.dataclass(frozen=True)
class Trace:
    """All that two equal runs must share, bit by bit: per step, then the state at the end."""

    losses: tuple[str, ...]
    gradients: tuple[dict[str, str | None], ...]
    state: dict[str, str]


def train(
    recipe: Recipe,
    around: Around | None = None,
    *,
    steps: int = 3,
    seed: int = 11,
    before_step: Callable[[], None] = lambda: None,
) -> Trace:
    """Train `recipe` with AdamW, the forward passes inside `around`, and trace every step."""
    torch.manual_seed(seed)
    model = recipe.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses, traced = [], []
    for _ in range(steps):
        batch = recipe.batch()
        optimizer.zero_grad(set_to_none=True)
        before_step()
        with around or contextlib.nullcontext():
            loss = model(*batch)
        loss.backward()
        losses.append(digest(loss))
        traced.append(gradients(model))
        optimizer.step()
    state = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    return Trace(tuple(losses), tuple(traced), state)


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """Assert that the block gives back all memory it took, with whole books and no hazard."""
    gc.collect()
    read_proofs()
    before = stagehand_alloc.stats()
    assert (before.records, before.handles) == (0, 0), "a test before this one left them"
    yield
    gc.collect()
    read_proofs()
    after = stagehand_alloc.stats()
    assert (after.records, after.handles, after.retained) == (0, 0, 0)
    assert after.live == before.live
    assert _native.check_invariants(DEVICE) == ""
    assert testing._running.found is not None
    assert testing._running.found.hazards() == []


@contextlib.contextmanager
def evicting_everything() -> Iterator[None]:
    """Evict and poison every retained block at every allocation, and assert that it happened."""
    before = stagehand_alloc.stats()
    _native.set_debug(evict_everything=True, poison=True)
    try:
        yield
    finally:
        _native.set_debug(evict_everything=False, poison=False)
    after = stagehand_alloc.stats().since(before)
    assert after.evicted_bytes + after.dropped_bytes > 0  # what nodes can make has no copy


def same_as_plain_torch(program: Callable[[Around], Any]) -> None:
    """Run `program` plainly, then in a pool with everything evicted; the results must be equal.

    `program` takes the context manager for its forward pass and returns digests.
    """
    expected = program(contextlib.nullcontext())
    with leaves_nothing(), evicting_everything():
        actual = program(stagehand_alloc.pool())
    assert actual == expected


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Occupied bytes of an unbudgeted run: at the start of its last step, and at its peak."""

    start: int
    peak: int

    def high(self, share: float) -> int:
        """A budget that leaves `share` of the activation memory."""
        return self.start + int(share * (self.peak - self.start))

    def pool(self, share: float) -> stagehand_alloc.Pool:
        """A pool of that budget."""
        high = self.high(share)
        return stagehand_alloc.pool(high=high, low=int(0.85 * high))


def footprint(recipe: Recipe) -> Footprint:
    """Measure `recipe` without a budget. Leaves nothing mapped that is not in use."""
    gc.collect()  # what a test before this one left in cycles is no part of it
    starts: list[int] = []

    def measure() -> None:
        starts.append(stagehand_alloc.stats().occupied)
        stagehand_alloc.reset_peak_stats()

    train(recipe, before_step=measure)
    peak = stagehand_alloc.stats().occupied_peak
    gc.collect()
    _native.empty_cache()
    stagehand_alloc.reset_peak_stats()
    return Footprint(starts[-1], peak)
