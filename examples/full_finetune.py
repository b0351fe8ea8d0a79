"""Full fine-tuning: weights, gradients and AdamW's state of more than the budget."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F

import stagehand_alloc

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("3GiB", 2048, 1024) if GPU else ("80MiB", 256, 256)
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(torch.device("cuda" if GPU else "cpu"))


def train(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block() for _ in range(8))), nn.Linear(WIDTH, 10))
    model = stagehand_alloc.offload(model, blocks=model[0], trained=True)
    optimizer = stagehand_alloc.offload_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    pool = stagehand_alloc.pool(high=HIGH)
    for step in range(STEPS):
        inputs = torch.randn(ROWS, WIDTH, device=device)
        labels = torch.randint(10, (ROWS,), device=device)
        with pool:
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print_memory(pool.stats())


def print_memory(stats: stagehand_alloc.PoolStats) -> None:
    mib = 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.d2h_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
