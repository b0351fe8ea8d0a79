"""The modes beside each other: the process allocator, and "native" and "mempool" without it.

    python benchmarks/modes.py [--quick] [--simulated] [--only free,75,50]

The GPT of main_job.py, every configuration in its own process; a phase's processes are there at
once and take about 120 GiB of GPU memory together. Phases, all in one run:

free   pool() at its defaults, far above the peak: step time and peak reserved beside plain torch's
75     a budget of 75 % of the activation memory
50     a budget of 50 %

activation memory = occupied peak without a budget - occupied at the start of a step, of the process
allocator. Configurations beside plain torch, the process allocator, "native" and "mempool":
mempool_backward, the pool around backward too, on the thread of forward; mempool_on_oom, a MemPool
made with use_on_oom=True; native_expandable, with PyTorch's expandable segments; native_no_trigger,
acting at the next pack or unpack.

The first step of a process is inside its pool already: the learning step. Inside a budget steps
follow until no other plan is tried. Configurations that are compared by time take turns in every
round, in an order that rotates; a turn begins with steps that are not timed; a ratio is the median
over the rounds of the ratio inside a round. The others run alone after them. A peak is that of the
whole life of the process, the learning step included.
Last, torch is made deterministic, and losses and gradients must be plain torch's bit by bit: where
they are not, a row says so, and the exit code is 1. Writes benchmarks/results/modes.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import (
    CUBLAS,
    Pace,
    Row,
    Worker,
    WorkerError,
    close_all,
    driver_version,
    refuse_without_gpu,
    report,
)
from measures import GIB, Budget, budget_of_share, ratio_in_turn
from shapes import GPT_8K, TINY_GPT

SHARES = {"75": 0.75, "50": 0.50}
PHASES = ("free", *SHARES)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "torch": {"ours": False},
    "allocator": {"ours": True},
    "native": {"ours": True, "mode": "native"},
    "native_expandable": {"ours": True, "mode": "native"},
    "native_no_trigger": {"ours": True, "mode": "native"},
    "mempool": {"ours": True, "mode": "mempool"},
    "mempool_backward": {"ours": True, "mode": "mempool", "around_backward": True},
    "mempool_on_oom": {"ours": True, "mode": "mempool", "use_on_oom": True},
}
AROUND = {
    "mempool": "mempool around forward",
    "mempool_backward": "mempool around forward and backward",
    "mempool_on_oom": "mempool around forward, use_on_oom",
    "native": "native",
    "native_expandable": "native, expandable segments",
}
SETTINGS = {  # of one configuration
    "native_expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "native_no_trigger": {"STAGEHAND_ALLOC_BUILD": "0"},
}
IN_TURN = {
    "free": ("torch", "allocator", "native", "mempool"),
    "75": ("torch", "allocator", "native", "mempool", "native_no_trigger"),
    "50": ("torch", "allocator", "native", "native_expandable"),
}
ALONE: dict[str, tuple[str, ...]] = {
    "free": ("mempool_backward", "mempool_on_oom"),
    "75": ("mempool_backward", "mempool_on_oom"),
    "50": (),
}
SIMULATED = ("torch", "allocator")  # what can run where there is no GPU
LABELS = {"free": "no pressure", "75": "budget 75 %", "50": "budget 50 %"}
FULL = Pace(rounds=4, steps=4, lead_steps=2, lead_seconds=0.6)
QUICK = Pace(rounds=2, steps=3, lead_steps=1, lead_seconds=0.5)
TINY = Pace(rounds=1, steps=2, lead_steps=1, lead_seconds=0)
WARM_STEPS = 4
COMPARED_STEPS = 2
SAMPLES = ("wall_ms", "forward_ms", "backward_ms")


def key_of(name: str, phase: str) -> str:
    return f"{name} {phase}"


@dataclasses.dataclass
class Measured:
    """Raw readings by configuration and phase, "native 75". Lists hold one list of steps a round.

    `life`: peaks of the process's whole life, by torch's count where it is torch's own allocator,
    and as mapped by our books. `memory`: one steady step with fresh peaks.
    """

    budgets: dict[str, Budget] = dataclasses.field(default_factory=dict)
    wall_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    forward_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    backward_ms: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    learning: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    settling: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    gained: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    life: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    memory: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    digests: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    triggers: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def per_step(self, key: str, counter: str) -> float:
        """How much a counter rose per timed step."""
        return self.gained[key].get(counter, 0) / sum(len(one) for one in self.wall_ms[key])

    def ratio(self, key: str, base: str) -> float:
        return ratio_in_turn(self.wall_ms[key], self.wall_ms[base])

    def over_high(self, key: str) -> int:
        """Bytes over high in planned steps: counted in those that try other plans and in the timed
        ones, seen in the steady one."""
        high = self.budgets[key.split()[1]].high
        counted = self.settling[key]["gained"], self.gained[key]
        over = sum(gained["overshoot_bytes"] for gained in counted)
        return max(0, self.memory[key]["mapped_peak"] - high, over)

    def forget(self, key: str) -> None:
        """Drop what a process that failed had measured."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).pop(key, None)


