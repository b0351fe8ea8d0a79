"""What workloads.py trains: models with their data, and how each of them makes a step.

Random weights and data from the seed. `build` gives a Workload; `step(n, around, phase)` is one
training step, `around()` what forward runs in (a pool, checkpoints, nothing), and `phase` is told
when another part of the step begins: "forward", "backward" or "other". Steps of the same number
have the same data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workload_networks import (
    Compiled,
    Critic,
    ExpertBlock,
    Generator,
    LstmLayer,
    UNet3d,
    VideoTransformer,
)

from stagehand_alloc._cli.demo_gpt import GPT
from stagehand_alloc._cli.demo_gpt import Shape as GPTShape

Around = Callable[[], AbstractContextManager[Any]]
Phase = Callable[[str], None]
DATA_SEED = 1000


@dataclasses.dataclass
class Workload:
    """`blocks`: what a checkpoint may be put around. `loss`: of the data of a step's number.

    As it stands: forward inside, backward after it.
    """

    model: nn.Module
    blocks: list[nn.Module]
    loss: Callable[[int], Tensor]
    keep_gradients: bool = False
    # What a user of ours adds to the model; what it returns has `remove`.
    ours: Callable[[], Any] | None = None

    def step(self, number: int, around: Around, phase: Phase) -> Tensor:
        with around():
            loss = self.loss(number)
        phase("backward")
        torch.autograd.backward(loss)
        return loss.detach()

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=not self.keep_gradients)

    def compared(self) -> list[Tensor]:
        """What must be bitwise plain torch's after a step: this process's part of each gradient."""
        return [_local(p.grad) for p in self.model.parameters() if p.grad is not None]


def build(name: str, shape: Mapping[str, Any], device: torch.device) -> Workload:
    """The workload `name` on `device`, in bf16 where that is a GPU."""
    with device:
        if name in _BUILDERS:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            return _BUILDERS[name](dict(shape), dtype)
    return _alone(models.build(name, shape, device))


def _alone(training: models.Training) -> Workload:
    return Workload(
        training.model, training.blocks, lambda _: training.loss(), training.keep_gradients
    )


def _local(gradient: Tensor) -> Tensor:
    """Of a sharded gradient the shard that is here."""
    whole: Any = gradient
    shard: Tensor = whole.to_local() if hasattr(whole, "to_local") else gradient
    return shard


# --- A video transformer with low-rank adapters


def _video(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    tokens, usual = shape.pop("tokens"), torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the weights in 32 bits first would be too much
    try:
        model = VideoTransformer(**shape, rank=16)
    finally:
        torch.set_default_dtype(usual)
    x = torch.randn(1, tokens, shape["width"], dtype=dtype)
    clean = torch.randn(1, tokens, 64, dtype=dtype)
    return Workload(model, list(model.blocks), lambda _: F.mse_loss(model(x), clean))


# --- A mixture of experts: how many tokens go where is known after the router only


def _moe(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    """New tokens in each step."""
    batch, experts = shape.pop("batch"), shape.pop("experts")
    sizes = GPTShape(**shape)
    model = GPT(dataclasses.replace(sizes, layers=0))
    model.blocks = nn.ModuleList(ExpertBlock(sizes, experts) for _ in range(sizes.layers))
    model.to(dtype)
    device = model.head.weight.device
    generator = torch.Generator(device)

    def loss(number: int) -> Tensor:
        generator.manual_seed(DATA_SEED + number)
        size = (batch, sizes.context + 1)
        tokens = torch.randint(sizes.vocabulary, size, generator=generator, device=device)
        found: Tensor = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return found

    return Workload(model, list(model.blocks), loss)


# --- Steps of several forwards and backwards


@dataclasses.dataclass
class Pipeline(Workload):
    """One stage of a pipeline: forwards of later micro-batches before backwards of earlier ones."""

    order: str = "F0 F1 B0 F2 B1 F3 B2 B3"

    def step(self, number: int, around: Around, phase: Phase) -> Tensor:
        graphs: dict[str, Tensor] = {}
        losses = []
        with around():
            for word in self.order.split():
                phase("forward" if word[0] == "F" else "backward")
                if word[0] == "F":
                    graphs[word[1:]] = self.loss(int(word[1:]))
                else:
                    loss = graphs.pop(word[1:])
                    torch.autograd.backward(loss)
                    losses.append(loss.detach())
                    del loss
        return torch.stack(losses).mean()


@dataclasses.dataclass
class Accumulation(Workload):
    """Micro-batches, an optimizer's step and an evaluation, all in one pool."""

    batches: int = 4

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, number: int, around: Around, phase: Phase) -> Tensor:
        with around():
            losses = self._micro_batches(nullcontext, phase)
            self.model.eval()
            with torch.no_grad():
                losses.append(self.loss(self.batches))
            self.model.train()
        return torch.stack(losses).sum()

    def _micro_batches(self, around: Around, phase: Phase) -> list[Tensor]:
        """Their losses; `around` each forward. The optimizer steps at the end."""
        losses = []
        for batch in range(self.batches):
            phase("forward")
            with around():
                loss = self.loss(batch) / self.batches
            phase("backward")
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            del loss
        phase("other")
        self.optimizer.step()
        return losses

    def compared(self) -> list[Tensor]:
        return [*super().compared(), *self.model.parameters()]


