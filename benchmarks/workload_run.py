"""Measuring one workload: its processes, which take turns, and what they said.

One process has torch's allocator, in most with expandable segments: plain torch, checkpoints, and
ours in mode "native", one after the other, its cache emptied in between. Another has the process
allocator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness
from harness import CUBLAS, Worker, WorkerError, close_all
from measures import Budget, Link, bound_ms, budget_of_share
from workload_cases import FREE, SHARES, Case

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
COMPARED_STEPS = 2
WARM_STEPS = 3  # after the first inside a pool: they learn, and pin memory
MOST_STEPS = 8  # of a turn
LOOKS = ("calls", "samples", "gaps")  # in this order: torch's profiler stays in the process
UNSETTLED_STEPS = 40  # instead of `settling`: of varying shapes


@dataclasses.dataclass(frozen=True)
class Pace(harness.Pace):
    """`lead_seconds`: as steps, of plain torch. `seconds`: a turn of short steps has more of them.

    `checkpoint_rounds`: it is only looked at beside, so it need not be in all. `settling`: steps in
    a budget, at most, in which plans are tried out before any is timed.
    """

    seconds: float
    checkpoint_rounds: int
    settling: int


@dataclasses.dataclass
class Measured:
    """Raw readings by configuration: "plain", "checkpoint", or a mode and a budget, "native 75".

    `turns`: by round. `first`: the first step inside a budget, a later one of the same data, and
    one of it without a budget that finds no memory mapped either ("cold").
    """

    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    budgets: dict[str, Budget] = dataclasses.field(default_factory=dict)
    links: dict[int, Link] = dataclasses.field(default_factory=dict)
    first: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    settling: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    turns: dict[str, dict[int, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    calls: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    gaps: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    digests: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    triggers: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def ours(self) -> list[str]:
        """The measured configurations with a budget."""
        return [key for key in self.turns if " " in key]

    def step_ms(self, case: Case, key: str) -> dict[int, float]:
        """By round: the mean step, or all of them together where each is another.

        Not the median: on a GPU that its power limits, longer and shorter steps take turns.
        """
        of = sum if case.varying else statistics.fmean
        return {at: of(one["ms"] for one in turn["steps"]) for at, turn in self.turns[key].items()}

    def bounds_ms(self, case: Case, budget: str) -> dict[int, float]:
        """By round: the bound, of plain torch's steps and the link in that round."""
        return {
            at: self._bound(case, budget, self.links[at], turn["steps"])
            for at, turn in self.turns["plain"].items()
        }

    def larger_ms(self, case: Case, budget: str) -> dict[int, float]:
        """By round: plain torch's step or the bound, whichever is more."""
        plain, bounds = self.step_ms(case, "plain"), self.bounds_ms(case, budget)
        return {at: max(plain[at], bounds[at]) for at in plain}

    def need(self, case: Case, budget: str, peak: int) -> int:
        """Bytes that must leave in a step with this peak. FREE is far above all."""
        if budget == FREE:
            return 0
        return max(0, peak - self.budgets[budget].high) * case.peaks

    def _bound(self, case: Case, budget: str, link: Link, steps: list[dict[str, float]]) -> float:
        if case.varying:
            needs = [self.need(case, budget, int(one["peak"])) for one in steps]
            return sum(_bound_of(case, n, link, one) for n, one in zip(needs, steps, strict=True))
        mean = {
            key: statistics.fmean(one.get(key, 0.0) for one in steps)
            for key in ("ms", "forward_ms", "backward_ms")
        }
        need = self.need(case, budget, self.memory["peak"])
        return _bound_of(case, need, link, mean)


def _bound_of(case: Case, need: int, link: Link, step: dict[str, float]) -> float:
    """measures.bound_ms; what is neither forward nor backward is added. Both ways at once: the
    longest of computing, all copies out, all copies in."""
    if case.both_ways:
        return max(step["ms"], need / link.d2h * 1e3, need / link.h2d * 1e3)
    forward, backward = step.get("forward_ms", 0.0), step.get("backward_ms", 0.0)
    return bound_ms(need, link, forward, backward) + step["ms"] - forward - backward


