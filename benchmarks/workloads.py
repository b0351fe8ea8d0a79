"""What people train, under budgets, beside plain torch; and what was waited for where it costs.

    python benchmarks/workloads.py [--quick] [--simulated] [--only gpt,moe] [--time-limit SECONDS]

Workloads (workload_cases.py has sizes, budgets and bars): a GPT, compiled by block and not; a video
transformer and another stack with low-rank adapters; a mixture of experts; a pipeline's order;
gradient accumulation in one pool, and in one for each forward; a GAN; a 3-D U-Net; an LSTM over
varying lengths, its layers made again or not; a Llama over such, with checkpoints; FSDP2 and DDP,
which need two GPUs, and one rank of FSDP2 alone, which does not.
Each as plain torch, with a checkpoint around every block, and ours, as process allocator and in
mode "native", with expandable segments but in one. Of several ranks the first one is timed; of what
each does `other_ranks` tells.

Where plans are tried (recompute), a configuration's first steps run before anything is timed.
Configurations take turns in every round, in an order that rotates. Steps of a turn follow each
other without a wait, after some that are not timed; a ratio is the median over the rounds of the
ratio inside a round. Where shapes vary, every configuration has the same ones in the same round.
The bound is measures.bound_ms of plain torch's times and the link in that round, of the bytes by
which its peak is above high, as often as the step gets there.

One step more is watched per configuration: host time inside calls to CUDA by function
(driver_calls.py), some for whose code the host runs (host_samples.py), and another for idle time of
the compute stream (gaps.py). Last, torch is made
deterministic, and losses and gradients of the first steps of a new model must be plain torch's bit
by bit: where they are not, a row says so, and the exit code is 1.

Writes benchmarks/results/workloads.json after every workload, and workloads.svg where matplotlib
can be imported. --join keeps what the file has of workloads that are not measured now, if it is of
the same sources: one GPU's and two GPUs' workloads are measured in two calls. --simulated: tiny
models, the process allocator only, no checkpoints, and nothing of calls and gaps.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import pathlib
import platform
import sys
import time
import traceback
from typing import Any

import plot
from harness import (
    RESULTS,
    SOURCES,
    Row,
    WorkerError,
    driver_version,
    earlier,
    print_rows,
    refuse_without_gpu,
    write_result,
)
from workload_cases import CASES, Case
from workload_rows import rows_of, summary_of, unlike_torch
from workload_run import LOOKS, CaseRun, Measured, Pace

FULL = Pace(5, 4, 2, 0.6, seconds=0.8, checkpoint_rounds=5, settling=120)
QUICK = Pace(3, 4, 2, 0.4, seconds=0.6, checkpoint_rounds=1, settling=120)
TINY = Pace(1, 2, 1, 0, seconds=0, checkpoint_rounds=0, settling=0)
AHEAD = 3  # workloads whose processes start before it is their turn: importing torch takes long
SAME = ("sources", "device", "torch", "driver")  # of results that may be joined


class Workloads:
    """The workloads of one call, one after the other, and what is written of them."""

    def __init__(self, names: list[str], pace: Pace, simulated: bool) -> None:
        self.pace, self.simulated = pace, simulated
        self.waiting = list(names)
        self.runs: dict[str, CaseRun] = {}
        self.workloads: dict[str, dict[str, Any]] = {}  # what was measured, as it is written
        self.place: dict[str, Any] = {}
        self.not_run: dict[str, str] = {}
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.began = time.perf_counter()

    def measure_next(self) -> None:
        """The first that waits."""
        self._start_ahead()
        name = self.waiting.pop(0)
        run, began = self.runs[name], time.perf_counter()
        error = None
        try:
            run.measure(self._build_next)
        except WorkerError as failure:
            error = str(failure)
        except Exception as failure:  # of this program: the other workloads are still measured
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        run.close()
        self.place.update(run.place)
        measured = run.measured
        self.wrong += unlike_torch(name, measured)
        self.wrong += [
            f"{name}: the trigger library: {', '.join(states)}"
            for states in measured.triggers.values()
            if states != ["loaded"]
        ]
        rows = claims_of(name, run.case, measured)
        self.rows += rows
        self.workloads[name] = described(run.case, measured, rows, error)
        seconds = self.workloads[name]["seconds"] = round(time.perf_counter() - began, 1)
        for key, values in self.workloads[name]["summary"].items():
            print(f"{name} {key}: {values}")
        print(f"{name}: {seconds} s", flush=True)

    def leave(self, why: str) -> None:
        """The rest is not run."""
        self.not_run.update(dict.fromkeys(self.waiting, why))
        self.waiting.clear()

    def close(self) -> None:
        for run in self.runs.values():
            run.close()

    def seconds(self) -> float:
        return round(time.perf_counter() - self.began, 1)

    def _start_ahead(self) -> None:
        for name in self.waiting[: 1 + (0 if self.simulated else AHEAD)]:
            if name not in self.runs:
                self.runs[name] = CaseRun(name, CASES[name], self.pace, self.simulated)

    def _build_next(self) -> None:
        self._start_ahead()
        if self.waiting and not self.simulated:
            self.runs[self.waiting[0]].start_building()


def claims_of(name: str, case: Case, measured: Measured) -> list[Row]:
    rows = rows_of(name, case, measured)
    if "plain" in measured.digests:
        claim = f"{name}: configurations whose losses or gradients are not plain torch's"
        rows.append(Row(claim, len(unlike_torch(name, measured)), at_most=0))
    return rows


def described(case: Case, measured: Measured, rows: list[Row], error: str | None) -> dict[str, Any]:
    """One workload, as it is written."""
    failed = dict(measured.failed)
    if error is not None:
        failed["plain"] = error
    return {
        "title": case.title,
        "rows": [row.as_dict() for row in rows],
        "failed": failed,
        "not_seen": sorted(
            {
                f"{look}: {found['why']}"
                for look in LOOKS
                for found in getattr(measured, look).values()
                if not found.get("seen")
            }
        ),
        "summary": summary_of(case, measured),
        "raw": dataclasses.asdict(measured),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 5")
    parser.add_argument("--simulated", action="store_true", help="tiny models, no GPU")
    parser.add_argument("--only", help="some of " + ",".join(CASES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start none after it")
    parser.add_argument("--join", action="store_true", help="keep other workloads of the file")
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    options = parser.parse_args(argv)
    asked = options.only.split(",") if options.only else list(CASES)
    if unknown := set(asked) - set(CASES):
        parser.error(f"--only: no workload {sorted(unknown)[0]!r}")
    options.names = [name for name in CASES if name in asked]
    partial = options.simulated or (options.only is not None and not options.join)
    options.out = options.out or (None if partial else RESULTS / "workloads.json")
    return options


def gpu_count() -> int:
    """Without torch: what opens a GPU before its time is in nobody's way."""
    count = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def kept(path: pathlib.Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """The workloads of an earlier result that may stand beside this one's."""
    return earlier(path, result, SAME, "workloads")


def result_of(run: Workloads, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "device": run.place.get("device", "not asked"),
        "torch": run.place.get("torch", "not asked"),
        "cuda": run.place.get("cuda", "not asked"),
        "driver": driver_version(),
        "python": platform.python_version(),
        "sources": SOURCES,
        "pace": dataclasses.asdict(run.pace),
        "seconds": run.seconds(),
        "not_run": run.not_run,
        "wrong": run.wrong,
    }
    others = kept(options.out, result) if options.join else {}
    together = {**others, **run.workloads}
    workloads = {name: together[name] for name in CASES if name in together}
    rows = [row for one in workloads.values() for row in one["rows"]]
    return {**result, "rows": rows, "workloads": workloads}


def main(argv: list[str] | None = None) -> int:
    """0: measured, whether or not every row holds; 1: something failed or the results differ."""
    options = parse(argv)
    refuse_without_gpu("workloads", options.simulated)
    pace = TINY if options.simulated else QUICK if options.quick else FULL
    if options.rounds:
        pace = dataclasses.replace(pace, rounds=options.rounds)
    gpus = 2 if options.simulated else gpu_count()
    few = {name for name in options.names if CASES[name].ranks > gpus}
    run = Workloads([name for name in options.names if name not in few], pace, options.simulated)
    run.not_run.update(dict.fromkeys(sorted(few), f"it needs more GPUs than {gpus}"))
    result: dict[str, Any] = {}
    try:
        while run.waiting:
            if options.time_limit is not None and run.seconds() > options.time_limit:
                run.leave(f"the time limit of {options.time_limit:g} s was reached")
                break
            run.measure_next()
            result = result_of(run, options)
            if options.out is not None:
                write_result(options.out, result)
    finally:
        run.close()
    result = result_of(run, options)
    if options.out is not None:
        write_result(options.out, result)
        if plot.available():
            plot.draw_workloads(result, options.out.with_suffix(".svg"))
    if run.rows:
        print_rows(run.rows)
    failed = {
        f"{name} {key}": why
        for name, one in run.workloads.items()
        for key, why in one["failed"].items()
    }
    for line in (*run.wrong, *(f"{key}: {why}" for key, why in {**failed, **run.not_run}.items())):
        print(f"workloads: {line}", file=sys.stderr)
    return 1 if run.wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
