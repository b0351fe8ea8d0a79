"""FSDP2, a rank for each GPU: torchrun --nproc-per-node 2 torchrun_fsdp2.py. DDP is alike."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import stagehand_alloc

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("1600MiB", 2048, 8192) if GPU else ("24MiB", 256, 1024)
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # where torchrun starts nobody
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


def main() -> None:
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        if GPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:  # a simulated one for each rank
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        mesh = init_device_mesh("cuda" if GPU else "cpu", (int(os.environ["WORLD_SIZE"]),))
        train(torch.device(mesh.device_type), mesh)
        dist.destroy_process_group()


def train(device: torch.device, mesh: dist.DeviceMesh) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 10)).to(device)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    pool = stagehand_alloc.pool(high=HIGH, telemetry="steps.jsonl")  # one file for all ranks
    for step in range(5):
        inputs = torch.randn(ROWS, WIDTH, device=device)
        labels = torch.randint(10, (ROWS,), device=device)
        with pool:
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")
    stats, mib = pool.stats(), 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
