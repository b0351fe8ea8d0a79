"""How mode "mempool" tells torch whom the MemPool serves; the native side is a list of calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stagehand_alloc._built.trigger import NOT_NEEDED, Trigger
from stagehand_alloc._errors import DriverError
from stagehand_alloc._tell import warn_once
from stagehand_alloc._torch_side import modes as _modes


class Native:
    """The functions of the native side that matter here."""

    def __init__(self, routes: bool, opens: bool = True, keeps: bool = True) -> None:
        self.calls: list[Any] = []
        self._routes = routes
        self._opens = opens
        self._keeps = keeps

    def can_route(self) -> bool:
        return self._routes

    def set_torch_pool(self, device: int, first: int, second: int) -> bool:
        self.calls.append((device, first, second))
        return self._opens or not second

    def keep_mem_pool(self, device: int, first: int, second: int) -> bool:
        self.calls.append(("keep", device, first, second))
        return self._keeps

    def let_mem_pool_go(self, device: int, first: int, second: int) -> None:
        self.calls.append(("let go", device, first, second))


class MemPool:
    id = (0, 7)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch was told by use_mem_pool; warned of nothing so far."""
    told: list[str] = []

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: int) -> Iterator[None]:
        told.append(f"in {pool.id} on {device}")
        try:
            yield
        finally:
            told.append("out")

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(warn_once, "said", set())
    return told


def inside(native: Native, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_modes, "native", native)
    allocating = _modes.allocating_from(MemPool(), 3)
    next(allocating)
    return allocating


def test_where_the_trigger_library_routes_torchs_own_context_is_not_used(
    entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Native(routes=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside(native, monkeypatch).close()
    assert native.calls == [(3, 0, 7), (3, 0, 0)]
    assert entered == []


@pytest.mark.parametrize("loaded", [True, False])
def test_where_torch_cannot_be_told_the_mem_pool_is_this_threads_and_one_warning_says_so(
    loaded: bool, entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Trigger(None, "loaded", "") if loaded else NOT_NEEDED
    monkeypatch.setattr(_modes._reached, "trigger", found)
    native = Native(routes=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            inside(native, monkeypatch).close()
    assert native.calls == [(3, 0, 7), (3, 0, 0)] * 2
    assert entered == ["in (0, 7) on 3", "out"] * 2
    texts = [str(one.message) for one in warned]
    assert len(texts) == (1 if loaded else 0)  # without the library another warning was given
    assert all("MemPool serve backward" in text for text in texts)


def test_a_mem_pool_that_the_driver_will_not_open_elsewhere_is_left_again(
    entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Native(routes=True, opens=False)
    with pytest.raises(DriverError, match="MemPool's memory on device 3"):
        inside(native, monkeypatch)
    assert native.calls == [(3, 0, 7)]


class Mortal(MemPool):
    """Says when it goes."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __del__(self) -> None:
        self._calls.append("gone")


KEPT_MEANWHILE = [("keep", 3, 0, 7), "gone", ("let go", 3, 0, 7)]


def test_a_mem_pool_of_ours_goes_while_it_is_kept_as_its_end_alone_may_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = Native(routes=True)
    monkeypatch.setattr(_modes, "native", native)
    _modes.give_up([Mortal(native.calls)], 3)
    assert native.calls == KEPT_MEANWHILE


def test_where_torch_cannot_be_told_a_mem_pool_just_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Native(routes=False, keeps=False)
    monkeypatch.setattr(_modes, "native", native)
    _modes.give_up([Mortal(native.calls)], 3)
    assert native.calls == KEPT_MEANWHILE[:2]


def test_a_pool_that_goes_gives_its_mem_pool_up(monkeypatch: pytest.MonkeyPatch) -> None:
    native = Native(routes=True)
    monkeypatch.setattr(_modes, "native", native)
    monkeypatch.setattr(_modes, "make_mem_pool", lambda device: Mortal(native.calls))

    class Owner:
        def __init__(self) -> None:
            self.held: list[Any] = []

    owner = Owner()
    for _ in range(2):
        _modes.fill(owner.held, owner, 3)
    assert len(owner.held) == 1
    del owner
    assert native.calls == KEPT_MEANWHILE
