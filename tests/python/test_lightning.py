"""The callback for Lightning, as `lightning.pytorch` and as `pytorch_lightning`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import STEPS, Watched, kept_and_used, within_a_share
from training import digest, gradients

from stagehand_alloc.integrations import lightning as for_lightning

pytestmark = pytest.mark.usefixtures("gpu")

# One library by two names: each has classes of its own.
EITHER = pytest.mark.parametrize("pl", [lightning.pytorch, pytorch_lightning])


class Steps:
    """A module's methods; `lightning_of` makes it one of either library's."""

    parameters: Any
    manual_backward: Any
    optimizers: Any

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
        self.watched.gradients.append(gradients(self))  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class ByHand(Steps):
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


class Stops(Steps):
    def training_step(self, batch: list[Tensor], index: int) -> Any:
        loss = super().training_step(batch, index)
        if index == 3:
            raise ZeroDivisionError
        return None if index == 1 else loss  # None: Lightning calls no backward


def train(pl: ModuleType, callback: Any, folder: Path, kind: type[Steps] = Steps) -> Any:
    """What was watched, and the trainer."""
    watched = Watched()
    module = type(kind.__name__, (kind, pl.LightningModule), {})(watched)
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


@EITHER
@pytest.mark.parametrize("kind", [Steps, ByHand])
def test_lightning_with_the_callback_equals_one_without_inside_the_budget(
    tmp_path: Path, kind: type[Steps], pl: ModuleType
) -> None:
    expected, high = within_a_share(lambda _: train(pl, None, tmp_path, kind)[0])
    callback = for_lightning.StagehandCallback(high=high)
    actual, trainer = train(pl, callback, tmp_path, kind)
    assert actual.results() == expected.results()
    assert kept_and_used(callback.pool, high)
    assert callback.pool is not None
    last = callback.pool.step_stats()
    for name in ("spill_bytes", "mapped_peak", "wall_time_ms"):
        assert trainer.callback_metrics[f"stagehand/{name}"] == pytest.approx(last[name])


@EITHER
def test_a_second_training_by_lightning_has_a_pool_of_its_own(
    tmp_path: Path, pl: ModuleType
) -> None:
    callback = for_lightning.StagehandCallback(high="64MiB")
    expected = train(pl, callback, tmp_path)[0]
    first = callback.pool
    assert train(pl, callback, tmp_path)[0].results() == expected.results()
    assert callback.pool is not first


@EITHER
def test_lightning_leaves_the_pool_where_no_backward_comes_or_a_step_raises(
    tmp_path: Path, pl: ModuleType
) -> None:
    callback = for_lightning.StagehandCallback(high="64MiB")
    with pytest.raises(ZeroDivisionError):
        train(pl, callback, tmp_path, Stops)
    assert callback.pool is not None
    assert callback.pool._entry is None
    expected = train(pl, None, tmp_path)[0]
    assert train(pl, callback, tmp_path)[0].results() == expected.results()
