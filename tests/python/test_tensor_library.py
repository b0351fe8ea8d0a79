"""With the tensor library and without it training is plain torch's; small storages stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stagehand_alloc._built import tensors as _tensors

# In a process of its own: the first pool of a process decides. Prints what was found.
SCRIPT = """
import gc, json, sys
import torch
from torch import nn
import stagehand_alloc
from stagehand_alloc import testing
from stagehand_alloc._built import tensors as _tensors

torch.set_num_threads(1)
memory, high, rows = sys.argv[1:]

class Fixed(torch.autograd.Function):  # returns as a gradient what it saved
    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient)
        return x.clone()
    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0], None

def step(model, x):
    model.zero_grad(set_to_none=True)
    y = model(x)
    fixed = torch.softmax(x.sum(1, keepdim=True).expand(*y.shape) + 0, 0)
    loss = y.pow(2).mean() + Fixed.apply(y, fixed).sum() + (y * 5).view(-1)[::3].sum()
    return loss, fixed

def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()

def make():
    torch.manual_seed(3)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())])
    return model, torch.randn(int(rows), 64)

model, x = make()
loss, fixed = step(model, x)
loss.backward()
want, wanted_fixed = gradients(model), fixed.clone()
testing.simulated_gpu(memory=memory, poison=False)
model, x = make()
pool = stagehand_alloc.pool(high=high, low=high)
found = {"same": True, "saved": [], "small": []}
for _ in range(3):
    before = pool.stats()
    with pool:
        loss, fixed = step(model, x)
    loss.backward()
    after = pool.stats()
    found["same"] &= torch.equal(gradients(model), want) and torch.equal(fixed, wanted_fixed)
    found["saved"].append(after.activations_saved - before.activations_saved)
    small = [s.passed_through.get("small", 0) for s in (before, after)]
    found["small"].append(small[1] - small[0])
found["evictions"] = after.clean_evictions + after.dirty_evictions
with pool:
    y = model(x).sin()
    z = y.exp()
    y.cos()
z.mul_(2)
try:
    z.sum().backward()
    found["in place"] = "no error"
except RuntimeError as error:
    found["in place"] = str(error).split(":")[0]
del y, z, loss, fixed
gc.collect()
last = stagehand_alloc.stats()
found["left"] = last.records + last.handles + last.aliases
found["library"] = _tensors.load()
print(json.dumps(found))
"""


def found(memory: str, high: str, rows: int, library: bool) -> dict[str, Any]:
    path = os.pathsep.join(sys.path[1:])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not library:
        environment["STAGEHAND_ALLOC_BUILD"] = "0"
    command = [sys.executable, "-c", SCRIPT, memory, high, str(rows)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_library_is_used_with_the_torch_that_is_here() -> None:
    assert _tensors.load() == "loaded"


@pytest.mark.parametrize("library", [True, False], ids=["library", "python"])
def test_gradients_errors_and_books_are_the_same_with_the_library_and_without(
    library: bool,
) -> None:
    result = found("64MiB", "4MiB", 2048, library)
    assert (result["library"] == "loaded") == library
    assert result["same"]
    assert result["evictions"] > 0
    assert result["in place"].startswith("one of the variables needed for gradient computation")
    assert result["left"] == 0
    assert result["small"] == [0, 0, 0]  # a budget under 1 GiB is held to the byte


@pytest.mark.parametrize("library", [True, False], ids=["library", "python"])
def test_small_storages_stay_counted_and_their_changes_are_seen(library: bool) -> None:
    without = found("64MiB", "32MiB", 128, library)
    result = found("4GiB", "2GiB", 128, library)
    assert result["same"]
    assert result["small"][0] > 0
    # What was ignored is forgotten with its graph.
    assert result["small"] == result["small"][:1] * 3
    pairs = zip(result["saved"], result["small"], without["saved"], strict=True)
    assert all(saved + small == all_of_them for saved, small, all_of_them in pairs)
    assert result["in place"].startswith("one of the variables needed for gradient computation")
    assert result["left"] == 0
