"""The ceiling as the driver sees it. Runs alone: cuMemGetInfo counts every process on the GPU."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from stagehand_alloc._cli.demo_gpt import GPT, Shape

MIB = 1 << 20
# What the driver itself may take meanwhile: page tables of pinned memory, lazily loaded kernels.
DRIVER_SLACK = 32 * MIB
SHAPE = Shape(vocabulary=4096, context=2048, width=1024, heads=8, layers=12)


class UsedMemory:
    """Samples the device's used bytes from a thread, as fast as the driver answers."""

    def __init__(self) -> None:
        self.peak = 0
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> UsedMemory:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, used_bytes())
            self.samples += 1
            time.sleep(0.0002)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def train(around: object, steps: int) -> int:
    """Returns the occupied bytes at the start of the last step."""
    import stagehand_alloc

    torch.manual_seed(1)
    with torch.device("cuda"):
        model = GPT(SHAPE).to(torch.bfloat16)
        tokens = torch.randint(SHAPE.vocabulary, (4, SHAPE.context))
    start = 0
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        start = stagehand_alloc.stats().occupied
        with around:  # type: ignore[attr-defined]
            loss = model(tokens, tokens)
        loss.backward()
    torch.cuda.synchronize()
    return start


def settle() -> None:
    """Give everything back that can be, so that what is used is what must be."""
    import stagehand_alloc

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stagehand_alloc.reset_peak_stats()


@pytest.mark.parametrize("share", [0.75, 0.40], ids=lambda share: f"{share:.0%}")
def test_used_device_memory_never_exceeds_high(share: float, books: None) -> None:
    import stagehand_alloc

    start = train(stagehand_alloc.pool(), steps=2)
    activation_bytes = stagehand_alloc.stats().occupied_peak - start
    settle()
    high = start + int(share * activation_bytes)
    pool = stagehand_alloc.pool(high=high, low=high - activation_bytes // 10)
    train(pool, steps=2)  # pins host memory and loads what is still to be loaded
    settle()
    overhead = used_bytes() - stagehand_alloc.stats().mapped
    before = stagehand_alloc.stats()
    with UsedMemory() as used:
        train(pool, steps=6)
    after = stagehand_alloc.stats()

    assert used.samples > 100
    assert after.evicted_bytes > before.evicted_bytes
    assert after.mapped_peak <= high
    assert after.overshoot_bytes == before.overshoot_bytes
    assert used.peak - overhead <= high + DRIVER_SLACK
    # The samples saw the peak at all: it is not a reading of an idle device.
    assert used.peak - overhead >= 0.9 * after.mapped_peak


def test_mapped_is_what_the_driver_sees(books: None) -> None:
    import stagehand_alloc

    torch.empty(1, device="cuda")
    settle()
    before_used, before_mapped = used_bytes(), stagehand_alloc.stats().mapped
    held = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 40, 700, 3)]
    grown = stagehand_alloc.stats().mapped - before_mapped
    assert grown >= 744 * MIB
    assert abs((used_bytes() - before_used) - grown) <= 4 * MIB
    del held
    settle()
    assert stagehand_alloc.stats().mapped == before_mapped
    assert abs(used_bytes() - before_used) <= 4 * MIB
