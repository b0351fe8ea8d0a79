"""Weights, optimizer state and activations in one budget that does not hold them, beside plain
torch, what else can be done, and the least time that link and compute allow.

    python benchmarks/weights.py [--quick] [--simulated] [--mode native] [--only 12,10,torchao full]
                                 [--time-limit SECONDS] [--list] [--out FILE]

A GPT of width 4096 and 12 layers in bf16 (4.8 GB), frozen, with LoRA beside its linear layers; one
sequence of 8192 tokens (9.6 GB saved), or of 1024; the same with all of it trained by AdamW; and 48
blocks of 393 M parameters (37.8 GB), checkpointed. Sizes in GB of 1e9 bytes. Compared with:

* plain torch, where everything fits;
* activations alone moved (`pool` without `offload`);
* a ring of two blocks with checkpointing, written anew (weight_models.py): what others' block swap
  does at its best;
* diffusers' group offload, accelerate's `cpu_offload`, FSDP2 on the CPU and torchao's
  `CPUOffloadOptimizer` (weight_anchors.py), where they are installed.

Every case is a process of its own; the next one imports torch while one is measured. A case brings
those that its rows need: plain torch is measured in each call, what others made only where the file
does not have it. Losses and gradients must be plain torch's bit by bit, with what is checkpointed
compared with plain torch under checkpointing: where they are not, the exit code is 1.

Writes benchmarks/results/weights.json after every case. Results of the same sources, device, torch
and driver stay there, so that several calls add up to one file; what others made stays also where
our sources are others, while the programs that measure are the same. --time-limit: no case begins
that would not end by then, as it is estimated (--list says how long each takes). --simulated: tiny
models without a GPU, to try the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import plot
from harness import (
    CUBLAS,
    RESULTS,
    SOURCES,
    Row,
    Worker,
    WorkerError,
    driver_version,
    earlier,
    print_rows,
    refuse_without_gpu,
    write_result,
)
from weight_cases import FULL, GB, MODES, QUICK, TINY, Case, Result, cases_of, chosen
from weight_rows import Missing, Rows, least_ms, unlike_torch

SAME = ("sources", "device", "torch", "driver")  # of results that may be joined
SAME_OF_OTHERS = ("programs", *SAME[1:])
PROGRAMS = ("weight_anchors.py", "weight_cases.py", "weight_models.py", "weight_worker.py")
PATIENCE = 90  # s, and three times what a case should take


def programs() -> str:
    """The sha256 of what measures the cases."""
    here = pathlib.Path(__file__).parent
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in PROGRAMS)).hexdigest()


class Weights:
    """The cases of one call, one after the other, and what is written of them."""

    def __init__(self, cases: dict[str, Case], options: argparse.Namespace) -> None:
        self.cases, self.options = cases, options
        self.waiting = [one.name for one in chosen(cases, options.only)]
        self.began = time.perf_counter()
        self.not_run: dict[str, str] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.printed: dict[str, Row | Missing] = {}
        self.next: Worker | None = self._start()
        worker, self.next = self.next, self._start()
        assert worker is not None
        try:
            place = worker.ask("place")
        finally:
            worker.close()
        self.link = tuple(place.pop("link"))
        self.head = {**place, "driver": driver_version(), "sources": SOURCES}
        self.head["programs"] = programs()
        if mine := self._earlier("cases", SAME):
            self.rows = {one["claim"]: one for one in self._earlier("rows", SAME)}
        theirs = self._earlier("cases", SAME_OF_OTHERS)
        theirs = {
            name: one for name, one in theirs.items() if name in cases and cases[name].is_others
        }
        self.found = {name: Result.of(one) for name, one in {**theirs, **mine}.items()}
        self.fresh: set[str] = set()

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def measure_next(self) -> None:
        """The first that waits, unless there is no time for it."""
        case = self.cases[self.waiting.pop(0)]
        limit = self.options.time_limit
        if missing := [name for name in case.before() if not self._known(name)]:
            self.not_run[case.name] = f"{missing[0]!r} was not measured"
        elif not self._asked(case) and case.kind != "plain" and self._known(case.name):
            print(f"{case.name:28} as in {self.options.out.name}")
        elif limit is not None and self.seconds() + case.seconds > limit:
            self.not_run[case.name] = f"it takes {case.seconds:g} s, beyond {limit:g} s in all"
        else:
            self._measure(case)

    def write(self) -> None:
        if self.options.out is not None:
            write_result(self.options.out, self.result())

    def result(self) -> dict[str, Any]:
        """Cases in their order, rows as they came first."""
        names = [name for name in self.cases if name in self.found]
        names += [name for name in self.found if name not in self.cases]
        cases = {name: dataclasses.asdict(self.found[name]) for name in names}
        return {
            **self.head,
            "link": self.link,
            "seconds": round(self.seconds(), 1),
            "not_run": self.not_run,
            "rows": list(self.rows.values()),
            "cases": cases,
        }

    def close(self) -> None:
        if self.next is not None:
            self.next.close()

    def _earlier(self, part: str, same: Sequence[str]) -> Any:
        return earlier(self.options.out, self.head, same, part)

    def _start(self) -> Worker:
        settings = {"simulated": self.options.simulated}
        return Worker("weights", settings, CUBLAS, "weight_worker.py")

    def _asked(self, case: Case) -> bool:
        only = self.options.only
        return only is None or case.name in only or case.short in only

    def _known(self, name: str) -> bool:
        """Measured, in this call where it is plain torch."""
        case, one = self.cases[name], self.found.get(name)
        return one is not None and one.measured and (case.kind != "plain" or name in self.fresh)

    def _measure(self, case: Case) -> None:
        worker = self.next or self._start()
        self.next = self._start() if self.waiting else None
        high = int(case.high * GB)
        if case.as_much_as:
            high = self.found[case.as_much_as].reserved
        began = time.perf_counter()
        patience = PATIENCE + 3 * case.seconds
        try:
            worker.name = case.name
            asked = dataclasses.asdict(case)
            reply = worker.ask("measure", case=asked, high=high, patience=patience)
            one = Result.of(reply["result"])
        except WorkerError as error:
            one = Result(case.name, high=high, error=str(error))
        finally:
            worker.close()
        one.seconds = round(time.perf_counter() - began, 1)
        self._compare(case, one)
        self.found[case.name] = one
        self.fresh.add(case.name)
        self._claim()
        print(line_of(case, one), flush=True)
        self.write()

    def _compare(self, case: Case, one: Result) -> None:
        """With plain torch."""
        base = self.found.get(case.base)
        if base is not None and one.measured:
            one.bitwise = one.digests == base.digests[: len(one.digests)]
        whole = self.found.get("plain 8192" if case.checkpoint and case.needs else case.base)
        if whole is not None and one.measured:
            one.to_plain = one.step / whole.step
        if base is not None and one.measured and case.kind == "ours" and case.offload:
            one.bound_to_plain = least_ms(case, one.high, base, self.link) / base.step

    def _claim(self) -> None:
        for mode in self.options.mode:
            found = Rows(mode, self.cases, self.found, self.fresh).all(self.link)
            self.printed.update((row.claim, row) for row in found)
        claim = "cases whose losses or gradients are not plain torch's"
        mine = {name: one for name, one in self.found.items() if name.startswith(MODES)}
        self.printed[claim] = Row(claim, len(unlike_torch(mine)), at_most=0)
        self.rows.update((claim, row.as_dict()) for claim, row in self.printed.items())


def waits_of(one: Result) -> str:
    """Empty where the host waited for nothing. An event made in a step counts, at no time."""
    if one.host_waits == 0:
        return ""
    times = ", ".join(f"{what} {ms:.2f} ms" for what, ms in one.waited_ms.items())
    return f"host waits {one.host_waits:.1f} ({times})  "


def line_of(case: Case, one: Result) -> str:
    if not one.measured:
        return f"{case.name:28} {one.absent or one.error}"
    same = {None: "", True: "  bitwise", False: "  NOT BITWISE"}[one.bitwise]
    return (
        f"{case.name:28} {one.step:7.1f} ms  peak {one.peak / GB:6.2f}  "
        f"reserved {one.reserved / GB:6.2f} GB  loads {one.loads:4.1f} (late {one.late:.1f})  "
        f"h2d {one.h2d / GB:5.2f} d2h {one.d2h / GB:5.2f} dropped {one.dropped / GB:5.2f} GB  "
        f"over {one.overshoot / GB:.2f}  maps {one.map_calls:.0f}  {waits_of(one)}"
        f"{one.seconds:.0f} s (about {case.seconds:.0f}){same}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="models of a sixteenth")
    parser.add_argument("--simulated", action="store_true", help="tiny models, no GPU")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--only", help="cases, with commas: 12,8,1024 at 4")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="end by then")
    parser.add_argument("--list", action="store_true", help="the cases and what each takes")
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    options = parser.parse_args(argv)
    options.only = options.only.split(",") if options.only else None
    options.mode = tuple(options.mode or (("allocator",) if options.simulated else MODES))
    partial = options.simulated or options.quick
    options.out = options.out or (None if partial else RESULTS / "weights.json")
    scale = TINY if options.simulated else QUICK if options.quick else FULL
    options.cases = cases_of(options.mode, scale)
    try:
        chosen(options.cases, options.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured, whether or not every row holds; 1: something failed or the results differ."""
    options = parse(argv)
    cases = chosen(options.cases, options.only)
    if options.list:
        for case in cases:
            print(f"{case.seconds:4.0f} s  {case.name}")
        print(f"{sum(case.seconds for case in cases):4.0f} s")
        return 0
    refuse_without_gpu("weights", options.simulated)
    run = Weights(options.cases, options)
    try:
        while run.waiting:
            run.measure_next()
    finally:
        run.close()
    run.write()
    result = run.result()
    if options.out is not None and plot.available():
        plot.draw_weights(result, options.out.with_suffix(".svg"))
    print(f"link {run.link[0] / 1e6:.1f} GB/s in, {run.link[1] / 1e6:.1f} GB/s out")
    print_rows([row for row in run.printed.values() if isinstance(row, Row)])
    for row in run.printed.values():
        if isinstance(row, Missing):
            print(f"{row.claim}: not measured: {row.why}")
    for name, why in run.not_run.items():
        print(f"weights: {name} was not run: {why}", file=sys.stderr)
    failed = {name: run.found[name].error for name in run.fresh if run.found[name].error}
    for name, why in failed.items():
        print(f"weights: {name}: {why}", file=sys.stderr)
    wrong = unlike_torch({name: run.found[name] for name in run.fresh})
    mine = [name for name in (*wrong, *failed) if name.startswith((*MODES, "plain", "ring"))]
    return 1 if mine else 0


if __name__ == "__main__":
    sys.exit(main())
