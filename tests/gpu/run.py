"""Runs the GPU tests, each in a process of its own, and writes the record of the run.

    python tests/gpu/run.py [-k EXPRESSION] [--jobs N] [--out FILE]

A test passes only if its process also ends with exit code 0: a crash at interpreter shutdown is a
failure. Tests in files named test_alone_* run one at a time, without others on the GPU: where there
are two, on the second, which no other uses once test_devices.py is through. What a test measured
(record_property) is printed and recorded beside its outcome. The record,
benchmarks/results/gpu-tests.json, names the sources it was made of (benchmarks/source_hash.py); a
selection with -k writes none unless told where.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = ROOT / "benchmarks" / "results" / "gpu-tests.json"
MOST_JOBS = 16
GIB_OF_EACH = 10  # of the device's memory
# What tests import beside torch, some without saying so. None of it starts CUDA.
MODULES = (
    "torch._dynamo",  # by every optimizer
    "stagehand_alloc",
    "transformers.models.llama.modeling_llama",
    "peft",
    "timm",
)
SHARED = "STAGEHAND_GPU_TESTS_SHARED"  # a folder for what several tests of one run need

sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import driver_version  # noqa: E402
from source_hash import source_hash  # noqa: E402

ABOUT = """
import json, platform, torch
print(json.dumps({"device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                  "devices": torch.cuda.device_count(),
                  "gib": torch.cuda.mem_get_info()[1] >> 30 if torch.cuda.is_available() else 0,
                  "torch": torch.__version__, "python": platform.python_version()}))
"""


# Beside each other, before the tests: the first of those would wait for one after the other. The
# compiler leaves the GPU alone, so those that want it for themselves run meanwhile.
LIBRARIES = """
from stagehand_alloc._built import build, storage, tensors, trigger
from stagehand_alloc._step import proofs
build.beside(*(each.LIBRARY for each in (proofs, trigger, tensors, storage)))
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    test: str
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float
    output: str
    figures: dict[str, str]


def environment(shared: str = "", gpu: int | None = None) -> dict[str, str]:
    """Ours, so that the tests find the package built in place and deterministic cuBLAS.

    `gpu`: the only one they see; None: all.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        **os.environ,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": nth_gpu(visible, gpu)}),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "2",  # several tests run at once: each takes its share of the cores
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed, and each test would import them
        SHARED: shared,
    }


def nth_gpu(visible: str | None, gpu: int) -> str:
    return visible.split(",")[gpu] if visible else str(gpu)


def pytest(*arguments: str) -> list[str]:
    # -s: what a crashed process has said is not lost with it.
    # -W: pyproject.toml has a setting of a plugin that is not loaded.
    ignored = "ignore::pytest.PytestConfigWarning"
    return ["-p", "no:cacheprovider", "-q", "-s", "-W", ignored, *arguments]


class ForkServer:
    """One process that tests are forked of, one after the other."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def run(self, arguments: list[str], env: dict[str, str], output: pathlib.Path) -> int:
        """pytest with these arguments; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"arguments": arguments, "environment": env, "output": str(output)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


class ForkServers:
    """As many as run at once. They import together, while tests are collected."""

    def __init__(self, count: int, *modules: str) -> None:
        self._all = [ForkServer(*modules) for _ in range(count)]
        self._free: queue.SimpleQueue[ForkServer] = queue.SimpleQueue()

    def __enter__(self) -> ForkServers:
        for server in self._all:
            self._free.put(server)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._all:
            server.end()

    def run(self, arguments: list[str], env: dict[str, str], output: pathlib.Path) -> int:
        """pytest with these arguments, in a fork of one that runs nothing else; its exit code."""
        server = self._free.get()
        try:
            return server.run(arguments, env, output)
        finally:
            self._free.put(server)


def collect(expression: str | None) -> list[str]:
    """The node ids of all tests, or those that `expression` selects."""
    selection = ["-k", expression] if expression else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *pytest("--collect-only", *selection, str(HERE))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"collecting the tests failed:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def run_one(test: str, servers: ForkServers, shared: str, gpu: int | None = None) -> Outcome:
    """Run one test in its own process group, which is ended when it takes too long."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        said = pathlib.Path(folder) / "output.txt"
        arguments = pytest(f"--junitxml={report}", test)
        code = servers.run(arguments, environment(shared, gpu), said)
        outcome = read_outcome(report) if code == 0 else "failed"
        figures = read_figures(report)
        output = said.read_text(encoding="utf-8", errors="replace")
    if outcome == "failed":
        output += f"\nexit code {code}"
    return Outcome(test, outcome, round(time.perf_counter() - began, 1), output, figures)


