"""Scripts in processes of their own: bad input, and the end of the interpreter.

Each must print what it should, and end with the exit code it should: no crash at shutdown.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
INSTALL = """
import torch, stagehand_alloc
torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
"""
# How a script begins in each mode; on torch's own allocator nothing is installed.
BEGIN = {"allocator": INSTALL, "native": "import torch, stagehand_alloc\n"}
BEGIN["mempool"] = BEGIN["native"]
every_mode = pytest.mark.parametrize("mode", ["allocator", "native", "mempool"])


def run(script: str, code: int = 0, **variables: str) -> str:
    """Run a script; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_installing_too_late_says_what_to_move_and_training_goes_on(cuda: None) -> None:
    printed = run(
        """
import torch, stagehand_alloc
torch.zeros(1, device="cuda")
try:
    torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
except stagehand_alloc.AllocatorTooLateError as error:
    print(error)
print(int(torch.ones(8, device="cuda").sum()))
"""
    )
    for word in ("before", "pin_memory()", "set_device", "mem_get_info", "8"):
        assert word in printed


def test_installing_twice_is_refused_and_training_goes_on(cuda: None) -> None:
    printed = run(
        INSTALL
        + """
torch.zeros(1, device="cuda")
try:
    torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
except stagehand_alloc.AlreadyInstalledError as error:
    print(error)
with stagehand_alloc.pool():
    y = torch.ones(8, device="cuda", requires_grad=True).exp().sum()
y.backward()
print("trained")
"""
    )
    assert "installed already" in printed
    assert "trained" in printed


@every_mode
def test_host_memory_is_pinned_from_the_creation_of_a_pool_on(mode: str, cuda: None) -> None:
    printed = run(
        BEGIN[mode]
        + f"""
import time
torch.zeros(1, device="cuda")
pool = stagehand_alloc.pool(mode={mode!r}, high="1GiB")
deadline = time.monotonic() + 60
while stagehand_alloc.stats().pinned_bytes == 0 and time.monotonic() < deadline:
    time.sleep(0.01)
print("pinned", stagehand_alloc.stats().pinned_bytes > 0)
with pool:
    loss = torch.ones(1 << 20, device="cuda", requires_grad=True).exp().sum()
loss.backward()
print("trained")
"""
    )
    assert "pinned True" in printed
    assert "trained" in printed


def test_a_pool_without_the_allocator_is_on_torchs_own(cuda: None) -> None:
    printed = run(
        """
import torch, stagehand_alloc
x = torch.ones(8, device="cuda", requires_grad=True)
with stagehand_alloc.pool() as pool:
    y = x.exp().sum()
y.backward()
print(pool.stats().mode, torch.equal(x.grad, x.exp()))
"""
    )
    assert "native True" in printed


def test_torch_takes_the_hole_that_could_grow_last(cuda: None) -> None:
    """`CacheMap::fit` goes by that: of a hole of 64 MiB, and one of 36 where no more is mapped."""
    printed = run(
        """
import torch
def block(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
first, between, last = block(64), block(20), block(36)  # pages of 20 MiB, all of them
place, end = first.data_ptr(), last.data_ptr()
del first, last
found = block(16)
print({place: "the larger", end: "the last"}.get(found.data_ptr(), "another"))
rest = block(48)
print({place: "the larger", end: "the last"}.get(block(16).data_ptr(), "another"))
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert printed.split("\n")[:2] == ["the larger", "the last"]


def test_training_is_right_with_expandable_segments(cuda: None) -> None:
    printed = run(
        f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from steps import budget_on_torch, mlp, one_step, rows
import torch
model, x = mlp(), rows()
expected = one_step(model, x)
assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
pool = budget_on_torch("native")
for step in range(6):
    assert one_step(model, x, pool) == expected, step
assert pool.stats().evicted_bytes > 0
assert pool.stats().mapped == torch.cuda.memory_reserved()
print("trained,", pool.stats().trigger)
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert "trained, loaded" in printed


def test_bad_budgets_are_refused_with_numbers(cuda: None) -> None:
    printed = run(
        INSTALL
        + """
for sizes in ({"high": "4GiB", "low": "5GiB"}, {"high": "9TiB"}, {"high": "much"}, {"low": -1}):
    try:
        with stagehand_alloc.pool(**sizes):
            pass
    except stagehand_alloc.SizeError as error:
        print("refused:", str(error).splitlines()[0])
print(int(torch.ones(8, device="cuda").sum()))
"""
    )
    assert printed.count("refused:") == 4


LIVE_AT_EXIT = """
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
x = torch.randn(8192, 512, device="cuda")
model(x).sum().backward()
torch.cuda.synchronize(); torch.cuda.empty_cache()
high = torch.cuda.memory_reserved() + (64 << 20)
pool = stagehand_alloc.pool(high=high, low=int(0.9 * high))
with pool:
    loss = model(x).exp().sum()
assert pool.stats().evicted_bytes > 0
"""


def live_at_exit(mode: str) -> str:
    return BEGIN[mode] + LIVE_AT_EXIT.replace("pool(", f"pool(mode={mode!r}, ")


@every_mode
def test_the_interpreter_ends_cleanly_with_a_live_graph(mode: str, cuda: None) -> None:
    run(live_at_exit(mode))


@every_mode
def test_the_interpreter_ends_cleanly_inside_a_pool(mode: str, cuda: None) -> None:
    run(
        BEGIN[mode] + f"pool = stagehand_alloc.pool(mode={mode!r})\npool.__enter__()\n"
        "y = torch.ones(1 << 20, device='cuda', requires_grad=True).exp().exp()\n"
    )


@every_mode
def test_an_uncaught_exception_ends_with_its_own_exit_code(mode: str, cuda: None) -> None:
    assert "ValueError: mine" in run(live_at_exit(mode) + "raise ValueError('mine')", code=1)


@every_mode
def test_the_demo_runs_on_the_gpu(mode: str, cuda: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagehand_alloc", "demo", "--steps", "4", "--mode", mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal" in done.stdout
    assert f"mode {mode}" in done.stdout
    assert ("trigger library loaded" in done.stdout) == (mode != "allocator")
