"""FSDP2's gradients in the computing stream's memory: what of it needs no GPU. On one:
`tests/gpu/test_devices_ranks.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from stagehand_alloc import ConfigError
from stagehand_alloc.integrations.fsdp2 import gradients_on_one_stream

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from stagehand_alloc.integrations.fsdp2 import gradients_on_one_stream

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
mesh = init_device_mesh("cpu", (1,))
for part in (*model, model):
    fully_shard(part, mesh=mesh)
rows = torch.randn(4, 8)

def gradients():
    model.zero_grad(set_to_none=True)
    model(rows).square().sum().backward()
    return [p.grad.to_local().clone() for p in model.parameters()]

before = gradients()
placed = gradients_on_one_stream(model)
assert all(torch.equal(one, two) for one, two in zip(before, gradients(), strict=True))
placed.remove()
dist.destroy_process_group()
print("the same")
"""


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no sharded parameter.*\n.*fully_shard"):
        gradients_on_one_stream(nn.Linear(2, 2))


def test_on_the_host_gradients_stay_as_fsdp2_leaves_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "the same" in done.stdout, done.stdout + done.stderr
