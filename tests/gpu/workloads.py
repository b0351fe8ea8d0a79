"""The models the GPU tests train: randomly initialised, nothing downloaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Workload:
    """`build` and `batch` are on the CPU or the GPU as their caller's default device says."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


# --- Hugging Face Llama, and LoRA adapters on it


@dataclasses.dataclass(frozen=True)
class LlamaSize:
    hidden: int = 1024
    layers: int = 18
    heads: int = 16
    key_value_heads: int = 8
    vocabulary: int = 8192
    sequence: int = 2048


def llama(size: LlamaSize, dtype: torch.dtype) -> nn.Module:
    """About 230 million parameters at the default size; SDPA, an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=size.sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config).to(dtype)
    return model


def lora(size: LlamaSize, dtype: torch.dtype) -> nn.Module:
    """The Llama with every weight frozen and low-rank adapters beside its linear layers."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=names)
    model: nn.Module = get_peft_model(llama(size, dtype), config)
    return model


def _language_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = batch
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _language(
    name: str,
    build: Callable[[LlamaSize, torch.dtype], nn.Module],
    dtype: torch.dtype,
    rows: int,
    size: LlamaSize = LlamaSize(),
) -> Workload:
    def batch() -> tuple[Tensor, ...]:
        return (torch.randint(size.vocabulary, (rows, size.sequence)),)

    return Workload(name, lambda: build(size, dtype), batch, _language_loss)


# --- timm ViT under autocast: the 16-bit copies of its weights are saved too


def _vit() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(
        "vit_base_patch16_224", pretrained=False, num_classes=100, drop_path_rate=0.1
    )
    return model


def _vit_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    with torch.autocast(images.device.type, torch.bfloat16):
        return F.cross_entropy(model(images), labels)


def _vit_batch() -> tuple[Tensor, ...]:
    return torch.randn(128, 3, 224, 224), torch.randint(100, (128,))


# --- A convolutional U-Net: skips that live from the first layer to the last


def _convolutions(inputs: int, outputs: int, count: int = 4) -> nn.Sequential:
    """Enough of them that no single operation's own memory is near 40 % of what is saved."""
    layers: list[nn.Module] = []
    for width in (inputs, *[outputs] * (count - 1)):
        layers += [
            nn.Conv2d(width, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth)]
        self.down = nn.ModuleList(
            _convolutions(inputs, outputs)
            for inputs, outputs in zip([3, *widths], widths, strict=False)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 2, stride=2) for w in widths[:-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[:-1])
        self.up = nn.ModuleList(_convolutions(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=False):
            skips.append(block(x))
            x = shrink(skips[-1])
        x = self.down[-1](x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([self.grow[level](x), skips.pop()], dim=1))
        image: Tensor = self.head(x)
        return image


def _unet_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    noisy, clean = batch
    return F.mse_loss(model(noisy), clean)


def _unet_batch() -> tuple[Tensor, ...]:
    return torch.randn(16, 3, 256, 256), torch.randn(16, 3, 256, 256)


WORKLOADS = (
    _language("llama_bf16", llama, torch.bfloat16, rows=4),
    # Without grouped queries: in 32 bits SDPA has no memory-efficient kernel for them.
    _language("llama_fp32", llama, torch.float32, rows=2, size=LlamaSize(key_value_heads=16)),
    _language("lora", lora, torch.bfloat16, rows=2),
    Workload("vit", _vit, _vit_batch, _vit_loss),
    Workload("unet", UNet, _unet_batch, _unet_loss),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}


def parameter_storages(model: nn.Module) -> set[int]:
    """Where the storages of all parameters and buffers start."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
