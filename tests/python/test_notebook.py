"""What a notebook shows of a pool: a plot, and tables of its statistics and its plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stagehand_alloc
from stagehand_alloc import InstallError, PlanLine, StepPlan
from stagehand_alloc._books.stats import PoolStats

MIB = 1 << 20


@pytest.mark.usefixtures("gpu")
def test_a_pool_plots_the_memory_of_its_newest_step() -> None:
    x = torch.ones(2 * MIB, requires_grad=True)
    pool = stagehand_alloc.pool(high="300MiB", low="280MiB", limit="310MiB")
    for _ in range(2):
        with pool:
            y = torch.sin(torch.sin(x))
        y.sum().backward()
    figure = pool.plot()
    assert "backward</text>" in figure._repr_svg_()  # type: ignore[attr-defined]
    assert figure.axes[0].get_ylim()[0] == 0


def test_before_a_step_there_is_nothing_to_plot(run_fresh: Callable[..., Any]) -> None:
    done = run_fresh(
        """
        import stagehand_alloc
        try:
            stagehand_alloc.pool(high="1GiB").plot()
        except stagehand_alloc.PoolError as error:
            print(error)
        """
    )
    assert "no step has been learned" in done.stdout


def test_statistics_are_a_table_and_a_bar() -> None:
    shown = PoolStats(device=3, mapped=6 * MIB, live=2 * MIB, high=8 * MIB)._repr_html_()
    assert "width:25.00%" in shown
    assert "<th>device 3</th>" in shown
    assert "8.00 MiB" in shown
    assert PoolStats()._repr_html_()


@pytest.mark.usefixtures("gpu")
def test_a_pool_is_a_table_of_its_budget_and_its_newest_step() -> None:
    pool = stagehand_alloc.pool(high="300MiB", low=0.25)
    shown = pool._repr_html_()
    assert "<th>pool</th><th>not entered yet</th>" in shown
    assert "<td>high</td><td>300.00 MiB</td>" in shown
    assert "newest step" not in shown
    assert "limit" not in shown  # nobody said one
    with pool:
        y = torch.sin(torch.ones(2 * MIB, requires_grad=True))
    y.sum().backward()
    shown = pool._repr_html_()
    assert "<th>device 0, allocator</th>" in shown
    assert "<td>low</td><td>256.00 MiB</td>" in shown  # of the device, which is known now
    assert "<td>newest step</td><td>1, " in shown
    assert "<td>over high</td><td>0 B</td>" in shown


def test_a_plan_is_a_table_whose_names_are_no_markup() -> None:
    plan = StepPlan((PlanLine("<b>", "Gelu", 1, 2, 3, 4, 0.5),), 12.0, 0.0, 1.0, 2.0)
    shown = plan._repr_html_()
    assert "<td>&lt;b&gt;</td><td>Gelu</td>" in shown
    assert "Computing 12.0 ms" in shown
    assert "No step has been learned" in StepPlan((), 0, 0, 0, 0)._repr_html_()


@pytest.mark.usefixtures("gpu")
def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InstallError, match=r"stagehand_alloc\[plot\]"):
        stagehand_alloc.pool().plot()
