"""What the tests of the integrations share: two equal trainings by somebody else's trainer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from training import digest, gradients
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import stagehand_alloc
from stagehand_alloc import _native

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


# ---- Hugging Face's Trainer ----------------------------------------------------------------------


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


def arguments(folder: Path, kind: type = TrainingArguments, **more: Any) -> Any:
    settings = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    settings |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    settings |= {"disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    settings |= {"bf16": False}  # trl's default; a CPU takes ten times as long with it
    return kind(str(folder), **(settings | more))


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
