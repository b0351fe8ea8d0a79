"""The callback for Hugging Face's Trainer, and what all integrations have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from trainers import (
    STEPS,
    arguments,
    forget,
    gpt2,
    huggingface,
    kept_and_used,
    rows,
    within_a_share,
)
from training import leaves_nothing
from transformers import Trainer, TrainerCallback, TrainingArguments

import stagehand_alloc
from stagehand_alloc import ConfigError, SizeError, StepStats
from stagehand_alloc.integrations import lightning as for_lightning
from stagehand_alloc.integrations import torchtune as for_torchtune
from stagehand_alloc.integrations import transformers as for_transformers
from stagehand_alloc.integrations import trl as for_trl

pytestmark = pytest.mark.usefixtures("gpu")


def test_a_trainer_with_the_callback_equals_one_without_inside_the_budget(tmp_path: Path) -> None:
    expected, high = within_a_share(lambda _: huggingface(None, tmp_path)[0])
    callback = for_transformers.StagehandCallback(high=high)
    with leaves_nothing():
        actual = huggingface(callback, tmp_path)[0]
        assert actual.results() == expected.results()
        assert kept_and_used(callback.pool, high)


@pytest.mark.filterwarnings("ignore:No eviction can hold")  # one block's forward fills most of it
def test_a_trainer_that_checkpoints_moves_what_its_regions_keep(tmp_path: Path) -> None:
    more = {"gradient_checkpointing": True}
    expected, high = within_a_share(lambda _: huggingface(None, tmp_path, **more)[0])  # type: ignore[arg-type]
    callback = for_transformers.StagehandCallback(high=high)
    with leaves_nothing():
        assert huggingface(callback, tmp_path, **more)[0].results() == expected.results()  # type: ignore[arg-type]
        assert callback.pool is not None
        assert callback.pool.stats().evicted_bytes > 0


@pytest.mark.filterwarnings("ignore:No eviction can hold")  # as above, where a region runs again
def test_a_trainer_with_when_needed_runs_no_block_again_where_there_is_room(tmp_path: Path) -> None:
    regions = {"use_reentrant": False, "context_fn": stagehand_alloc.when_needed}
    more: Any = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": regions}
    expected = huggingface(None, tmp_path)[0]
    forget()
    _, half = within_a_share(lambda _: huggingface(None, tmp_path)[0])
    for high, again in (("256MiB", False), (half, True)):
        callback = for_transformers.StagehandCallback(high=high)
        with leaves_nothing():
            assert huggingface(callback, tmp_path, **more)[0].results() == expected.results()
        assert callback.pool is not None
        found = callback.pool.stats()
        assert (found.reruns == 0) or again
        assert (found.evicted_bytes + found.dropped_bytes > 0) == again


def test_a_size_in_the_environment_that_cannot_be_stops_a_training_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEHAND_ALLOC_HIGH", "20 potatoes")
    callback = for_transformers.StagehandCallback()
    with pytest.raises(SizeError, match="20 potatoes") as caught:
        huggingface(callback, tmp_path)
    assert "STAGEHAND_ALLOC_HIGH" in caught.value.what
    assert callback.pool is None


def test_each_log_says_what_the_newest_step_moved_in_the_trainer_s_own_loggers(
    tmp_path: Path,
) -> None:
    _, high = within_a_share(lambda _: huggingface(None, tmp_path)[0])
    steps: list[StepStats] = []
    callback = for_transformers.StagehandCallback(high=high, on_step=steps.append)
    _, trainer, watching = huggingface(callback, tmp_path)
    logs = watching.logs[:STEPS]  # the last one sums the training up
    newest = [step.numbers() for step in steps[1::2]]  # of two batches to an optimizer step
    assert len(newest) == len(logs) == STEPS
    for log, kept, step in zip(logs, trainer.state.log_history, newest, strict=False):
        told = {name: value for name, value in log.items() if name.startswith("stagehand/")}
        assert told == {name: step[name.split("/")[1]] for name in told}
        assert {"stagehand/spill_bytes", "stagehand/mapped_peak"} <= told.keys()
        assert told["stagehand/spill_bytes"] > 0
        assert kept.items() >= told.items()


class Reporter(TrainerCallback):
    """What the Trainer adds before the callbacks it is given, as it does TensorBoard's."""

    def __init__(self) -> None:
        self.begun = 0
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class Later(Reporter):
    """Another: the Trainer wants each class once."""


