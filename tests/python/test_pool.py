"""What a pool is before its first entry, and of several that take turns."""

from __future__ import annotations

import pytest

import stagehand_alloc
from stagehand_alloc import SizeError, _driver
from stagehand_alloc._settings import config as _config
from stagehand_alloc._settings import host_memory as _host_memory
from stagehand_alloc._step.device import process

pytestmark = pytest.mark.usefixtures("gpu")


def test_a_pool_s_device_is_that_of_its_first_entry() -> None:
    pool = stagehand_alloc.pool(high="64MiB")  # before torch.cuda.set_device(rank)
    assert pool._device is None
    assert repr(pool) == "<Pool high=64.00 MiB low=None limit=None mode=None, not entered yet>"
    with pytest.raises(SizeError, match="the device has"):
        stagehand_alloc.pool(high="64GiB")  # checked all the same
    with pool:
        assert pool._device is process.device(0)
        text = "<Pool high=64.00 MiB low=56.89 MiB limit=1.00 GiB mode=allocator, device 0"
        assert repr(pool) == text + ", entered>"
    assert repr(pool) == text + ">"


def test_a_pool_for_each_step_asks_neither_the_machine_nor_the_driver_for_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stagehand_alloc.pool(high="64MiB"):
        pass

    def asked(*_: object) -> int:
        raise AssertionError("asked again")

    monkeypatch.setattr(_driver, "require_virtual_memory", asked)
    monkeypatch.setattr(_host_memory, "_machine_available", asked)
    with stagehand_alloc.pool(high="63MiB"):
        pass


def test_two_pools_that_take_turns_ask_the_machine_for_its_memory_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[None] = []

    def available() -> int:
        asked.append(None)
        return 1 << 30

    monkeypatch.setattr(_config, "default_host_limit", available)
    pools = [
        stagehand_alloc.pool(config={"slabs_per_class": 1}),
        stagehand_alloc.pool(config={"slabs_per_class": 2}),
    ]
    before = len(asked)
    for _ in range(3):
        for pool in pools:
            with pool:
                pass
    assert len(asked) - before <= 2
    with stagehand_alloc.pool():  # the default slabs again
        pass