# --- Measuring


class Run:
    """The workers of one run and what they measured. One that fails leaves the run; it goes on."""

    def __init__(self, pace: Pace, simulated: bool, phases: list[str]) -> None:
        self.pace = pace
        self.simulated = simulated
        self.phases = phases
        self.measured = Measured()
        self.failed: dict[str, str] = {}
        self.place: dict[str, Any] = {}
        self._ended: list[Worker] = []
        # All start at once: importing torch takes longer than measuring. None opens the GPU yet.
        self._workers = {
            key_of(name, phase): self._worker(name, phase)
            for phase in phases
            for name in self._here((*IN_TURN[phase], *ALONE[phase]))
        }

    def measure(self) -> None:
        for phase in self.phases:
            began = time.perf_counter()
            if phase == "free" or phase in self.measured.budgets:
                self._phase(phase)
            else:
                self.failed[phase] = "no budget: the process allocator without one was not measured"
            print(f"{phase}: {time.perf_counter() - began:.1f} s", flush=True)

    def close(self) -> None:
        close_all([*self._workers.values(), *self._ended])

    def _here(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name in SIMULATED or not self.simulated]

    def _worker(self, name: str, phase: str) -> Worker:
        shape = TINY_GPT if self.simulated else GPT_8K
        environment = {**CUBLAS, **SETTINGS.get(name, {})}
        settings = {"model": "gpt", "shape": shape, "simulated": self.simulated}
        return Worker(key_of(name, phase), {**CONFIGURATIONS[name], **settings}, environment)

    def _phase(self, phase: str) -> None:
        in_turn, alone = self._here(IN_TURN[phase]), self._here(ALONE[phase])
        for command in (self._send_build, self._receive_build):  # beside each other
            for name in (*in_turn, *alone):
                self._do(command, name, phase)
        for name in in_turn:
            self._do(self._warm_up, name, phase)
        for at in range(self.pace.rounds):
            at %= len(in_turn)
            for name in in_turn[at:] + in_turn[:at]:
                self._do(self._turn, name, phase)
        for name in in_turn:
            self._do(self._finish, name, phase)
        for name in alone:
            for command in (self._warm_up, self._turn, self._finish):
                self._do(command, name, phase)
        self._close_ended()

    def _do(self, command: Callable[[Worker, str, str], None], name: str, phase: str) -> None:
        """`command` for a configuration that is still in the run."""
        key = key_of(name, phase)
        worker = self._workers.get(key)
        if worker is None:
            return
        try:
            command(worker, name, phase)
        except WorkerError as error:
            self.failed[key] = str(error)
            print(f"modes: {error}", file=sys.stderr)
            self._workers.pop(key).close()
            self.measured.forget(key)

    def _send_build(self, worker: Worker, name: str, phase: str) -> None:
        budget = self.measured.budgets.get(phase) if name != "torch" else None
        worker.send("build", budgets={phase: dataclasses.astuple(budget)} if budget else {})

    def _receive_build(self, worker: Worker, name: str, phase: str) -> None:
        self.place = worker.receive()

    def _warm_up(self, worker: Worker, name: str, phase: str) -> None:
        mode = word_of(name, phase)
        first = worker.ask("steps", mode=mode, count=1)
        learning = {"wall_ms": first["wall_ms"][0], **first["gained"]}
        self.measured.learning[key_of(name, phase)] = learning
        if name == "torch" or phase == "free":
            worker.ask("steps", mode=mode, count=WARM_STEPS)
            return
        settling = worker.ask("until_settled", mode=mode)
        self.measured.settling[key_of(name, phase)] = settling

    def _turn(self, worker: Worker, name: str, phase: str) -> None:
        key, measured = key_of(name, phase), self.measured
        mode = word_of(name, phase)
        reply = worker.ask("steps", mode=mode, count=self.pace.steps, **self.pace.lead())
        for sample in SAMPLES:
            getattr(measured, sample).setdefault(key, []).append(reply[sample])
        total = measured.gained.setdefault(key, {})
        for counter, value in reply["gained"].items():
            total[counter] = total.get(counter, 0) + value
        measured.stats[key] = reply["stats"]

    def _finish(self, worker: Worker, name: str, phase: str) -> None:
        """What is not timed; then the process is told to end."""
        key, measured = key_of(name, phase), self.measured
        mode = word_of(name, phase)
        measured.life[key] = worker.ask("reserved")
        memory = measured.memory[key] = worker.ask("memory", mode=mode)
        measured.digests[key] = worker.ask("digests", mode=mode, count=COMPARED_STEPS)
        if "mode" in CONFIGURATIONS[name]:
            measured.triggers[key] = worker.ask("trigger")["states"]
        if key == key_of("allocator", "free"):
            for budgeted, share in SHARES.items():
                budget = budget_of_share(memory["start"], memory["peak"], share)
                measured.budgets[budgeted] = budget
        worker.hang_up()
        self._ended.append(self._workers.pop(key))

    def _close_ended(self) -> None:
        """Wait until those that are done have ended, as they should."""
        for worker in self._ended:
            if code := worker.close():
                self.failed[worker.name] = f"exit code {code}, after it was measured"
        self._ended.clear()