def test_what_reports_to_services_sees_the_numbers_though_it_was_added_first(
    tmp_path: Path,
) -> None:
    before, after = Reporter(), Later()
    callback = for_transformers.StagehandCallback(high="64MiB")
    trainer = Trainer(
        gpt2(), arguments(tmp_path), train_dataset=rows(), callbacks=[before, callback, after]
    )
    trainer.train()
    assert [before.begun, after.begun] == [1, 1]  # nobody was passed over, or asked twice
    for reporter in (before, after):
        assert all("stagehand/spill_bytes" in log for log in reporter.logs[:STEPS])
    order = trainer.callback_handler.callbacks
    assert order[0] is callback
    assert order.count(callback) == 1
    assert order.index(before) < order.index(after)


def test_the_callback_works_where_no_handler_of_that_shape_calls_it(tmp_path: Path) -> None:
    callback = for_transformers.StagehandCallback(high="64MiB")
    callback.on_train_begin(arguments(tmp_path), None, None, model=gpt2())
    callback.on_train_end(None, None, None)


class Raises(TrainerCallback):
    """Has the model's forward raise once, in the second step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            block = self.model.transformer.h[2]  # type: ignore[index]
            self.handle = block.register_forward_hook(self.stop)

    def stop(self, *_: Any) -> None:
        self.handle.remove()
        raise ZeroDivisionError


def test_a_trainer_whose_model_raised_has_left_the_pool_and_trains_again(tmp_path: Path) -> None:
    expected, high = within_a_share(lambda _: huggingface(None, tmp_path)[0])
    callback = for_transformers.StagehandCallback(high=high)
    model = gpt2()
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=rows(),
        callbacks=[callback, Raises(model)],
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert callback.pool is not None
    assert callback.pool._entry is None
    del trainer
    model.load_state_dict(gpt2().state_dict())
    model.zero_grad()
    forget()
    again = huggingface(callback, tmp_path, model)[0]
    assert again.results() == expected.results()
    assert kept_and_used(callback.pool, high)
    saved = callback.pool.stats().activations_saved
    model(**{name: row[None] for name, row in rows()[0].items()}).loss.backward()
    assert callback.pool.stats().activations_saved == saved  # it is off the model


@dataclasses.dataclass
class LikeTrl(TrainingArguments):
    activation_offloading: bool = True


def test_another_that_moves_activations_to_the_host_is_refused(tmp_path: Path) -> None:
    offload = {"gradient_checkpointing_kwargs": {"offload": True}}
    for args in (
        arguments(tmp_path, LikeTrl),
        arguments(tmp_path, gradient_checkpointing=True, **offload),  # type: ignore[arg-type]
    ):
        callback = for_transformers.StagehandCallback(high="64MiB")
        trainer = Trainer(gpt2(), args, train_dataset=rows(), callbacks=[callback])
        with pytest.raises(ConfigError, match="both move") as caught:
            trainer.train()
        assert len(str(caught.value).splitlines()) == 2
        assert callback.pool is None


def test_threads_of_one_process_are_refused() -> None:
    class Args:
        n_gpu = 2

    with pytest.raises(ConfigError, match="2 GPUs"):
        for_transformers.StagehandCallback(high="64MiB").on_train_begin(Args(), None, None)


# ---- all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        for_transformers.StagehandCallback,
        for_lightning.StagehandCallback,
        for_trl.OffloadActivations,
        for_torchtune.OffloadActivations,
    ],
)
def test_an_argument_that_pool_does_not_have_is_refused_at_once(made: Any) -> None:
    with pytest.raises(TypeError, match="hihg"):
        made(hihg="20GiB")


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_without_its_library_an_integration_says_what_to_install(
    library: str, run_fresh: Callable[..., Any]
) -> None:
    run_fresh(f"""
        import sys
        for name in ("transformers", "lightning", "lightning.pytorch", "pytorch_lightning"):
            sys.modules[name] = None  # importing it raises ImportError
        import stagehand_alloc
        try:
            import stagehand_alloc.integrations.{library}
        except stagehand_alloc.InstallError as error:
            what, todo = str(error).splitlines()
            assert "{library}" in what and "pip install {library}" in todo
        else:
            raise AssertionError("imported")
    """)
