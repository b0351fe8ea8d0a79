"""What is told of offloaded weights: statistics, telemetry, the report, and other budgets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import DEVICE, MIB, Model, tokens, trained
from lora import build as build_of
from telemetry_lines import GIB, known_step, line, shape, with_shape, write

import stagehand_alloc
from stagehand_alloc import StepStats, TelemetryError, _native
from stagehand_alloc.__main__ import main
from stagehand_alloc._books import advice as _advice
from stagehand_alloc._books import findings as _findings
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books import telemetry as _telemetry
from stagehand_alloc._books.advice import Link
from stagehand_alloc._books.runs import Run
from stagehand_alloc._books.shape import StepShape
from stagehand_alloc._books.stats import PoolStats

ROOM, TIGHT = 64 * MIB, 8 * MIB
BLOCKS = 16
COUNTS = ("loads", "late", "loaded_bytes", "left", "wait_ns")
WEIGHTS = {f"weights_{name}" for name in ("bytes", "home", "home_peak", *COUNTS)}


def build() -> Any:
    """8 MiB of frozen weights: two thirds of them do not fit beside what a TIGHT step needs."""
    return build_of(lambda: Model(blocks=BLOCKS))


@pytest.fixture
def none_left(leaves_no_weights: None) -> Iterator[None]:
    yield
    _telemetry.close()


def of_weights(found: PoolStats) -> dict[str, int]:
    return {name: getattr(found, name) for name in WEIGHTS}


# ---- counted -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("none_left")
def test_statistics_say_what_the_engine_counted_of_weights() -> None:
    before = stagehand_alloc.stats()
    model = stagehand_alloc.offload(build())
    stagehand_alloc.reset_peak_stats()
    pool = stagehand_alloc.pool(high=TIGHT)
    trained(model, pool)
    now = _native.weights(DEVICE)
    found = stagehand_alloc.stats()
    assert (found.weights_bytes, found.weights_home) == (now["bytes"], now["home"])
    counts = found.since(before)
    assert counts.weights_loads > counts.weights_late > 0
    assert counts.weights_loaded_bytes > found.weights_bytes  # more than once
    assert 0 <= counts.weights_loads - counts.weights_left <= BLOCKS  # the others are at home
    assert found.weights_home <= found.weights_home_peak < found.weights_bytes
    assert found.weights_home <= found.live
    assert counts.h2d_bytes >= counts.weights_loaded_bytes
    assert 0 < counts.weights_wait_ns <= counts.stall_ns
    assert "of the stalls" in str(found)
    assert "title='weights 0 B'" not in found._repr_html_()


@pytest.mark.usefixtures("none_left")
def test_weights_that_fit_come_once_and_make_nobody_wait() -> None:
    before = stagehand_alloc.stats()
    model = stagehand_alloc.offload(build())
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(high=ROOM, on_step=seen.append)
    trained(model, pool, steps=4)
    pool.step_stats()
    first, *others = (one.counted for one in seen)
    assert first.weights_loads == BLOCKS
    assert first.weights_loaded_bytes == first.weights_bytes == first.weights_home
    for one in others:
        assert {getattr(one, f"weights_{name}") for name in COUNTS} == {0}
        assert one.weights_home == one.weights_home_peak == one.weights_bytes
    assert stagehand_alloc.stats().since(before).weights_loads == BLOCKS


@pytest.mark.usefixtures("none_left")
def test_steps_add_up_to_what_was_counted_in_all(gpu: Any) -> None:
    model = stagehand_alloc.offload(build())
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(high=TIGHT, on_step=seen.append)
    with pool:  # what came before the pool is not its own
        pass
    pool.step_stats()
    seen.clear()
    before = stagehand_alloc.stats()
    trained(model, pool, steps=5)
    gpu.drain()  # a wait is told once the GPU has passed it
    numbers = pool.step_stats()
    after = stagehand_alloc.stats().since(before)
    for name in (f"weights_{one}" for one in COUNTS):
        assert sum(getattr(one.counted, name) for one in seen) == getattr(after, name), name
    last = seen[-1].counted
    assert numbers["weights_loads"] == last.weights_loads > 0
    assert numbers["weights_wait_ms"] == round(last.weights_wait_ns / 1e6, 3)


@pytest.mark.usefixtures("none_left")
def test_the_peak_at_home_is_of_the_step_alone_and_starts_again_when_asked() -> None:
    model = stagehand_alloc.offload(build())
    seen: list[StepStats] = []
    for high in (ROOM, TIGHT, TIGHT):
        pool = stagehand_alloc.pool(high=high, on_step=seen.append)
        trained(model, pool, steps=1)
        pool.step_stats()
    whole, _, tight = (one.counted for one in seen)
    assert whole.weights_home_peak == whole.weights_bytes > tight.weights_home_peak > 0
    assert stagehand_alloc.stats().weights_home_peak == whole.weights_bytes
    stagehand_alloc.reset_peak_stats()
    assert stagehand_alloc.stats().weights_home_peak == stagehand_alloc.stats().weights_home


@pytest.mark.usefixtures("none_left")
def test_who_offloads_nothing_is_told_nothing_of_weights() -> None:
    stagehand_alloc.reset_peak_stats()
    before = stagehand_alloc.stats()
    trained(build(), stagehand_alloc.pool(high=ROOM), steps=2)
    assert set(of_weights(stagehand_alloc.stats().since(before)).values()) == {0}
    assert "weights" not in str(PoolStats(live=1))
    assert "weights" not in PoolStats(live=1)._repr_html_()


# ---- told ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("none_left")
def test_a_run_s_file_is_reported_with_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    model = stagehand_alloc.offload(build())
    trained(model, stagehand_alloc.pool(high=TIGHT, telemetry=path), steps=9)
    _telemetry.close()
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    bytes_ = _native.weights(DEVICE)["bytes"]
    assert {one["weights_bytes"] for one in lines} == {bytes_}
    assert main(["report", "--json", "--no-html", str(path)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["weights_bytes"] == bytes_
    assert 0 < run["weights_bytes_a_step"] <= max(one["weights_loaded_bytes"] for one in lines)
    assert main(["report", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"weights {bytes_ / MIB:.2f} MiB, at most" in printed
    assert "weights MiB" in printed.splitlines()[0]
    page = path.with_suffix(".html").read_text()
    assert "Weights" in page
    assert "of weights come a step" in page
    assert main(["advise", str(path), "--link", "25GB/s"]) == 0
    head, *budgets = capsys.readouterr().out.splitlines()[3:8]
    assert "weights" in head
    assert any("KiB" in one or "MiB" in one for one in budgets)


def streamed(loaded: int = 8 * GIB, count: int = 8, of: Any = None, **fields: Any) -> Run:
    """Steps in which weights come, and little else does."""
    usual = {"weights_bytes": 10 * GIB, "weights_loaded_bytes": loaded, "weights_loads": 16}
    usual |= {
        "weights_late": 2,
        "h2d_bytes": loaded + GIB,
        "d2h_bytes": GIB,
        "d2h_rate": 25 * 10**9,
    }
    steps = tuple(line(n, **{**usual, **fields}) for n in range(1, count + 1))
    return Run("steps.jsonl", 0, 0, steps, of)


def found_in(run: Run) -> dict[str, _findings.Finding]:
    return {one.kind: one for one in _findings.find(run)}


def test_a_link_full_of_weights_says_so_and_not_that_recompute_helps() -> None:
    full = found_in(streamed(stall_time_ms=90.0, h2d_rate=25 * 10**9))
    assert set(full) == {"weights_link_full"}
    told = full["weights_link_full"]
    assert told.level is _findings.Level.PROBLEM
    assert "8.00 GiB of weights come in 16 loads a step, 89% of what comes" in told.what
    assert "recompute" not in told.todo
    assert "does not help" not in told.todo


def test_weights_that_come_late_on_an_idle_link_name_the_late_loads() -> None:
    late = found_in(streamed(stall_time_ms=90.0, h2d_rate=250 * 10**9))
    assert set(late) == {"weights_late"}
    assert "2 of them not begun before their block was reached" in late["weights_late"].what


def test_a_link_full_of_saved_tensors_is_theirs_though_weights_come_too() -> None:
    mixed = streamed(GIB, h2d_bytes=8 * GIB, stall_time_ms=90.0, h2d_rate=20 * 10**9)
    assert set(found_in(mixed)) == {"link_full"}


def test_weights_that_stream_are_moved_though_no_saved_tensor_is() -> None:
    calm = {"spill_bytes": 0, "restore_bytes": 0, "mapped_peak": 7 * GIB}
    assert set(found_in(streamed(**calm))) == {"held"}
    assert set(found_in(streamed(activations_saved=0))) == {"held"}  # sampling
    resident = found_in(streamed(0, weights_loads=0, weights_late=0, **calm))
    assert set(resident) == {"never_pressed"}
    assert all("advise" not in one.todo for one in resident.values())


LINK = Link(25e9, 25e9)


def of_idle_weights(layers: int = 8) -> StepShape:
    """Each layer has 1 GiB of weights beside the one it saves, held in its forward and backward."""
    known = known_step(layers)
    end = len(known.full) - 1
    idle = [
        (GIB, *span)
        for i in range(layers)
        for span in ((0, i), (i + 1, end - i), (end - i + 1, -1))
        if span[1] == -1 or span[0] < span[1]
    ]
    return shape(dataclasses.replace(known, idle=tuple(one for one in idle if one[1] < end)))


def test_advise_counts_offloaded_weights_in_what_a_step_needs_and_in_what_comes() -> None:
    run = streamed(0, of=of_idle_weights(), weights_loads=0)
    advice = _advice.advise(run, [32 * GIB, 12 * GIB], LINK)
    alone = _advice.advise(streamed(0, of=shape(), weights_bytes=0), [12 * GIB], LINK)
    assert advice.needs > alone.needs + 6 * GIB
    assert advice.least == alone.least
    roomy, tight = advice.budgets
    assert (roomy.weights, roomy.moved, roomy.slower) == (0, 0, 1.0)
    assert 4 * GIB <= tight.weights <= 16 * GIB
    assert tight.step_ms > alone.budgets[0].step_ms
    told = _advice.text(advice)
    assert "weights" in told
    assert "weights" not in _advice.text(alone)


def test_advise_refuses_weights_that_it_is_not_told_the_uses_of_or_that_are_written_back() -> None:
    with pytest.raises(TelemetryError, match=r"10\.00 GiB of offloaded weights") as caught:
        _advice.advise(streamed(of=shape()), [8 * GIB], LINK)
    assert len(str(caught.value).splitlines()) == 2
    written = streamed(of=of_idle_weights(), weights_written_bytes=GIB)
    with_room = streamed(of=dataclasses.replace(of_idle_weights(), dirty=GIB))
    for run in (written, with_room):
        with pytest.raises(TelemetryError, match=r"trained some of its 10\.00 GiB") as caught:
            _advice.advise(run, [8 * GIB], LINK)
        assert len(str(caught.value).splitlines()) == 2


@pytest.mark.usefixtures("none_left")
def test_advise_refuses_a_run_that_had_room_for_what_it_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.jsonl"
    model = build().requires_grad_()
    stagehand_alloc.offload(model, trained=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pool = stagehand_alloc.pool(high=ROOM, telemetry=path)
    for step in range(9):
        with pool:
            loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _telemetry.close()
    assert all(
        json.loads(one)["weights_written_bytes"] == 0 for one in path.read_text().splitlines()
    )
    assert main(["advise", str(path), "--link", "25GB/s"]) == 2
    assert "trained some of its" in capsys.readouterr().err


@pytest.mark.parametrize("row", [(GIB, 2), (GIB, "2", 4), (-GIB, 2, 4), (GIB, 99, 4), (0, 2, 4)])
def test_idle_weights_that_are_broken_give_no_figures(tmp_path: Path, row: Any) -> None:
    known = dataclasses.replace(known_step(), idle=(row,))
    path = write(tmp_path / "broken.jsonl", [line(1), with_shape(line(2), shape(known))])
    (run,) = _runs.read([path]).runs
    with pytest.raises(TelemetryError):
        _advice.advise(run, [8 * GIB], LINK)


def test_lines_from_before_weights_were_told_are_read(tmp_path: Path) -> None:
    old = [{k: v for k, v in line(n).items() if k not in WEIGHTS} for n in (1, 2)]
    path = write(tmp_path / "old.jsonl", [old[0], with_shape(old[1], shape())])
    (run,) = _runs.read([path]).runs
    assert not run.has_weights()
    assert main(["report", str(path)]) == 0
    assert "weights" not in path.with_suffix(".html").read_text().split("</style>")[1]
