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
def ranks(cuda: None) -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module) -> OneStream:
    """In one group, and what places its gradients; nothing of the cache is free."""
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return gradients_on_one_stream(model)


@pytest.fixture
def parameter(ranks: None) -> tuple[Tensor, OneStream]:
    model = nn.Linear(SIDE, SIDE, bias=False, device="cuda")
    placing = shard(model)  # what was its weight is not after this
    return model.weight, placing


def place(parameter: Tensor, placing: OneStream, side: torch.cuda.Stream) -> None:
    """A gradient of ones that was reduced on ``side``, as FSDP2 tells of it."""
    assert isinstance(parameter, DTensor)
    with torch.cuda.stream(side):
        reduced = torch.ones(SIDE, SIDE, device="cuda")
        parameter.grad = DTensor.from_local(reduced, parameter.device_mesh, parameter.placements)
        placing._place(parameter)


def place_group(model: nn.Module, placing: OneStream, reduced: Tensor) -> None:
    """A gradient for each parameter out of ``reduced``, one after the other, on this stream."""
    start = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        part = reduced[start : start + parameter.numel()].view(parameter.size())
        start += parameter.numel()
        parameter.grad = DTensor.from_local(part, parameter.device_mesh, parameter.placements)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_copied_by_kernels_bit_by_bit(ranks: None, dtype: torch.dtype) -> None:
    # No part but the first is where a kernel could read several numbers at once.
    sizes = ((3, 5), (SIDE, SIDE - 1), (1, 7), (64, 64))
    model = nn.Sequential(
        *[nn.Linear(ins, outs, bias=False, device="cuda", dtype=dtype) for outs, ins in sizes]
    )
    placing, side = shard(model), torch.cuda.Stream()
    numel = sum(outs * ins for outs, ins in sizes)
    with torch.cuda.stream(side):
        # All bits there are, also NaNs that say more than that.
        bits = torch.randint(-(2**15), 2**15, (numel * dtype.itemsize // 2,), device="cuda")
        reduced = bits.to(torch.int16).view(dtype)
        expected = reduced.view(torch.int16).clone()
        profiled = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with profiled as profile:
            place_group(model, placing, reduced)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert not [name for name in names if "memcpy" in name.lower()]
    assert len([name for name in names if "multi_tensor_apply" in name]) == len(sizes)
    found = torch.cat([local(one).flatten().view(torch.int16) for one in model.parameters()])
    assert torch.equal(found, expected)


def test_a_backward_places_gradients_in_the_computing_streams_memory(ranks: None) -> None:
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, device="cuda") for _ in range(3)])
    mesh = init_device_mesh("cuda", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    rows = torch.randn(64, SIDE, device="cuda")

    def gradients() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(rows).square().sum().backward()
        return [local(one).clone() for one in model.parameters()]

    before = gradients()
    gradients_on_one_stream(model)
    for _ in range(3):
        assert all(torch.equal(one, two) for one, two in zip(before, gradients(), strict=True))
    places = [local(one).untyped_storage().data_ptr() for one in model.parameters()]
    streams = {
        block["address"]: segment["stream"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
    }
    assert {streams[one] for one in places} == {0}
