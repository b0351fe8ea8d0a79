"""``pool(recompute=...)``: which modules become regions, and what that leaves of them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import BY_NAME, Recipe
from regions import Block, batch, dropping, made, nothing_dropped, plainly, when_needed
from torch import Tensor, nn
from training import digest, footprint, gradients, leaves_nothing, train

import stagehand_alloc
from stagehand_alloc import ConfigError
from stagehand_alloc._step import marks as _marks

pytestmark = pytest.mark.usefixtures("gpu")


class Kept:
    """`recipe` with the model that was built last, for a pool that names modules of it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.pool: Any = None

    def __enter__(self) -> Any:
        return self.pool.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.pool.__exit__(*error)

    def build(self, **sizes: Any) -> Recipe:
        def build() -> nn.Module:
            model = self.recipe.build()
            self.pool = stagehand_alloc.pool(recompute=model, **sizes)
            return model

        return Recipe(self.recipe.name, build, self.recipe.batch)


MODELS = ("gpt", "gpt_dropout", "conv_batchnorm")


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_plain_torch_with_all_dropped_that_can_be(name: str) -> None:
    expected = train(BY_NAME[name])
    kept = Kept(BY_NAME[name])
    with leaves_nothing(), dropping():
        assert train(kept.build(high="310MiB"), kept) == expected


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_plain_torch_inside_a_budget(name: str) -> None:
    expected = train(BY_NAME[name])
    kept = Kept(BY_NAME[name])
    with leaves_nothing():
        assert train(kept.build(high=footprint(BY_NAME[name]).high(0.6)), kept) == expected


def test_nothing_runs_twice_while_there_is_room() -> None:
    expected = train(BY_NAME["gpt"])
    kept = Kept(BY_NAME["gpt"])
    with leaves_nothing(), nothing_dropped():
        assert train(kept.build(), kept) == expected


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def test_of_a_model_the_entries_of_its_outermost_lists_are_regions() -> None:
    model = Nested()
    assert _marks.modules_of(model) == list(model.layers)
    assert _marks.modules_of(model.layers) == list(model.layers)
    assert _marks.modules_of([model.head, model.embed]) == [model.head, model.embed]
    assert _marks.modules_of(model.head) == [model.head]
    assert _marks.modules_of(model.embed) == [model.embed]


def test_shared_modules_are_marked_once() -> None:
    layer = nn.Linear(4, 4)
    assert _marks.modules_of([layer, layer]) == [layer]


@pytest.mark.parametrize("wrong", ["layers", 3, [], [nn.ReLU(), "x"], object()])
def test_what_is_no_module_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="neither a bool, nor 'nodes', nor modules"):
        stagehand_alloc.pool(recompute=wrong)


def test_forward_is_as_before_once_the_pool_is_left_also_by_an_error() -> None:
    model = Nested()
    own = model.layers[0]
    plain = own.forward
    own.forward = lambda x: plain(x)  # as libraries do that wrap it
    wrapped = own.forward
    for _ in range(2):
        pool = stagehand_alloc.pool(recompute=model)
        with contextlib.suppress(ZeroDivisionError), pool:
            assert isinstance(model.layers[1].forward, _marks.Region)
            raise ZeroDivisionError
        assert "forward" not in model.layers[1].__dict__
        assert own.forward is wrapped


def test_the_next_entry_begins_where_one_was_cut_off() -> None:
    model = Nested()
    pool = stagehand_alloc.pool(recompute=model)
    x = torch.randn(8, 4)
    pool.__enter__()
    pool._marks.enter()  # type: ignore[union-attr]  # as an interrupt leaves it
    pool.__exit__(None, None, None)
    model.layers[0].__dict__["forward"] = _marks.Region(model.layers[0], False)
    with pool:
        model(x).sum().backward()
    assert all("forward" not in layer.__dict__ for layer in model.layers)


def test_a_copy_made_inside_the_pool_computes_with_its_own_parameters() -> None:
    model = Nested()
    x = torch.randn(8, 4)
    with stagehand_alloc.pool(recompute=model):
        copied = copy.deepcopy(model)
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert digest(copied(x)) != digest(model(x))
        assert not copied(x).any()
    assert not copied(x).any()
    pickle.loads(pickle.dumps(model))


def test_arguments_by_name_and_flags_reach_the_module() -> None:
    model = nn.Sequential(made(Block), made(Block))

    def once(around: Any, run: Callable[[], Tensor]) -> Any:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with around:
            loss = run()
        loss.backward()
        return digest(loss), gradients(model)

    x = batch()

    def run() -> Tensor:
        return model[1](model[0](x, scale=0.5), scale=0.25).square().mean()  # type: ignore[no-any-return]

    expected = once(contextlib.nullcontext(), run)
    with leaves_nothing(), dropping():
        assert once(stagehand_alloc.pool("310MiB", recompute=list(model)), run) == expected


def test_false_turns_off_what_the_settings_turned_on() -> None:
    assert stagehand_alloc.pool(config={"recompute": True})._config.recompute
    assert not stagehand_alloc.pool(recompute=False, config={"recompute": True})._config.recompute
    assert stagehand_alloc.pool(recompute=True)._config.recompute


@pytest.mark.parametrize("wrong", ["node", 3, [True]])
def test_settings_that_recompute_cannot_have_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="neither a bool nor 'nodes'"):
        stagehand_alloc.Config(recompute=wrong)