def ratio(mine: dict[int, float], base: dict[int, float]) -> float:
    """The median of the ratios inside a round, of the rounds that both have."""
    return statistics.median(mine[at] / base[at] for at in mine if at in base)


class CaseRun:
    """One workload's processes. They start at once, and open the GPU when told to build."""

    def __init__(self, name: str, case: Case, pace: Pace, simulated: bool) -> None:
        self.name, self.case, self.pace, self.simulated = name, case, pace, simulated
        self.measured = Measured()
        self.place: dict[str, Any] = {}
        self._built = False
        self._lead = pace.lead_steps
        self._count = pace.steps
        self._workers = {"torch": self._start("torch"), "allocator": self._start("allocator")}

    def start_building(self) -> None:
        """The models; their replies are read by `measure`."""
        self._built = True
        for who, worker in self._workers.items():
            self._try(who, worker.send, "build")

    def measure(self, before_digests: Callable[[], None]) -> None:
        """All of it. `before_digests` is called when nothing is timed any more.

        WorkerError where there is no plain torch to compare with.
        """
        if not self._built:
            self.start_building()
        for who, worker in list(self._workers.items()):
            self._try(who, self._receive_place, worker)
        self._prepare()
        keys = ["plain", *(["checkpoint"] if self.case.checkpoint else []), *self._ours()]
        for key in self._ours():
            self._try(key, self._first, key)
        for at in range(self.pace.rounds * self.case.shorter):
            self.measured.links[at] = Link(**self._worker("plain").ask("link"))
            first = at % len(keys)
            for key in keys[first:] + keys[:first]:
                if key != "checkpoint" or at < self.pace.checkpoint_rounds * self.case.shorter:
                    self._try(key, self._turn, key, at)
        looked_at = [key for key in keys if key != "checkpoint"]
        for look in LOOKS:
            for key in looked_at:
                self._try(key, self._look, key, look)
        before_digests()
        self._digests(looked_at)

    def close(self) -> None:
        close_all(self._workers.values())

    # --- Parts

    def _start(self, who: str) -> Worker:
        case, simulated = self.case, self.simulated
        mode = "native" if who == "torch" and not simulated else None
        settings = {
            "ours": who == "allocator" or not simulated,
            "model": case.model,
            "shape": case.tiny if simulated else case.shape,
            "simulated": simulated,
            "mode": mode,
            "deterministic": case.deterministic,
            "ranks": case.ranks,
            "marked": case.marked,
        }
        environment = {**CUBLAS, **(EXPANDABLE if mode and case.expandable else {})}
        return Worker(f"{self.name} {who}", settings, environment, "workload_worker.py")

    def _ours(self) -> list[str]:
        modes = ["allocator"] if self.simulated else ["allocator", "native"]
        return [f"{mode} {budget}" for mode in modes for budget in self.case.bars]

    def _receive_place(self, worker: Worker) -> None:
        try:
            self.place.update(worker.receive())
        except WorkerError:
            if not worker.alive:
                raise
            # The workload before it may have left too little of a GPU of 80 GB. It is gone by now.
            self.place.update(worker.ask("build"))

    def _worker(self, key: str) -> Worker:
        """The process of a configuration."""
        who = "allocator" if key.startswith("allocator") else "torch"
        if who not in self._workers:
            raise WorkerError(f"{self.name} {who}: its process is gone")
        return self._workers[who]

    def _try(self, key: str, part: Callable[..., object], *arguments: Any) -> None:
        """`part` of a configuration that has not failed; one that fails leaves the run.

        A process that ended takes all its configurations along. What was timed before stays, but
        for a configuration that failed in its turn. Without plain torch's there is nothing to say.
        """
        if key in self.measured.failed:
            return
        try:
            part(*arguments)
        except WorkerError as error:
            self.measured.failed[key] = str(error)
            print(f"workloads: {self.name} {key}: {error}", file=sys.stderr)
            untimed = (self._look, self._send_digests, self._receive_digests)
            if part not in untimed:
                self.measured.turns.pop(key, None)
            for who, worker in list(self._workers.items()):
                with contextlib.suppress(OSError):
                    if not worker.alive:
                        self._workers.pop(who).close()
            if key in ("plain", "torch") and part not in untimed:
                raise

    def _prepare(self) -> None:
        """Steps without a budget, of both, from which budgets and the pace follow."""
        torch, pace = self._worker("plain"), self.pace
        plain_ms = min(torch.ask("single", mode="plain", number=at)["wall_ms"] for at in (1, 2))
        self._lead = max(pace.lead_steps, min(6, math.ceil(pace.lead_seconds * 1e3 / plain_ms)))
        steps = round(pace.seconds * 1e3 / plain_ms)
        self._count = max(1, max(pace.steps, min(MOST_STEPS, steps)) // self.case.shorter)
        self._try("allocator", self._prepare_allocator)
        if not self.measured.memory:
            self.measured.memory = torch.ask("memory", mode="plain")
        start, peak = self.measured.memory["start"], self.measured.memory["peak"]
        for budget in self.case.bars:
            if budget != FREE:
                made = budget_of_share(start, peak, SHARES[budget])
                self.measured.budgets[budget] = made
        pools = {
            budget: dataclasses.astuple(self.measured.budgets[budget]) if budget != FREE else None
            for budget in self.case.bars
        }
        for key in {key.split()[0] for key in self._ours()}:
            self._try(key, self._ask_for_pools, key, pools)

    def _prepare_allocator(self) -> None:
        """Its books say what the budgets are shares of, as in modes.py."""
        worker = self._worker("allocator")
        for number in (1, 2):
            worker.ask("single", mode="plain", number=number)
        self.measured.memory = worker.ask("memory", mode="plain")

    def _ask_for_pools(self, key: str, pools: dict[str, Any]) -> None:
        self._worker(key).ask("budgets", budgets=pools)

    def _first(self, key: str) -> None:
        """The first step inside the budget, others that learn, and that step once more."""
        worker, budget = self._worker(key), key.split()[1]
        worker.ask("empty_cache")
        # As before training: pinning has begun. And what a step without a budget takes that, like
        # the first inside one, finds no memory that is mapped.
        cold = worker.ask("single", mode="plain", number=0)
        first = worker.ask("single", mode=budget, number=0)
        for number in range(1, 1 + WARM_STEPS):
            worker.ask("single", mode=budget, number=number)
        later = worker.ask("single", mode=budget, number=0)
        self.measured.first[key] = {"first": first, "later": later, "cold": cold}
        if self.pace.settling and budget != FREE:
            varying = self.case.varying
            most = min(self.pace.settling, UNSETTLED_STEPS) if varying else self.pace.settling
            self.measured.settling[key] = worker.ask("settle", mode=budget, number=10, most=most)

    def _turn(self, key: str, at: int) -> None:
        number = 10 + at * self._count
        reply = self._worker(key).ask(
            "turn",
            mode=_mode(key),
            number=number,
            count=self._count,
            lead=self._lead if " " in key else max(1, self._lead - 1),
            peaks=self.case.varying,
        )
        self.measured.turns.setdefault(key, {})[at] = reply

    def _look(self, key: str, look: str) -> None:
        lead = 1 if key == "plain" else 2
        reply = self._worker(key).ask(look, mode=_mode(key), number=3, lead=lead)
        getattr(self.measured, look)[key] = reply

    def _digests(self, keys: list[str]) -> None:
        """Of each configuration; the two processes beside each other, since nothing is timed."""
        mine = [key for key in keys if key.startswith("allocator")]
        pairs = itertools.zip_longest([key for key in keys if key not in mine], mine)
        for pair in pairs:
            asked = [key for key in pair if key is not None]
            for key in asked:
                self._try(key, self._send_digests, key)
            for key in asked:
                self._try(key, self._receive_digests, key)
        if not self.simulated:
            self._try("native", self._trigger)

    def _send_digests(self, key: str) -> None:
        self._worker(key).send("digests", mode=_mode(key), count=COMPARED_STEPS)

    def _receive_digests(self, key: str) -> None:
        self.measured.digests[key] = self._worker(key).receive()

    def _trigger(self) -> None:
        self.measured.triggers["native"] = self._worker("native").ask("trigger")["states"]


def _mode(key: str) -> str:
    """The worker's word for a configuration."""
    return key.split()[-1]
