"""What transfers cost: budgets against the free window and the bound, pinned memory, the link.

    python benchmarks/transfers.py [--quick] [--simulated] [--only gpt,long,adapters,pinned,first]

The GPT of main_job.py; with sequence 32768 and 6 layers; and a stack of low-rank adapters beside
frozen layers that saves 636 storages of 0.9 MB. Sections, all in one run:

gpt       budgets of 75 % and 50 % of the activation memory, and one that needs 80 % of the free
          window; a foreign copy of 64 KiB to the GPU beside backward
long      sequence 32768, a budget of 50 %
adapters  a budget that 422 of the 636 storages must leave
first     fresh processes: warm-up steps without a budget, then the first step inside one
pinned    fresh processes: from the creation of a pool to 4 GiB of pinned memory

need = peak - high, the bytes that must leave; free window = link bytes/s x forward time;
bound = max(Tf, need / B) + max(Tb, need / B). Forward and backward times (on the device's clock)
and the link are measured in the same run, with plain torch. Configurations take turns in every
round, in an order that rotates, once no other plan is tried; a turn begins with steps that are not
timed, since the GPU lowers its clocks in the first half second of load; a ratio is the median over
the rounds of the ratio inside a round. Losses and gradient norms must agree with plain torch's, or
nothing is claimed and the exit code is 1. Writes benchmarks/results/transfers.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

import harness
from harness import (
    Row,
    Worker,
    WorkerError,
    ask_all,
    close_all,
    driver_version,
    refuse_without_gpu,
    report,
)
from measures import (
    GIB,
    Budget,
    Link,
    agree,
    bound_ms,
    budget_of_need,
    budget_of_share,
    ratio_in_turn,
    window_bytes,
)
from shapes import (
    ADAPTERS,
    ADAPTERS_EVICTED,
    ADAPTERS_SAVED_BYTES,
    GPT_8K,
    GPT_32K,
    TINY_ADAPTERS,
    TINY_GPT,
    Shape,
)

SECTIONS = ("gpt", "long", "adapters", "first", "pinned")
WINDOW_SHARE = 0.8
LOSS_TOLERANCE = 1e-3  # relative; bf16 has 8 bits
GRADIENT_TOLERANCE = 1e-2  # backward's atomic sums have no fixed order
SAMPLES = ("wall_ms", "forward_ms", "backward_ms")


@dataclasses.dataclass(frozen=True)
class Pace(harness.Pace):
    """Beside that, what happens once in a process, and steps beside foreign copies."""

    fresh: int  # processes, for what happens once in each
    foreign_steps: int


FULL = Pace(rounds=5, steps=4, lead_steps=2, lead_seconds=0.6, fresh=3, foreign_steps=12)
QUICK = Pace(rounds=2, steps=3, lead_steps=2, lead_seconds=0.6, fresh=1, foreign_steps=6)
TINY = Pace(rounds=1, steps=2, lead_steps=1, lead_seconds=0, fresh=1, foreign_steps=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model under budgets, beside plain torch. Budgets by name, as a share, or by their need."""

    model: str
    shape: Shape
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    window_share: float | None = None  # the budget "window": this share of the free window leaves
    need_share: float | None = None  # the budget "need": this share of `need_of` bytes leaves
    need_of: int = 0
    foreign: bool = False  # beside the tightest budget
    short: float = 1  # how many times more steps a turn has, where a step is short


