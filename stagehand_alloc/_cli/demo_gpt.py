"""A small GPT: trained by the demo and the tests, and, larger, by the benchmark.

Nothing in it knows of stagehand_alloc.
"""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a GPT. `context` is the longest sequence, in tokens."""

    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int
    dropout: float = 0.0


class Block(nn.Module):
    """Pre-norm attention and MLP. The projection of q, k and v is fused, as in most GPTs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self._attend(self.attention_norm(x)))
        return x + self._drop(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        by_head = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(by_head).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return merged

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Token and position embeddings, blocks, an untied head. forward() returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `targets`; both are integers of shape [batch, tokens]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameter_count(model: nn.Module) -> int:
    """The number of trained numbers in `model`."""
    return sum(p.numel() for p in model.parameters())
