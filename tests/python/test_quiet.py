"""Quiet steps: with far more room than is used a pool leaves saved tensors alone, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from training import evicting_everything

import stagehand_alloc
from stagehand_alloc import StepStats, _native
from stagehand_alloc._step import quiet

MIB = 1 << 20
HIGH = 64 * MIB
DEVICE = 0

pytestmark = pytest.mark.usefixtures("gpu")


def saves(layers: int, x: Tensor) -> Tensor:
    """Saves a MiB a layer, and makes one more each time."""
    for _ in range(layers):
        x = torch.sin(x)
    return x


def leaf() -> Tensor:
    return torch.linspace(0, 1, MIB // 4, requires_grad=True)


def gradient(pool: Any, layers: int) -> Tensor:
    """Of a step of so many layers."""
    return gradient_of(lambda x: saves(layers, x), pool)


def gradient_of(model: Callable[[Tensor], Tensor], pool: Any) -> Tensor:
    """Of a step; forward alone is inside the pool."""
    x = leaf()
    with pool:
        y = model(x)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def plain(layers: int) -> Tensor:
    x = leaf()
    saves(layers, x).sum().backward()
    assert x.grad is not None
    return x.grad


def saved() -> int:
    return int(_native.stats(DEVICE)["activations_saved"])


def calm(pool: Any, steps: int = quiet.FEW + 1) -> None:
    """So many that the next one is quiet."""
    for _ in range(steps):
        gradient(pool, 4)


def top() -> Any:
    from torch._C import _autograd

    return _autograd._top_saved_tensors_default_hooks(True)


def test_after_a_few_calm_steps_nothing_is_shown_to_the_pool_and_its_step_says_so() -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(high=HIGH, on_step=seen.append)
    calm(pool)
    before = saved()
    assert before > 0
    with pool:
        assert top() is None
    assert torch.equal(gradient(pool, 4), plain(4))
    assert saved() == before
    assert not any(one.quiet for one in seen[: quiet.FEW])
    assert seen[-1].quiet
    assert seen[-1].numbers()["quiet"] == 1
    assert "quiet" in pool.step_stats()


def test_of_budgets_that_take_turns_the_lowest_decides_for_all() -> None:
    large, small = stagehand_alloc.pool(high=HIGH), stagehand_alloc.pool(high=HIGH // 4)
    for layers, quiet_then in ((12, False), (2, True)):
        for _ in range(quiet.FEW + 2):
            gradient(large, layers)
            gradient(small, layers)
        for pool in (large, small):
            with pool:
                assert (top() is None) == quiet_then


def test_a_pool_that_is_made_anew_for_each_step_is_quiet_too() -> None:
    for _ in range(quiet.FEW + 1):
        gradient(stagehand_alloc.pool(high=HIGH), 4)
    before = saved()
    gradient(stagehand_alloc.pool(high=HIGH), 4)
    assert saved() == before


def test_a_quiet_step_that_grows_beyond_its_room_keeps_to_it_with_plain_gradients() -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(high=HIGH, on_step=seen.append)
    expected = plain(100)
    calm(pool)
    stagehand_alloc.reset_peak_stats()
    before = stagehand_alloc.stats().overshoot_bytes
    x = leaf()
    with pool:
        assert top() is None
        y = saves(100, x)
        assert top() is not None
    assert top() is None
    assert stagehand_alloc.stats().mapped_peak <= HIGH
    assert stagehand_alloc.stats().evicted > 0
    y.sum().backward()
    del y
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert stagehand_alloc.stats().overshoot_bytes == before
    assert pool.step_stats()["quiet"] == 1  # some of it was not counted
    assert torch.equal(gradient(pool, 100), expected)  # and the next one is followed as a whole
    assert pool.step_stats()["quiet"] == 0
    assert stagehand_alloc.stats().overshoot_bytes == before


def test_steps_under_pressure_are_never_quiet_and_after_an_alarm_more_have_to_be_calm() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    for _ in range(2 * quiet.FEW):
        gradient(pool, 100)
    with pool:
        assert top() is not None
    calm(pool)  # the first sees that the one before was not
    with pool:
        assert top() is None
    gradient(pool, 50)  # quiet, and then not
    calm(pool, 2 * quiet.FEW - 1)
    with pool:
        assert top() is not None
    with pool:
        assert top() is None


def test_a_step_in_which_something_left_is_not_calm_however_little_was_in_use() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    with evicting_everything():
        calm(pool, 3 * quiet.FEW)
        with pool:
            assert top() is not None


def test_room_is_what_the_device_has_where_that_is_less_than_the_budget(gpu: Any) -> None:
    pool = stagehand_alloc.pool(high=900 * MIB)
    calm(pool)
    with pool:
        assert top() is None
    gpu.fail("cuMemGetInfo_v2", times=1)  # nobody knows what it has
    with pool:
        assert top() is not None


def test_what_an_evaluation_between_forward_and_backward_takes_counts_for_the_step() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    for _ in range(3 * quiet.FEW):
        with pool:
            assert top() is not None
            y = saves(16, leaf())
        with torch.no_grad(), pool:
            torch.empty(20 * MIB, dtype=torch.uint8)
        y.sum().backward()


def test_what_a_backward_takes_counts_too() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    for _ in range(2 * quiet.FEW):
        gradient(pool, 4)
        torch.empty(40 * MIB, dtype=torch.uint8)  # as an optimizer might
    with pool:
        assert top() is not None


def test_what_is_in_use_for_good_is_no_sign_of_pressure_and_a_lower_budget_begins_anew() -> None:
    weights = torch.ones(40 * MIB, dtype=torch.uint8)
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with pool:
        assert top() is None
    with stagehand_alloc.pool(high=HIGH - MIB):
        assert top() is not None
    del weights


def test_evaluations_are_no_calm_steps() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    for _ in range(4 * quiet.FEW):
        with torch.no_grad(), pool:
            saves(4, torch.ones(MIB // 4))
    with pool:
        assert top() is not None


def test_hooks_that_others_pushed_meanwhile_stay_theirs_and_above_the_pools() -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    before = saved()
    with torch.autograd.graph.saved_tensors_hooks(unpack, unpack):  # around the pool
        outer = top()
        with pool:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                y = saves(50, leaf())
                assert top()[0] is pack
            assert len(packed) == 50
            assert isinstance(top()[0].__self__, _native.Hooks)
            assert saved() == before
            y = saves(1, y)
            assert saved() == before + 1
        assert top()[0] is outer[0]
    assert top() is None
    y.sum().backward()


def test_a_pair_of_hooks_that_is_pushed_around_the_pool_and_inside_it_stays_there() -> None:
    def keep(tensor: Tensor) -> Tensor:
        return tensor

    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(keep, keep):
        with pool:
            with hooks(keep, keep):
                saves(50, leaf())
                assert top()[0] is keep
                assert _native.count_hooks() == 3
            assert isinstance(top()[0].__self__, _native.Hooks)
        assert _native.count_hooks() == 1
    assert _native.count_hooks() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_in_the_middle_of_an_alarm_reaches_the_program(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(entry: object) -> None:
        raise error

    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with monkeypatch.context() as patched:
        patched.setattr(quiet, "follow", follow)
        with pytest.raises(error), pool:
            saves(50, leaf())
    assert top() is None
    assert torch.equal(gradient(pool, 100), plain(100))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_of_ours_in_an_alarm_is_printed_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with monkeypatch.context() as patched:
        patched.setattr(quiet, "follow", None)
        assert torch.equal(gradient(pool, 50), plain(50))
    assert torch.equal(gradient(pool, 100), plain(100))


def test_after_an_alarm_nothing_is_dropped_before_a_leaf_was_seen() -> None:
    """What a proof is of rests on it (decision 37): one of another model would count."""
    pool = stagehand_alloc.pool(high=HIGH, recompute="nodes")

    def drops(quiet_then: bool) -> int:
        before = stagehand_alloc.stats()
        with pool:
            assert (top() is None) == quiet_then
            y = leaf()
            for _ in range(50):
                y = torch.nn.functional.gelu(y)
        y.sum().backward()
        found = stagehand_alloc.stats().since(before)
        assert found.evicted_bytes + found.dropped_bytes > 0
        return found.drops

    calm(pool)
    with evicting_everything():
        assert drops(quiet_then=True) == 0
        assert drops(quiet_then=False) > 0


def test_an_alarm_in_the_middle_of_a_backward_rings_again_after_it() -> None:
    class Takes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            for _ in range(2):
                torch.empty(40 * MIB, dtype=torch.uint8)
            return gradient

    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with pool:
        Takes.apply(leaf()).sum().backward()
        assert top() is None  # torch would have taken them away again
        y = saves(50, leaf())
        assert top() is not None
        assert stagehand_alloc.stats().mapped <= HIGH
    del y


def test_a_step_whose_alarm_could_not_be_heeded_is_not_calm() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with pool, torch.autograd.graph.disable_saved_tensors_hooks("a user's wish"):
        saves(34, leaf())
    with pool:
        assert top() is not None


def test_a_quiet_steps_numbers_are_of_its_backward_too() -> None:
    seen: list[StepStats] = []
    pool = stagehand_alloc.pool(high=HIGH, on_step=seen.append)
    calm(pool)
    x = leaf()
    with pool:
        told = len(seen)
        y = saves(4, x)
    assert len(seen) == told
    torch.empty(20 * MIB, dtype=torch.uint8)  # as backward might
    y.sum().backward()
    assert pool.step_stats()["quiet"] == 1
    assert seen[-1].counted.occupied_peak >= 20 * MIB


@pytest.mark.filterwarnings("error")
def test_nobody_is_warned_of_a_step_whose_alarm_rang_after_its_last_save() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with pool:
        y = saves(28, leaf())
        torch.empty(29 * MIB, dtype=torch.uint8)
        assert top() is not None
    y.sum().backward()
    assert pool.step_stats()["quiet"] == 1


def test_where_hooks_are_turned_off_the_alarm_rings_again_later() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    before = saved()
    with pool:
        with torch.autograd.graph.disable_saved_tensors_hooks("a user's wish"):
            y = saves(36, leaf())
        assert top() is None
        y = saves(6, y)
        assert top() is not None
        saves(1, y)
    assert saved() > before
    del y


def test_an_error_in_a_quiet_step_leaves_nothing_behind() -> None:
    def fails(layers: int) -> None:
        with pool:
            saves(layers, leaf())
            raise KeyError

    pool = stagehand_alloc.pool(high=HIGH)
    for layers in (4, 50):
        calm(pool, 2 * quiet.FEW + 1)
        with pytest.raises(KeyError):
            fails(layers)
        assert top() is None
        assert torch.equal(gradient(pool, 100), plain(100))
        assert top() is None


@pytest.mark.parametrize("what", ["telemetry", "keep", "checksums"])
def test_who_asked_to_be_shown_what_is_saved_is_shown_all_of_it(what: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "telemetry": {"telemetry": tmp_path / "steps.jsonl"},
        "keep": {"keep": lambda info: False},
        "checksums": {"config": {"debug_checksums": True}},
    }
    pool = stagehand_alloc.pool(high=HIGH, **settings[what])
    calm(pool, 3 * quiet.FEW)
    before = saved()
    gradient(pool, 4)
    assert saved() > before


def test_while_a_timeline_runs_no_step_is_quiet(tmp_path: Path) -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    with stagehand_alloc.timeline(tmp_path / "steps.json"), pool:
        assert top() is not None
    with pool:
        assert top() is None


def test_a_step_of_another_thread_is_followed_since_no_alarm_is_heard_there() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    found: list[Any] = []

    def step() -> None:
        with pool:
            found.append(top())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert found[0] is not None


def test_a_region_inside_a_quiet_step_has_its_hooks_and_no_step_is_quiet_after_it() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    calm(pool)
    x = leaf()
    with pool:
        assert top() is None
        y = checkpoint(
            lambda one: saves(4, one),
            x,
            use_reentrant=False,
            context_fn=stagehand_alloc.when_needed,
        )
    before = stagehand_alloc.stats().reruns
    y.sum().backward()
    assert stagehand_alloc.stats().reruns == before  # there was room
    assert x.grad is not None
    assert torch.equal(x.grad, plain(4))
    calm(pool, 3 * quiet.FEW)
    with pool:
        assert top() is not None


class Sines(torch.nn.Module):
    """Blocks that save a MiB for each of their layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Sine() for _ in range(layers // Sine.LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sine(torch.nn.Module):
    LAYERS = 4

    def forward(self, x: Tensor) -> Tensor:
        return saves(self.LAYERS, x)


@pytest.mark.parametrize("named", [True, False])
def test_modules_that_may_run_again_keep_no_step_from_being_quiet(named: bool) -> None:
    model = Sines(8)
    pool = stagehand_alloc.pool(high=HIGH, recompute=model if named else True)
    for _ in range(2 * quiet.FEW):
        assert torch.equal(gradient_of(model, pool), plain(8))
    with pool:
        assert top() is None
        assert not any("forward" in vars(block) for block in model.blocks)
    assert torch.equal(gradient_of(model, pool), plain(8))
    assert pool.step_stats()["quiet"] == 1


def test_a_quiet_step_that_grows_has_its_modules_run_again() -> None:
    small, large = Sines(8), Sines(100)
    expected = plain(100)
    pool = stagehand_alloc.pool(high=HIGH, recompute=[*small.blocks, *large.blocks])
    for _ in range(2 * quiet.FEW):
        gradient_of(small, pool)
    before = stagehand_alloc.stats()
    for quiet_then in (1, 0, 0):
        assert torch.equal(gradient_of(large, pool), expected)
        assert pool.step_stats()["quiet"] == quiet_then
    gained = stagehand_alloc.stats().since(before)
    assert gained.overshoot_bytes == 0
    assert gained.reruns > 0
    with pool:
        assert top() is not None


def test_a_plan_that_was_learned_outlives_quiet_steps() -> None:
    pool = stagehand_alloc.pool(high=HIGH)
    expected = plain(100)
    for _ in range(3):
        gradient(pool, 100)
    learned = str(pool.plan())
    assert "sin" in learned.lower()
    calm(pool, 3 * quiet.FEW)
    assert torch.equal(gradient(pool, 100), expected)
    stagehand_alloc.reset_peak_stats()
    assert torch.equal(gradient(pool, 100), expected)
    assert stagehand_alloc.stats().mapped_peak <= HIGH


def test_without_gradients_nothing_is_quiet() -> None:
    decide = quiet.Quiet()
    for _ in range(3 * quiet.FEW):
        assert not decide.begin(DEVICE, HIGH, gradients=False, may=True)
