"""torchrun with two ranks, a simulated GPU for each: tests/gpu/ranks.py, and a script as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "gpu"))  # last: its files are not the tests' own

from test_devices_ranks import WORLD, run  # noqa: E402

from stagehand_alloc._books.runs import read  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(params=["ddp", "fsdp2"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    return run(tmp_path, request.param, "allocator", "--simulated")


def test_ranks_train_alike_each_in_its_own_budget_and_half_of_the_host(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    for rank in ranks:
        assert all(rank["same"])
        assert rank["evicted_bytes"] > 0
        assert rank["overshoot_bytes"] == 0
        assert rank["mapped_peak"] <= rank["high"]
        assert rank["host_share"] == pytest.approx(0.5 / WORLD, rel=0.1)
    assert ranks[0]["high"] < ranks[1]["high"]
    runs = read([tmp_path / "steps.jsonl"]).runs
    steps = [step for run in runs for step in run.steps]
    for number, rank in enumerate(ranks):
        found = [one for one in steps if one["rank"] == number]
        assert [one["step"] for one in found] == list(range(1, len(rank["same"]) + 1))
        assert {one["high"] for one in found} == {rank["high"]}
        assert sum(one["spill_bytes"] for one in found) == rank["evicted_bytes"]
    assert {(run.rank, run.device) for run in runs} == {(0, 0), (1, 0)}


# FSDP2's own hooks are around the pool's, or within: both orders are tried, here and above.
SCRIPT = """
import gc
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from stagehand_alloc import testing

torch.set_num_threads(1)
with testing.simulated_gpu(memory="256MiB", seed=1):
    first = torch.ones(1)  # the GPU is in use before anything of a training is
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
    for part in (*model, model):
        fully_shard(part)
    rows = torch.randn(1024, 256) * (1 + dist.get_rank())
    for _ in range(3):
        model.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
    sums = [p.grad.to_local().double().sum().item().hex() for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            print(rank, loss.item().hex(), *sums, flush=True)
        dist.barrier()
    # torch's gloo ends a process that exits while one of its threads still has a tensor, and those
    # threads live as long as somebody has their group: the model does (pytorch #190489).
    del model, part, loss
    gc.collect()
    dist.destroy_process_group()
"""


def test_torchrun_starts_a_script_inside_a_budget_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}")

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *torchrun, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=dict(os.environ),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    plain = start(str(script))
    inside = start("-m", "stagehand_alloc", "run", "--high", "14MiB", str(script))
    assert sorted(inside.stdout.split()) == sorted(plain.stdout.split())
    assert inside.stderr.count("0 B over.") == WORLD
    assert "0 B were moved" not in inside.stderr
