"""The main job, measured: one GPT training step, plain and inside budgets, against plain torch.

    python benchmarks/main_job.py [--quick] [--simulated] [--layers N] [--only native,ours_50]

Workload: GPT, 12 layers, width 4096, 32 heads, sequence 8192, batch 1, bf16, causal SDPA, no
checkpoint, vocabulary 32768 untied, random weights and data. A step is forward and backward with
gradients set to None before it, ended by a device synchronisation; there is no optimizer.

activation memory = occupied peak without a budget - occupied at the start of a step
high = occupied at the start + share * activation memory;   low = high - gap (1 GiB)

Inside a budget steps go on until no other plan is tried. All configurations then take turns in
every round (see harness.py), in an order that rotates. A turn begins with steps that are not timed,
since the GPU lowers its clocks in the first half second of load; a ratio is the median over the
rounds of the ratio inside a round. Writes
benchmarks/results/main-job.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

from harness import (
    Row,
    Worker,
    WorkerError,
    close_all,
    driver_version,
    refuse_without_gpu,
    report,
)
from measures import GIB, ratio_in_turn
from shapes import GPT_8K, TINY_GPT

SHARES = {"ours_75": 0.75, "ours_50": 0.50}
CONFIGURATIONS = ("native", "ours", "ours_75", "ours_50", "save_on_cpu")
VARIANTS = ("ours_plain", "ours_armed")  # of "ours": no pool entered; pool() at its defaults
ALLOCATION_SIZES = (4 << 10, 2 << 20, 64 << 20)
SAMPLES = ("wall_ms", "forward_ms", "backward_ms")


@dataclasses.dataclass(frozen=True)
class Job:
    shape: dict[str, Any]
    simulated: bool
    warm_steps: int
    rounds: int
    lead_steps: int  # of every turn, not timed: the GPU's clocks settle under load in about 0.5 s
    steps: int
    gap_bytes: int
    allocations: int


@dataclasses.dataclass
class Measured:
    """Raw readings. Lists by configuration hold one list of steps per round."""

    wall_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    forward_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    backward_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    warm_ms: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    settling: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    allocation_us: dict[str, list[dict[str, float]]] = dataclasses.field(default_factory=dict)
    memory: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    budgets: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    stats_before: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    stats_after: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def gained(self, name: str, counter: str) -> int:
        """How much a counter rose in the timed rounds."""
        return int(self.stats_after[name][counter] - self.stats_before[name][counter])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 8")
    parser.add_argument("--simulated", action="store_true", help="a tiny model, no GPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--low-gap", type=float, default=1.0, help="high - low, in GiB")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", help="some of " + ",".join(CONFIGURATIONS))
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    options = parser.parse_args(argv)
    unknown = set(options.only.split(",") if options.only else ()) - set(CONFIGURATIONS)
    if unknown:
        parser.error(f"--only: no configuration {sorted(unknown)[0]!r}")
    return options


def job_of(options: argparse.Namespace) -> Job:
    if options.simulated:
        return Job(TINY_GPT, True, 2, options.rounds or 2, 1, 2, 4 << 20, 200)
    shape = {
        **GPT_8K,
        "vocabulary": options.vocabulary,
        "context": options.sequence,
        "layers": options.layers,
    }
    rounds = options.rounds or (2 if options.quick else 6)
    return Job(shape, False, 4, rounds, 3, 4, int(options.low_gap * GIB), 5000)


# --- Measuring


class Run:
    """The workers of one run and what they measured."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.workers: dict[str, Worker] = {}
        self.measured = Measured()
        self.place: dict[str, Any] = {}

    def start(self, names: list[str]) -> None:
        """Start the workers; those with a budget once "ours" has measured what it is a share of."""
        first = [name for name in names if name not in SHARES]
        for name in first:
            self.workers[name] = Worker(name, self._settings(name))
        self._build(first)
        if "ours" not in self.workers:
            return
        self.workers["ours"].ask("steps", mode="default", count=2)
        memory = self.workers["ours"].ask("memory", mode="default")
        self.measured.memory["ours"] = memory
        budgeted = [name for name in names if name in SHARES]
        for name in budgeted:
            high = memory["start"] + int(SHARES[name] * (memory["peak"] - memory["start"]))
            self.measured.budgets[name] = {"high": high, "low": high - self.job.gap_bytes}
            self.workers[name] = Worker(name, self._settings(name))
        self._build(budgeted)

    def _settings(self, name: str) -> dict[str, Any]:
        job = self.job
        ours = name.startswith("ours")
        return {"ours": ours, "model": "gpt", "shape": job.shape, "simulated": job.simulated}

    def _build(self, names: list[str]) -> None:
        """Build the models beside each other; nothing is timed here."""
        for name in names:
            budget = self.measured.budgets.get(name)
            budgets = {name: (budget["high"], budget["low"])} if budget else {}
            self.workers[name].send("build", budgets=budgets)
        for name in names:
            self.place = self.workers[name].receive()

    def warm_up(self) -> None:
        for name in self._in_turn(0):
            reply = self._steps(name, self.job.warm_steps)
            self.measured.warm_ms[name] = reply["wall_ms"]
            if name in SHARES:
                settling = self._worker(name).ask("until_settled", mode=name)
                self.measured.settling[name] = settling
        for name in ("native", "save_on_cpu"):
            if name in self.workers:
                self.measured.memory[name] = self.workers[name].ask("memory", mode=name)

    def rounds(self) -> None:
        for name in self._in_turn(0):
            self.measured.stats_before[name] = self._worker(name).ask("stats")
        for at in range(self.job.rounds):
            for name in self._in_turn(at):
                lead = self.job.lead_steps
                reply = self._steps(name, lead + self.job.steps)
                for key in SAMPLES:
                    getattr(self.measured, key).setdefault(name, []).append(reply[key][lead:])
                self.measured.stats_after[name] = reply["stats"]
            self._time_allocations(at)

    def _time_allocations(self, at: int) -> None:
        names = [name for name in ("native", "ours") if name in self.workers]
        for name in names if at % 2 else reversed(names):
            reply = self.workers[name].ask(
                "allocations", sizes=ALLOCATION_SIZES, count=self.job.allocations
            )
            self.measured.allocation_us.setdefault(name, []).append(reply)

    def _in_turn(self, at: int) -> list[str]:
        """The configurations, "ours" as its two variants, rotated by `at`."""
        names: list[str] = []
        for name in self.workers:
            names += VARIANTS if name == "ours" else [name]
        at %= len(names)
        return names[at:] + names[:at]

    def _worker(self, name: str) -> Worker:
        return self.workers["ours" if name in VARIANTS else name]

    def _steps(self, name: str, count: int) -> dict[str, Any]:
        mode = {"ours_plain": "plain", "ours_armed": "default"}.get(name, name)
        return self._worker(name).ask("steps", mode=mode, count=count)

    def close(self) -> None:
        close_all(self.workers.values())


