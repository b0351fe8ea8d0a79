"""`Pool.plan`: what becomes of what a step saves, by what made it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import stagehand_alloc
from stagehand_alloc import PlanLine, StepPlan, _native
from stagehand_alloc._books import plan as _plan
from stagehand_alloc._step import proofs as _recompute

pytestmark = pytest.mark.usefixtures("gpu")


def test_before_any_step_a_plan_is_empty_and_says_so() -> None:
    assert str(_plan.read(-1)).startswith("No step has been learned")
    assert _plan.read(-1).lines == ()


@pytest.mark.parametrize("recompute", [False, True])
def test_what_moves_and_what_is_dropped_stands_with_the_op_that_made_it(recompute: bool) -> None:
    assert _recompute.load() == "loaded"
    _native.empty_cache()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6)]
    pool = stagehand_alloc.pool(high="27MiB", low="23MiB", recompute=recompute)
    x = torch.randn(2080, 256)
    before = stagehand_alloc.stats()
    # Eight steps or a few more: whose turn a lane has, and where earlier tests have left addresses,
    # make the same step up to a tenth longer, and so another plan is tried.
    for at in range(40):
        y = x
        with pool:
            for block in blocks:
                y = y + block(y)
            loss = y.square().mean()
        loss.backward()
        plan = pool.plan()
        if at >= 7 and plan.settled:
            break
    gained = stagehand_alloc.stats().since(before)
    lines = {line.op: line for line in plan.lines}
    assert gained.evicted_bytes > 0
    assert (gained.drops > 0) == recompute
    assert sum(line.moves + line.dropped for line in plan.lines) > 0
    assert (lines["GeluBackward0"].dropped > 0) == recompute
    assert (
        all(line.dropped == 0 for op, line in lines.items() if op != "GeluBackward0") or recompute
    )
    saved = 4 * 520 * 512 * 4
    gelu = lines["GeluBackward0"]
    assert gelu.stays + gelu.moves + gelu.dropped >= 6 * saved
    assert plan.step_ms > 0
    assert plan.settled


def test_the_table_lists_what_leaves_first_and_the_forecast_last() -> None:
    plan = StepPlan(
        (
            PlanLine("Block", "GeluBackward0", 6, 0, 1 << 20, 5 << 20, 0.25),
            PlanLine("", "", 2, 3 << 20, 0, 0, 0.0),
        ),
        step_ms=12.0,
        best_ms=12.5,
        late_ms=0.5,
        again_ms=0.25,
        settled=True,
    )
    told = (
        "Computing 12.0 ms; forecast: 0.5 ms late on the link, 0.2 ms made again; "
        "best so far 12.5 ms in all."
    )
    assert str(plan).splitlines() == [
        "in     made by        storages      stay      move   dropped   again",
        "Block  GeluBackward0         6       0 B  1.00 MiB  5.00 MiB  0.2 ms",
        "-      (no graph)            2  3.00 MiB       0 B       0 B  0.0 ms",
        told,
    ]
    trying = dataclasses.replace(plan, settled=False)
    assert str(trying).endswith("best so far 12.5 ms in all; other plans are still tried.")


def test_regions_are_named_by_their_modules_or_functions() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))

    def head(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    x = torch.randn(512, 64, requires_grad=True)
    pool = stagehand_alloc.pool(high="310MiB", recompute=model)
    for _ in range(2):
        y = x
        with pool:
            for block in model:
                y = block(y)
            loss = stagehand_alloc.checkpoint(head, y).sum()
        loss.backward()
    found = {(line.region, line.op) for line in pool.plan().lines}
    assert ("Sequential", "AddmmBackward0") in found
    assert any(region.endswith("head") for region, _ in found)
