"""torchrun on two GPUs: DDP and FSDP2, each rank inside a budget of its own, bit by bit.

Skipped where there is one. `tests/python/test_ranks.py` runs the same ranks on simulated GPUs.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

RANKS = pathlib.Path(__file__).with_name("ranks.py")
WORLD = 2


def run(
    folder: pathlib.Path, *arguments: str, timeout: float = 240, world: int = WORLD
) -> list[dict[str, Any]]:
    """What each rank found. Also for the ranks on simulated GPUs."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    done = subprocess.run(
        [sys.executable, *torchrun, str(RANKS), *arguments[:2], str(folder), *arguments[2:]],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("mode", ["native", "allocator", "mempool"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "one-stream"])
def test_ranks_train_alike_with_and_without_a_pool_each_in_its_own_budget(
    tmp_path: pathlib.Path, kind: str, mode: str
) -> None:
    if torch.cuda.device_count() < WORLD:
        pytest.skip("one CUDA device")
    found = run(tmp_path, kind, mode)
    for rank in found:
        assert all(rank["same"])
        assert rank["evicted_bytes"] > 0
        # The first may go over: their kind is new.
        assert rank["last"]["overshoot_bytes"] == 0, (rank["high"], rank["steps"])
        assert rank["last"]["mapped_peak"] <= rank["high"], (rank["high"], rank["steps"])
    assert found[0]["high"] < found[1]["high"]


def test_fsdp2s_gradients_may_be_in_memory_of_the_stream_that_computes(
    tmp_path: pathlib.Path, cuda: None
) -> None:
    def alone(kind: str) -> dict[str, Any]:
        (folder := tmp_path / kind).mkdir()
        return run(folder, kind, "native", world=1)[0]

    with ThreadPoolExecutor() as threads:
        reduced, placed = threads.map(alone, ("fsdp2", "one-stream"))
    for found in (reduced, placed):
        assert all(found["same"])
        assert found["last"]["overshoot_bytes"] == 0
    assert placed["beside"] < reduced["beside"] / 2
