"""A pool in Hugging Face's Trainer, and in what is made from it, such as TRL's SFTTrainer.

from stagehand_alloc.integrations.transformers import StagehandCallback
trainer = Trainer(model, args, train_dataset=data, callbacks=[StagehandCallback(high="20GiB")])
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._settings.sizes import Size
from stagehand_alloc._step.attach import Attached
from stagehand_alloc._step.pool import Pool
from stagehand_alloc.integrations._training import PoolOfTraining, missing

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", "transformers accelerate") from error

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn


class StagehandCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps a training inside a budget: the model's forward enters and leaves a pool.

    Takes the arguments of `stagehand_alloc.pool`. A loss that is computed from the model's output,
    outside of its forward, is outside of the pool. Where training raised, the model keeps its pool
    until the next training, or `remove`.

    Each log gains some of `Pool.step_stats`, such as ``stagehand/spill_bytes``, of the newest step;
    telemetry has all of every step. As training begins, this callback moves to the front of the
    Trainer's, so that what reports to services, such as TensorBoard, sees these numbers.
    """

    def __init__(self, high: Size | None = None, low: Size | None = None, **arguments: Any) -> None:
        super().__init__()
        self._training = PoolOfTraining(high, low, arguments)
        self._attached: Attached | None = None

    @property
    def pool(self) -> Pool | None:
        """The pool of the training that runs, or of the last one; None before the first."""
        return self._training.pool

    def remove(self) -> None:
        """The model's forward enters no pool any more. Any number of times."""
        if self._attached is not None:
            self._attached.remove()
        self._attached = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        """Attach a new pool to the model.

        Raises ConfigError for arguments of the Trainer that a pool does not go with, and what
        `stagehand_alloc.pool` raises.
        """
        self.remove()  # from a training that raised, which calls no on_train_end
        _check(args)
        _move_to_front(self)
        assert model is not None  # the Trainer gives its own, which no wrapper is around
        self._attached = self._training.begin().attach(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the pool off the model."""
        self.remove()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the numbers to the log, and to what the Trainer remembers of it."""
        if self._attached is None:
            return
        numbers = self._training.numbers()
        if logs is not None:
            logs.update(numbers)
        if state.log_history:  # a copy of `logs`, made just before
            state.log_history[-1].update(numbers)


def _move_to_front(callback: TrainerCallback) -> None:
    """The Trainer asks its reporters first, which were added first: they would miss our numbers.

    A callback is given no way to its list: it is looked for in the handler that calls.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list) and any(one is callback for one in callbacks):
            # In place: the handler goes through this list now, and those after us stay after us.
            callbacks.sort(key=lambda one: one is not callback)
            return
        frame = frame.f_back


def _check(args: Any) -> None:
    todo = "Turn it off: the pool moves as much as its budget asks for."
    both = "and StagehandCallback would both move what is saved for backward to the host."
    if getattr(args, "activation_offloading", False):  # TRL's
        raise ConfigError(f"activation_offloading=True {both}", todo)
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # of transformers 5; older
        settings = getattr(args, f"{name}_kwargs", None)
        if getattr(args, name, False) and isinstance(settings, dict) and settings.get("offload"):
            raise ConfigError(f"{name}_kwargs={{'offload': True}} {both}", todo)
    gpus = getattr(args, "n_gpu", 1)
    if gpus > 1:
        raise ConfigError(
            f"The Trainer would run forward on {gpus} GPUs from {gpus} threads of one process "
            "(DataParallel), and a pool is for one.",
            "Start one process per GPU (torchrun, accelerate launch), or set CUDA_VISIBLE_DEVICES.",
        )
