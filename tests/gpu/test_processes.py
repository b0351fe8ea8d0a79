"""Scripts in processes of their own: bad input, and the end of the interpreter.

Each must print what it should, and end with the exit code it should: no crash at shutdown.
"""

from __future__ import annotations

import subprocess
import sys

INSTALL = """
import torch, stagehand_alloc
torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
"""


def run(script: str, code: int = 0) -> str:
    """Run a script; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
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


def test_a_pool_without_the_allocator_says_which_lines_to_add(cuda: None) -> None:
    printed = run(
        """
import torch, stagehand_alloc
try:
    with stagehand_alloc.pool():
        pass
except stagehand_alloc.ModeError as error:
    print(error)
print(int(torch.ones(8, device="cuda").sum()))
"""
    )
    assert "change_current_allocator" in printed
    assert "8" in printed


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
high = stagehand_alloc.stats().mapped + (64 << 20)
pool = stagehand_alloc.pool(high=high, low=int(0.9 * high))
with pool:
    loss = model(x).exp().sum()
assert pool.stats().evicted_bytes > 0
"""


def test_the_interpreter_ends_cleanly_with_a_live_graph(cuda: None) -> None:
    run(INSTALL + LIVE_AT_EXIT)


def test_the_interpreter_ends_cleanly_inside_a_pool(cuda: None) -> None:
    run(
        INSTALL + "pool = stagehand_alloc.pool()\npool.__enter__()\n"
        "y = torch.ones(1 << 20, device='cuda', requires_grad=True).exp().exp()\n"
    )


def test_an_uncaught_exception_ends_with_its_own_exit_code(cuda: None) -> None:
    assert "ValueError: mine" in run(INSTALL + LIVE_AT_EXIT + "raise ValueError('mine')", code=1)


def test_the_demo_runs_on_the_gpu(cuda: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagehand_alloc", "demo", "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal" in done.stdout
    assert "process allocator" in done.stdout
