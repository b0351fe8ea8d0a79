"""The callbacks for Hugging Face's Trainer and for Lightning: plain torch's bits, in a budget."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import digest, gradients, leaves_nothing
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import stagehand_alloc
from stagehand_alloc import ConfigError, _native
from stagehand_alloc.integrations import lightning as for_lightning
from stagehand_alloc.integrations import transformers as for_transformers

pytestmark = pytest.mark.usefixtures("gpu")

STEPS = 3


class Watched:
    """What two equal trainings share bit by bit, and what one without a budget takes."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.gradients: list[dict[str, str | None]] = []
        self.state: dict[str, str] = {}
        self.start = 0

    def begin_step(self) -> None:
        """Later steps only: the first one begins without the optimizer's state."""
        self.start = stagehand_alloc.stats().occupied

    def end(self, model: nn.Module) -> None:
        self.state = {name: digest(tensor) for name, tensor in model.state_dict().items()}

    def results(self) -> tuple[Any, ...]:
        assert len(self.gradients) == STEPS
        return self.losses, self.gradients, self.state


def within_a_share(train: Callable[[Any], Watched], share: float = 0.5) -> tuple[Watched, int]:
    """A training without a callback, and a budget that its activations do not fit."""
    forget()
    expected = train(None)
    peak = stagehand_alloc.stats().occupied_peak
    forget()
    return expected, expected.start + int(share * (peak - expected.start))


def forget() -> None:
    gc.collect()
    _native.empty_cache()
    stagehand_alloc.reset_peak_stats()


def kept_and_used(pool: stagehand_alloc.Pool | None, high: int) -> bool:
    assert pool is not None
    assert pool._entry is None
    found = pool.stats()
    assert found.overshoot_bytes == 0
    assert found.mapped_peak <= high
    return found.evicted_bytes > 0


# ---- Hugging Face --------------------------------------------------------------------------------


class Watching(TrainerCallback):
    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.logs: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watched.begin_step()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.watched.gradients.append(gradients(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(128, (STEPS * 32, 64), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, kind: type = TrainingArguments, **more: Any) -> TrainingArguments:
    settings = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    settings |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    settings |= {"disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    return kind(str(folder), **settings, **more)


def huggingface(
    callback: Any, folder: Path, model: nn.Module | None = None, **more: Any
) -> tuple[Watched, Trainer, Watching]:
    watched = Watched()
    model = gpt2() if model is None else model
    watching = Watching(watched)

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        watched.losses.append(digest(output.loss))

    handle = model.register_forward_hook(note)
    callbacks = [watching] if callback is None else [callback, watching]
    trainer = Trainer(model, arguments(folder, **more), train_dataset=rows(), callbacks=callbacks)
    try:
        trainer.train()
    finally:
        handle.remove()
    watched.end(model)
    return watched, trainer, watching


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


def test_each_log_says_what_was_moved_since_the_one_before(tmp_path: Path) -> None:
    _, high = within_a_share(lambda _: huggingface(None, tmp_path)[0])
    callback = for_transformers.StagehandCallback(high=high)
    _, trainer, watching = huggingface(callback, tmp_path)
    assert callback.pool is not None
    moved = callback.pool.stats().evicted_bytes
    name = "stagehand/evicted_bytes"
    assert sum(log[name] for log in watching.logs) == moved > 0
    assert sum(log[name] for log in trainer.state.log_history) == moved
    assert {"stagehand/mapped_peak", "stagehand/overshoot_bytes"} <= watching.logs[0].keys()


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


# ---- Lightning -----------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, watched: Watched) -> None:
        super().__init__()
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
        self.layers = nn.Sequential(*blocks, nn.Linear(64, 10))
        self.watched = watched

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.watched.losses.append(digest(loss))
        return loss

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        if index % 2 == 0:
            self.watched.begin_step()
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.watched.gradients.append(gradients(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class ByHand(Module):
    """Two losses in each step, and backward called by the step itself."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        if index >= STEPS:
            return
        self.watched.begin_step()
        for _ in range(2):
            self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Stops(Module):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        loss = super().training_step(batch, index)
        if index == 3:
            raise ZeroDivisionError
        return None if index == 1 else loss  # None: Lightning calls no backward


def lightning(callback: Any, folder: Path, kind: type[Module] = Module) -> tuple[Watched, Any]:
    watched = Watched()
    module = kind(watched)
    count = STEPS * 2 * 2048
    torch.manual_seed(4)
    data = TensorDataset(torch.randn(count, 64), torch.randint(10, (count,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=1 if kind is ByHand else 2,
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(data, batch_size=2048))
    watched.end(module)
    return watched, trainer


@pytest.mark.parametrize("kind", [Module, ByHand])
def test_lightning_with_the_callback_equals_one_without_inside_the_budget(
    tmp_path: Path, kind: type[Module]
) -> None:
    expected, high = within_a_share(lambda _: lightning(None, tmp_path, kind)[0])
    callback = for_lightning.StagehandCallback(high=high)
    for _ in range(2):  # a second training has a pool of its own
        actual = trainer = None  # the first one's model would be in the second one's budget
        forget()
        actual, trainer = lightning(callback, tmp_path, kind)
        assert actual.results() == expected.results()
        assert kept_and_used(callback.pool, high)
        assert trainer.callback_metrics["stagehand/mapped_peak"] > 0


def test_lightning_leaves_the_pool_where_no_backward_comes_or_a_step_raises(
    tmp_path: Path,
) -> None:
    callback = for_lightning.StagehandCallback(high="64MiB")
    with pytest.raises(ZeroDivisionError):
        lightning(callback, tmp_path, Stops)
    assert callback.pool is not None
    assert callback.pool._entry is None
    expected = lightning(None, tmp_path)[0]
    assert lightning(callback, tmp_path)[0].results() == expected.results()


# ---- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [for_transformers, for_lightning])
def test_an_argument_that_pool_does_not_have_is_refused_at_once(made: Any) -> None:
    with pytest.raises(TypeError, match="hihg"):
        made.StagehandCallback(hihg="20GiB")


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
