"""A pool in Lightning's Trainer, as `lightning.pytorch` or as `pytorch_lightning`.

from stagehand_alloc.integrations.lightning import StagehandCallback
trainer = lightning.pytorch.Trainer(callbacks=[StagehandCallback(high="20GiB")])
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stagehand_alloc._settings.sizes import Size
from stagehand_alloc._step.pool import Pool
from stagehand_alloc.integrations._training import PoolOfTraining, missing

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        # Each has a Callback of its own: the program's, where it has imported one of them already.
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise missing("lightning", "lightning") from error


class StagehandCallback(Callback):  # type: ignore[misc]
    """Keeps a training inside a budget: a pool is around each ``training_step``.

    Takes the arguments of `stagehand_alloc.pool`. The pool is left before backward, and entered
    again after it where the module calls ``manual_backward`` itself. What an optimizer runs again,
    such as LBFGS its closure, is outside of the pool.

    With each batch some of `Pool.step_stats`, such as ``stagehand/spill_bytes``, is logged.
    """

    def __init__(self, high: Size | None = None, low: Size | None = None, **arguments: Any) -> None:
        super().__init__()
        self._training = PoolOfTraining(high, low, arguments)
        self._inside = False

    @property
    def pool(self) -> Pool | None:
        """The pool of the training that runs, or of the last one; None before the first."""
        return self._training.pool

    def _enter(self) -> None:
        self._leave()
        if self.pool is not None:
            self.pool.__enter__()
            self._inside = True

    def _leave(self, error: BaseException | None = None) -> None:
        if self._inside and self.pool is not None:
            self._inside = False
            self.pool.__exit__(type(error) if error is not None else None, error, None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the pool: the device is chosen by now. Raises what `stagehand_alloc.pool` raises."""
        self._training.begin()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Enter the pool."""
        self._enter()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Leave the pool."""
        self._leave()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Enter the pool for what a step of its own loop computes next, such as a second loss."""
        if not pl_module.automatic_optimization:
            self._enter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the pool where no backward did, and log what was done."""
        self._leave()
        pl_module.log_dict(self._training.numbers())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the pool of a batch that was skipped."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the pool."""
        self._leave(exception)