# --- What is claimed


def rows_of(measured: Measured) -> list[Row]:
    """The rows that the measured configurations allow."""
    have = measured.wall_ms.keys()
    rows: list[Row] = []
    if {"native", *VARIANTS} <= have:
        ratio = max(ratio_to_native(measured, name) for name in VARIANTS)
        claim = "no budget set: step time / native (worse of no pool and pool() at its defaults)"
        rows.append(Row(claim, ratio, at_most=1.01))
        rows += [allocation_row(measured)]
    if "ours" in measured.memory:
        memory = measured.memory["ours"]
        ratio = memory["mapped_peak"] / memory["peak"]
        rows.append(Row("no budget set: mapped peak / occupied peak", ratio, at_most=1.03))
    for name, at_most in (("ours_75", 1.35), ("ours_50", 1.60)):
        if name in have:
            rows += budget_rows(measured, name, at_most)
    if {"ours_50", "save_on_cpu"} <= have:
        slower = ratio_in_turn(measured.wall_ms["save_on_cpu"], measured.wall_ms["ours_50"])
        rows.append(Row("save_on_cpu step time / ours at 50 %", slower, at_least=2.3))
    return rows


def budget_rows(measured: Measured, name: str, at_most: float) -> list[Row]:
    label = f"budget {SHARES[name]:.0%} of the activation memory"
    stats = measured.stats_after[name]
    over = max(0, stats["mapped_peak"] - measured.budgets[name]["high"], stats["overshoot_bytes"])
    waits = measured.gained(name, "host_waits")
    rows = [Row(f"{label}: bytes over high", over, at_most=0)]
    if "native" in measured.wall_ms:
        ratio = ratio_to_native(measured, name)
        rows.append(Row(f"{label}: step time / native", ratio, at_most=at_most))
    return [*rows, Row(f"{label}: host waits in steady state", waits, at_most=0)]