@dataclasses.dataclass
class Measured:
    """Raw readings of one case. Lists by configuration hold one list of steps per round."""

    memory: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    budgets: dict[str, Budget] = dataclasses.field(default_factory=dict)
    links: list[Link] = dataclasses.field(default_factory=list)
    saved_storages: int = 0
    wall_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    forward_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    backward_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    gained: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    foreign_us: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def link(self) -> Link:
        """The median of what was measured."""
        medians = (statistics.median(getattr(x, way) for x in self.links) for way in ("d2h", "h2d"))
        return Link(*medians)

    def median_ms(self, name: str, sample: str = "wall_ms") -> float:
        rounds: list[list[float]] = getattr(self, sample)[name]
        return statistics.median(ms for one in rounds for ms in one)

    def need(self, name: str) -> int:
        """Bytes that must leave for the budget to hold."""
        return int(self.memory["unbudgeted"]["peak"]) - self.budgets[name].high

    def per_step(self, name: str, counter: str) -> float:
        """How much a counter rose per timed step."""
        return self.gained[name][counter] / sum(len(one) for one in self.wall_ms[name])

    def bounds_ms(self, name: str) -> list[list[float]]:
        """The bound in each round, of plain torch's times and the link in that round."""
        return [
            [bound_ms(self.need(name), link, statistics.median(tf), statistics.median(tb))]
            for link, tf, tb in zip(
                self.links, self.forward_ms["native"], self.backward_ms["native"], strict=True
            )
        ]

    def bound_ratio(self, name: str) -> float:
        return ratio_in_turn(self.wall_ms[name], self.bounds_ms(name))

    def native_ratio(self, name: str) -> float:
        return ratio_in_turn(self.wall_ms[name], self.wall_ms["native"])


# --- Measuring


class Run:
    """Worker processes, which all start at once: importing torch takes longer than measuring."""

    def __init__(self, pace: Pace, simulated: bool) -> None:
        self.pace = pace
        self.simulated = simulated
        self.place: dict[str, Any] = {}
        self._all: list[Worker] = []

    def worker(self, name: str, ours: bool, model: str, shape: Shape) -> Worker:
        settings = {"ours": ours, "model": model, "shape": shape, "simulated": self.simulated}
        self._all.append(Worker(name, settings))
        return self._all[-1]

    def close(self) -> None:
        close_all(self._all)


class CaseRun:
    """One case's workers and what they measured: plain torch, and one process per budget."""

    def __init__(self, run: Run, case: Case) -> None:
        self.run = run
        self.case = case
        self.measured = Measured()
        self.budgeted = list(case.shares)
        if case.window_share is not None:
            self.budgeted.append("window")
        if case.need_share is not None:
            self.budgeted.append("need")
        self.workers = {
            name: run.worker(f"{case.model} {name}", name != "native", case.model, case.shape)
            for name in ("native", *self.budgeted)
        }

    def measure(self) -> None:
        self.run.place = ask_all(list(self.workers.values()), "build")[0]
        self._warm_up()
        for at in range(self.run.pace.rounds):
            names = list(self.workers)
            at %= len(names)
            self.measured.links.append(Link(**self.workers["native"].ask("link")))
            for name in names[at:] + names[:at]:
                self._turn(name)
        if self.case.foreign:
            for name in ("native", self.budgeted[0]):
                reply = self.workers[name].ask(
                    "foreign", mode=name, count=self.run.pace.foreign_steps
                )
                self.measured.foreign_us[name] = reply

    def close(self) -> None:
        close_all(self.workers.values())

    def _warm_up(self) -> None:
        """Plain steps, from which the budgets follow; then steps inside each budget."""
        native = self.workers["native"]
        pace = self.run.pace
        warm = native.ask("steps", mode="native", count=3, lead=2, lead_seconds=pace.lead_seconds)
        window = window_bytes(Link(**native.ask("link")), statistics.median(warm["forward_ms"]))
        self.measured.memory["native"] = native.ask("memory", mode="native")
        first = self.workers[self.budgeted[0]]
        first.ask("steps", mode="default", count=2)
        self.measured.saved_storages = first.ask("saved", mode="default")["records"]
        memory = first.ask("memory", mode="default")
        self.measured.memory["unbudgeted"] = memory
        self.measured.budgets = self._budgets(memory["start"], memory["peak"], window)
        first.ask("empty_cache")
        for name, budget in self.measured.budgets.items():
            worker = self.workers[name]
            worker.ask("budgets", budgets={name: dataclasses.astuple(budget)})
            worker.ask("until_settled", mode=name)
            self.measured.memory[name] = worker.ask("memory", mode=name)
            worker.ask("empty_cache")

    def _budgets(self, start: int, peak: int, window: float) -> dict[str, Budget]:
        case = self.case
        found = {name: budget_of_share(start, peak, share) for name, share in case.shares.items()}
        if case.window_share is not None:
            found["window"] = budget_of_need(start, peak, case.window_share * window)
        if case.need_share is not None:
            found["need"] = budget_of_need(start, peak, case.need_share * case.need_of)
        return found

    def _turn(self, name: str) -> None:
        pace = self.run.pace
        count = round(pace.steps * self.case.short)
        reply = self.workers[name].ask("steps", mode=name, count=count, **pace.lead())
        for sample in SAMPLES:
            getattr(self.measured, sample).setdefault(name, []).append(reply[sample])
        self.measured.losses.setdefault(name, []).extend(reply["loss"])
        total = self.measured.gained.setdefault(name, {})
        for counter, value in reply["gained"].items():
            total[counter] = total.get(counter, 0) + value
        self.measured.stats[name] = reply["stats"]


