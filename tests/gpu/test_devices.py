"""Two GPUs in one process: each has its own books, budget and pinned memory's copies.

Skipped where there is one. Every step is compared with one without a pool, bit by bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from steps import MIB, TIGHT_ROOM, in_threads, mean_square, mlp, one_step, rows
from torch import Tensor, nn

STEPS = 5
BEHIND = 200_000_000  # cycles: a tenth of a second
MODES = ("allocator", "native", "mempool")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, cuda: None) -> Iterator[str]:
    """A mode on two devices; after the test nothing is retained and the books of both are whole."""
    import stagehand_alloc
    from stagehand_alloc import _native

    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    if request.param == "allocator":
        request.getfixturevalue("installed")
    yield request.param
    gc.collect()
    for device in range(2):
        torch.cuda.synchronize(device)
        after = stagehand_alloc.stats(device)
        assert (after.records, after.handles, after.retained) == (0, 0, 0)
        assert _native.check_invariants(device) == ""


def pool_on(device: int, mode: str, room: int = TIGHT_ROOM) -> Any:
    """A pool on ``device``, which may take ``room`` bytes over what is reserved there now."""
    import stagehand_alloc

    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    high = torch.cuda.memory_reserved(device) + room
    return stagehand_alloc.pool(high=high, low=high - room // 10, mode=mode, device=device)


def training_on(device: int) -> tuple[nn.Sequential, Tensor, list[str]]:
    """A model and its input on ``device``, and what a step of it finds."""
    with torch.cuda.device(device):
        model, x = mlp(), rows()
        return model, x, one_step(model, x)


def test_threads_train_on_two_devices_at_once_each_in_its_own_budget(mode: str) -> None:
    trainings = [training_on(device) for device in range(2)]
    pools = [pool_on(device, mode) for device in range(2)]

    def trainer(device: int) -> Callable[[], None]:
        model, x, expected = trainings[device]

        def train() -> None:
            torch.cuda.set_device(device)
            for _ in range(STEPS):
                assert one_step(model, x, pools[device]) == expected
            assert pools[device].stats().evicted_bytes > 0

        return train

    in_threads(trainer(0), trainer(1))


def test_a_pool_on_a_device_that_is_not_the_current_one(mode: str) -> None:
    import stagehand_alloc

    model, x, expected = training_on(1)
    pool = pool_on(1, mode)
    before = stagehand_alloc.stats(0)
    assert torch.cuda.current_device() == 0
    for _ in range(STEPS):
        assert one_step(model, x, pool) == expected
    assert torch.cuda.current_device() == 0
    assert pool.stats().evicted_bytes > 0
    assert stagehand_alloc.stats(0).evicted_bytes == before.evicted_bytes
    if mode == "mempool":  # its segments are ours on that device too: we keep them for the next one
        del pool
        gc.collect()
        torch.cuda.synchronize(1)
        torch.cuda.empty_cache()
        assert stagehand_alloc.stats(1).mapped > torch.cuda.memory_reserved(1)


def test_of_a_model_on_two_devices_a_pool_moves_what_is_on_its_own(mode: str) -> None:
    with torch.cuda.device(0):
        whole, x = mlp(), rows()
    second = whole[3:].to("cuda:1")

    def across(model: nn.Sequential, x: Tensor) -> Tensor:
        return mean_square(second, model[:3](x).to("cuda:1")).to("cuda:0")

    expected = one_step(whole, x, loss_of=across)
    pool = pool_on(0, mode, 60 * MIB)
    for _ in range(STEPS):
        assert one_step(whole, x, pool, across) == expected
    assert pool.stats().evicted_bytes > 0
    assert pool.stats().passed_through["foreign_storage"] > 0


def test_memory_that_a_queued_copy_between_devices_names_does_not_go_back(mode: str) -> None:
    """The first device is far behind the host: its copy to the second is queued still when what it
    writes is free, and memory goes above high."""
    with torch.cuda.device(0):
        whole, x = mlp(), rows()
    second = whole[3:].to("cuda:1")

    def across(model: nn.Sequential, x: Tensor) -> Tensor:
        hidden = model[:3](x)
        torch.cuda._sleep(BEHIND)
        return mean_square(second, hidden.to("cuda:1")).to("cuda:0")

    expected = one_step(whole, x, loss_of=across)
    pool = pool_on(0, mode, 60 * MIB)
    for _ in range(STEPS):
        assert one_step(whole, x, pool, across) == expected
    assert pool.stats().evicted_bytes > 0
