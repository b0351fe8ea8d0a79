"""Pool.limits: what is asked of the lanes reaches the device, now, at entry and while running."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import stagehand_alloc
from stagehand_alloc import Config, ConfigError, LaneLimits, SizeError, _native
from stagehand_alloc._step.device import process

DEVICE = 0
GB = 10**9
NONE = (0, 0, 0, 0, 0)


def in_force() -> tuple[int, ...]:
    """In flight and bytes per second, each to the host and back, and piece; 0 is no limit."""
    return _native.lane_limits(DEVICE)


def test_only_what_is_named_changes() -> None:
    pool = stagehand_alloc.pool()
    assert pool.limits() == LaneLimits()
    pool.limits(max_inflight_d2h=2, d2h_bytes_per_second="10GB")
    pool.limits(max_inflight_h2d=3, h2d_bytes_per_second="1GiB")
    assert pool.limits() == LaneLimits(2, 3, 10 * GB, 1 << 30)
    assert pool.limits(max_inflight_d2h=None) == LaneLimits(None, 3, 10 * GB, 1 << 30)
    assert pool.limits(h2d_bytes_per_second=None) == LaneLimits(None, 3, 10 * GB, None)
    assert pool.limits(piece="1MiB") == LaneLimits(None, 3, 10 * GB, None, 1 << 20)
    assert pool.limits(piece=None) == LaneLimits(None, 3, 10 * GB, None)


def test_settings_are_where_a_pool_starts() -> None:
    config = {"max_inflight_d2h": 1, "h2d_bytes_per_second": "5GB"}
    assert stagehand_alloc.pool(config=config).limits() == LaneLimits(1, None, None, 5 * GB)
    assert LaneLimits.of(Config()) == LaneLimits()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_inflight_d2h": 0}, ConfigError, "max_inflight_d2h=0"),
        ({"max_inflight_h2d": -2}, ConfigError, "max_inflight_h2d=-2"),
        ({"max_inflight_h2d": 1 << 32}, ConfigError, "max_inflight_h2d=4294967296"),
        ({"max_inflight_d2h": 1.5}, ConfigError, "max_inflight_d2h=1.5"),
        ({"max_inflight_d2h": True}, ConfigError, "max_inflight_d2h=True"),
        ({"d2h_bytes_per_second": 0}, SizeError, "d2h_bytes_per_second=0"),
        ({"h2d_bytes_per_second": -1}, SizeError, "h2d_bytes_per_second=-1"),
        ({"h2d_bytes_per_second": "fast"}, SizeError, "h2d_bytes_per_second='fast'"),
        ({"d2h_bytes_per_second": 0.5}, SizeError, "d2h_bytes_per_second=0.5"),
        ({"piece": "32KiB"}, SizeError, "piece='32KiB' is 32.00 KiB, under 64.00 KiB"),
        ({"piece": (64 << 10) - 1}, SizeError, "piece=65535"),
        ({"piece": 0}, SizeError, "piece=0"),
        ({"piece": "small"}, SizeError, "piece='small'"),
        ({"piece": 0.5}, SizeError, "piece=0.5"),
        ({"piece": True}, SizeError, "piece=True"),
    ],
)
def test_a_limit_that_cannot_be_is_named_and_changes_nothing(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    pool = stagehand_alloc.pool(config={"max_inflight_d2h": 7})
    with pytest.raises(error, match=words) as caught:
        pool.limits(**{"max_inflight_d2h": 5, **arguments})
    assert len(str(caught.value).splitlines()) == 2
    assert pool.limits() == LaneLimits(7)


def test_the_least_piece_is_what_a_copy_costs_whatever_its_size() -> None:
    assert stagehand_alloc.pool().limits(piece=64 << 10) == LaneLimits(piece=64 << 10)


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(TypeError, match="max_inflight"):
        stagehand_alloc.pool().limits(max_inflight=1)  # type: ignore[call-arg]


@pytest.mark.usefixtures("gpu")
def test_limits_hold_from_entry_on_and_change_while_running() -> None:
    pool = stagehand_alloc.pool(config={"max_inflight_d2h": 1})
    pool.limits(h2d_bytes_per_second=GB)
    with pool:
        assert in_force() == (1, 0, 0, GB, 0)
        pool.limits(max_inflight_h2d=4, max_inflight_d2h=None, piece="1MiB")
        assert in_force() == (0, 4, 0, GB, 1 << 20)
        thread = threading.Thread(target=lambda: pool.limits(h2d_bytes_per_second=None))
        thread.start()
        thread.join()
        assert in_force() == (0, 4, 0, 0, 1 << 20)
    pool.limits(max_inflight_h2d=6, piece=None)  # backward runs now
    assert in_force() == (0, 6, 0, 0, 0)
    with pool:
        assert in_force() == (0, 6, 0, 0, 0)


@pytest.mark.usefixtures("gpu")
def test_a_driver_that_refuses_a_rate_is_named_and_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = stagehand_alloc.pool()
    with pool:
        monkeypatch.setattr(_native, "set_lane_limits", lambda *limits: False)
        with pytest.raises(stagehand_alloc.DriverError, match="pinned memory that rates need"):
            pool.limits(d2h_bytes_per_second="1GB")
    assert pool._limits == LaneLimits()


@pytest.mark.usefixtures("gpu")
def test_the_limits_of_the_pool_entered_last_are_in_force() -> None:
    first, second = stagehand_alloc.pool(config={"max_inflight_d2h": 1}), stagehand_alloc.pool()
    with first:
        pass
    with second:
        assert in_force() == NONE
        first.limits(max_inflight_d2h=2)  # for its own steps
        assert in_force() == NONE
    with first:
        assert in_force() == (2, 0, 0, 0, 0)
    with second:
        pass


@pytest.mark.usefixtures("gpu")
def test_a_step_under_limits_has_the_right_gradient() -> None:
    pool = stagehand_alloc.pool(config={"debug_checksums": True, "max_inflight_d2h": 1})
    pool.limits(max_inflight_h2d=1, d2h_bytes_per_second="1GB", h2d_bytes_per_second="1GB")
    pool.limits(piece="64KiB")
    for _ in range(3):
        x = torch.linspace(0, 1, 1 << 18, requires_grad=True)
        with pool:
            _native.set_debug(evict_everything=True, poison=True, checksums=True)
            y = torch.sin(x).exp()
        y.sum().backward()
        _native.set_debug(evict_everything=False, poison=False)
        a = torch.linspace(0, 1, 1 << 18, requires_grad=True)
        torch.sin(a).exp().sum().backward()
        assert x.grad is not None
        assert a.grad is not None
        assert torch.equal(x.grad, a.grad)
    with stagehand_alloc.pool():
        pass


@pytest.mark.usefixtures("gpu")
def test_a_signal_handler_asks_for_limits_while_its_thread_has_the_lock() -> None:
    pool = stagehand_alloc.pool(config={"max_inflight_d2h": 3})
    with pool:
        pass
    asked: list[LaneLimits] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: asked.append(pool.limits()))
    try:
        device = process.device(DEVICE)
        for lock in (process.lock, device.lock):
            taken = lock.acquire()
            signal.raise_signal(signal.SIGUSR1)
            process.device(DEVICE)
            assert taken
            lock.release()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == [LaneLimits(3)] * 2


class Handler:
    """Runs `handle` at the nth bytecode of this thread that a signal could come at in `files`."""

    def __init__(self, files: set[str], nth: int, handle: Callable[[], object]) -> None:
        self.ran = False
        self._files, self._left, self._handle = files, nth, handle

    def __enter__(self) -> Handler:
        sys.settrace(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.ran = True
                self._handle()
        return self._look


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("asks", [False, True], ids=["an entry", "a call of limits"])
def test_limits_from_a_handler_are_in_force_at_once_wherever_it_comes(asks: bool) -> None:
    files = {inspect.getfile(stagehand_alloc.Pool), inspect.getfile(type(process))}
    pool, other = stagehand_alloc.pool(), stagehand_alloc.pool()
    with pool:
        pass
    nth, ran = 0, True
    while ran:
        nth += 1
        with other:  # whose limits are in force before
            pass
        pool.limits(max_inflight_d2h=1)
        if asks:
            with pool:
                pass
        ours = functools.partial(pool.limits, max_inflight_d2h=2 + nth)
        with Handler(files, nth, ours) as handler:
            if asks:
                pool.limits(max_inflight_h2d=7)
            else:
                pool.__enter__()
        ran, there = handler.ran, in_force()
        assert pool.limits().for_native() == there, nth
        if ran and not asks:
            assert pool.limits().max_inflight_d2h == 2 + nth
        if not asks:
            pool.__exit__(None, None, None)
    assert nth > 20


def test_a_forked_child_waits_for_no_thread_of_its_parents(run_fresh: Callable[..., Any]) -> None:
    run_fresh("""
        import contextlib, gc, os, signal, threading
        import stagehand_alloc
        from stagehand_alloc import _driver, testing
        from stagehand_alloc._guarded import Guarded
        from stagehand_alloc._step.device import process

        testing.simulated_gpu(memory="64MiB")
        pool = stagehand_alloc.pool()
        with pool:
            pass
        held, go = threading.Event(), threading.Event()
        guarded = [one for one in gc.get_objects() if isinstance(one, Guarded)]
        device = process.device(0)
        assert {process, device, device.steps, _driver._table} < set(guarded)

        def hold():
            with contextlib.ExitStack() as stack:
                for one in guarded:
                    stack.enter_context(one.lock)
                held.set()
                go.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits
            code = 0
            for use in (pool.limits, pool.__enter__, _driver.device_count):
                try:
                    use()
                    code = 2
                except stagehand_alloc.ForkedError:
                    pass
            process.device(0)
            _driver.start()
            for one in guarded:
                with one.lock:
                    pass
            pool.step_stats()
            os._exit(code)
        go.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    """)
