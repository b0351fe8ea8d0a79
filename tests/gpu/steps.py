"""What the small GPU tests train, and how two runs of it are compared."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MIB = 1 << 20
ROOM = 100 * MIB  # half of what a step of `mlp` on `rows` saves
TIGHT_ROOM = 150 * MIB  # for steps beside which others use memory
ON_TORCH = ("native", "mempool")  # the modes on torch's own caching allocator


LossOf = Callable[[Any, Tensor], Tensor]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def mlp(width: int = 512, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    ).cuda()


def rows(count: int = 8192, width: int = 512) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, width, device="cuda")


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def one_step(
    model: nn.Module,
    x: Tensor,
    around: Any = None,
    loss_of: LossOf = mean_square,
) -> list[str]:
    """The digests of the loss and of every gradient. ``around`` is a pool, or nothing.

    With a MemPool backward runs inside too, on this thread. The gradients are gone afterwards:
    every step starts with the same memory in use.
    """
    model.zero_grad(set_to_none=True)
    with around or contextlib.nullcontext():
        loss = loss_of(model, x)
        inside = getattr(around, "mem_pool", None) is not None
        if inside:  # a MemPool is for the thread that is inside
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
    if not inside:
        loss.backward()
    found = [digest(loss)] + [digest(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def budget_on_torch(mode: str, room: int = ROOM, **settings: Any) -> Any:
    """A pool on torch's allocator, which may reserve ``room`` bytes over what it has now."""
    import stagehand_alloc

    high = settled() + room
    return stagehand_alloc.pool(high=high, low=high - room // 10, mode=mode, **settings)


def settled() -> int:
    """The bytes that torch has reserved once it has given back all it can."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def in_threads(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    # A thread that hangs must not keep the process from ending.
    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
