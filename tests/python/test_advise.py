"""`advise`: what a run says of other budgets, and what training inside them then does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from telemetry_lines import GIB, known_step, line, shape, with_shape, write
from torch import nn
from virtual_time import VirtualTime

import stagehand_alloc
from stagehand_alloc import TelemetryError, _native
from stagehand_alloc.__main__ import main
from stagehand_alloc._books import advice as _advice
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books import telemetry as _telemetry
from stagehand_alloc._books.advice import Link
from stagehand_alloc._books.runs import Run
from stagehand_alloc._cli import doctor, link
from stagehand_alloc.testing import SimulatedGpu, simulated_gpu

MIB = 1 << 20
FAST, SLOW = Link(1000e9, 1000e9), Link(10e9, 10e9)


def recorded(**fields: Any) -> Run:
    """Eight layers of 1 GiB each over 4 GiB: 12 GiB at most, 160 ms of computing."""
    steps = tuple(line(n, wall_time_ms=200.0) for n in range(1, 9))
    return Run("steps.jsonl", 0, 0, steps, shape(**{"all_ms": 160.0, "waited_ms": 0.0, **fields}))


def test_less_memory_moves_more_and_takes_no_less_time() -> None:
    told = _advice.advise(recorded(), [13 * GIB, 10 * GIB, 8 * GIB, 6 * GIB], SLOW)
    moved = [one.moved for one in told.budgets]
    times = [one.step_ms for one in told.budgets]
    assert moved[0] == 0
    assert times[0] == told.plain_ms == 160 + 40  # and what is outside of forward and backward
    assert moved == sorted(moved)
    assert times == sorted(times)
    assert times[-1] > times[0]
    assert [one.slower for one in told.budgets] == [ms / 200 for ms in times]
    assert 12 * GIB <= told.needs <= 12.1 * GIB


def test_a_quicker_link_moves_as_much_in_less_time() -> None:
    (slow,) = _advice.advise(recorded(), [7 * GIB], SLOW).budgets
    (fast,) = _advice.advise(recorded(), [7 * GIB], FAST).budgets
    assert fast.late_ms < slow.late_ms
    assert fast.host >= fast.moved * 0.9


def test_a_budget_below_what_is_in_use_at_once_cannot_be_held() -> None:
    told = _advice.advise(recorded(), [8 * GIB, 2 * GIB], FAST)
    assert [one.fits for one in told.budgets] == [True, False]
    assert "cannot be held" in _advice.text(told)


def test_without_budgets_shares_of_what_a_step_needs_are_told() -> None:
    told = _advice.advise(recorded(), link=FAST)
    shares = [round(one.high / told.needs, 2) for one in told.budgets]
    assert shares == [0.9, 0.8, 0.7, 0.6, 0.5]
    cheap = [one for one in told.budgets if one.late_ms + one.again_ms <= 0.05 * told.plain_ms]
    assert cheap
    assert f"The smallest here that costs at most 5 %: {cheap[-1].settings()}" in _advice.text(told)


def test_the_link_is_as_measured_else_has_to_be_given() -> None:
    told = _advice.advise(recorded())
    assert (told.link, told.measured_link) == (Link(25 * 10**9, 24 * 10**9), True)
    with pytest.raises(TelemetryError, match="--link 25GB/s"):
        _advice.advise(recorded(d2h_rate=0, h2d_rate=0))


def test_a_run_without_a_measured_step_is_refused() -> None:
    short = Run("steps.jsonl", 0, 0, (line(1),), None)
    with pytest.raises(TelemetryError, match="the run was too short"):
        _advice.advise(short, link=FAST)


def test_what_can_be_made_again_sooner_is_dropped() -> None:
    known = known_step()

    def advised(*again: int) -> _advice.Advice:
        rows = tuple((*row[:3], *again, *row[6:]) for row in known.records)
        changed = type(known)(rows, known.full, known.at_ns)
        return _advice.advise(recorded(known=changed), [7 * GIB], SLOW)

    moving = _advice.advise(recorded(), [7 * GIB], SLOW)
    assert "Of moving alone" in _advice.text(moving)
    for again, settings in (
        ((100_000, 0, 0), 'pool(high="7168MiB")'),  # by autograd's nodes: the default
        ((0, 1, 100_000), 'pool(high="7168MiB", recompute=model)'),
    ):
        told = advised(*again)
        (dropping,) = told.budgets
        assert dropping.dropped > 0
        assert dropping.step_ms < moving.budgets[0].step_ms
        assert dropping.settings() == settings
        assert "Of moving alone" not in _advice.text(told)


@pytest.mark.parametrize(
    ("records", "full", "at_ns", "rate"),
    [
        ([], [], [], 1.0),
        ([], [1, 2], [0], 1.0),
        ([], [1, 2], [5, 0], 1.0),
        ([], [1], [0], 0.0),
        ([(8, 7, -1, 0, 0, 0, -1, -1, -1, 0)], [1], [0], 1.0),
        ([(8, 0, -1, 0, 0, 0, 3, -1, -1, 0)], [1], [0], 1.0),
        ([(0, 0, -1, 0, 0, 0, -1, -1, -1, 0)], [1], [0], 1.0),
    ],
)
def test_the_engine_refuses_a_step_that_cannot_be(
    records: Any, full: Any, at_ns: Any, rate: float
) -> None:
    with pytest.raises(ValueError, match=r"step|record"):
        _native.advise(records, full, at_ns, [], 1, rate, rate)


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(1), with_shape(line(2), shape())]
    path = write(tmp_path / "steps.jsonl", lines, tail="broken")
    assert main(["advise", str(path), "--high", "8GiB, 6GiB", "--link", "25GB/s,20GB/s"]) == 0
    printed = capsys.readouterr().out
    assert "25 GB/s to the host and 20 GB/s back, as was given" in printed
    assert "8.00 GiB" in printed
    assert "1 line is broken" in printed
    assert main(["advise", str(path), "--high", "8GiB", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["budgets"][0]["high"] == 8 * GIB
    assert found["budgets"][0]["settings"] == 'pool(high="8192MiB")'
    numbers = ["--high", str(8 * GIB), "--link", "25000000000,20000000000"]
    assert main(["advise", str(path), *numbers, "--json"]) == 0
    (in_bytes,) = json.loads(capsys.readouterr().out)
    assert in_bytes["budgets"][0]["high"] == 8 * GIB
    assert (in_bytes["link"]["d2h"], in_bytes["link"]["h2d"]) == (25e9, 20e9)
    for wrong in (["--high", "much"], ["--link", "1GB/s,2GB/s,3GB/s"], ["--link", "fast"]):
        assert main(["advise", str(path), *wrong]) == 2
    assert main(["advise", str(tmp_path / "absent")]) == 2


def rates(device: int, out: float, back: float) -> link.Rates:
    return link.Rates(device, out, back, None)


def test_what_the_doctor_measured_is_the_link_of_the_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [with_shape(line(1, device=1), shape(d2h_rate=0, h2d_rate=0))]
    path = str(write(tmp_path / "steps.jsonl", steps))
    file = tmp_path / "link.json"

    def asked(*links: link.Rates, simulated: bool = False) -> int:
        found = doctor.Findings(links=list(links), simulated=simulated)
        file.write_text(json.dumps(dataclasses.asdict(found)))
        return main(["advise", path, "--high", "8GiB", "--json", "--link", str(file)])

    assert asked(rates(0, 1e9, 2e9), rates(1, 50e9, 40e9)) == 0
    (of_its_device,) = json.loads(capsys.readouterr().out)
    assert (of_its_device["link"]["d2h"], of_its_device["link"]["h2d"]) == (50e9, 40e9)
    assert asked(rates(0, 3e9, 2e9)) == 0
    (of_the_only_one,) = json.loads(capsys.readouterr().out)
    assert of_the_only_one["budgets"][0]["late_ms"] > of_its_device["budgets"][0]["late_ms"]
    assert asked(rates(0, 1e9, 2e9), rates(2, 1e9, 2e9)) == 2
    assert asked() == 2
    assert asked(rates(1, 0.0, 2e9)) == 2
    assert asked(rates(1, 1e9, 2e9), simulated=True) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 8
    assert all("doctor --json" in todo for todo in errors[1::2])
    file.write_text("no JSON")
    assert main(["advise", path, "--link", str(file)]) == 2


def test_a_run_that_moved_nothing_is_told_with_the_link_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [with_shape(line(1), shape(d2h_rate=0, h2d_rate=0))]
    path = str(write(tmp_path / "steps.jsonl", steps))

    def none(simulated: bool) -> list[link.Rates]:
        raise stagehand_alloc.DriverError("There is no GPU.", "Use one.")

    monkeypatch.setattr(link, "measure", none)
    assert main(["advise", path]) == 2
    assert "--link 25GB/s" in capsys.readouterr().err
    monkeypatch.setattr(link, "measure", lambda simulated: [rates(0, 30e9, 20e9)])
    assert main(["advise", path]) == 0
    printed = capsys.readouterr().out
    assert "30 GB/s to the host and 20 GB/s back, as measured on this machine now" in printed


# ---- beside real steps ---------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks whose tensors are large beside the 2 MiB that memory is mapped in."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, 256))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def steps_of(
    model: nn.Module, x: torch.Tensor, pool: stagehand_alloc.Pool, gpu: SimulatedGpu, count: int
) -> list[tuple[int, float]]:
    """Bytes moved and virtual milliseconds of each step."""
    found = []
    for _ in range(count):
        model.zero_grad(set_to_none=False)
        with VirtualTime(gpu) as time:
            before, began = pool.stats().evicted_bytes, time.now_ns()
            with pool:
                loss = model(x)
            loss.backward()
            ms = (time.now_ns() - began) / 1e6
        found.append((pool.stats().evicted_bytes - before, ms))
    return found


def test_a_plain_run_tells_what_budgets_cost_bytes_and_time(run_fresh: Any) -> None:
    # What a device has learned of other models, and its host memory, would count too.
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.append({here!r}); import test_advise as t; t.measured()"
    run_fresh(code)


def measured() -> None:
    with simulated_gpu(memory="1GiB", seed=1) as gpu:
        advised_on(gpu, Path("steps.jsonl"))


def advised_on(gpu: SimulatedGpu, path: Path) -> None:
    torch.manual_seed(0)
    model, x = Chain(6, 1024), torch.randn(1040, 256)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = steps_of(model, x, stagehand_alloc.pool(high="900MiB", telemetry=path), gpu, 5)
    assert {moved for moved, _ in plain} == {0}
    _telemetry.close()
    (run,) = _runs.read([path]).runs
    carries = Link(25e9, 25e9)  # the simulated GPU's
    largest = max(row[0] for row in run.shape.known.records)  # type: ignore[union-attr]
    needs = _advice.advise(run, link=carries).needs
    high = round(0.7 * needs)
    (told,) = _advice.advise(run, [high], carries).budgets
    pool = stagehand_alloc.pool(high=high, low=int(0.9 * high), recompute=False)
    moved, ms = steps_of(model, x, pool, gpu, 7)[-1]
    # Holes of 2 MiB beside tensors of 4; tests/native/test_advice.cpp has real sizes, to 5 %.
    assert abs(told.moved - moved) <= 3 * largest
    assert plain[-1][1] + told.late_ms == pytest.approx(ms, rel=0.10)
