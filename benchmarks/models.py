"""The models the benchmarks train: randomly initialised, nothing downloaded."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]
from stagehand_alloc._cli.demo_gpt import GPT  # noqa: E402
from stagehand_alloc._cli.demo_gpt import Shape as GPTShape  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Training:
    """A model with its data on it. `blocks`: what a checkpoint may be put around.

    `keep_gradients`: they are zeroed between steps and not dropped, so that they are no part of
    what a step needs beyond its activations.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    blocks: list[nn.Module]
    keep_gradients: bool = False

    def zero_grad(self) -> None:
        """Before a step."""
        self.model.zero_grad(set_to_none=not self.keep_gradients)


def build(
    name: str, shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None = None
) -> Training:
    """The model `name` on `device`, in bf16 where that is a GPU. Random numbers as seeded."""
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        return _BUILDERS[name](dict(shape), dtype)


def _gpt(shape: dict[str, Any], dtype: torch.dtype) -> Training:
    batch = shape.pop("batch")
    sizes = GPTShape(**shape)
    model = GPT(sizes).to(dtype)
    tokens = torch.randint(sizes.vocabulary, (batch, sizes.context + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Training(model, lambda: model(inputs, targets), list(model.blocks))


def _llama(shape: dict[str, Any], dtype: torch.dtype) -> Training:
    import workloads

    batch = shape.pop("batch")
    size = workloads.LlamaSize(**shape)  # type: ignore[attr-defined]  # of tests/gpu
    model = workloads.llama(size, dtype)  # type: ignore[attr-defined]
    tokens = torch.randint(size.vocabulary, (batch, size.sequence))
    layers: Any = model.model.layers
    return Training(model, lambda: model(input_ids=tokens, labels=tokens).loss, list(layers))


def _vit(shape: dict[str, Any], dtype: torch.dtype) -> Training:
    """Weights in 32 bits under autocast, as ViTs are trained."""
    import timm

    model: Any = timm.create_model(shape["name"], pretrained=False, num_classes=100)
    images = torch.randn(shape["batch"], 3, 224, 224)
    labels = torch.randint(100, (shape["batch"],))

    def loss() -> Tensor:
        with torch.autocast(images.device.type, dtype):
            return F.cross_entropy(model(images), labels)

    return Training(model, loss, list(model.blocks))


class Adapted(nn.Module):
    """x + gelu(frozen(x) + B(A(x))). Saves x, gelu's input and the small A(x); A and B train."""

    def __init__(self, frozen: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self._frozen = (frozen,)  # shared by many: in a tuple, so that it is no child of each
        self.a = nn.Linear(width, rank, bias=False)
        self.b = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.b.weight, std=1e-3)  # near the usual zero: hundreds of blocks in a row

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self._frozen[0](x) + self.b(self.a(x)))


class Adapters(nn.Module):
    """Frozen linear layers with low-rank adapters beside them: many saved tensors, all alike.

    `depth` frozen layers without a nonlinearity, which save nothing, stand for the work between
    two saved tensors. The blocks share a few sets of them, together larger than the L2 cache.
    """

    def __init__(self, width: int, blocks: int, depth: int, sets: int, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))  # trained: the first block saves x too
        self.frozen = nn.ModuleList(
            nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
            for _ in range(sets)
        )
        for weight in self.frozen.parameters():
            nn.init.normal_(weight, std=0.1 / width**0.5)  # hundreds of blocks in a row stay finite
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(
            Adapted(self.frozen[at % sets], width, rank) for at in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _adapters(shape: dict[str, Any], dtype: torch.dtype) -> Training:
    rows = shape.pop("rows")
    model = Adapters(**shape, rank=16).to(dtype)
    x = torch.randn(rows, shape["width"], dtype=dtype)
    return Training(model, lambda: model(x), list(model.blocks), keep_gradients=True)


_BUILDERS: dict[str, Callable[[dict[str, Any], torch.dtype], Training]] = {
    "gpt": _gpt,
    "llama": _llama,
    "vit": _vit,
    "adapters": _adapters,
}


class Checkpointed:
    """A checkpoint around a share of the blocks while entered, spread evenly."""

    def __init__(
        self,
        blocks: list[nn.Module],
        share: float,
        context_fn: Callable[[], Any] | None = None,  # checkpoint's own argument
    ) -> None:
        count = len(blocks)
        self._context_fn = context_fn
        # Block i is chosen where the rounded share of the first i + 1 blocks rises.
        self._chosen = [
            block
            for at, block in enumerate(blocks)
            if int((at + 1) * share + 1e-9) > int(at * share + 1e-9) and count
        ]

    def __enter__(self) -> None:
        for block in self._chosen:
            block.forward = _checkpointed(block.forward, self._context_fn)

    def __exit__(self, *error: object) -> None:
        for block in self._chosen:
            del block.forward


def _checkpointed(
    forward: Callable[..., Any], context_fn: Callable[[], Any] | None
) -> Callable[..., Any]:
    more = {} if context_fn is None else {"context_fn": context_fn}

    def run(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **more, **named)  # type: ignore[arg-type]

    return run


def products_kept() -> tuple[Any, Any]:
    """A ``context_fn`` of torch's selective checkpointing: products and attention are not made
    again, all else is."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten: Any = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(kept)
    return contexts
