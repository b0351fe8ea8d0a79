"""A training loop of one's own: the pool is around forward, backward comes after it."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F

import stagehand_alloc

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("1600MiB", 2048, 8192) if GPU else ("24MiB", 256, 1024)
STEPS = 5


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(torch.device("cuda" if GPU else "cpu"))


def train(device: torch.device) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
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
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
