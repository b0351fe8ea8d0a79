"""`Pool.attach`: the pool is around a model's own forward, whoever calls it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BY_NAME
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import footprint, leaves_nothing, train

import stagehand_alloc
from stagehand_alloc import ConfigError, TelemetryError
from stagehand_alloc._books import telemetry as _telemetry
from stagehand_alloc._step.attach import Everywhere
from stagehand_alloc._step.device import process
from stagehand_alloc._step.trouble import Trouble

pytestmark = pytest.mark.usefixtures("gpu")

RECIPE = BY_NAME["gpt"]


def test_training_an_attached_model_equals_plain_torch_inside_the_budget() -> None:
    expected = train(RECIPE)
    pool = stagehand_alloc.pool(footprint(RECIPE).high(0.5))

    class Attaching:
        name = RECIPE.name
        batch = staticmethod(RECIPE.batch)

        @staticmethod
        def build() -> nn.Module:
            model = RECIPE.build()
            pool.attach(model)
            return model

    before = stagehand_alloc.stats()
    with leaves_nothing():
        assert train(Attaching) == expected  # type: ignore[arg-type]
    assert stagehand_alloc.stats().since(before).evicted_bytes > 0


class Stops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).exp()
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_the_pool_or_the_next_one_does(
    kind: type[BaseException],
) -> None:
    model = Stops()
    pool = stagehand_alloc.pool(high="64MiB")
    pool.attach(model)
    x = torch.randn(4, 8)
    model.error = kind()
    with pytest.raises(kind):
        model(x)
    model.error = None
    for _ in range(2):
        model(x).sum().backward()
        assert pool._entry is None
    assert pool.stats().activations_saved > 0


def test_removed_it_enters_no_pool_any_more() -> None:
    model = Stops()
    pool = stagehand_alloc.pool(high="64MiB")
    attached = pool.attach(model)
    model(torch.randn(4, 8)).sum().backward()
    saved = pool.stats().activations_saved
    for _ in range(2):
        attached.remove()
        model(torch.randn(4, 8)).sum().backward()
    assert pool.stats().activations_saved == saved > 0


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_an_attached_model_is_copied_and_pickled(again: Any) -> None:
    model = Stops()
    stagehand_alloc.pool(high="64MiB").attach(model)
    found = again(model)
    before = stagehand_alloc.stats().activations_saved
    found(torch.randn(4, 8)).sum().backward()
    assert stagehand_alloc.stats().activations_saved > before


def test_inside_another_pool_the_error_says_so() -> None:
    model = Stops()
    stagehand_alloc.pool(high="64MiB").attach(model)
    with (
        stagehand_alloc.pool(high="64MiB"),
        pytest.raises(stagehand_alloc.NestedPoolError),
    ):
        model(torch.randn(4, 8))
    model(torch.randn(4, 8)).sum().backward()


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module"):
        stagehand_alloc.pool(high="64MiB").attach(print)  # type: ignore[arg-type]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_what_backward_runs_again_enters_no_pool() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 8)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    around = Everywhere(stagehand_alloc.pool(high="64MiB"))
    try:
        model(x).sum().backward()
    finally:
        around.remove()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected) == 8


def test_a_pool_whose_entry_failed_was_not_entered(tmp_path: Path) -> None:
    model = Stops()
    around = Everywhere(stagehand_alloc.pool(telemetry=tmp_path / "no" / "folder.jsonl"))
    try:
        with pytest.raises(TelemetryError):
            model(torch.randn(4, 8))
        assert not around.entered
        (tmp_path / "no").mkdir()
        model(torch.randn(4, 8)).sum().backward()
        assert around.entered
    finally:
        around.remove()
    _telemetry.close()


def test_the_blocks_of_an_attached_model_are_found_from_its_root() -> None:
    model = Blocks()
    pool = stagehand_alloc.pool(high="64MiB", recompute=True)
    pool.attach(model)
    model(torch.randn(4, 8)).sum().backward()
    assert pool._marks is not None
    assert pool._marks._alive() == list(model.layers)


def test_another_thread_that_evaluates_meanwhile_does_not_leave_the_pool() -> None:
    class Evaluated(Stops):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                worker = threading.Thread(target=evaluate, args=(self, x))
                worker.start()
                worker.join()
                assert pool._entry is not None
            return super().forward(x)

    def evaluate(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            done.append(model(x))

    done: list[Tensor] = []
    model, pool = Evaluated(), stagehand_alloc.pool(high="64MiB")
    pool.attach(model)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        assert pool._entry is None
    assert len(done) == 2


class Recursive(nn.Module):
    """Calls itself, as a tree does; inside, the pool must still be entered."""

    def __init__(self, pool: stagehand_alloc.Pool) -> None:
        super().__init__()
        self.linear, self._seen = nn.Linear(8, 8), [pool]
        self.entered: list[bool] = []
        self.error: BaseException | None = None

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        y: Tensor = self.linear(x).exp()
        if depth:
            y = self(y, depth - 1)
        elif self.error is not None:
            raise self.error
        self.entered.append(self._seen[0]._entry is not None)
        return self.linear(y).sin()


@pytest.mark.parametrize("kind", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_forward_that_calls_itself_stays_inside_the_pool_until_the_outermost_ends(
    everywhere: bool, kind: type[BaseException] | None
) -> None:
    pool = stagehand_alloc.pool(high="64MiB")
    model = Recursive(pool)
    around = Everywhere(pool) if everywhere else pool.attach(model)
    try:
        if kind is not None:
            model.error = kind()
            with pytest.raises(kind):
                model(torch.randn(4, 8))
            model.error = None
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            assert pool._entry is None
    finally:
        around.remove()
    assert model.entered == [True] * 8
    assert pool._steps == 2 + (kind is not None)


def test_after_an_interrupt_in_one_model_the_pool_is_around_the_next_one() -> None:
    pool = stagehand_alloc.pool(high="64MiB")
    first, second = Stops(), Stops()
    around = Everywhere(pool)
    try:
        first.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            first(torch.randn(4, 8))
        saved = pool.stats().activations_saved
        second(torch.randn(4, 8)).sum().backward()
        assert pool._entry is None
        assert pool._steps == 2
        assert pool.stats().activations_saved > saved
    finally:
        around.remove()


def test_an_interrupted_forward_keeps_nothing_of_who_called_it() -> None:
    pool = stagehand_alloc.pool(high="64MiB")
    model = Stops()
    attached = pool.attach(model)
    held: list[weakref.ref[Tensor]] = []

    def train() -> None:
        batch, of_ours = torch.randn(4, 8), torch.randn(4)
        held.extend(map(weakref.ref, (batch, of_ours)))
        model(batch)

    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        train()
    del caught
    model.error = None
    assert attached._running is not None
    gc.collect()
    assert [one() for one in held] == [None, None]
    model(torch.randn(4, 8)).sum().backward()  # the pool is around it
    assert pool._entry is None
    assert pool._steps == 2


def test_a_copy_made_in_the_middle_of_forward_is_around_nothing() -> None:
    class Copies(Stops):
        def forward(self, x: Tensor) -> Tensor:
            if not copies:
                copies.append(pickle.loads(pickle.dumps(attached)))
                copies.append(copy.deepcopy(attached))
            return super().forward(x)

    copies: list[Any] = []
    model = Copies()
    attached = stagehand_alloc.pool(high="64MiB").attach(Stops())
    attached._handles.clear()
    attached._enter(model)
    model(torch.randn(4, 8))
    attached._leave(model)
    assert [one._running for one in copies] == [None, None]


def test_of_several_models_called_one_by_one_all_blocks_are_found() -> None:
    pool = stagehand_alloc.pool(high="64MiB", recompute=True)
    first, second, third = Blocks(), Blocks(), Blocks()
    around = Everywhere(pool)
    try:
        for _ in range(2):
            second(first(torch.randn(4, 8))).sum().backward()
        third(torch.randn(4, 8)).sum().backward()  # a network that comes later, as of a GAN
        for _ in range(4):
            second(first(torch.randn(4, 8))).sum().backward()
    finally:
        around.remove()
    assert pool._marks is not None
    assert pool._marks._alive() == [*first.layers, *second.layers, *third.layers]
    assert not pool._marks.looking()


def test_a_warning_in_an_attached_model_names_the_users_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process.device(0), "trouble", Trouble())
    model, x = Stops(), torch.randn(1 << 18, 8)
    stagehand_alloc.pool(high="2MiB").attach(model)

    def steps() -> None:
        for _ in range(3):
            model(x).sum().backward()

    with pytest.warns(stagehand_alloc.StagehandWarning, match="No eviction can hold") as told:
        steps()
    assert {one.filename for one in told} == {__file__}


def test_an_attached_model_is_compiled() -> None:
    torch.manual_seed(0)
    model, x = Stops(), torch.randn(4, 8)
    model(x).sum().backward()
    expected = model.linear.weight.grad
    model.zero_grad(set_to_none=True)
    pool = stagehand_alloc.pool(high="64MiB")
    pool.attach(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        compiled(x).sum().backward()
        assert pool._entry is None
    assert expected is not None
    assert model.linear.weight.grad is not None
    assert torch.equal(model.linear.weight.grad, expected)
