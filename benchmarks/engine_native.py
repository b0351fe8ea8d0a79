"""Builds and runs what benchmarks/engine.py measures: the engine's program twice, and its promises.

The same program (benchmarks/native) is built over this checkout's core and over version 0.1's,
which comes out of the history. Release builds; the promises (tests/native/test_promises_*) are
built with assertions.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "engine"
BEFORE_COMMIT = "0b4aecb"  # version 0.1
NOW, BEFORE = "now", "version_0_1"
TIMEOUT = 600  # seconds for one run of one case


class BuildError(RuntimeError):
    """What could not be built; the compiler's words are on stderr above."""


def tool(name: str) -> str:
    """The program beside this Python, or else the one on the path."""
    found = shutil.which(name, path=str(pathlib.Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise BuildError(f"'{name}' was not found")
    return found


def call(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        raise BuildError(f"failed with exit code {done.returncode}: {' '.join(command)}")


def configure(source: pathlib.Path, build: pathlib.Path, *options: str) -> None:
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    call([tool("cmake"), "-S", str(source), "-B", str(build), "-G", "Ninja", ninja, *options])


def build(folder: pathlib.Path, jobs: int, *targets: str) -> None:
    call([tool("cmake"), "--build", str(folder), "-j", str(jobs), "--target", *targets])


def full_name(commit: str) -> str | None:
    """Of a commit that this history has."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git
        return None


def source_of_before() -> pathlib.Path | None:
    """Version 0.1's native/ and tests/; None where this history does not go back so far."""
    return source_of(BEFORE_COMMIT) if full_name(BEFORE_COMMIT) is not None else None


def source_of(commit: str) -> pathlib.Path:
    """That commit's native/ and tests/. Raises BuildError where this history does not have it."""
    name = full_name(commit)
    if name is None:
        raise BuildError(f"there is no commit {commit!r}")
    folder = BUILD / f"source-{name[:12]}"
    if folder.exists():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", name, "native", "tests"],
        stdout=subprocess.PIPE,
        check=True,
    )
    subprocess.run(["tar", "x", "-C", str(partial)], input=archive.stdout, check=True)
    partial.rename(folder)
    return folder


def build_programs(jobs: int) -> dict[str, pathlib.Path]:
    """The benchmark of each version there is."""
    sources = {NOW: ROOT, BEFORE: source_of_before()}
    programs = {}
    for version, source in sources.items():
        if source is None:
            continue
        folder = BUILD / version
        configure(ROOT / "benchmarks" / "native", folder, f"-DENGINE_SOURCE={source}")
        build(folder, jobs, "engine")
        programs[version] = folder / "engine"
    return programs


@dataclasses.dataclass(frozen=True)
class Case:
    """One path at some sizes; `rounds` runs of each version, which take turns."""

    name: str
    sizes: tuple[int, ...] = (0,)
    rounds: int = 3
    rounds_before: int | None = None  # of version 0.1, where it takes long; None: as many


# (what, size) -> the values of a version's runs, in their order
Found = dict[tuple[str, int], dict[str, list[float]]]


def run_case(case: Case, programs: dict[str, pathlib.Path]) -> tuple[Found, dict[str, str]]:
    """What was measured, and the unit of each thing."""
    found: Found = {}
    units: dict[str, str] = {}
    for size in case.sizes:
        for turn in range(case.rounds):
            versions = list(programs) if turn % 2 == 0 else list(programs)[::-1]
            for version in versions:
                most = case.rounds if case.rounds_before is None else case.rounds_before
                if version == BEFORE and turn >= most:
                    continue
                command = [str(programs[version]), case.name, str(size)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
                except subprocess.TimeoutExpired:
                    print(f"{version}: {case.name} {size} took over {TIMEOUT} s", file=sys.stderr)
                    continue
                if done.returncode != 0:
                    sys.stderr.write(done.stderr[-2000:])
                    raise RuntimeError(f"{version}: {case.name} {size} was not measured")
                for line in done.stdout.splitlines():
                    one = json.loads(line)
                    key = (str(one["what"]), size)
                    found.setdefault(key, {}).setdefault(version, []).append(float(one["value"]))
                    units[str(one["what"])] = str(one["unit"])
    return found, units


@dataclasses.dataclass(frozen=True)
class Paired:
    """Of pairs of runs, one right behind the other: this version's over version 0.1's."""

    median: float
    low: float  # the quartiles
    high: float
    pairs: int


def paired(values: dict[str, list[float]]) -> Paired:
    ratios = sorted(a / b for a, b in zip(values[NOW], values[BEFORE], strict=True))
    quarter = len(ratios) // 4
    return Paired(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter], len(ratios))


@dataclasses.dataclass(frozen=True)
class Promises:
    """What one file of promises said."""

    program: str
    passed: int
    failed: int
    broken: list[str]


def run_promises(jobs: int, timeout: float = 300) -> list[Promises]:
    """Build and run the promises, with assertions. A crash or a hang is one that is broken."""
    folder = BUILD / "promises"
    configure(ROOT / "native", folder, "-DSTAGEHAND_TESTS=ON", "-DSTAGEHAND_CHECKS=1")
    names = sorted(path.stem for path in (ROOT / "tests" / "native").glob("test_promises_*.cpp"))
    build(folder, jobs, "native_tests")
    environment = {**os.environ, "STAGEHAND_SEEDS": "all"}
    all_found = []
    for name in names:
        passed, failed, broken = 0, 1, []
        try:
            done = subprocess.run(
                [str(folder / "native_tests"), "--file", name],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
            )
            broken = re.findall(r"^FAILED: (.*)$", done.stderr, re.MULTILINE)
            if counts := re.search(r"^(\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE):
                passed, failed = int(counts[1]), int(counts[2])
            else:
                broken.append(f"the program ended with exit code {done.returncode}")
                failed = len(broken)
        except subprocess.TimeoutExpired:
            broken = [f"the program did not end within {timeout:g} s"]
        all_found.append(Promises(name, passed, failed, broken))
    return all_found


def compiler_version() -> str:
    done = subprocess.run(
        [os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True
    )
    return done.stdout.splitlines()[0] if done.stdout else "unknown"
