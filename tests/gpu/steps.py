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
SLEEP_CYCLES = 20_000_000  # about 10 ms: what is queued behind it comes late


LossOf = Callable[[Any, Tensor], Tensor]


def digest(tensor: Tensor) -> str:
    words = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)  # of any dtype
    return hashlib.sha256(words.numpy().tobytes()).hexdigest()


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

    The gradients are gone afterwards: every step starts with the same memory in use.
    """
    model.zero_grad(set_to_none=True)
    with around or contextlib.nullcontext():
        loss = loss_of(model, x)
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


def captured(
    x: Tensor, model: nn.Module, unsafe_calls: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the model's forward on ``x``, and where each replay puts the result.

    ``unsafe_calls``: whose end the capture, as torch.cuda.graph's capture_error_mode has it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=unsafe_calls):
        y = model(x)
    return graph, y


def warmed_up(x: Tensor, model: nn.Module) -> Tensor:
    """The model's result; what may not start inside a capture, such as cuBLAS, has started."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad():
        result: Tensor = model(x)
    return result


def assert_replays(graph: torch.cuda.CUDAGraph, x: Tensor, y: Tensor, model: nn.Module) -> None:
    """A replay on new input has the model's result, and writes into nobody's memory."""
    others = [torch.full((256, 256), float(n), device="cuda") for n in range(64)]
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, model(x))
    for n, other in enumerate(others):
        assert bool((other == n).all()), "a replay wrote into memory that was handed out"


class Captures:
    """Another thread, which captures graphs and replays them, one after the other, inside a `with`.

    Made before the budgets are: what it needs of its own (a cuBLAS handle has its workspace) is
    there then.
    """

    def __init__(self) -> None:
        self.count = 0
        self._model, self._x = mlp(256, 4), rows(256, 256)
        self._events = {name: threading.Event() for name in ("warm", "go", "first", "done")}
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        torch.cuda.synchronize()
        self._thread.start()
        self._wait("warm")

    def _wait(self, event: str) -> None:
        assert self._events[event].wait(timeout=120), "the thread that captures hangs"
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                self._capture()
                torch.cuda.synchronize()
                self._events["warm"].set()
                self._events["go"].wait(timeout=120)
                while not self._events["done"].is_set():
                    self._capture()
                    self.count += 1
                    self._events["first"].set()
        except BaseException as error:
            self._errors.append(error)
        finally:
            for event in self._events.values():
                event.set()

    def _capture(self) -> None:
        warmed_up(self._x, self._model)
        graph, y = captured(self._x, self._model, "thread_local")
        assert_replays(graph, self._x, y, self._model)

    def __enter__(self) -> Captures:
        self._events["go"].set()
        self._wait("first")
        return self

    def __exit__(self, *_: object) -> None:
        self._events["done"].set()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "the thread that captures hangs"
        if self._errors:
            raise self._errors[0]