def word_of(name: str, phase: str) -> str:
    """The worker's word for the configuration's steps."""
    return "plain" if name == "torch" else "default" if phase == "free" else phase


# --- What is claimed


def rows_of(measured: Measured) -> list[Row]:
    """The rows that the measured configurations allow; those without a bar last."""
    rows = no_pressure_rows(measured)
    for phase in SHARES:
        rows += budget_rows(measured, phase)
    if any(key.startswith("native ") for key in measured.digests):
        rows += learning_rows(measured)
    count = len(measured.digests) - sum(key.startswith("torch ") for key in measured.digests)
    if count:
        claim = f"configurations, of {count}, whose losses or gradients are not plain torch's"
        rows.append(Row(claim, len(unlike_torch(measured)), at_most=0))
    return sorted(rows, key=lambda row: row.bar == "reported")


def no_pressure_rows(measured: Measured) -> list[Row]:
    label, rows = LABELS["free"], []
    base = "torch free"
    for name in ("native", "mempool", "allocator"):
        key = key_of(name, "free")
        if {key, base} <= measured.wall_ms.keys():
            bar = 1.01 if name == "native" else None
            claim = f"{label}: step time / plain torch, {AROUND.get(name, name)}"
            rows.append(Row(claim, measured.ratio(key, base), at_most=bar))
    for name, around in AROUND.items():
        key = key_of(name, "free")
        if {key, base} <= measured.life.keys():
            bar = {"native": 1.03, "mempool": 1.05}.get(name)
            ratio = measured.life[key]["peak"] / measured.life[base]["peak"]
            claim = f"{label}: peak reserved of the process / plain torch, {around}"
            rows.append(Row(claim, ratio, at_most=bar))
    return rows


def budget_rows(measured: Measured, phase: str) -> list[Row]:
    label, rows = LABELS[phase], []
    base = key_of("allocator", phase)
    for name in ("native", "native_expandable", "mempool", "native_no_trigger"):
        key = key_of(name, phase)
        if {key, base} <= measured.wall_ms.keys():
            bar = 1.05 if name == "native" else None
            claim = f"{label}: step time / the process allocator, {AROUND.get(name, name)}"
            rows.append(Row(claim, measured.ratio(key, base), at_most=bar))
    forward, native = key_of("mempool", phase), key_of("native", phase)
    if {forward, native} <= measured.wall_ms.keys():
        claim = f"{label}: step time / native's, {AROUND['mempool']}"
        rows.append(Row(claim, measured.ratio(forward, native), at_most=1.05))
    for name in ("native", *SETTINGS):
        key = key_of(name, phase)
        if key in measured.memory:
            bar = 0 if name == "native" else None
            claim = f"{label}: bytes over high in planned steps, {AROUND.get(name, name)}"
            rows.append(Row(claim, measured.over_high(key), at_most=bar))
    for name, around in {"allocator": "allocator", **AROUND}.items():
        key = key_of(name, phase)
        if key in measured.life:
            peak = measured.life[key]["peak"] / measured.budgets[phase].high
            claim = f"{label}: peak reserved of the process / high, {around}"
            rows.append(Row(claim, peak, at_most=1.02 if name == "mempool" else None))
            gib = measured.per_step(key, "evicted_bytes") / GIB
            rows.append(Row(f"{label}: GiB evicted per step, {around}", gib))
    return rows


def learning_rows(measured: Measured) -> list[Row]:
    """How far the first pressured steps of native mode went over high, in largest segments."""
    largest = measured.life.get("torch free", {}).get("largest_segment", 0)
    over = {
        phase: measured.learning[key]["overshoot_bytes"]
        for phase in SHARES
        if (key := key_of("native", phase)) in measured.learning
    }
    if not largest:
        return []
    return [
        Row(
            f"{LABELS[phase]}: bytes over high in the learning step / largest request's segment "
            f"({largest >> 20} MiB), native",
            bytes_over / largest,
            at_most=1,
        )
        for phase, bytes_over in over.items()
    ]