@dataclasses.dataclass
class Cycles(Accumulation):
    """Micro-batches with a pool around each forward, then the optimizer's step."""

    def step(self, number: int, around: Around, phase: Phase) -> Tensor:
        return torch.stack(self._micro_batches(around, phase)).sum()


def _batches(shape: dict[str, Any], dtype: torch.dtype, count: int) -> tuple[Any, ...]:
    """A GPT, and the loss of each of `count` batches of the given size."""
    batch = shape.pop("batch")
    sizes = GPTShape(**shape)
    model = GPT(sizes).to(dtype)
    data = torch.randint(sizes.vocabulary, (count, 2, batch, sizes.context))
    return model, list(model.blocks), lambda number: model(data[number, 0], data[number, 1])


def _pipeline(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    return Pipeline(*_batches(shape, dtype, 4))


def _accumulation(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    return Accumulation(*_batches(shape, dtype, 5))


def _cycles(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    return Cycles(*_batches(shape, dtype, 4))


# --- A GAN: two graphs are alive at once


class Gan(Workload):
    """The critic's graph and the generator's, both through the same image, then two backwards."""

    def __init__(self, widths: list[int], side: int, batch: int, dtype: torch.dtype) -> None:
        self.generator, self.critic = Generator(widths).to(dtype), Critic(widths[::-1]).to(dtype)
        super().__init__(
            nn.ModuleList([self.generator, self.critic]), [], lambda _: torch.zeros(())
        )
        self.optimizers = [
            torch.optim.AdamW(part.parameters(), lr=1e-4, fused=True)
            for part in (self.generator, self.critic)
        ]
        self.noise = torch.randn(batch, 16, side, side, dtype=dtype)
        size = side << (len(widths) - 1)
        self.real = torch.randn(batch, 3, size, size, dtype=dtype)

    def step(self, number: int, around: Around, phase: Phase) -> Tensor:
        with around():
            fake = self.generator(self.noise)
            wrong = F.softplus(-self.critic(self.real)).mean()
            wrong = wrong + F.softplus(self.critic(fake.detach())).mean()
            unlike = F.softplus(-self.critic(fake)).mean()
            del fake
            phase("backward")
            torch.autograd.backward(unlike, inputs=list(self.generator.parameters()))
            torch.autograd.backward(wrong, inputs=list(self.critic.parameters()))
            phase("other")
            for optimizer in self.optimizers:
                optimizer.step()
        return (wrong + unlike).detach()

    def compared(self) -> list[Tensor]:
        return [*super().compared(), *self.model.parameters()]


def _gan(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    return Gan(**shape, dtype=dtype)


# --- A 3-D U-Net


def _unet(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    side, batch = shape.pop("side"), shape.pop("batch")
    model = UNet3d(**shape).to(dtype)
    x = torch.randn(batch, 1, side, side, side, dtype=dtype)
    clean = torch.randn_like(x)
    blocks = [*model.down, *model.up]
    return Workload(model, blocks, lambda _: F.mse_loss(model(x), clean))


# --- An LSTM over sequences whose lengths differ


def length_of(number: int, longest: int, shortest: int) -> int:
    """Step 0 has the longest sequence; the others' lengths repeat seldom."""
    return longest - number * 97 % (longest - shortest + 1)


def _lstm(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    """In fp16 on a GPU: torch keeps weights together as cuDNN wants them in that, not in bf16."""
    half = torch.float16 if dtype == torch.bfloat16 else dtype
    width, longest = shape["width"], shape["longest"]
    model = nn.Sequential(*(LstmLayer(width, half) for _ in range(shape["layers"])))
    x = torch.randn(longest, shape["batch"], width, dtype=half)

    def loss(number: int) -> Tensor:
        length = length_of(number, longest, shape["shortest"])
        y: Tensor = model(x[:length])
        return y.float().square().sum() / 1e3  # of their mean all gradients would be 0 in fp16

    return Workload(model, list(model), loss)


# --- A Llama over batches that are as long as their longest text


def _lengths(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    """Without cuDNN's attention: that plans anew for each length, in each thread that runs it."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    shortest, multiple, batch = (shape.pop(name) for name in ("shortest", "multiple", "batch"))
    training = models.build("llama", {**shape, "batch": batch}, torch.get_default_device(), dtype)
    tokens = torch.randint(shape["vocabulary"], (batch, shape["sequence"]))

    def loss(number: int) -> Tensor:
        numbers = (shape["sequence"] // multiple, shortest // multiple)
        mine = tokens[:, : multiple * length_of(number, *numbers)]
        found: Tensor = training.model(input_ids=mine, labels=mine).loss
        return found

    return Workload(training.model, training.blocks, loss)


# --- Compiled by block


def _compiled(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    backend = shape.pop("backend")
    model, blocks, loss = _batches(shape, dtype, 1)
    model.blocks = nn.ModuleList(Compiled(block, backend) for block in blocks)
    return Workload(model, list(model.blocks), lambda _: loss(0))


# --- Several ranks; torch.distributed is set up by then


def _fsdp2(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    """Parameters in 32 bits, sharded by block; computes and communicates in `dtype`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, blocks, loss = _batches(shape, torch.float32, 1)
    mesh = init_device_mesh(torch.get_default_device().type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)

    def one_stream() -> Any:
        from stagehand_alloc.integrations.fsdp2 import gradients_on_one_stream

        return gradients_on_one_stream(model)

    return Workload(model, blocks, lambda _: loss(0), ours=one_stream)


class _Copies:
    """A collective of one rank of two, alone: it copies what the other one would send."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Copies):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        for part in output_tensor.view(2, -1):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))


class _Reduce(_Copies):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        output_tensor.view(-1).copy_(input_tensor.view(2, -1)[0])


def _fsdp2_alone(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    """FSDP2's memory and streams of one rank of two, on one GPU."""
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    work = _fsdp2(shape, dtype)
    gather: Any = _Gather()
    reduce: Any = _Reduce()
    for part in work.model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(reduce)
    return work


def _ddp(shape: dict[str, Any], dtype: torch.dtype) -> Workload:
    from torch.nn.parallel import DistributedDataParallel

    training = models.build("gpt", shape, torch.get_default_device(), dtype)
    batch, context = shape["batch"], shape["context"]
    data = torch.randint(shape["vocabulary"], (2, batch, context))
    model = DistributedDataParallel(training.model)
    return Workload(model, training.blocks, lambda _: model(data[0], data[1]))


_BUILDERS: dict[str, Callable[[dict[str, Any], torch.dtype], Workload]] = {
    "video": _video,
    "moe": _moe,
    "pipeline": _pipeline,
    "accumulation": _accumulation,
    "cycles": _cycles,
    "gan": _gan,
    "unet3d": _unet,
    "lstm": _lstm,
    "lengths": _lengths,
    "compiled": _compiled,
    "fsdp2": _fsdp2,
    "fsdp2_alone": _fsdp2_alone,
    "ddp": _ddp,
}
