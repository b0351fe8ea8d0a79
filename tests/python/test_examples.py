"""The examples run as they are, with no GPU on the simulated one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_inside_its_budget_and_moves_bytes(path: Path, tmp_path: Path) -> None:
    if "from trl" in path.read_text() and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL needs Python 3.11")
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss" in done.stdout
    peak, high = (float(word) for word in _line(done.stdout, "peak").split()[1::3])
    assert 0 < peak <= high
    moved, dropped = (_mib(done.stdout, start) for start in ("moved to the host", "dropped"))
    assert moved + dropped > 0
    assert len(path.read_text().splitlines()) < 60


def _mib(text: str, start: str) -> float:
    found = re.search(rf"^{start}: ([\d.]+) MiB", text, re.MULTILINE)
    return float(found[1]) if found else 0


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))
