"""What weights.py compares with that others made: each the library itself, on the same model.

* diffusers' group offload, with a stream: hooks of its own around each block, or around each
  linear layer. Made for inference; in training its hooks run again where checkpoints do, and ahead
  of need it loads in forward's order. No optimizer steps: it leaves trained parameters on the CPU.
* accelerate's `cpu_offload`: each module's own weights come when it is called.
* FSDP2 with `CPUOffloadPolicy`, one process: gradients go to the CPU, AdamW runs there.
* torchao's `CPUOffloadOptimizer`: weights stay on the GPU, gradients and AdamW are on the CPU.

Where AdamW runs on the CPU only the first step can be plain torch's bit by bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from weight_cases import Case
from weight_models import Gpt, Ring, build

RATE = 1e-4


class AbsentError(Exception):
    """What a case needs is not here."""


@dataclass
class Setup:
    """A model that is ready for its steps. `optimizer`: None where no step is made."""

    model: Gpt
    optimizer: Any = None
    around: Any = contextlib.nullcontext()  # noqa: RUF009 (it has no state)
    gradient: Callable[[nn.Parameter], Tensor | None] = lambda p: p.grad
    same_steps: int = 3  # of the compared ones, those that are to be plain torch's bit by bit
    load: float = 0  # ms, of `offload`


def need(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise AbsentError(f"{library} is not installed")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, fused=True)


def plain(case: Case, device: torch.device) -> Setup:
    model = build(case, device)
    return Setup(model, None if case.forward_only else adamw(model))


def ring(case: Case, device: torch.device) -> Setup:
    setup = plain(case, device)
    Ring(list(setup.model.layers), device)
    return setup


def diffusers(level: str, case: Case, device: torch.device) -> Setup:
    need("diffusers")
    from diffusers.hooks import apply_group_offloading

    model = build(case, device)
    # It looks ahead only where something of the model is in no list of blocks.
    model.add_module("beside", nn.Identity())
    streams = device.type == "cuda"  # it has none on a CPU
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type=f"{level}_level",
        num_blocks_per_group=1 if level == "block" else None,
        non_blocking=True,
        use_stream=streams,
        record_stream=streams,
    )
    return Setup(model, same_steps=1)


def accelerate(case: Case, device: torch.device) -> Setup:
    need("accelerate")
    from accelerate import cpu_offload

    model = build(case, device, torch.device("cpu"))
    cpu_offload(model, execution_device=device)
    return Setup(model, same_steps=1)


def fsdp2(case: Case, device: torch.device) -> Setup:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=cuda)
    model = build(case, device)
    for block in model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return Setup(model, adamw(model), gradient=_whole, same_steps=1)


def _whole(p: nn.Parameter) -> Tensor | None:
    found: Any = p.grad
    return None if found is None else found.to_local()  # of one process: all of it


def torchao(case: Case, device: torch.device) -> Setup:
    need("torchao")
    if device.type != "cuda":
        raise AbsentError("torchao's CPUOffloadOptimizer needs a GPU")
    from torchao.optim import CPUOffloadOptimizer

    model = build(case, device)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=RATE, fused=True
    )

    def gradient(p: nn.Parameter) -> Tensor | None:
        on_cpu = optimizer.param_d2h_map.get(p)
        return p.grad if on_cpu is None else on_cpu.grad

    return Setup(model, optimizer, gradient=gradient, same_steps=1)