class FirstSteps:
    """Fresh processes, their pool made first of all: the first step inside it, and steady ones."""

    def __init__(self, run: Run, model: str, shape: Shape) -> None:
        self.run = run
        self.workers = [
            run.worker(f"first {at}", True, model, shape) for at in range(run.pace.fresh)
        ]
        self.first_ms: list[float] = []
        self.steady_ms: list[list[float]] = []

    def measure(self, budget: Budget) -> None:
        steps = max(3, self.run.pace.steps)
        for worker in self.workers:
            worker.ask("build", budgets={"budget": dataclasses.astuple(budget)})
            # What is mapped without a budget goes back, as if this much had never been there.
            lead = {"lead": 3, "lead_seconds": self.run.pace.lead_seconds}
            worker.ask("steps", mode="plain", count=1, **lead)
            worker.ask("empty_cache")
            first = worker.ask("steps", mode="budget", count=1)
            steady = worker.ask("steps", mode="budget", count=2 * steps, lead=2)
            self.first_ms += first["wall_ms"]
            self.steady_ms.append(steady["wall_ms"])
            worker.close()

    def ratio(self) -> float:
        """The median over the processes of (first step / median steady step)."""
        pairs = zip(self.first_ms, self.steady_ms, strict=True)
        return statistics.median(first / statistics.median(steady) for first, steady in pairs)


class PinnedPools:
    """Fresh processes in which a pool of 4 GiB is made."""

    def __init__(self, run: Run) -> None:
        self.workers = [run.worker(f"pinned {at}", True, "gpt", {}) for at in range(run.pace.fresh)]
        self.readings: list[dict[str, Any]] = []

    def measure(self) -> None:
        for worker in self.workers:
            self.readings.append(worker.ask("pinned"))
            worker.close()

    def gib_per_second(self) -> float:
        return float(
            statistics.median(one["bytes"] / GIB / one["seconds"] for one in self.readings)
        )


# --- What is claimed


def gpt_rows(measured: Measured) -> list[Row]:
    need = measured.need("window") / GIB
    window = window_bytes(measured.link, measured.median_ms("native", "forward_ms")) / GIB
    claim = f"budget that needs 80 % of the free window ({need:.2f} of {window:.2f} GiB)"
    evicted = max(
        measured.per_step(name, "evicted_bytes") / measured.need(name) for name in ("75", "50")
    )
    names = ("window", "75")
    ratio, share75 = (measured.native_ratio(name) for name in names)
    return [
        Row(f"{claim}: step time / native", ratio, at_most=1.01),
        Row("budget 75 % of the activation memory: step time / native", share75, at_most=1.01),
        Row("budget 50 %: step time / the bound", measured.bound_ratio("50"), at_most=1.04),
        Row("bytes evicted / (peak - high), worse of 75 % and 50 %", evicted, at_most=1.03),
    ]


def foreign_row(measured: Measured) -> Row:
    own = measured.foreign_us["50"]
    plain = measured.foreign_us["native"]
    claim = (
        "foreign 64 KiB H2D while restoring at 50 %: p99 / idle p99 in the same process "
        f"({own['backward']['p99']:.0f} / {own['idle']['p99']:.0f} us; plain torch's backward "
        f"{plain['backward']['p99']:.0f}, idle {plain['idle']['p99']:.0f})"
    )
    return Row(claim, own["backward"]["p99"] / own["idle"]["p99"], at_most=1.5)