def read_outcome(report: pathlib.Path) -> str:
    """What pytest's report says of the one test in it."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return "failed"
    if len(cases) != 1 or any(
        case.find(tag) is not None for case in cases for tag in ("failure", "error")
    ):
        return "failed"
    return "skipped" if cases[0].find("skipped") is not None else "passed"


def read_figures(report: pathlib.Path) -> dict[str, str]:
    """What the test gave to record_property."""
    try:
        found = list(ElementTree.parse(report).iter("property"))
    except (OSError, ElementTree.ParseError):
        return {}
    return {one.get("name", ""): one.get("value", "") for one in found}


def show(outcome: Outcome) -> None:
    figures = ", ".join(f"{name} {value}" for name, value in outcome.figures.items())
    print(
        f"{outcome.outcome:<8} {outcome.seconds:6.1f} s  {outcome.test}"
        + (f"\n{'':20}{figures}" if figures else ""),
        flush=True,
    )
    if outcome.outcome != "passed":
        print(outcome.output.strip(), flush=True)


def longest_first(tests: list[str]) -> list[str]:
    """By the last record; those it does not name before all others."""
    if not RECORD.exists():
        return tests
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["tests"]
    seconds = {one["test"]: one["seconds"] for one in recorded}
    return sorted(tests, key=lambda test: -seconds.get(test, math.inf))


def run_all(
    tests: list[str],
    jobs: int,
    servers: ForkServers,
    server_of_alone: ForkServers,
    shared: str,
    gpus: int,
) -> list[Outcome]:
    alone = [test for test in reversed(tests) if file_of(test).startswith("test_alone_")]
    on_all = [test for test in tests if file_of(test).startswith("test_devices")]
    others = longest_first([test for test in tests if test not in alone and test not in on_all])
    first, last = (0, 1) if gpus > 1 else (None, None)
    outcomes = []

    def show_all(running: Iterable[Future[Outcome]]) -> None:
        for done in concurrent.futures.as_completed(running):
            outcomes.append(done.result())
            show(outcomes[-1])

    with ThreadPoolExecutor(jobs) as threads, ThreadPoolExecutor(1) as one:

        def start_alone() -> list[Future[Outcome]]:
            return [one.submit(run_one, test, server_of_alone, shared, last) for test in alone]

        with subprocess.Popen([sys.executable, "-c", LIBRARIES], cwd=ROOT, env=environment()):
            if gpus == 1:  # the first of these need no library
                show_all(start_alone())
        on_all_running = [threads.submit(run_one, test, servers, shared) for test in on_all]
        running = [threads.submit(run_one, test, servers, shared, first) for test in others]
        if gpus > 1:
            show_all(on_all_running)
            running += start_alone()
            show_all(running)
        else:
            show_all([*on_all_running, *running])
    return outcomes


def default_jobs(gib: int) -> int:
    """Most of a test is one thread of its process; what it trains is smaller than GIB_OF_EACH."""
    cores = os.cpu_count() or 2
    return max(1, min(MOST_JOBS, cores * 7 // 8, gib // GIB_OF_EACH))


def file_of(test: str) -> str:
    return pathlib.Path(test.split("::")[0]).name


def about() -> dict[str, Any]:
    """Device, torch and Python, asked in a process that ends: the runner itself uses no GPU."""
    done = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "driver": driver_version()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-k", dest="expression", help="pytest's -k: run only these tests")
    parser.add_argument(
        "--jobs", type=int, help="tests at once (default: what cores and the GPU's memory are for)"
    )
    parser.add_argument("--out", type=pathlib.Path, help="where to write the record")
    options = parser.parse_args(argv)
    place = about()
    if place["device"] is None:
        print("There is no CUDA device here: nothing was run, no record was written.")
        return 1
    gib = place.pop("gib")
    jobs = options.jobs or default_jobs(gib)
    sources = source_hash(ROOT)
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as shared,
        ForkServers(jobs, *MODULES) as servers,
        ForkServers(1) as server_of_alone,  # those tests need no modules, and begin before others
    ):
        collected = collect(options.expression)
        outcomes = run_all(collected, jobs, servers, server_of_alone, shared, place["devices"])
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for outcome in outcomes:
        counts[outcome.outcome] += 1
    seconds = round(time.perf_counter() - began, 1)
    print(f"{place['device']}: {counts} in {seconds} s")
    out = options.out or (None if options.expression else RECORD)
    if out is not None:
        tests = [
            {
                "test": one.test,
                "outcome": one.outcome,
                "seconds": one.seconds,
                **({"figures": one.figures} if one.figures else {}),
            }
            for one in sorted(outcomes, key=lambda one: one.test)
        ]
        record = {**place, **counts, "sources": sources, "seconds": seconds, "tests": tests}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written: {out}")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
