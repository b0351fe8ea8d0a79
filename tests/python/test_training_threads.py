"""Two threads train two models at once, each with the results it has alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Around, digest, evicting_everything, gradients, leaves_nothing

import stagehand_alloc

pytestmark = pytest.mark.usefixtures("gpu")

STEPS = 4
WIDTHS = (96, 160)


def build(width: int) -> tuple[nn.Module, list[Tensor]]:
    """Made before the threads start: they share one random number generator."""
    torch.manual_seed(width)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), [torch.randn(128, width) for _ in range(STEPS)]


def steps(model: nn.Module, batches: list[Tensor], around: Around) -> list[str]:
    found = []
    for x in batches:
        model.zero_grad(set_to_none=True)
        with around:
            loss = model(x).pow(2).mean()
        loss.backward()
        found += [digest(loss), str(gradients(model))]
    model.zero_grad(set_to_none=True)
    return found


def in_threads(*jobs: Callable[[], None]) -> None:
    """Run the jobs at once; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


class TakesTurns:
    """A pool that waits for the other thread's forward to end: a device has one pool at a time."""

    _turn = threading.Lock()

    def __init__(self) -> None:
        self._pool = stagehand_alloc.pool()

    def __enter__(self) -> None:
        self._turn.acquire()
        self._pool.__enter__()

    def __exit__(self, *failure: Any) -> None:
        try:
            self._pool.__exit__(*failure)
        finally:
            self._turn.release()


def test_two_threads_whose_forwards_take_turns_train_as_they_do_alone() -> None:
    """Each thread's backward runs while the other's forward evicts."""
    setups = [build(width) for width in WIDTHS]
    alone = [steps(model, batches, contextlib.nullcontext()) for model, batches in setups]
    together: dict[int, list[str]] = {}

    def job(at: int) -> Callable[[], None]:
        def run() -> None:
            together[at] = steps(*setups[at], TakesTurns())

        return run

    with leaves_nothing(), evicting_everything():
        in_threads(job(0), job(1))
    assert [together[0], together[1]] == alone


def test_a_thread_beside_the_pool_is_left_alone() -> None:
    """Hooks are the thread's own: the other thread's tensors are not tagged, its numbers right."""
    setups = [build(width) for width in WIDTHS]
    alone = [steps(model, batches, contextlib.nullcontext()) for model, batches in setups]
    together: dict[int, list[str]] = {}

    def with_pool() -> None:
        together[0] = steps(*setups[0], stagehand_alloc.pool())

    def without() -> None:
        together[1] = steps(*setups[1], contextlib.nullcontext())

    with leaves_nothing(), evicting_everything():
        in_threads(with_pool, without)
    assert [together[0], together[1]] == alone


def test_backward_in_another_thread_than_forward() -> None:
    model, (x, *_) = build(WIDTHS[0])
    expected = steps(model, [x], contextlib.nullcontext())
    found: list[str] = []
    with leaves_nothing(), evicting_everything():
        with stagehand_alloc.pool():
            loss = model(x).pow(2).mean()
        in_threads(loss.backward)
        found += [digest(loss), str(gradients(model))]
        model.zero_grad(set_to_none=True)
        del loss
    assert found == expected
