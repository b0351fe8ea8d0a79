"""What the engine costs as things become many, and whether it keeps its promises. No GPU is needed.

    python benchmarks/engine.py [--quick] [--only native,promises,python,suite]

native     each path of native/core on the simulated GPU, beside n of what there may be many of, by
           benchmarks/native, built over this checkout and over version 0.1; their runs take turns
promises   tests/native/test_promises_*, built with assertions
python     benchmarks/engine_python.py: losses and interrupts beside plain torch's
suite      tests/python, end to end

Counts are exact; times are this machine's and this hour's, so that the bars on them are loose, and
what is compared with version 0.1 was measured in the same run. Writes
benchmarks/results/engine.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from typing import Any

from engine_native import (
    BEFORE,
    BEFORE_COMMIT,
    NOW,
    ROOT,
    BuildError,
    Case,
    Found,
    build_programs,
    compiler_version,
    paired,
    run_case,
    run_promises,
)
from harness import RESULTS, Row, print_rows, write_result

PARTS = ("native", "promises", "python", "suite")
THOUSANDS = (1_000, 10_000, 100_000)
HIT_PAIRS = 15
# By the review of version 0.1, on another machine: for where it cannot be measured beside.
STORED_NS = {"alloc_free_hit": 216, "save_unpack_cycle": 540}
CASES = (
    Case("alloc_free_hit", rounds=HIT_PAIRS),
    Case("save_unpack_cycle", rounds=HIT_PAIRS),
    Case("planned_calls_allocator", rounds=1),
    Case("planned_calls_native", rounds=1),
    Case("queries_beside_evicting", (64, 256, 512), rounds=1),
    Case("queries_of_restores", (800,), rounds=1),
    Case("miss", THOUSANDS),
    Case("evict_to_low", THOUSANDS[:2], rounds_before=1),
    Case("free_saved_no_slabs", THOUSANDS[:2], rounds_before=1),
    Case("free_saved_slabs", THOUSANDS[:2], rounds_before=1),
    Case("held_miss", (1_000, 5_000, 20_000), rounds_before=1),
    Case("held_save_beside_live", (0, 16, 64, 1_000)),
    Case("held_make_hole", (250, 1_000, 4_000), rounds=1),
)
# Of version 0.1 these take minutes; of this one they show whether the path is linear.
LARGE = (
    Case("evict_to_low", (100_000,), rounds=1, rounds_before=0),
    Case("free_saved_no_slabs", (100_000,), rounds=1, rounds_before=0),
    Case("free_saved_slabs", (100_000,), rounds=1, rounds_before=0),
)
PYTHON_CHECKS = (
    ("accumulate", "gradients where a Function returns what it saved are plain torch's"),
    ("reused", "tensors that are read after backward are plain torch's"),
    ("lines", "interrupts at each line of entry and exit leave the next entry working"),
    ("signals", "interrupts at random moments leave the next entry working"),
)


@dataclasses.dataclass(frozen=True)
class EngineRow(Row):
    """A claim; with it what version 0.1 has, and more that was seen."""

    unit: str = ""
    before: float | None = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        row = {**super().as_dict(), "unit": self.unit}
        if self.before is not None:
            row[BEFORE] = round(self.before, 4)
        return {**row, **self.more}


class Measured:
    """The medians of all cases, by case, thing and size."""

    def __init__(self) -> None:
        self.found: dict[str, Found] = {}
        self.units: dict[str, dict[str, str]] = {}

    def add(self, case: Case, found: Found, units: dict[str, str]) -> None:
        self.found.setdefault(case.name, {}).update(found)
        self.units.setdefault(case.name, {}).update(units)

    def value(self, case: str, what: str, size: int = 0, version: str = NOW) -> float | None:
        values = self.found[case].get((what, size), {}).get(version)
        return statistics.median(values) if values else None

    def row(
        self, claim: str, case: str, what: str, size: int = 0, at_most: float | None = None
    ) -> EngineRow:
        value = self.value(case, what, size)
        assert value is not None
        before = self.value(case, what, size, BEFORE)
        return EngineRow(claim, value, at_most, unit=self.units[case][what], before=before)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Everything that was measured, as rows of one size each."""
        return {
            case: [
                {"n": size, "what": what, "unit": self.units[case][what]}
                | {version: values for version, values in by_version.items() if values}
                for (what, size), by_version in sorted(found.items(), key=lambda one: one[0])
            ]
            for case, found in self.found.items()
        }


def native_rows(of: Measured) -> list[EngineRow]:
    rows = [
        of.row(
            f"driver calls for each 1 MiB tensor that leaves and returns, {mode}",
            f"planned_calls_{mode}",
            "calls",
            at_most=bar,
        )
        for mode, bar in (("allocator", 4), ("native", 5))
    ]
    rows.append(
        of.row(
            "event queries in one allocation beside 512 evicting blocks",
            "queries_beside_evicting",
            "queries",
            512,
            at_most=2,
        )
    )
    rows.append(
        of.row(
            "event queries of a restore, the GPU 800 of them behind",
            "queries_of_restores",
            "queries",
            800,
            at_most=2,
        )
    )
    few, many = (of.value("miss", "miss", n) for n in (1_000, 100_000))
    few_before, many_before = (of.value("miss", "miss", n, BEFORE) for n in (1_000, 100_000))
    assert few is not None
    assert many is not None
    rows.append(
        EngineRow(
            "a miss beside 100,000 live blocks, over one beside 1,000",
            many / few,
            at_most=4,
            unit="ratio",
            before=many_before / few_before if many_before and few_before else None,
        )
    )
    rows += [
        of.row(f"a miss beside {n:,} live blocks", "miss", "miss", n) for n in (1_000, 100_000)
    ]
    rows.append(
        of.row(
            "one allocation that evicts to low beside 10,000 records",
            "evict_to_low",
            "evict_to_low",
            10_000,
            at_most=30,
        )
    )
    for case, with_slabs in (("free_saved_no_slabs", "no slabs"), ("free_saved_slabs", "slabs")):
        claim = f"free of a saved block beside 10,000 records, unplanned step, {with_slabs}"
        rows.append(of.row(claim, case, "free", 10_000, at_most=3))
    claim = "native miss beside 20,000 live storages and as many dropped ones"
    rows.append(of.row(claim, "held_miss", "first", 20_000, at_most=0.5))
    rows.append(of.row("the same miss once more", "held_miss", "again", 20_000))
    claim = "native restore that has to make a hole beside 4,000 large blocks"
    rows.append(of.row(claim, "held_make_hole", "make_hole", 4_000))
    return rows