def allocation_row(measured: Measured) -> Row:
    """The worst size's ratio of medians; each reading is a p50 of many."""

    def median_us(name: str, size: int) -> float:
        return statistics.median(reading[str(size)] for reading in measured.allocation_us[name])

    worst = max(median_us("ours", size) / median_us("native", size) for size in ALLOCATION_SIZES)
    sizes = ", ".join(f"{size >> 10} KiB" for size in ALLOCATION_SIZES)
    return Row(f"allocation + free, hit, p50 / torch's own (worst of {sizes})", worst, at_most=1.0)


def ratio_to_native(measured: Measured, name: str) -> float:
    return ratio_in_turn(measured.wall_ms[name], measured.wall_ms["native"])


def summary(measured: Measured, lead_steps: int) -> dict[str, dict[str, float]]:
    """Medians over all timed steps, and what moved per step."""
    found: dict[str, dict[str, float]] = {}
    for name, rounds in measured.wall_ms.items():
        steps = sum(len(one) + lead_steps for one in rounds)
        found[name] = {
            key: round(
                statistics.median(ms for one in getattr(measured, key)[name] for ms in one), 2
            )
            for key in SAMPLES
        }
        if measured.stats_after[name]:
            for counter in ("evicted_bytes", "restored_bytes"):
                gib = measured.gained(name, counter) / steps / GIB
                found[name][counter.replace("bytes", "gib_per_step")] = round(gib, 3)
            for counter in ("host_waits", "prefetch_hits", "prefetch_lates", "stall_count"):
                found[name][counter] = measured.gained(name, counter)
    return found


def main(argv: list[str] | None = None) -> int:
    """0: measured and written, whether or not every row holds; 1: a worker failed."""
    options = parse(argv)
    refuse_without_gpu("main_job", options.simulated)
    names = options.only.split(",") if options.only else list(CONFIGURATIONS)
    if any(name in SHARES for name in names) and "ours" not in names:
        names.insert(0, "ours")  # budgets are shares of what it measures
    began = time.perf_counter()
    run = Run(job_of(options))
    try:
        run.start(names)
        run.warm_up()
        run.rounds()
    except WorkerError as error:
        print(f"main_job: {error}", file=sys.stderr)
        return 1
    finally:
        run.close()
    rows = rows_of(run.measured)
    result = {
        "device": run.place["device"],
        "torch": run.place["torch"],
        "driver": driver_version(),
        "job": {**dataclasses.asdict(run.job), "parameters": run.place["parameters"]},
        "seconds": round(time.perf_counter() - began, 1),
        "rows": [row.as_dict() for row in rows],
        "summary": summary(run.measured, run.job.lead_steps),
        "raw": dataclasses.asdict(run.measured),
    }
    for name, values in result["summary"].items():
        print(f"{name:<12} {values}")
    report(rows, result, "main-job.json", options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