def unlike_torch(measured: Measured) -> list[str]:
    """The configurations with a step whose loss or gradients are not, bit by bit, plain torch's."""
    torchs = [step for key in torch_keys(measured) for step in measured.digests[key]["steps"]]
    return [
        key
        for key, found in measured.digests.items()
        if not torchs
        or any(step != torchs[0] or not math.isfinite(step[0]) for step in found["steps"])
    ]


def torch_keys(measured: Measured) -> list[str]:
    return [key for key in measured.digests if key.startswith("torch ")]


def wrong_of(measured: Measured) -> list[str]:
    """What is not as it must be for the rows to mean what they say."""
    found = [
        f"{key}: losses or gradients differ: {measured.digests[key]['steps']}"
        for key in unlike_torch(measured)
    ]
    for key, states in measured.triggers.items():
        wanted = ["forbidden"] if key.startswith("native_no_trigger") else ["loaded"]
        if states != wanted:
            found.append(f"{key}: the trigger library: {', '.join(states)}")
    return found


def summary(measured: Measured) -> dict[str, dict[str, Any]]:
    """Medians over all timed steps, peaks, and what happened per step."""
    found: dict[str, dict[str, Any]] = {}
    for key, rounds in measured.wall_ms.items():
        phase = key.split()[1]
        one: dict[str, Any] = {
            sample: round(
                statistics.median(ms for r in getattr(measured, sample)[key] for ms in r), 2
            )
            for sample in SAMPLES
        }
        base = key_of("torch", phase)
        if len(rounds) == len(measured.wall_ms.get(base, ())):
            one["to_torch"] = round(measured.ratio(key, base), 4)
        if key in measured.life:
            one["peak_gib"] = round(measured.life[key]["peak"] / GIB, 3)
            one["steady_peak_gib"] = round(measured.memory[key]["mapped_peak"] / GIB, 3)
        if not key.startswith("torch "):
            if key in measured.life:
                one["mapped_peak_gib"] = round(measured.life[key]["mapped_peak"] / GIB, 3)
            for counter in ("evicted_bytes", "restored_bytes"):
                gib = measured.per_step(key, counter) / GIB
                one[counter.replace("bytes", "gib_per_step")] = round(gib, 3)
            for counter in ("overshoot_bytes", "host_waits", "prefetch_lates", "stall_count"):
                one[counter] = measured.gained[key][counter]
            one["learning_overshoot_bytes"] = measured.learning[key]["overshoot_bytes"]
            one["learning_ms"] = round(measured.learning[key]["wall_ms"], 1)
            if key in measured.settling:
                settling = measured.settling[key]
                one["settling_steps"] = len(settling["wall_ms"])
                one["settling_ms"] = round(statistics.mean(settling["wall_ms"] or [0]), 2)
                one["settling_host_waits"] = settling["gained"]["host_waits"]
                one["settling_overshoot_bytes"] = settling["gained"]["overshoot_bytes"]
            one["plan_state"] = measured.stats[key]["plan_state"]
        found[key] = one
    return found


# --- The run


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds instead of 4")
    parser.add_argument("--simulated", action="store_true", help="a tiny model, no GPU")
    parser.add_argument("--only", help="free, and some of " + ",".join(SHARES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    options = parser.parse_args(argv)
    asked = set(options.only.split(",") if options.only else PHASES)
    if unknown := asked - set(PHASES):
        parser.error(f"--only: no phase {sorted(unknown)[0]!r}")
    options.phases = [phase for phase in PHASES if phase in asked | {"free"}]
    return options


def main(argv: list[str] | None = None) -> int:
    """0: measured, whether or not every row holds; 1: a worker failed or the results differ."""
    options = parse(argv)
    refuse_without_gpu("modes", options.simulated)
    pace = TINY if options.simulated else QUICK if options.quick else FULL
    if options.rounds:
        pace = dataclasses.replace(pace, rounds=options.rounds)
    began = time.perf_counter()
    run = Run(pace, options.simulated, options.phases)
    try:
        run.measure()
    finally:
        run.close()
    measured = run.measured
    wrong = wrong_of(measured)
    rows = rows_of(measured)
    result = {
        "device": run.place.get("device", "not asked"),
        "torch": run.place.get("torch", "not asked"),
        "driver": driver_version(),
        "pace": dataclasses.asdict(pace),
        "seconds": round(time.perf_counter() - began, 1),
        "rows": [row.as_dict() for row in rows],
        "failed": run.failed,
        "wrong": wrong,
        "summary": summary(measured),
        "raw": dataclasses.asdict(measured),
    }
    for key, values in result["summary"].items():
        print(f"{key:<22} {values}")
    for line in wrong:
        print(f"modes: {line}", file=sys.stderr)
    report(rows, result, "modes.json", options)
    return 1 if wrong or run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