@pytest.mark.parametrize("asked", [{"recompute": True}, {"config": {"recompute": True}}])
def test_true_finds_the_blocks_of_what_the_first_steps_call(asked: dict[str, Any]) -> None:
    recipe = BY_NAME["gpt"]
    expected = train(recipe)
    pool = stagehand_alloc.pool(footprint(recipe).high(0.4), **asked)
    before = stagehand_alloc.stats().reruns
    with leaves_nothing(), dropping():
        assert train(recipe, pool) == expected
    assert stagehand_alloc.stats().reruns > before


def test_true_marks_blocks_while_the_pool_is_entered_and_none_of_a_compiled_model() -> None:
    model = Nested()
    pool = stagehand_alloc.pool("310MiB", recompute=True)
    for marked in (False, True):
        with pool:
            model(torch.randn(8, 4)).sum()
            assert all("forward" in one.__dict__ for one in model.layers) == marked
        assert not any("forward" in one.__dict__ for one in model.modules())
    marks = _marks.Marks.found()
    marks.look_in([torch.compile(model)])  # type: ignore[list-item]
    assert marks.looking()


def test_a_block_that_adds_to_a_cache_does_not_run_twice() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor, past_key_values: list[Tensor]) -> Tensor:
            past_key_values.append(x.detach())
            return torch.tanh(self.linear(x))

    block = Block()
    cache: list[Tensor] = []
    pool = stagehand_alloc.pool("310MiB", recompute=[block])
    with pytest.warns(stagehand_alloc.StagehandWarning, match="use_cache = False"), pool:
        loss = block(torch.randn(32, 64), past_key_values=cache).sum()
    loss.backward()
    assert len(cache) == 1


def note_regions(block: nn.Module, noted: list[bool]) -> None:
    """At each forward of the block: whether torch's checkpoint runs it."""

    def look(*_: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
            frame = frame.f_back
        noted.append(frame is not None)

    next(block.children()).register_forward_pre_hook(look)


def forget_pressure() -> None:
    """So many steps without any: then what other tests ran short of counts no more."""
    pool = stagehand_alloc.pool()
    for _ in range(1024):
        with pool:
            pass


def test_while_there_is_room_no_module_is_a_region_once_that_is_known() -> None:
    forget_pressure()
    recipe = BY_NAME["gpt"]
    model, inputs = recipe.build(), recipe.batch()
    marked: list[bool] = []
    for block in _marks.modules_of(model):
        note_regions(block, marked)

    def step(around: Any) -> dict[str, str | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        with around:
            loss = model(*inputs)
        loss.backward()
        return gradients(model)

    expected = step(contextlib.nullcontext())
    marked.clear()
    roomy = stagehand_alloc.pool(recompute=model)
    with nothing_dropped():
        assert step(roomy) == expected
        assert all(marked)
        assert step(roomy) == expected
        marked.clear()
        assert [step(roomy) for _ in range(2)] == [expected] * 2
        assert not any(marked)
    # Inside another budget nothing is known: there they are regions again, and run twice.
    tight = stagehand_alloc.pool(footprint(recipe).high(0.4), recompute=model)
    before = stagehand_alloc.stats().reruns
    with dropping():
        assert [step(tight) for _ in range(3)] == [expected] * 3
    assert stagehand_alloc.stats().reruns > before


def test_a_step_that_runs_short_after_steps_with_room_has_regions_from_there_on() -> None:
    forget_pressure()
    recipe = BY_NAME["gpt"]
    model, inputs = recipe.build(), recipe.batch()
    regions: list[bool] = []
    note_regions(_marks.modules_of(model)[-1], regions)
    pool = stagehand_alloc.pool(recompute=model)
    held = []
    for filled in (False, False, False, True):
        if filled:
            room = stagehand_alloc.stats()
            held.append(torch.empty(room.high - room.occupied, dtype=torch.uint8))
        with pool:
            loss = model(*inputs)
        loss.backward()
    assert regions[:4] == [True, False, False, True]  # and again, for what was dropped of it


@pytest.mark.parametrize("outer", ["named", "the user's"])
def test_blocks_named_inside_of_another_region_train_as_plain_torch(outer: str) -> None:
    model = nn.Sequential(made(Block), made(Block))
    x = batch()

    def once(around: Any, apply: Callable[..., Any]) -> Any:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with around:
            loss = apply(model, x).square().mean()
        loss.backward()
        return digest(loss), gradients(model)

    expected = once(contextlib.nullcontext(), plainly)
    named = [model, *model] if outer == "named" else list(model)
    apply = plainly if outer == "named" else when_needed
    with leaves_nothing(), dropping():
        assert once(stagehand_alloc.pool("310MiB", recompute=named), apply) == expected


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x).relu()


def test_a_compiled_block_stays_one_graph_that_is_compiled_once() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model = nn.Sequential(Norms(), Norms())
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    x = torch.randn(8, 4, requires_grad=True)
    model(x).sum().backward()
    expected = gradients(model)
    graphs.clear()
    pool = stagehand_alloc.pool(recompute=model)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with pool:
            loss = model(x).sum()
        loss.backward()
        assert gradients(model) == expected
    assert len(graphs) <= 2  # one for each block, whose forward is another inside the pool


def test_what_is_written_down_tells_of_regions_while_there_is_room(tmp_path: Path) -> None:
    model = Nested()
    regions: list[bool] = []
    note_regions(model.layers[0], regions)
    path = str(tmp_path / "run.jsonl")
    pool = stagehand_alloc.pool(recompute=model, config={"telemetry": path})
    for _ in range(4):
        with pool:
            loss = model(torch.randn(8, 4)).sum()
        loss.backward()
    assert regions == [True] * 4
