"""Lightning: one callback, around each training_step."""

import contextlib

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stagehand_alloc.integrations.lightning import StagehandCallback

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("2GiB", 2048, 8192) if GPU else ("32MiB", 256, 1024)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
        self.layers = nn.Sequential(*blocks, nn.Linear(WIDTH, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        print(f"batch {index}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train()


def train() -> None:
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(5 * ROWS, WIDTH), torch.randint(10, (5 * ROWS,)))
    callback = StagehandCallback(high=HIGH)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    accelerator = "gpu" if GPU else "cpu"
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, callbacks=[callback], **quiet
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=ROWS))
    stats, mib = callback.pool.stats(), 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