def adapters_row(measured: Measured) -> Row:
    evictions = sum(measured.per_step("need", f"{how}_evictions") for how in ("clean", "dirty"))
    mebibytes = measured.per_step("need", "evicted_bytes") / (1 << 20)
    claim = (
        f"0.9 MB case, {evictions:.0f} storages ({mebibytes:.0f} MiB) evicted of "
        f"{measured.saved_storages} saved: step time / native"
    )
    return Row(claim, measured.native_ratio("need"), at_most=1.02)


def late_row(cases: dict[str, Measured]) -> Row:
    """Every restore that compute waited for, prefetched or not."""
    late = sum(
        gained["stall_count"]
        for measured in cases.values()
        for name, gained in measured.gained.items()
        if name != "native"
    )
    return Row("late restores in steady state, all budgets", late, at_most=0)


def disagreements(cases: dict[str, Measured]) -> list[str]:
    """Where losses or gradients are not finite, or not plain torch's."""
    found = []
    for case, measured in cases.items():
        losses = [loss for one in measured.losses.values() for loss in one]
        norms = [one["gradient_norm"] for one in measured.memory.values()]
        if losses and not agree(losses, LOSS_TOLERANCE):
            found.append(f"{case}: losses differ: {measured.losses}")
        if norms and not agree(norms, GRADIENT_TOLERANCE):
            found.append(f"{case}: gradient norms differ: {norms}")
    return found


def summary(measured: Measured) -> dict[str, dict[str, float]]:
    """Medians over all timed steps, and what happened per step."""
    found: dict[str, dict[str, float]] = {}
    for name in measured.wall_ms:
        found[name] = {sample: round(measured.median_ms(name, sample), 2) for sample in SAMPLES}
        if name != "native":
            found[name]["bound_ms"] = round(
                statistics.median(ms for one in measured.bounds_ms(name) for ms in one), 2
            )
            found[name]["need_gib"] = round(measured.need(name) / GIB, 3)
            over = measured.memory[name]["mapped_peak"] - measured.budgets[name].high
            found[name]["over_high_bytes"] = max(0, over)
            for counter in ("evicted_bytes", "restored_bytes"):
                gib = measured.per_step(name, counter) / GIB
                found[name][counter.replace("bytes", "gib_per_step")] = round(gib, 3)
            for counter in ("host_waits", "prefetch_hits", "prefetch_lates", "stall_count"):
                found[name][counter] = measured.gained[name][counter]
    return found


# --- The run


