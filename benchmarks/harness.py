"""What the benchmarks share: worker processes that take turns, rows, and the result file.

Configurations cannot share a process where the allocator differs (it is chosen once, before CUDA
starts), and times taken minutes apart cannot be compared. So every configuration has a worker
process that stays alive, and the workers run a few steps each in turn, on one GPU, one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from source_hash import source_hash

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
SOURCES = source_hash()  # as the run begins
# Of a process that is to be deterministic: torch asks for it, once (digest.seen_by_cublas).
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
REPLY = "@reply "  # marks the lines that are replies; all else a worker prints is passed on
NO_GPU = 3  # exit code


class WorkerError(RuntimeError):
    """A worker process failed; its own message is on stderr above."""


class Worker:
    """One configuration's process. ask() sends a command and waits for its reply."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        script: str = "worker.py",
    ) -> None:
        """`environment`: added to this process's own. `script`: what the process runs."""
        self.name = name
        command = [sys.executable, str(FOLDER / script), json.dumps(dict(settings))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
            text=True,
            bufsize=1,
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send `command`, return its reply. Raises WorkerError where it fails."""
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        """Send without waiting: for commands that may run beside other workers'."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._died() from error

    def receive(self) -> dict[str, Any]:
        """The reply to the oldest command that has none yet."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                reply: dict[str, Any] = json.loads(line[len(REPLY) :])
                if "error" in reply:
                    raise WorkerError(f"{self.name}: {reply['error']}")
                return reply
            sys.stderr.write(f"[{self.name}] {line}")
        raise self._died()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _died(self) -> WorkerError:
        code = self._process.wait()
        if code == -signal.SIGKILL:  # nobody else here kills workers that still answer
            return WorkerError(f"{self.name} was killed by the system: host memory ran out")
        return WorkerError(f"{self.name} ended with exit code {code}")

    def hang_up(self) -> None:
        """Tell the worker to end, without waiting until it has."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # a command that a dead worker never read
                self._process.stdin.close()

    def close(self, timeout: float = 60) -> int:
        """End the worker; returns its exit code."""
        self.hang_up()
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


def close_all(workers: Iterable[Worker]) -> None:
    """End the workers, all at once; their memory is free when this returns."""
    workers = list(workers)
    for worker in workers:
        worker.hang_up()
    for worker in workers:
        worker.close()


def ask_all(workers: Sequence[Worker], command: str, **arguments: Any) -> list[dict[str, Any]]:
    """The same command on all of them beside each other: for what is not timed."""
    for worker in workers:
        worker.send(command, **arguments)
    return [worker.receive() for worker in workers]


def have_gpu() -> bool:
    """Whether the driver finds a GPU; torch is not imported for it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    started = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return started and count.value > 0


def refuse_without_gpu(program: str, simulated: bool) -> None:
    """Exit with code NO_GPU where there is nothing to measure."""
    if not simulated and not have_gpu():
        print(
            f"{program}: no GPU was found, so nothing is measured.\n"
            f"Run it on a machine with one, or try the program itself with --simulated.",
            file=sys.stderr,
        )
        raise SystemExit(NO_GPU)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How much is measured: rounds of turns; in each, timed steps after some that are not."""

    rounds: int
    steps: int
    lead_steps: int
    lead_seconds: float

    def lead(self) -> dict[str, float]:
        """What a worker's "steps" is told of the steps that are not timed."""
        return {"lead": self.lead_steps, "lead_seconds": self.lead_seconds}


@dataclasses.dataclass(frozen=True)
class Row:
    """A claim, what was measured, and what it is held against; without a bar, only reported."""

    claim: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    @property
    def bar(self) -> str:
        if self.at_most is None and self.at_least is None:
            return "reported"
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "value": round(self.value, 4),
            "bar": self.bar,
            "holds": self.holds,
        }


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.splitlines()[0].strip()


def print_rows(rows: Sequence[Row]) -> None:
    width = max(len(row.claim) for row in rows)
    for row in rows:
        mark = "MISSED" if not row.holds else "" if row.bar == "reported" else "ok"
        print(f"{row.claim:<{width}}  {row.value:>12.4g}  {row.bar:>9}  {mark}")


def write_result(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    """In the place of what is there, at once: a call that is cut short leaves one or the other.

    It names the sources that it is of.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".new")
    named = {"sources": SOURCES, **result}
    whole.write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)
    print(f"written: {path}")


def earlier(
    path: pathlib.Path | None, result: Mapping[str, Any], same: Iterable[str], part: str
) -> dict[str, Any]:
    """The ``part`` of an earlier result that may stand beside this one's: what is ``same`` is."""
    if path is None or not path.exists():
        return {}
    there = json.loads(path.read_text(encoding="utf-8"))
    differ = [key for key in same if there.get(key) != result[key]]
    if differ:
        print(f"{part}: {path.name} is of another {differ[0]}: not joined", file=sys.stderr)
        return {}
    found: dict[str, Any] = there[part]
    return found


def report(
    rows: Sequence[Row], result: Mapping[str, Any], name: str, options: argparse.Namespace
) -> None:
    """Print the rows; write the result to --out, or to `name` where the run was whole."""
    if rows:
        print_rows(rows)
    partial = options.simulated or options.only is not None
    if options.out is not None or not partial:
        write_result(options.out or RESULTS / name, result)
