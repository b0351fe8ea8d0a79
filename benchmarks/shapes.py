"""The sizes of the benchmarks' models, without torch: on a GPU, and tiny for the simulated one."""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

GPT_8K: Shape = {
    "vocabulary": 32768,
    "context": 8192,
    "width": 4096,
    "heads": 32,
    "layers": 12,
    "batch": 1,
}
GPT_32K: Shape = {**GPT_8K, "context": 32768, "layers": 6}
TINY_GPT: Shape = {
    "vocabulary": 512,
    "context": 128,
    "width": 128,
    "heads": 4,
    "layers": 4,
    "batch": 4,
}

# 32 rows of 14336 numbers in bf16 are 917504 bytes. Two are saved per block, and the model's input
# and output: 636 (and the small products of the adapters' first halves beside them). The layers are
# large enough to keep the GPU busy: with half the width the host set the pace of plain torch too.
ADAPTERS: Shape = {"rows": 32, "width": 14336, "blocks": 317, "depth": 2, "sets": 2}
ADAPTERS_SAVED_BYTES = 32 * 14336 * 2
ADAPTERS_EVICTED = 422 / 636  # the share of the saved storages that must leave
TINY_ADAPTERS: Shape = {"rows": 64, "width": 256, "blocks": 12, "depth": 1, "sets": 2}

LLAMA: Shape = {
    "hidden": 2048,
    "layers": 16,
    "heads": 16,
    "key_value_heads": 8,
    "vocabulary": 32768,
    "sequence": 4096,
    "batch": 2,
}
TINY_LLAMA: Shape = {
    "hidden": 128,
    "layers": 4,
    "heads": 4,
    "key_value_heads": 2,
    "vocabulary": 512,
    "sequence": 256,
    "batch": 4,
}
VIT: Shape = {"name": "vit_base_patch16_224", "batch": 256}

# By name: the builder in models.py, and the sizes.
MODELS: dict[str, tuple[str, Shape]] = {
    "gpt": ("gpt", GPT_8K),
    "gpt_32k": ("gpt", GPT_32K),
    "llama": ("llama", LLAMA),
    "vit": ("vit", VIT),
    "adapters": ("adapters", ADAPTERS),
}
