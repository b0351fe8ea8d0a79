"""Accelerate's loop, with two batches to an optimizer step: attached, the model enters the pool."""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stagehand_alloc

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("2GiB", 2048, 8192) if GPU else ("32MiB", 256, 1024)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
        self.layers = nn.Sequential(*blocks, nn.Linear(WIDTH, 10))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), labels)


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(Accelerator(gradient_accumulation_steps=2, cpu=not GPU))


def train(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    model = Classifier()
    pool = stagehand_alloc.pool(high=HIGH)
    attached = pool.attach(model)
    data = TensorDataset(torch.randn(8 * ROWS, WIDTH), torch.randint(10, (8 * ROWS,)))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = DataLoader(data, batch_size=ROWS)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for step, (inputs, labels) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(inputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log(pool.step_stats(), step)  # to its trackers, where there are any
        accelerator.print(f"loss {loss.item():.3f}")
    attached.remove()
    stats, mib = pool.stats(), 1 << 20
    accelerator.print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    accelerator.print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
