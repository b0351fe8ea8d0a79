"""A digest of tensors, taken where they are: gradients of GiB are compared without copying them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SEED = 5
CHUNK = 1 << 22  # words
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the size of a number


def digest(tensors: Iterable[Tensor]) -> str:
    """Of every bit and its place: words times random odd numbers, summed modulo 2**64.

    Integer sums do not depend on their order. Comparable between tensors of one kind of device.
    """
    total = weights = None
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1)
        words = words.view(WORDS[words.element_size()])
        if total is None or weights is None:
            device = words.device
            seeded = torch.Generator(device).manual_seed(SEED)  # the training's own stays as it is
            weights = torch.randint(1 << 62, (CHUNK,), device=device, generator=seeded) * 2 + 1
            total = torch.zeros((), dtype=torch.int64, device=device)
        for chunk in words.split(CHUNK):
            total = total * weights[0] + (chunk * weights[: chunk.numel()]).sum()
    return "" if total is None else f"{int(total.item()) % (1 << 64):016x}"
