"""`python -m stagehand_alloc demo` on the simulated GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from stagehand_alloc._cli import demo as _demo
from stagehand_alloc._cli.demo_gpt import Shape

RUN = _demo.Run(
    parameters=10,
    losses=[2.0, 1.0],
    digests=[{"the loss": "a", "the gradient of w": "b"}] * 2,
    step_seconds=0.1,
    start_bytes=1 << 20,
    occupied_peak=9 << 20,
    mapped_peak=10 << 20,
    evicted_bytes=0,
    restored_bytes=0,
)
PLAN = _demo.Plan(Shape(256, 8, 8, 1, 1), 1, 2, 0.5, torch.device("cpu"), "a test")
BUDGET = _demo.Budget(high=10 << 20, low=8 << 20)


def test_the_demo_shows_equal_gradients_inside_a_budget() -> None:
    command = [sys.executable, "-m", "stagehand_alloc", "demo", "--simulated", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise equal" in done.stdout
    assert "simulated GPU" in done.stdout
    assert "mode allocator" in done.stdout
    assert "\r" not in done.stdout + done.stderr  # no progress line: nobody watches


def test_a_different_gradient_is_named_and_makes_the_demo_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = dataclasses.replace(RUN, digests=[RUN.digests[0], {"the loss": "a"}])
    assert _demo._report(PLAN, b"text", RUN, other, BUDGET) == 1
    assert "the gradient of w at step 2" in capsys.readouterr().out


def test_a_peak_over_the_budget_makes_the_demo_fail(capsys: pytest.CaptureFixture[str]) -> None:
    over = dataclasses.replace(RUN, mapped_peak=BUDGET.high + 1)
    assert _demo._report(PLAN, b"text", RUN, over, BUDGET) == 1
    assert "OVER THE BUDGET" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "ending"),
    [
        (dataclasses.replace(RUN, trigger="loaded", mapped_peak=BUDGET.high + 1), "inside"),
        (dataclasses.replace(RUN, trigger="loaded", over_bytes=3 << 20), "3.0 MiB over"),
        (dataclasses.replace(RUN, trigger="forbidden", mapped_peak=12 << 20), "2.0 MiB over"),
    ],
    ids=["by the optimizer", "learning", "without the trigger"],
)
def test_a_native_run_says_its_trigger_and_what_went_over_while_armed(
    run: _demo.Run, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dataclasses.replace(PLAN, mode="native")
    assert _demo._report(plan, b"text", RUN, run, BUDGET) == 0
    printed = capsys.readouterr().out
    assert f"mode native (trigger library {run.trigger})" in printed
    assert f"bitwise equal, {ending} a budget" in printed


@pytest.mark.parametrize("mode", ["native", "mempool"])
def test_the_simulated_gpu_has_the_process_allocator_only(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _demo.main(["--simulated", "--mode", mode]) == 2
    said = capsys.readouterr().err
    assert f"--mode {mode} was asked for, but the simulated GPU" in said


@pytest.mark.parametrize(
    "arguments", [["--steps", "1"], ["--share", "1.5"], ["--mode", "best"], ["--nonsense"]]
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _demo.main(arguments)
    assert caught.value.code == 2
