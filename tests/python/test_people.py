"""benchmarks/people.py, small and on the simulated GPU: what it measures, and how calls merge."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(FOLDER))  # last: its models.py is not the tests' own

import people  # noqa: E402
import people_stacks  # noqa: E402
from harness import Row  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "people.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_an_example_is_compared_with_itself_without_our_line(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "people.json"
    chosen = ("--only", "stacks,telemetry", "--examples", "plain_loop", "--pairs", "2")
    done = run("--simulated", *chosen, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    rows = {row["claim"]: row for row in found["rows"]}
    for claim in (
        "losses, gradients and weights as without our line",
        "bytes over high, from step 3 on",
        "bytes moved or dropped",
    ):
        assert rows[f"examples/plain_loop.py: {claim}"]["holds"]
    assert rows["telemetry: steps heard of"]["holds"]
    assert {row["device"] for row in found["rows"]} == {"simulated"}
    assert len(found["raw"]["stacks"]["plain_loop"]["plain"]["steps"]) == 5


def test_an_example_whose_weights_leave_is_compared_with_one_whose_stay(
    tmp_path: pathlib.Path,
) -> None:
    out = tmp_path / "people.json"
    assert "full_finetune" in people_stacks.names()
    chosen = ("--only", "stacks", "--examples", "full_finetune")
    done = run("--simulated", *chosen, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    of = "examples/full_finetune.py: losses, gradients and weights as without our line"
    assert of in [row["claim"] for row in rows]
    assert all(row.get("holds", True) for row in rows)


def test_a_second_call_replaces_its_own_rows_and_leaves_the_others() -> None:
    raw: dict[str, Any] = {"advise": {"gpt": 1, "vit": 2}, "stacks": {"x": 3}}
    old = {"rows": [{"claim": "a", "value": 1}, {"claim": "b", "value": 2}], "raw": raw}
    rows = [{"claim": "c", "value": 3}, {"claim": "a", "value": 4}]
    new = people.merged(old, rows, {"advise": {"gpt": 5}, "telemetry": {"y": 6}})
    assert [(row["claim"], row["value"]) for row in new["rows"]] == [("a", 4), ("b", 2), ("c", 3)]
    assert new["raw"] == {
        "advise": {"gpt": 5, "vit": 2},
        "stacks": {"x": 3},
        "telemetry": {"y": 6},
    }


def test_an_examples_rows_go_with_those_of_its_newer_run() -> None:
    claims = ("examples/a.py runs", "examples/ab.py: moved", "advice")
    old = {"rows": [{"claim": claim, "value": 0} for claim in claims]}
    new = people.merged(old, [{"claim": "examples/a.py: moved", "value": 1}], {})
    found = [(row["claim"], row["value"]) for row in new["rows"]]
    assert found == [("examples/ab.py: moved", 0), ("advice", 0), ("examples/a.py: moved", 1)]


def test_what_was_measured_is_written_though_the_rest_is_cut_short(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "people.json"

    def broken(names: list[str], simulated: bool, jobs: int) -> Any:
        yield [Row("an example", 1, at_least=1)], {"plain_loop": {}}
        raise RuntimeError("the machine was taken away")

    monkeypatch.setattr(people_stacks, "found", broken)
    assert people.main(["--simulated", "--only", "stacks,readme", "--out", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [row["section"] for row in rows] == ["stacks", "readme", "readme", "readme"]


@pytest.mark.parametrize("changed", ["losses", "steps"])
def test_one_bit_that_differs_is_a_row_that_does_not_hold(changed: str) -> None:
    plain = {"losses": ["a", "b", "c"], "steps": ["a", "b", "c"], "over": [], "moved": 0}
    ours = {**plain, "over": [0, 5, 5], "moved": 9}
    assert all(row.holds for row in people_stacks._rows("x", {"plain": plain, "ours": ours}))
    other = {**ours, changed: ["a", "b", "d"]}
    held = [row.holds for row in people_stacks._rows("x", {"plain": plain, "ours": other})]
    assert held.count(False) == 1


def test_a_byte_over_high_once_a_step_is_known_is_missed() -> None:
    plain = {"losses": ["a"], "steps": ["a"], "over": [], "moved": 0}
    ours = {**plain, "over": [3, 3, 4], "moved": 9}
    held = [row.holds for row in people_stacks._rows("x", {"plain": plain, "ours": ours})]
    assert held.count(False) == 1
