"""What recorded trainings take inside a budget, in virtual time, beside an older version.

    python benchmarks/replays.py --before HEAD~1 [--traces llama,vit] [--shares 0.5,0.75]
        [--modes native,expandable] [--micro-batches 4] [--state 720] [--steps 48]

For decisions of the core, before a GPU is asked: tests/native/traces on the simulated GPU, with the
times of an H200. Each is run at five budgets side by side, since where things come to lie in the
first steps decides by up to a tenth. Prints a line for each, and version: the mean step of the
later half of all, of plain torch's; the worst of them; how many steps went over `high`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from engine_native import BUILD, ROOT, BuildError, build, configure, source_of

MODES = ("allocator", "native", "expandable")
BESIDE = (-200_000_000, -100_000_000, 0, 100_000_000, 200_000_000)  # bytes
MIB = 1 << 20
TIMEOUT = 600  # seconds for one budget


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Of all budgets: times are of plain torch's."""

    mean: float
    worst: float
    over: int


def build_program(name: str, source: pathlib.Path, jobs: int) -> pathlib.Path:
    folder = BUILD / "replays" / name
    configure(ROOT / "benchmarks" / "native" / "replay", folder, f"-DENGINE_SOURCE={source}")
    build(folder, jobs, "replay")
    return folder / "replay"


def run(program: pathlib.Path, *words: str) -> dict[str, float]:
    done = subprocess.run(
        [str(program), *words], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} was not replayed: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def replayed(program: pathlib.Path, jobs: int, *words: str) -> Replayed:
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda more: run(program, *words, f"beside={more}"), BESIDE))
    return Replayed(
        statistics.fmean(one["mean"] for one in found),
        max(one["worst"] for one in found),
        round(sum(one["over"] for one in found)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a commit of this history to replay beside")
    traces = sorted(path.stem for path in (ROOT / "tests/native/traces").glob("*.txt"))
    parser.add_argument("--traces", default="llama,gpt_8k,vit,unet", help=", ".join(traces))
    parser.add_argument("--modes", default="native,expandable", help=", ".join(MODES))
    parser.add_argument("--shares", default="0.5,0.6,0.75", help="of the activations")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each optimizer's step")
    parser.add_argument("--state", type=int, default=720, help="MiB that an optimizer keeps")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    named = [name for name in options.traces.split(",") if name not in traces]
    named += [name for name in options.modes.split(",") if name not in MODES]
    if named:
        parser.error(f"there is no {named[0]!r}")
    try:
        sources = {"now": ROOT}
        if options.before is not None:
            sources = {"before": source_of(options.before), **sources}
        programs = {
            name: build_program(name, source, options.jobs) for name, source in sources.items()
        }
    except BuildError as error:
        print(f"replays: {error}", file=sys.stderr)
        return 1
    numbers = (
        f"micro_batches={options.micro_batches}",
        f"state={options.state * MIB}",
        f"steps={options.steps}",
    )
    lists = (options.traces.split(","), options.modes.split(","), options.shares.split(","))
    try:
        for (trace, mode, share), version in itertools.product(itertools.product(*lists), programs):
            one = replayed(programs[version], options.jobs, trace, mode, share, *numbers)
            where = f"{trace}, {mode}, {float(share):.0%}, {version}"
            print(f"{where:42} {one.mean:6.3f} {one.worst:6.2f} {one.over:4d}", flush=True)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"replays: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
