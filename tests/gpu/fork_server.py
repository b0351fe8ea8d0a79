"""Runs pytest in forks of a process that has imported torch already, and the modules it is given
where they are installed: importing takes longer than most tests.

    python fork_server.py [MODULE ...]

One line in, {"arguments": [...], "environment": {...}, "output": path}; one line out, the exit code
of a process that ended as any Python does, its interpreter shut down. Negative: ended by a signal.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

import pytest
import torch

TIMEOUT_SECONDS = 300


def become(order: dict[str, Any]) -> None:
    """A process group of its own, with the order's environment and output."""
    os.setsid()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(ours, theirs)
    os.environ.clear()
    os.environ.update(order["environment"])


def wait(child: int) -> int:
    """Its exit code; its whole group is ended when it takes too long."""
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(TIMEOUT_SECONDS)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    return os.waitstatus_to_exitcode(status)


def forks_have_cuda() -> bool:
    """Not once this process has asked CUDA for anything; torch.cuda.is_available does."""
    child = os.fork()
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    _, status = os.waitpid(child, 0)
    return status == 0


def main(modules: list[str]) -> int:
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if not forks_have_cuda():
        raise SystemExit(f"No test can use CUDA: importing torch or one of {modules} asked for it.")
    gc.collect()
    gc.freeze()  # half a million objects: no collection in a fork need walk them
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            become(order)
            return int(pytest.main(order["arguments"]))
        print(wait(child), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
