"""A digest of tensors, taken where they are: gradients of GiB are compared without copying them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from harness import CUBLAS
from torch import Tensor

SEED = 5
CHUNK = 1 << 22  # words
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the size of a number


def seen_by_cublas(device: torch.device) -> None:
    """Let torch look at ``CUBLAS``, and take it away: what comes is as quick as without it.

    torch 2.11 reads it again before each product of matrices, with a regular expression that it
    makes anew each time (getChosenWorkspaceSize): 30 % of the host's time in a video transformer's
    steps. For a process that has it in its environment, before its model. Of no other value: the
    workspace that torch has made by then is told to be as large as without it, which is not more
    than this one asks for; with ":16:8" it would be, and cuBLAS would write behind its end.
    """
    if not CUBLAS.keys() & os.environ.keys():
        return
    if device.type == "cuda":
        one = torch.ones(16, 16, device=device)
        torch.mm(one, one)
    for name in CUBLAS:
        os.environ.pop(name, None)


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
