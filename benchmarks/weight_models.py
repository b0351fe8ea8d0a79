"""The models of weights.py, and a ring of two blocks to compare with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weight_cases import Case


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of rank 16 beside it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(into, out, bias=False)
        self.base.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(16, into) * 0.02)
        self.b = nn.Parameter(torch.randn(out, 16) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return y


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, self.heads = case.width, case.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for norm in (self.norm1, self.norm2):
            norm.requires_grad_(False)
        self.qkv, self.out = LoraLinear(width, 3 * width), LoraLinear(width, width)
        self.up, self.down = LoraLinear(width, case.hidden), LoraLinear(case.hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = (one.transpose(1, 2) for one in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, width))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class Gpt(nn.Module):
    """Blocks on random embeddings: what is measured is in the blocks."""

    def __init__(self, blocks: list[Block], checkpoint: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        again = self.checkpoint and torch.is_grad_enabled()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return x.float().square().mean()


def build(case: Case, device: torch.device, home: torch.device | None = None) -> Gpt:
    """The same numbers wherever the model is to be: each block is made on `device` and goes to
    `home` before the next one, so that no more than `home` has to hold all of them.
    """
    torch.manual_seed(0)
    blocks = []
    for _ in range(case.layers):
        with torch.device(device), dtype_of(torch.bfloat16):
            block = Block(case)
        if case.full:
            block.requires_grad_()
        blocks.append(block.to(home) if home is not None else block)
    return Gpt(blocks, case.checkpoint)


def block_bytes(model: Gpt, full: bool) -> list[int]:
    """Of each block, what is not trained, or all of it."""
    return [
        sum(p.nbytes for p in block.parameters() if full or not p.requires_grad)
        for block in model.layers
    ]


@contextlib.contextmanager
def dtype_of(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Ring:
    """Two blocks' frozen weights on the GPU at a time.

    Needs checkpointing: what autograd saves of a weight points into a buffer that the next block
    but one overwrites.
    """

    def __init__(self, blocks: list[nn.Module], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.cuda = device.type == "cuda"
        self.weights = [[p for p in b.parameters() if not p.requires_grad] for b in blocks]
        self.shapes = [[p.shape for p in weights] for weights in self.weights]
        self.masters = [self._flat(weights) for weights in self.weights]
        like = self.masters[0]
        self.buffers = [torch.empty_like(like, device=device) for _ in range(2)]
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.inside: list[int | None] = [None, None]
        self.ready: list[Any] = [None, None]
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(self._enter, i))

    def _flat(self, weights: list[nn.Parameter]) -> Tensor:
        flat = torch.cat([p.detach().reshape(-1).cpu() for p in weights])
        for p in weights:
            p.data = torch.empty(0, dtype=p.dtype, device=self.device)
        return flat.pin_memory() if self.cuda else flat

    def _load(self, i: int, slot: int) -> None:
        if self.stream is None:
            self.buffers[slot].copy_(self.masters[i])
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.buffers[slot].copy_(self.masters[i], non_blocking=True)
            self.ready[slot] = self.stream.record_event()
        self.inside[slot] = i

    def _enter(self, i: int, *_: Any) -> None:
        if i not in self.inside:
            self._load(i, 0 if self.inside[1] in (i - 1, i + 1) else 1)
        slot = self.inside.index(i)
        if self.ready[slot] is not None:
            torch.cuda.current_stream().wait_event(self.ready[slot])
        at = 0
        for p, shape in zip(self.weights[i], self.shapes[i], strict=True):
            count = shape.numel()
            p.data = self.buffers[slot][at : at + count].view(shape)
            at += count
        following = i - 1 if torch._C._current_graph_task_id() >= 0 else i + 1
        if 0 <= following < len(self.blocks) and following not in self.inside:
            self._load(following, 1 - slot)
