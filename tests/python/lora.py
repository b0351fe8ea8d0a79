"""What the tests of offloaded weights share: small LoRA models, trained beside plain torch."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from training import digest, gradients

import stagehand_alloc
from stagehand_alloc import _native

DEVICE = 0
WIDTH, TOKENS = 128, 256
MIB = 1 << 20


class Block(nn.Module):
    """A frozen MLP of 0.5 MiB with a LoRA beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.lora_a = nn.Parameter(torch.randn(WIDTH, 4) * 0.05)
        self.lora_b = nn.Parameter(torch.randn(4, WIDTH) * 0.05)
        for frozen in (self.norm, self.up, self.down):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h))) + (h @ self.lora_a) @ self.lora_b


class Model(nn.Module):
    """An embedding, blocks, and a head tied to the embedding."""

    def __init__(self, blocks: int = 8, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.run():
            x = layer(x)
        # Small enough that no gradient is denormal: those take a CPU fifty times as long.
        return F.cross_entropy(self.head(x) / WIDTH, tokens)

    def run(self) -> list[Callable[[Tensor], Tensor]]:
        """The blocks in the order in which they run."""
        return list(self.layers)


class Twice(Model):
    """Each block runs twice: forward goes through them two times."""

    def run(self) -> Any:
        return [*self.layers, *self.layers]


class Dropped(Model):
    """Some layers are left out at random, others in each step."""

    def run(self) -> Any:
        return [layer for layer in self.layers if torch.rand(()) > 0.3 or layer is self.layers[0]]


class Checkpointed(Model):
    """Blocks under torch's checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def run(self) -> Any:
        again = functools.partial(
            torch.utils.checkpoint.checkpoint, use_reentrant=self.use_reentrant
        )
        first = self.layers[0]  # whose input asks for no gradient
        return [first, *(functools.partial(again, layer) for layer in list(self.layers)[1:])]


def build(make: Callable[[], nn.Module] = Model) -> Any:
    torch.manual_seed(5)
    return make()


def tokens(step: int) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randint(0, 64, (TOKENS,))


def trained(model: nn.Module, pool: Any = None, *, steps: int = 4) -> list[Any]:
    """Losses, gradients and trained weights of each step, as digests."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: list[Any] = []
    for step in range(steps):
        batch = tokens(step)
        with pool or contextlib.nullcontext():
            loss = model(batch)
        loss.backward()
        found.append((digest(loss), gradients(model)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found.append([digest(p) for p in model.parameters() if p.requires_grad])
    return found


@dataclass
class Seen:
    """What the engine counted during a `watched`."""

    before: tuple[int, int] = (0, 0)  # bytes live and mapped
    mapped_peak: int = 0
    overshoot: int = 0
    host_waits: int = 0
    weights: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Start with nothing mapped that is not in use; what is left at the end is as before."""
    gc.collect()
    _native.empty_cache()
    stagehand_alloc.reset_peak_stats()
    before, weights = stagehand_alloc.stats(), _native.weights(DEVICE)
    seen = Seen((before.live, before.mapped))
    yield seen
    after = stagehand_alloc.stats()
    seen.mapped_peak = after.mapped_peak
    seen.overshoot = after.overshoot_bytes - before.overshoot_bytes
    seen.host_waits = after.host_waits - before.host_waits
    now = _native.weights(DEVICE)
    seen.weights = {name: now[name] - weights[name] for name in now}
    assert _native.check_invariants(DEVICE) == ""


def plain(make: Callable[[], nn.Module] = Model, **settings: Any) -> list[Any]:
    """What `trained` finds of the model without us."""
    return trained(build(make), **settings)
