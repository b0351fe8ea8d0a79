"""What is promised to people, measured: their stacks, telemetry's cost, advice, pages, the wheel.

    python benchmarks/people.py [--only telemetry,advise,stacks,page,wheel,readme] [--simulated]
                                [--examples plain_loop,...] [--models gpt,...] [--out FILE]

Writes benchmarks/results/people.json: rows of claim, value, bar and holds, each with the place and
the sources it was measured with. What cannot be measured in one place is measured in another: a
second call replaces the rows that it measures, and leaves the others. Rows are written as they
come, so that a call that is cut short keeps what it has. Without --only, all that needs a GPU,
in about 4 minutes (`make bench-people`); the page needs Chromium, and the wheel a network:

    python benchmarks/people.py --only page,wheel,readme
    python benchmarks/people.py --only stacks --examples trl_sft --simulated
    python benchmarks/people.py --only advise --models llama
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import people_stacks
import people_steps
from harness import (
    FOLDER,
    RESULTS,
    SOURCES,
    Row,
    driver_version,
    print_rows,
    refuse_without_gpu,
    write_result,
)

ROOT = FOLDER.parent
ON_A_GPU = ("telemetry", "advise", "stacks")
ANYWHERE = ("page", "wheel", "readme")
README_LINES = 130
PAGE_TESTS = ("tests/python/test_report.py", "the_page_fits_its_window")
WIDTHS_AND_SCHEMES = 4  # 1280 and 390 px, light and dark
JOBS = max(2, min(8, (os.cpu_count() or 2) // 2))  # examples at once

Found = Iterator[tuple[list[Row], dict[str, Any]]]


def page() -> Found:
    """The page's own tests, in Chromium: a skipped one is none."""
    path, expression = PAGE_TESTS
    done = _done(sys.executable, "-m", "pytest", "-q", str(ROOT / path), "-k", expression)
    passed = re.search(r"(\d+) passed", done.stdout)
    count = int(passed[1]) if passed and done.returncode == 0 else 0
    of = "the report page in Chromium at 1280 and 390 px, light and dark: no complaint, no scroll"
    yield [Row(of, count, at_least=WIDTHS_AND_SCHEMES)], {}


def wheel() -> Found:
    """Built, and tried in an environment whose PATH has no compiler."""
    tool = str(ROOT / "tools" / "wheels.py")
    done = [_done(sys.executable, tool, verb, sys.executable) for verb in ("build", "try")]
    passed = all(one.returncode == 0 for one in done)
    yield [Row("the wheel's demo where there is no compiler", passed, at_least=1)], {}


def readme() -> Found:
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    figures = _done(sys.executable, str(ROOT / "tools" / "figures.py"), "--check")
    today = figures_sources() == SOURCES
    yield (
        [
            Row("README: lines", lines, at_most=README_LINES),
            Row("README: every figure is of a results file", figures.returncode == 0, at_least=1),
            Row("README: that file is of the sources as they stand", today, at_least=1),
        ],
        {},
    )


def figures_sources() -> str:
    """What sources README's figures were measured with."""
    return str(json.loads((RESULTS / "recompute.json").read_text())["sources"])


def _done(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        print(f"{done.stdout}{done.stderr}", file=sys.stderr)
    return done


def place(simulated: bool) -> dict[str, Any]:
    """Where and with what a row was measured."""
    import torch

    gpu = not simulated and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "simulated" if simulated else "CPU",
        "driver": driver_version(),
        "torch": torch.__version__,
        "sources": SOURCES,
    }


def example_of(claim: str) -> str | None:
    """The file that a claim is about; None where it is about no example."""
    found = re.match(r"examples/\w+\.py", claim)
    return found[0] if found else None


def merged(old: dict[str, Any], rows: list[dict[str, Any]], raw: dict[str, Any]) -> dict[str, Any]:
    """The rows of both, each claim once: the newer one, where the older stood. Raw by section.

    An example's rows go with those of its newer run: one that fails says less than one that runs.
    """
    new = {row["claim"]: row for row in rows}
    again = {example_of(claim) for claim in new} - {None}
    kept = [
        new.pop(row["claim"], row)
        for row in old.get("rows", [])
        if row["claim"] in new or example_of(row["claim"]) not in again
    ]
    was = old.get("raw", {})
    parts = {name: {**was.get(name, {}), **part} for name, part in raw.items()}
    return {"rows": [*kept, *new.values()], "raw": {**was, **parts}}


def found(section: str, options: argparse.Namespace) -> Found:
    """Rows of a section as they come, and what they were made of."""
    if section == "stacks":
        names = options.examples.split(",") if options.examples else people_stacks.names()
        return people_stacks.found(names, options.simulated, options.jobs)
    if section == "telemetry":
        return people_steps.telemetry(options.simulated, options.pairs)
    if section == "advise":
        models = people_steps.ADVISED[:1] if options.simulated else options.models.split(",")
        return people_steps.advise(options.simulated, models)
    return {"page": page, "wheel": wheel, "readme": readme}[section]()


def measure(section: str, options: argparse.Namespace) -> bool:
    """Whether it came to its end: where not, the other sections say what they can."""
    try:
        for rows, raw in found(section, options):
            if rows:
                write(section, rows, raw, options)
    except Exception:
        traceback.print_exc()
        return False
    return True


def write(section: str, rows: list[Row], raw: dict[str, Any], options: argparse.Namespace) -> None:
    """Print them, and put them beside those that are written."""
    print_rows(rows)
    there = place(options.simulated and section in ON_A_GPU)
    new = [{"section": section, **row.as_dict(), **there} for row in rows]
    old = json.loads(options.out.read_text()) if options.out.exists() else {}
    write_result(options.out, merged(old, new, {section: raw} if raw else {}))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(ON_A_GPU))
    parser.add_argument("--examples", help="of the stacks, these")
    parser.add_argument(
        "--models", default=",".join(people_steps.ADVISED), help="that advise is asked of"
    )
    parser.add_argument("--simulated", action="store_true", help="without a GPU")
    parser.add_argument("--pairs", type=int, default=60, help="of steps, for telemetry")
    parser.add_argument("--jobs", type=int, default=JOBS, help="examples at once")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "people.json")
    options = parser.parse_args(argv)
    unknown = set(options.only) - {*ON_A_GPU, *ANYWHERE}
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    needs = set(options.only) & set(ON_A_GPU)
    if needs:
        refuse_without_gpu("people.py", options.simulated)
    with contextlib.ExitStack() as stack:
        if needs - {"stacks"}:  # the examples are processes of their own
            _use_gpu(stack, options.simulated)
        failed = [section for section in options.only if not measure(section, options)]
    if failed:
        print(f"people.py: not measured to the end: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _use_gpu(stack: contextlib.ExitStack, simulated: bool) -> None:
    import torch

    import stagehand_alloc

    if simulated:
        from stagehand_alloc import testing

        stack.enter_context(testing.simulated_gpu(memory="1GiB", seed=1))
        return
    torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
    torch.backends.cuda.enable_cudnn_sdp(False)  # it has no deterministic kernels


if __name__ == "__main__":
    sys.exit(main())
