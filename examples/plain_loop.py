"""A training loop of one's own: the pool is around forward, backward comes after it."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F

import stagehand_alloc

HIGH, STEPS = "24MiB", 5


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def train(device: torch.device) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)]
    model = nn.Sequential(*blocks, nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    pool = stagehand_alloc.pool(high=HIGH)
    for step in range(STEPS):
        inputs = torch.randn(1024, 256, device=device)
        labels = torch.randint(10, (1024,), device=device)
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
