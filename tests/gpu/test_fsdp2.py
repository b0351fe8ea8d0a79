"""FSDP2's gradients in memory of the stream that computes: what orders the two streams.

That trained steps are the same: `test_devices_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from steps import SLEEP_CYCLES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stagehand_alloc.integrations.fsdp2 import OneStream, gradients_on_one_stream

SIDE = 1024  # 4 MiB of 32-bit numbers


@pytest.fixture
def parameter(cuda: None) -> Iterator[tuple[Tensor, OneStream]]:
    """A sharded one, and what places its gradients; nothing of the cache is free."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(SIDE, SIDE, bias=False, device="cuda")
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        yield model.weight, gradients_on_one_stream(model)
    finally:
        dist.destroy_process_group()


def place(parameter: Tensor, placing: OneStream, side: torch.cuda.Stream) -> None:
    """A gradient of ones that was reduced on ``side``, as FSDP2 tells of it."""
    assert isinstance(parameter, DTensor)
    with torch.cuda.stream(side):
        reduced = torch.ones(SIDE, SIDE, device="cuda")
        parameter.grad = DTensor.from_local(reduced, parameter.device_mesh, parameter.placements)
        placing._place(parameter)


def local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def test_a_gradient_goes_where_the_computing_stream_is_done(
    parameter: tuple[Tensor, OneStream],
) -> None:
    weight, placing = parameter
    side = torch.cuda.Stream()
    before = torch.empty(SIDE, SIDE, device="cuda")
    address = before.data_ptr()
    torch.cuda._sleep(5 * SLEEP_CYCLES)
    before.fill_(7)
    del before
    place(weight, placing, side)
    assert local(weight).data_ptr() == address
    torch.cuda.synchronize()
    assert bool((local(weight) == 1).all())


def test_a_gradient_that_is_dropped_early_takes_its_memory_along(
    parameter: tuple[Tensor, OneStream],
) -> None:
    weight, placing = parameter
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(5 * SLEEP_CYCLES)
    place(weight, placing, side)
    weight.grad = None
    other = torch.full((SIDE, SIDE), 9.0, device="cuda")
    torch.cuda.synchronize()
    assert bool((other == 9).all())


def test_what_is_accumulated_stays_in_its_place(
    parameter: tuple[Tensor, OneStream],
) -> None:
    weight, placing = parameter
    side = torch.cuda.Stream()
    place(weight, placing, side)
    address = local(weight).data_ptr()
    with torch.cuda.stream(side):
        local(weight).add_(1)
        placing._place(weight)
    assert local(weight).data_ptr() == address
    torch.cuda.synchronize()
    assert bool((local(weight) == 2).all())
