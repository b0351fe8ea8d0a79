"""The networks of workload_models.py that are written here: modules, without data or steps."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagehand_alloc._cli.demo_gpt import Block
from stagehand_alloc._cli.demo_gpt import Shape as GPTShape


class Lora(nn.Module):
    """A frozen linear layer, and beside it a low-rank one that trains."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)
        nn.init.normal_(self.b.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.b(self.a(x))
        return y


class VideoBlock(nn.Module):
    """Attention over all frames, then an MLP, each shifted, scaled and gated by the time step."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.merge = (Lora(width, width, rank) for _ in range(4))
        self.up, self.down = Lora(width, 4 * width, rank), Lora(4 * width, width, rank)
        self.modulation = nn.Parameter(torch.randn(6, width) / width**0.5, requires_grad=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (time + self.modulation).unbind()
        x = x + gate * self._attend(_normed(x) * (1 + scale) + shift)
        y = _normed(x) * (1 + scale_mlp) + shift_mlp
        y = self.down(F.gelu(self.up(y), approximate="tanh"))
        z: Tensor = x + gate_mlp * y
        return z

    def _attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        by_head = (batch, tokens, self.heads, width // self.heads)
        q, k, v = self.q(x).view(by_head), self.k(x).view(by_head), self.v(x).view(by_head)
        q, k = (F.rms_norm(part, by_head[-1:]) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return merged


class VideoTransformer(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, rank: int) -> None:
        super().__init__()
        self.time = nn.Parameter(torch.randn(6, width) / width**0.5, requires_grad=False)
        self.blocks = nn.ModuleList(VideoBlock(width, heads, rank) for _ in range(layers))
        self.head = nn.Linear(width, 64, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.time)
        patches: Tensor = self.head(_normed(x))
        return patches


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class Experts(nn.Module):
    """Each token's best two experts, found with nonzero and gathered by index, as many do."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                nn.GELU(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            rows, which = (chosen == at).nonzero(as_tuple=True)
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, which].unsqueeze(1))
        return result


class ExpertBlock(Block):
    """The GPT's block with experts in place of its MLP."""

    def __init__(self, shape: GPTShape, experts: int) -> None:
        super().__init__(shape)
        del self.up, self.down
        self.experts = Experts(shape.width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        mixed: Tensor = self.experts(self.mlp_norm(x).flatten(0, 1))
        return x + mixed.view_as(x)


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class Generator(nn.Module):
    """From noise of `side` x `side` to images of `side` * 2**(levels - 1)."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(16, widths[0])]
        for inputs, outputs in itertools.pairwise(widths):
            grow = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
            layers += [_convolution(inputs, inputs), grow, _convolution(outputs, outputs)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 3, 3, padding=1), nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        image: Tensor = self.layers(noise)
        return image


class Critic(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, widths[0])]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [_convolution(inputs, inputs), _convolution(inputs, outputs, stride=2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        verdict: Tensor = self.layers(image)
        return verdict


class UNet3d(nn.Module):
    """Skips that live from the first layer to the last, of sizes that differ eightfold."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth)]
        down = zip([1, *widths], widths, strict=False)
        self.down = nn.ModuleList(_volumes(inputs, outputs) for inputs, outputs in down)
        self.shrink = nn.ModuleList(nn.Conv3d(w, w, 2, stride=2) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.ConvTranspose3d(2 * w, w, 2, stride=2) for w in widths[:-1])
        self.up = nn.ModuleList(_volumes(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=False):
            skips.append(block(x))
            x = shrink(skips[-1])
        x = self.down[-1](x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([self.grow[level](x), skips.pop()], dim=1))
        volume: Tensor = self.head(x)
        return volume


def _volumes(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [
            nn.Conv3d(width, outputs, 3, padding=1, bias=False),
            nn.BatchNorm3d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class LstmLayer(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


class Compiled(nn.Module):
    """Runs the block through torch.compile; in the model's tree it is the block itself."""

    def __init__(self, block: nn.Module, backend: str) -> None:
        super().__init__()
        self.block = block
        self._run = (torch.compile(block, dynamic=False, backend=backend),)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._run[0](x)
        return y
