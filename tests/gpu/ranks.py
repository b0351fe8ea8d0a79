"""One rank of a training that torchrun starts: without a pool, then inside a budget of its own.

    torchrun --nproc-per-node 2 ranks.py ddp native FOLDER [--simulated]

"one-stream" is FSDP2 with its gradients in memory of the stream that computes.

Each rank writes FOLDER/rank<N>.json, and all of them their telemetry to one file. A GPU for each;
with --simulated a simulated one for each, in mode "allocator", and gloo in the place of NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stagehand_alloc
from stagehand_alloc import _native
from stagehand_alloc._settings.host_memory import available_host_bytes
from stagehand_alloc._torch_side import install as _install
from stagehand_alloc.integrations.fsdp2 import gradients_on_one_stream

STEPS = 5
TELEMETRY = "steps.jsonl"  # of all ranks
SHARES = (0.5, 0.75)  # of the activation memory, by rank: no two budgets are alike
SIZES = {True: (128, 8, 1024), False: (1024, 12, 16384)}  # simulated or not: width, depth, rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("ddp", "fsdp2", "one-stream"))
    parser.add_argument("mode", choices=("native", "allocator", "mempool"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    with contextlib.ExitStack() as stack:
        device = torch.device("cpu") if options.simulated else torch.device("cuda", rank)
        if options.simulated:
            from stagehand_alloc import testing

            torch.set_num_threads(1)
            stack.enter_context(testing.simulated_gpu(memory="256MiB", seed=rank))
        else:
            if options.mode == "allocator":
                torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if options.simulated else "nccl")
        stack.callback(dist.destroy_process_group)
        found = compare(Ranked(options.kind, options.simulated, device, rank), options)
        (options.folder / f"rank{rank}.json").write_text(json.dumps(found))


class Ranked:
    """A model that the ranks train together, each on rows of its own."""

    def __init__(self, kind: str, simulated: bool, device: torch.device, rank: int) -> None:
        width, depth, rows = SIZES[simulated]
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        whole = nn.Sequential(*blocks).to(device)
        torch.manual_seed(1 + rank)
        self.rows = torch.randn(rows, width).to(device)
        self.device = device
        self.model: nn.Module = whole
        self.one_stream = False
        if kind == "ddp":
            self.model = DistributedDataParallel(whole)
            return
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*blocks, whole):
            fully_shard(part, mesh=mesh)
        self.one_stream = kind == "one-stream"

    def keep_gradients_on_one_stream(self) -> None:
        if self.one_stream:
            gradients_on_one_stream(self.model)

    def step(self, around: contextlib.AbstractContextManager[Any]) -> list[str]:
        """Digests of the loss and of this rank's gradients."""
        self.model.zero_grad(set_to_none=True)
        with around:
            loss: Tensor = self.model(self.rows).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return [digest(loss), *(digest(p.grad) for p in self.model.parameters())]

    def settle(self) -> None:
        """Nothing is queued, and nothing kept that is not in use."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if _install.is_installed():
            _native.empty_cache()
        stagehand_alloc.reset_peak_stats()


def digest(tensor: Any) -> str:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP2's shard
    return hashlib.sha256(local.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def compare(ranked: Ranked, options: argparse.Namespace) -> dict[str, Any]:
    """Steps with a pool beside one without, and what the pool's books say of them."""
    plain = contextlib.nullcontext()
    expected = ranked.step(plain)
    ranked.keep_gradients_on_one_stream()
    ranked.settle()
    start = mapped()
    ranked.step(plain)
    share = SHARES[dist.get_rank()]
    high = start + int(share * (mapped() - start))
    ranked.settle()
    pool = stagehand_alloc.pool(high=high, mode=options.mode, telemetry=options.folder / TELEMETRY)
    same, steps = [], []
    for _ in range(STEPS):
        same.append(ranked.step(pool) == expected)
        step = pool.step_stats()
        steps.append({each: step[each] for each in ("mapped_peak", "overshoot_bytes")})
    found = pool.stats()
    return {
        "same": same,
        "high": found.high,
        "mapped_peak": found.mapped_peak,
        "evicted_bytes": found.evicted_bytes,
        "overshoot_bytes": found.overshoot_bytes,
        "last": pool.step_stats(),
        "steps": steps,
        "beside": beside(),
        "host_share": stagehand_alloc.Config().host_limit_bytes() / available_host_bytes(),
    }


def beside() -> int:
    """Bytes that torch's cache has for other streams than the one that computes."""
    if not torch.cuda.is_initialized() or _install.is_installed():
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if one["stream"] != 0)


def mapped() -> int:
    """Bytes that the process has of its GPU; after a step, at most in it: nothing goes back."""
    found = stagehand_alloc.stats().mapped
    return found if _install.is_installed() else torch.cuda.memory_reserved()


if __name__ == "__main__":
    main()