def cases(simulated: bool) -> dict[str, Case]:
    tiny = simulated
    adapters, saved = (TINY_ADAPTERS, 65536) if tiny else (ADAPTERS, ADAPTERS_SAVED_BYTES)
    saved_bytes = saved * 2 * (adapters["blocks"] + 1)
    return {
        "gpt": Case(
            *("gpt", TINY_GPT if tiny else GPT_8K),
            shares={"50": 0.5, "75": 0.75},
            window_share=WINDOW_SHARE,
            foreign=True,
        ),
        "long": Case("gpt", TINY_GPT if tiny else GPT_32K, shares={"50": 0.5}, short=0.75),
        "adapters": Case(
            *("adapters", adapters), need_share=ADAPTERS_EVICTED, need_of=saved_bytes, short=4
        ),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and processes")
    parser.add_argument("--simulated", action="store_true", help="tiny models, no GPU")
    parser.add_argument("--only", help="some of " + ",".join(SECTIONS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    options = parser.parse_args(argv)
    options.sections = options.only.split(",") if options.only else list(SECTIONS)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"--only: no section {sorted(unknown)[0]!r}")
    return options


class Transfers:
    """All sections of a run, each tried though another failed."""

    def __init__(self, pace: Pace, simulated: bool, sections: list[str]) -> None:
        self.run = Run(pace, simulated)
        wanted = set(sections) | ({"gpt"} if "first" in sections else set())  # its budget of 50 %
        self.cases = {
            name: CaseRun(self.run, case)
            for name, case in cases(simulated).items()
            if name in wanted
        }
        self.pinned = PinnedPools(self.run) if "pinned" in wanted else None
        shape = TINY_GPT if simulated else GPT_8K
        self.first = FirstSteps(self.run, "gpt", shape) if "first" in wanted else None
        self.failed: dict[str, str] = {}

    def measure(self) -> None:
        for name, case in self.cases.items():
            self._try(name, case.measure)
            case.close()
        if self.first is not None and "50" in (budgets := self._gpt.budgets):
            first = self.first
            self._try("first", lambda: first.measure(budgets["50"]))
        if self.pinned is not None:  # last: nothing else runs beside it any more
            self._try("pinned", self.pinned.measure)

    def rows(self) -> list[Row]:
        """Those of the sections that were measured, in the order of the claims."""
        done = {name: run.measured for name, run in self.cases.items() if name not in self.failed}
        rows = gpt_rows(done["gpt"]) if "gpt" in done else []
        if "long" in done:
            ratio = done["long"].native_ratio("50")
            rows.append(Row("seq 32768, 6 layers, 50 %: step time / native", ratio, at_most=1.08))
        if self.first is not None and self.first.steady_ms:
            claim = "first step inside the 50 % budget / a steady one"
            rows.append(Row(claim, self.first.ratio(), at_most=1.5))
        if self.pinned is not None and self.pinned.readings:
            ready = min(one["bytes"] / one["target"] for one in self.pinned.readings)
            short = "" if ready == 1 else f" ({ready:.0%} of it after the time-out)"
            rate = self.pinned.gib_per_second()
            rows.append(Row(f"4 GiB pinned pool ready, GiB/s{short}", rate, at_least=12))
        if "adapters" in done:
            rows.append(adapters_row(done["adapters"]))
        if done:
            rows.append(late_row(done))
        if "gpt" in done:
            rows.append(foreign_row(done["gpt"]))
        return rows

    @property
    def measured(self) -> dict[str, Measured]:
        return {name: run.measured for name, run in self.cases.items()}

    @property
    def _gpt(self) -> Measured:
        return self.cases["gpt"].measured

    def _try(self, section: str, measure: Any) -> None:
        began = time.perf_counter()
        try:
            measure()
        except WorkerError as error:
            self.failed[section] = str(error)
            print(f"transfers: {section}: {error}", file=sys.stderr)
        print(f"{section}: {time.perf_counter() - began:.1f} s", flush=True)


def main(argv: list[str] | None = None) -> int:
    """0: measured, whether or not every row holds; 1: a section failed or the results differ."""
    options = parse(argv)
    refuse_without_gpu("transfers", options.simulated)
    pace = TINY if options.simulated else QUICK if options.quick else FULL
    if options.rounds:
        pace = dataclasses.replace(pace, rounds=options.rounds)
    began = time.perf_counter()
    transfers = Transfers(pace, options.simulated, options.sections)
    try:
        transfers.measure()
    finally:
        transfers.run.close()
    wrong = disagreements(transfers.measured)
    rows = [] if wrong else transfers.rows()
    first, pinned = transfers.first, transfers.pinned
    done = {name: one for name, one in transfers.measured.items() if name not in transfers.failed}
    result = {
        "device": transfers.run.place.get("device", "not asked"),
        "torch": transfers.run.place.get("torch", "not asked"),
        "driver": driver_version(),
        "pace": dataclasses.asdict(pace),
        "seconds": round(time.perf_counter() - began, 1),
        "rows": [row.as_dict() for row in rows],
        "failed": transfers.failed,
        "disagreements": wrong,
        "summary": {name: summary(one) for name, one in done.items()},
        "raw": {
            **{name: dataclasses.asdict(one) for name, one in transfers.measured.items()},
            "first": {"first_ms": first.first_ms, "steady_ms": first.steady_ms} if first else {},
            "pinned": pinned.readings if pinned else [],
        },
    }
    for name, values in result["summary"].items():
        for configuration, found in values.items():
            print(f"{name:<9} {configuration:<7} {found}")
    for line in wrong:
        print(f"transfers: {line}", file=sys.stderr)
    report(rows, result, "transfers.json", options)
    return 1 if wrong or transfers.failed else 0


if __name__ == "__main__":
    sys.exit(main())
