"""The models the end-to-end tests train: small, seeded, one per kind of thing autograd saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagehand_alloc._cli.demo_gpt import GPT, Shape


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model whose forward takes a batch and returns the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


# --- GPT: attention, fused q, k, v, layer norm, embeddings, an integer batch


def _gpt(dropout: float) -> Recipe:
    shape = Shape(vocabulary=64, context=128, width=128, heads=4, layers=3, dropout=dropout)

    def batch() -> tuple[Tensor, ...]:
        tokens = torch.randint(shape.vocabulary, (8, shape.context + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Recipe("gpt_dropout" if dropout else "gpt", lambda: GPT(shape), batch)


# --- Convolutions with BatchNorm: buffers changed in forward, pooling indices, channels


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1, groups=4),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.1, inplace=True),
            nn.AvgPool2d(2),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(images).mean(dim=(2, 3))), labels)


def _conv() -> Recipe:
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(8, 3, 48, 48), torch.randint(10, (8,))

    return Recipe("conv_batchnorm", ConvNet, batch)


# --- LSTM: many small saved tensors, the same weights used at every position


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.lstm = nn.LSTM(64, 96, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(192, 50)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


def _lstm() -> Recipe:
    def batch() -> tuple[Tensor, ...]:
        tokens = torch.randint(50, (16, 24))
        return tokens, tokens.flip(1)

    return Recipe("lstm", Tagger, batch)


# --- Dropout: masks, and random numbers that must be drawn in the same order


class DropoutMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.3, self.training)
        return F.mse_loss(x, y)


def _dropout() -> Recipe:
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(512, 256), torch.randn(512, 256)

    return Recipe("dropout_mlp", DropoutMlp, batch)


RECIPES = (_gpt(0.0), _gpt(0.1), _conv(), _lstm(), _dropout())
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
