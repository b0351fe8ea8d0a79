"""A step as an object: when it ends, who is told, and what is in it."""

from __future__ import annotations

import functools
import gc
import json
import operator
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import stagehand_alloc
from stagehand_alloc import ConfigError, StagehandWarning, StepStats, _native
from stagehand_alloc._books import runs as _runs
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._books import steps as _steps
from stagehand_alloc._books import telemetry as _telemetry

MIB = 1 << 20
NAMES = Path(__file__).with_name("telemetry_fields.txt")
Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    _telemetry.close()


def forward(pool: stagehand_alloc.Pool, megabytes: int = 1) -> torch.Tensor:
    x = torch.ones(megabytes * MIB // 16, requires_grad=True)
    with pool:
        y = x
        for _ in range(4):
            y = torch.sin(y)
    return y.sum()


def step(pool: stagehand_alloc.Pool, megabytes: int = 1) -> None:
    forward(pool, megabytes).backward()


@pytest.mark.usefixtures("gpu")
def test_a_step_is_told_once_when_the_next_begins() -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    for _ in range(3):
        step(pool)
    assert [one.step for one in seen] == [1, 2]
    assert [one.counted.activations_saved for one in seen] == [3, 3]
    assert [one.passed_through for one in seen] == [{"leaf": 1}] * 2
    assert all(0 < one.began_ns < one.left_ns < one.ended_ns for one in seen)
    assert seen[1].began_ns == seen[0].ended_ns


@pytest.mark.usefixtures("gpu")
def test_step_stats_after_backward_are_of_that_step_and_while_it_is_alive_of_the_one_before() -> (
    None
):
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    assert pool.step_stats() == {}
    for number in (1, 2):
        loss = forward(pool)
        assert len(seen) == number - 1
        assert pool.step_stats().get("step", 0) == number - 1
        loss.backward()
        del loss
        assert pool.step_stats()["step"] == number == len(seen)
        assert pool.step_stats()["step"] == number == len(seen)  # asked for again
    numbers = pool.step_stats()
    assert numbers["activations_saved"] == 3.0
    assert numbers["device"] == 0.0
    assert all(type(value) is float for value in numbers.values())
    assert "pid" not in numbers


@pytest.mark.usefixtures("gpu")
def test_a_step_that_leaves_nothing_behind_ends_with_the_with() -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    with pool:
        torch.ones(MIB, requires_grad=True).sin().sum().backward()
    assert [one.step for one in seen] == [1]


@pytest.mark.usefixtures("gpu")
def test_nothing_is_lost_between_steps_and_what_came_before_the_pool_is_not_its_own() -> None:
    torch.ones(64 * MIB, dtype=torch.uint8)
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    before = stagehand_alloc.stats().allocations
    for _ in range(3):
        step(pool)
        pool.step_stats()
        torch.ones(8 * MIB, dtype=torch.uint8)  # as an optimizer might
    step(pool)
    assert seen[0].counted.occupied_peak < 60 * MIB
    assert all(one.counted.occupied_peak >= 8 * MIB for one in seen[1:])
    pool.step_stats()
    counted = sum(one.counted.allocations for one in seen)
    assert counted <= stagehand_alloc.stats().allocations - before <= counted + 16


@pytest.mark.usefixtures("gpu")
def test_peaks_of_the_run_outlive_its_steps_and_a_reset_of_them_takes_nothing_from_the_step() -> (
    None
):
    stagehand_alloc.reset_peak_stats()
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    step(pool, 32)
    step(pool)
    assert seen[0].counted.occupied_peak > 30 * MIB
    assert stagehand_alloc.stats().occupied_peak > 30 * MIB
    torch.ones(48 * MIB, dtype=torch.uint8)
    stagehand_alloc.reset_peak_stats()  # in the middle of the second
    assert stagehand_alloc.stats().occupied_peak < 30 * MIB
    step(pool)
    assert seen[1].counted.occupied_peak > 45 * MIB
    assert stagehand_alloc.stats().occupied_peak < 30 * MIB


@pytest.mark.usefixtures("gpu")
def test_lanes_are_counted_by_what_they_moved() -> None:
    seen: list[StepStats] = []
    high = stagehand_alloc.stats().live + 40 * MIB
    pool = stagehand_alloc.pool(high=high, low=high, on_step=seen.append)
    for _ in range(3):
        step(pool, 32)
    pool.step_stats()
    for one in seen:
        found = one.counted
        assert found.evicted_bytes > 0
        assert found.d2h_bytes > 0
        assert found.h2d_bytes == found.restored_bytes > 0
        assert found.express_bytes <= found.h2d_bytes
        assert found.high == high
        assert found.mode == "allocator"


class Nobody:
    """The pool of steps that no pool began."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def _passed_through(self) -> dict[str, int]:
        return {}

    def _told(self, step: StepStats) -> None:
        self.told.append(step.step)


def open_step(owner: Nobody, number: int) -> _steps.OpenStep:
    made = _steps.OpenStep(number, "native", True, weakref.ref(owner), (), {})
    made.left_ns = 1
    return made


def test_who_asks_whether_a_step_is_over_never_ends_the_one_that_began_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, owner = _steps.Steps(0), Nobody()
    steps.begin(open_step(owner, 1))

    def another_thread_goes_on(_: int) -> int:
        monkeypatch.setattr(_stats, "records", lambda _: 0)
        steps.end()
        steps.begin(open_step(owner, 2))
        return 0

    monkeypatch.setattr(_stats, "records", another_thread_goes_on)
    steps.end_if_over(owner)
    assert owner.told == [1]
    steps.end_if_over(owner)
    assert owner.told == [1, 2]


def test_a_step_that_many_threads_end_is_told_once() -> None:
    steps, owner = _steps.Steps(0), Nobody()
    ready = threading.Barrier(4)
    errors: list[BaseException] = []

    def ask() -> None:
        ready.wait()
        try:
            for _ in range(2000):
                steps.end_if_over(owner)
        except BaseException as error:  # what a thread raises is the test's
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        ready.wait()
        for number in range(500):
            steps.begin(open_step(owner, number))
            steps.end()
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert errors == []
    assert sorted(owner.told) == list(range(500))


@pytest.mark.usefixtures("gpu")
def test_a_listener_may_enter_a_pool_and_the_newest_step_is_the_last_told() -> None:
    seen: list[int] = []

    def evaluate(one: StepStats) -> None:
        seen.append(one.step)
        if one.step == 1:
            step(pool)
            assert pool.step_stats()["step"] == 2

    pool = stagehand_alloc.pool(on_step=evaluate)
    step(pool)
    assert pool.step_stats()["step"] == 2
    assert seen == [1, 2]


@pytest.mark.usefixtures("gpu")
def test_an_entry_that_fails_is_a_step_ended_by_an_error_and_the_next_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    step(pool)

    def fail(_: object) -> None:
        raise ValueError("in the middle of an entry")

    with monkeypatch.context() as patched:
        patched.setattr(pool, "_push_hooks", fail)
        with pytest.raises(ValueError, match="in the middle"), pool:
            pass
    step(pool)
    pool.step_stats()
    assert [one.step for one in seen] == [1, 2, 3]
    assert [one.left_ns > 0 for one in seen] == [True, False, True]
    assert seen[2].counted.activations_saved == 3
    assert [one.began_ns for one in seen[1:]] == [one.ended_ns for one in seen[:-1]]


@pytest.mark.usefixtures("gpu")
def test_an_entry_that_fails_inside_a_checkpoint_leaves_its_hooks_on_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._C import _autograd

    pool = stagehand_alloc.pool()
    push = _autograd._push_saved_tensors_default_hooks
    fails = True

    def fail_once(*hooks: Any) -> None:
        nonlocal fails
        if fails:
            fails = False
            raise ValueError("in the middle of an entry")
        push(*hooks)

    def inner(x: torch.Tensor) -> torch.Tensor:
        if fails:
            with monkeypatch.context() as patched:
                patched.setattr(_autograd, push.__name__, fail_once)
                with pytest.raises(ValueError, match="in the middle"), pool:
                    pass
        return (x * x).sum()

    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    x = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(inner, x, use_reentrant=False)
        packed.clear()
        (x * x).sum()
        assert packed
    y.backward()
    assert x.grad is not None
    assert x.grad.equal(2 * x)


ASKS_TO_THE_END = """
    import threading
    import stagehand_alloc
    from stagehand_alloc import testing

    def ask(pool):
        while True:
            pool.stats()

    with testing.simulated_gpu(memory="256MiB", seed=1):
        pool = stagehand_alloc.pool()
        with pool:
            pass
        for _ in range(4):
            threading.Thread(target=ask, args=(pool,), daemon=True).start()
"""


def test_a_thread_that_asks_to_the_end_does_not_abort_the_process(run_fresh: Fresh) -> None:
    for _ in range(3):
        run_fresh(ASKS_TO_THE_END)


@pytest.mark.usefixtures("gpu")
def test_training_goes_on_where_a_listener_raises_which_one_warning_says() -> None:
    called: list[int] = []

    def fail(one: StepStats) -> None:
        called.append(one.step)
        raise ValueError("mine")

    pool = stagehand_alloc.pool(on_step=fail)
    step(pool)
    with pytest.warns(StagehandWarning, match=r"on_step=.*fail raised ValueError: mine") as told:
        step(pool)
    assert len(told) == 1
    assert f"({__file__}, line " in str(told[0].message)
    step(pool)
    assert pool.step_stats()["step"] == 3
    assert called == [1]


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Nameless:
    def __call__(self, _: StepStats) -> None:
        raise UnspeakableError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __repr__(self) -> str:
        raise RuntimeError("no name")


@pytest.mark.usefixtures("gpu")
def test_training_goes_on_where_neither_a_listener_nor_its_error_can_be_printed() -> None:
    pool = stagehand_alloc.pool(on_step=Nameless())
    step(pool)
    with pytest.warns(StagehandWarning, match="on_step=Nameless raised UnspeakableError: Unspeak"):
        step(pool)
    assert pool.step_stats()["step"] == 2


@pytest.mark.usefixtures("gpu")
def test_of_a_listener_in_c_that_raises_no_line_of_ours_is_named() -> None:
    of_c: Any = operator.itemgetter("step")
    pool = stagehand_alloc.pool(on_step=of_c)
    step(pool)
    with pytest.warns(StagehandWarning, match="raised TypeError") as told:
        step(pool)
    assert "pool.py" not in str(told[0].message)


@pytest.mark.usefixtures("gpu")
def test_an_interrupt_inside_a_listener_ends_the_training() -> None:
    def stop(_: StepStats) -> None:
        raise KeyboardInterrupt

    pool = stagehand_alloc.pool(on_step=stop)
    step(pool)
    with pytest.raises(KeyboardInterrupt):
        pool.step_stats()


def test_a_listener_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_step=3 cannot be called"):
        stagehand_alloc.pool(on_step=3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("gpu")
def test_an_open_step_keeps_neither_the_pool_nor_its_listener(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.pool = stagehand_alloc.pool(
                on_step=self.log, telemetry=tmp_path / "steps.jsonl", keep=self.first
            )

        def log(self, _: StepStats) -> None:
            raise AssertionError

        def first(self, info: stagehand_alloc.SavedTensorInfo) -> bool:
            return info.order == 0

    trainer = Trainer()
    step(trainer.pool)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
    _telemetry.close()  # and its last step is in the file
    (line,) = (json.loads(row) for row in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert line["passed_through"] == {"kept": 1, "leaf": 1}
    assert line["activations_saved"] == 2


@pytest.mark.usefixtures("gpu")
def test_a_line_is_in_the_file_soon_and_the_step_did_not_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setattr(_telemetry, "_PAUSE", 0.05)
    pool = stagehand_alloc.pool(telemetry=path)
    step(pool)
    step(pool)
    deadline = time.monotonic() + 60
    while not path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads(path.read_text())["step"] == 1


def test_many_steps_at_once_wait_for_no_thread(tmp_path: Path) -> None:
    writer = _telemetry.Writer(tmp_path / "steps.jsonl")
    with writer._lock:  # as while a slow disk takes lines
        for number in range(_telemetry._MOST_WAITING - 1):
            writer.listen(StepStats(number, 0))
    writer.close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) == _telemetry._MOST_WAITING - 1


PROGRAM = """
    import sys
    import torch, stagehand_alloc
    from stagehand_alloc import testing

    with testing.simulated_gpu(memory="256MiB", seed=1):
        pool = stagehand_alloc.pool(telemetry="steps.jsonl")
        for n in range(5):
            with pool:
                y = torch.ones(1 << 16, requires_grad=True).sin().sin()
            y.sum().backward()
            {inside}
"""


@pytest.mark.parametrize(
    ("inside", "exit_code"),
    [("pass", 0), ("if n == 4: raise ValueError", 1), ("n == 4 and sys.exit(3)", 3)],
)
def test_nothing_is_lost_however_the_process_ends(
    run_fresh: Fresh, tmp_path: Path, inside: str, exit_code: int
) -> None:
    run_fresh(PROGRAM.format(inside=inside), exit_code=exit_code)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_two_processes_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            try:
                writer = _telemetry.writer_of(path)
                for number in range(300):
                    writer.listen(StepStats(number, 0, rank))
                    if number % 7 == 0:
                        writer.write()
                _telemetry.close()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    found = _runs.read([path])
    assert found.skipped == ()
    for run in found.runs:
        assert [line["step"] for line in run.steps] == list(range(1, 301))
    assert [run.rank for run in found.runs] == [0, 1]


@pytest.mark.usefixtures("gpu")
def test_a_line_says_what_the_step_counted() -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(on_step=seen.append)
    step(pool)
    pool.step_stats()
    (one,) = seen
    fields = _steps.step_fields(1, one.counted, dict(one.passed_through))
    assert {name: one.fields()[name] for name in fields} == fields


def test_fields_are_added_and_never_taken_away() -> None:
    now = list(StepStats(1, 0).fields())
    before = NAMES.read_text().split()
    assert set(before) <= set(now), "a field of telemetry is gone"
    assert set(now) <= set(before), f"add it to {NAMES.name}"


@pytest.mark.usefixtures("gpu")
def test_native_and_python_call_the_same_things_counters() -> None:
    first = _native.stats(0)
    _native.end_step(0)
    ended = _native.end_step(0)
    subtracted = {
        name
        for name, value in ended.items()
        if value == 0 < first[name] and not name.endswith("_peak") and "overshoot_" not in name
    }
    not_shown = {"requested_bytes", "take_ups", "loans", "overtakes"}
    assert subtracted <= {*_stats.COUNTERS, *not_shown}


@pytest.mark.usefixtures("gpu")
def test_stats_search_for_a_proposal_once_for_one_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    found = _stats.propose_classes([])

    def count(demand: object) -> object:
        searched.append(demand)
        return found

    monkeypatch.setattr(_stats, "_proposal", functools.lru_cache(maxsize=8)(count))
    for _ in range(3):
        stagehand_alloc.stats()
    assert len(searched) == 1
    _stats.torch_memory_stats(0)
    assert len(searched) == 1


def test_the_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, rank in (("3", 3), ("", 0), ("x", 0)):
        monkeypatch.setenv("RANK", text)
        assert _steps.rank() == rank


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "ask",
    [
        *("stats", "end_step", "records", "reset_peaks", "pinned_demand", "contents"),
        *("step_kind", "step_shape", "plan", "lane_limits", "start_timeline", "stop_timeline"),
    ],
)
def test_who_asks_what_a_device_counted_lets_other_threads_run_meanwhile(ask: str) -> None:
    step(stagehand_alloc.pool())
    turns = 0
    stop = False

    def another() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on a thread runs where the other gives way
    thread = threading.Thread(target=another)
    thread.start()
    try:
        began, deadline = turns, time.monotonic() + 20
        while turns == began and time.monotonic() < deadline:
            getattr(_native, ask)(0)
        assert turns > began
    finally:
        stop = True
        sys.setswitchinterval(interval)
        thread.join()
        _native.stop_timeline(0)
