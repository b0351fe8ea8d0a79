"""A KeyboardInterrupt anywhere in entering or leaving a pool: the next entry works all the same."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from training import leaves_nothing

import stagehand_alloc
from stagehand_alloc._guarded import Guarded
from stagehand_alloc._step.device import process

pytestmark = pytest.mark.usefixtures("gpu")

PACKAGE = Path(stagehand_alloc.__file__).parent
# Where a pool is entered and left: looked at by the bytecode; the rest of the package by the line.
CLOSELY = {
    str(PACKAGE / "_step" / name)
    for name in ("pool.py", "entry.py", "device.py", "module_names.py")
}


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace function may raise between the body of a `with lock` and its exit, as no signal can.

    Nothing runs at the same time here, so the locks are not missed.
    """
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith(PACKAGE.name) else ():
            if isinstance(value, Guarded):
                monkeypatch.setattr(value, "lock", contextlib.nullcontext())
    for guarded in (process.device(0), process.device(0).steps):
        monkeypatch.setattr(guarded, "lock", contextlib.nullcontext())


class Interrupts:
    """Raises KeyboardInterrupt at the nth moment of this thread inside the package; 0: counts."""

    def __init__(self, nth: int, closely: bool) -> None:
        self.seen = 0
        self._nth = nth
        self._closely = closely

    def __enter__(self) -> Interrupts:
        sys.settrace(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(str(PACKAGE)):
            return None
        frame.f_trace_opcodes = self._closely and name in CLOSELY
        if event in ("call", "line", "opcode"):
            self.seen += 1
            if self.seen == self._nth:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._look


def hooks_left() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def module_hooks_left() -> int:
    return sum(
        len(hooks)
        for hooks in (
            torch_modules._global_forward_pre_hooks,
            torch_modules._global_forward_hooks,
            torch_modules._global_forward_hooks_always_called,
        )
    )


def make(keep: bool) -> stagehand_alloc.Pool:
    return stagehand_alloc.pool(
        high="64MiB", low="32MiB", keep=(lambda info: info.module == "1") if keep else None
    )


class Step:
    """A step of a small model, and the gradients it must have."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        self.x = torch.randn(2, 4)
        self.want = self.gradients(contextlib.nullcontext())

    def gradients(self, around: contextlib.AbstractContextManager[Any]) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        with around:
            loss = self.model(self.x).pow(2).sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def works(self, around: contextlib.AbstractContextManager[Any]) -> None:
        assert torch.equal(self.gradients(around), self.want)
        assert hooks_left() is None
        assert module_hooks_left() == 0


def interrupted_everywhere(step: Step, pool: stagehand_alloc.Pool, closely: bool) -> Iterator[int]:
    """After a forward that was interrupted at its nth moment, for every one it has."""
    nth = 0
    while True:
        nth += 1
        moments = Interrupts(nth, closely)
        with moments, contextlib.suppress(KeyboardInterrupt), pool:
            step.model(step.x)
        if moments.seen < nth:
            return
        yield nth


@pytest.mark.parametrize(
    ("keep", "closely"),
    [(False, False), (True, True)],
    ids=["every line", "keep, and every bytecode of the pool"],
)
def test_the_next_entry_works_wherever_the_last_was_interrupted(keep: bool, closely: bool) -> None:
    step = Step()
    pool = make(keep)
    step.works(pool)
    step.model.zero_grad(set_to_none=True)
    with leaves_nothing():
        for nth in interrupted_everywhere(step, pool, closely):
            first, second = (pool, make(keep)) if nth % 2 else (make(keep), pool)
            step.works(first)
            step.works(second)
        step.model.zero_grad(set_to_none=True)
    assert nth > 100


def test_modules_that_are_regions_are_as_before_wherever_the_last_entry_was_interrupted() -> None:
    step = Step()
    pool = stagehand_alloc.pool(recompute=list(step.model))
    step.works(pool)
    moments = 0
    for nth in interrupted_everywhere(step, pool, closely=False):
        moments = nth
        step.works(pool)
        assert all("forward" not in module.__dict__ for module in step.model)
    assert moments > 100


def test_a_pool_interrupted_on_another_thread_is_taken_over() -> None:
    step = Step()
    pool = make(keep=True)
    step.works(pool)

    def interrupted(nth: int) -> None:
        with contextlib.suppress(KeyboardInterrupt), Interrupts(nth, False), pool:
            step.model(step.x)

    for nth in range(1, 200, 7):
        worker = threading.Thread(target=interrupted, args=(nth,))
        worker.start()
        worker.join()
        step.works(pool)
        step.works(make(keep=False))


def test_a_users_hooks_around_an_interrupted_pool_stay() -> None:
    step = Step()
    pool = make(keep=False)
    step.works(pool)

    def same(tensor: Tensor) -> Tensor:
        return tensor

    nth = 0
    interrupted = True
    while interrupted:
        nth += 1
        interrupted = False
        with torch.autograd.graph.saved_tensors_hooks(same, same):
            with Interrupts(nth, False):
                try:
                    with pool:
                        pass
                except KeyboardInterrupt:
                    interrupted = True
            with pool:
                pass
            assert hooks_left()[0] is same
        assert hooks_left() is None


def test_an_exit_stack_that_is_interrupted_lets_the_next_pool_in() -> None:
    step = Step()
    pool = make(keep=False)
    nth = 0
    interrupted = True
    while interrupted:
        nth += 1
        interrupted = False
        with Interrupts(nth, False):
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(pool)
            except KeyboardInterrupt:
                interrupted = True
        step.works(pool)
        step.works(make(keep=False))


def _nested_with(outer: stagehand_alloc.Pool, inner: stagehand_alloc.Pool) -> None:
    with outer, inner:
        pass


def _nested_by_hand(outer: stagehand_alloc.Pool, inner: stagehand_alloc.Pool) -> None:
    outer.__enter__()
    try:
        inner.__enter__()
    finally:
        outer.__exit__(None, None, None)


def _nested_in_a_stack(outer: stagehand_alloc.Pool, inner: stagehand_alloc.Pool) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)


def _nested_in_a_generator(outer: stagehand_alloc.Pool, inner: stagehand_alloc.Pool) -> None:
    def inside() -> Any:
        with outer:
            yield

    generator = inside()
    next(generator)
    try:
        with inner:
            pass
    finally:
        generator.close()


@pytest.mark.parametrize(
    "nest", [_nested_with, _nested_by_hand, _nested_in_a_stack, _nested_in_a_generator]
)
@pytest.mark.parametrize("itself", [False, True], ids=["another", "itself"])
def test_a_pool_that_somebody_is_inside_is_never_taken_over(
    nest: Callable[[stagehand_alloc.Pool, stagehand_alloc.Pool], None], itself: bool
) -> None:
    step = Step()
    outer = make(keep=False)
    inner = outer if itself else make(keep=False)
    with pytest.raises(stagehand_alloc.NestedPoolError):
        nest(outer, inner)
    step.works(outer)
    step.works(inner)


def test_leaving_a_pool_that_is_not_entered_says_so() -> None:
    pool = make(keep=False)
    for _ in range(2):
        with pytest.raises(stagehand_alloc.PoolError, match="not entered"):
            pool.__exit__(None, None, None)
        with pool:
            pass