def hit_rows(of: Measured) -> list[EngineRow]:
    rows = []
    for case, claim in (
        ("alloc_free_hit", "alloc and free, hit"),
        ("save_unpack_cycle", "save and unpack, resident"),
    ):
        values = of.found[case][(case, 0)]
        mine = statistics.median(values[NOW])
        if BEFORE not in values:
            # Other machines' nanoseconds do not compare; they are shown, and held to nothing.
            more: dict[str, Any] = {
                "note": f"{BEFORE_COMMIT} is not in this history: {BEFORE} is a stored figure"
            }
            stored = float(STORED_NS[case])
            rows.append(EngineRow(claim, mine, unit="ns", before=stored, more=more))
            continue
        ratio = paired(values)
        more = {
            "quartiles": [round(ratio.low, 4), round(ratio.high, 4)],
            "pairs": ratio.pairs,
            "ns": {version: round(statistics.median(runs), 1) for version, runs in values.items()},
        }
        claim = f"{claim}: this over version 0.1, paired"
        rows.append(EngineRow(claim, ratio.median, at_most=1.02, unit="ratio", more=more))
    return rows


def measure_native(options: argparse.Namespace) -> tuple[list[EngineRow], dict[str, Any]]:
    programs = build_programs(options.jobs)
    of = Measured()
    for case in CASES + (() if options.quick else LARGE):
        rounds = (case.rounds + 4) // 5 if options.quick else case.rounds
        of.add(case, *run_case(dataclasses.replace(case, rounds=rounds), programs))
        print(f"measured: {case.name}", flush=True)
    compared = {"version": "0.1", "commit": BEFORE_COMMIT, "measured": BEFORE in programs}
    rows = native_rows(of) + hit_rows(of)
    return rows, {"compared_with": compared, "tables": of.tables()}


def check_promises(options: argparse.Namespace) -> tuple[list[EngineRow], dict[str, Any]]:
    found = run_promises(options.jobs)
    failed = sum(one.failed for one in found)
    claim = f"promises of the review that are broken, of {failed + sum(o.passed for o in found)}"
    rows = [EngineRow(claim, failed, at_most=0, unit="promises")]
    return rows, {"promises": [dataclasses.asdict(one) for one in found]}


def check_python(options: argparse.Namespace) -> tuple[list[EngineRow], dict[str, Any]]:
    """Each in a process of its own; what it printed last says how often it went wrong."""
    rows = []
    details = {}
    for name, claim in PYTHON_CHECKS:
        command = [sys.executable, str(ROOT / "benchmarks" / "engine_python.py"), name]
        if options.quick:
            command.append("--quick")
        found: dict[str, Any]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=900, env=python_environment()
            )
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
            ended = f"ended with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            found, ended = {}, "did not end"
        found = found or {"tried": 0, "wrong": 1, "first": [ended]}
        details[name] = found
        rows.append(
            EngineRow(
                f"{claim}: wrong of {found['tried']}", found["wrong"], at_most=0, unit="cases"
            )
        )
    return rows, {"python": details}


def check_suite(options: argparse.Namespace) -> tuple[list[EngineRow], dict[str, Any]]:
    command = [sys.executable, "-m", "pytest", "-q", "tests/python"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=python_environment()
    )
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)
    }
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    wrong = sum(number for word, number in counts.items() if word[:4] in ("fail", "erro"))
    if done.returncode != 0 and wrong == 0:
        wrong = 1  # it did not come to its end
    broken = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    claim = f"Python tests end to end that fail, beside {passed} that pass"
    rows = [EngineRow(claim, wrong, at_most=0, unit="tests")]
    return rows, {"suite": {"passed": passed, "skipped": skipped, "failed": broken}}


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def host() -> dict[str, Any]:
    model = "unknown"
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists() and (named := re.search(r"model name\s*:\s*(.*)", info.read_text())):
        model = named[1]
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": compiler_version(),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def main(argv: list[str] | None = None) -> int:
    """0: measured, and every bar holds; 1: one does not; 2: something could not be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs, sizes and interrupts")
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}; nothing is written")
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="to build with")
    options = parser.parse_args(argv)
    parts = options.only.split(",") if options.only else list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    run = dict(zip(PARTS, (measure_native, check_promises, check_python, check_suite), strict=True))
    result: dict[str, Any] = {"host": host()}
    rows: list[EngineRow] = []
    try:
        for part in parts:
            more, details = run[part](options)
            rows += more
            result.update(details)
            print(f"done: {part}", flush=True)
    except BuildError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    print_rows(rows)
    whole = options.only is None and not options.quick
    if options.out is not None or whole:
        first = {"host": result.pop("host")}
        result = {**first, "rows": [row.as_dict() for row in rows], **result}
        write_result(options.out or RESULTS / "engine.json", result)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
