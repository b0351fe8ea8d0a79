"""Each example with our line beside the same without it: bit by bit, and what its budget held."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from harness import FOLDER, Row

EXAMPLES = FOLDER.parent / "examples"
LEARNING = 2  # optimizer steps in which a step's kind is new: without and with its state
TIMEOUT_S = 150  # the first ones build libraries


class MissingError(RuntimeError):
    """An example needs a library that is not here."""


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


def found(
    only: list[str], simulated: bool, jobs: int
) -> Iterator[tuple[list[Row], dict[str, Any]]]:
    """Rows of each example named as it ends, and what it said; where a library is missing, none."""
    with ThreadPoolExecutor(jobs) as threads:
        pairs = {threads.submit(_pair, name, simulated): name for name in only}
        for done in as_completed(pairs):
            name, pair = pairs[done], done.result()
            yield _rows(name, pair), {name: pair}


def _pair(name: str, simulated: bool) -> dict[str, Any]:
    try:
        return {"plain": _run(name, simulated, "--plain"), "ours": _run(name, simulated)}
    except (MissingError, subprocess.TimeoutExpired) as error:
        print(f"{name}: not measured: {error}", file=sys.stderr)
        return {"missing": str(error)}


def _run(name: str, simulated: bool, *more: str) -> dict[str, Any]:
    script = str(FOLDER / "people_example.py")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "found.json"
        done = subprocess.run(
            [sys.executable, script, str(EXAMPLES / f"{name}.py"), str(out), *more],
            cwd=folder,
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if simulated else {})},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if "ModuleNotFoundError" in last:
            raise MissingError(last)
        print(f"{name} failed:\n{done.stdout}{done.stderr}", file=sys.stderr)
        return {"failed": last}


def _rows(name: str, pair: dict[str, Any]) -> list[Row]:
    if "missing" in pair:
        return []
    plain, ours = pair["plain"], pair["ours"]
    ran = bool(plain.get("losses")) and bool(ours.get("losses"))
    same = ran and all(plain[key] == ours[key] for key in ("losses", "steps"))
    of = f"examples/{name}.py"
    if not ran:
        return [Row(f"{of} runs", 0, at_least=1)]
    over = ours["over"][-1] - ours["over"][min(LEARNING, len(ours["over"])) - 1]
    return [
        Row(f"{of}: losses, gradients and weights as without our line", same, at_least=1),
        Row(f"{of}: bytes over high, from step {LEARNING + 1} on", over, at_most=0),
        Row(f"{of}: bytes over high while it learns", ours["over"][-1] - over),
        Row(f"{of}: bytes moved or dropped", ours["moved"], at_least=1),
    ]
