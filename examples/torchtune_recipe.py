"""A loop as torchtune's recipes have it: their activation offloading, with a budget."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F

from stagehand_alloc.integrations.torchtune import get_act_offloading_ctx_manager

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("1600MiB", 2048, 8192) if GPU else ("24MiB", 256, 1024)


class Recipe:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 10)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        # In a recipe's copy (tune cp): the import, and high=, are all that changes.
        self.activations_handling_ctx = get_act_offloading_ctx_manager(
            self.model, enable_activation_offloading=True, high=HIGH
        )

    def train(self) -> None:
        for step in range(5):
            inputs = torch.randn(ROWS, WIDTH, device=self.device)
            labels = torch.randint(10, (ROWS,), device=self.device)
            with self.activations_handling_ctx:
                outputs = self.model(inputs)
            loss = F.cross_entropy(outputs, labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        recipe = Recipe(torch.device("cuda" if GPU else "cpu"))
        recipe.train()
        stats, mib = recipe.activations_handling_ctx.pool.stats(), 1 << 20
        print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
        print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
