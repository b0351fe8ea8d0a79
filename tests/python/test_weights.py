"""Offloaded weights: training is plain torch's bit by bit, inside a budget they do not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from lora import (
    DEVICE,
    MIB,
    TOKENS,
    WIDTH,
    Block,
    Checkpointed,
    Dropped,
    Model,
    Twice,
    build,
    plain,
    tokens,
    trained,
    watched,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from training import digest, evicting_everything, gradients, leaves_nothing

import stagehand_alloc
from stagehand_alloc import _native
from stagehand_alloc._weights import offload as _offload
from stagehand_alloc._weights.groups import registry

pytestmark = pytest.mark.usefixtures("gpu", "leaves_no_weights")


def offloaded(make: Any = Model, **how: Any) -> Any:
    return stagehand_alloc.offload(build(make), **how)


# --- Other ways to write a model


@dataclasses.dataclass
class Out:
    x: Tensor
    note: str = ""


class OutBlock(Block):
    """Returns a dataclass, as LTX-2's blocks do."""

    def forward(self, x: Any) -> Any:
        return Out(super().forward(x.x if isinstance(x, Out) else x))


class Outs(Model):
    def __init__(self) -> None:
        super().__init__(block=OutBlock)

    def run(self) -> Any:
        return [*self.layers, lambda out: out.x]


class InCtx(torch.autograd.Function):
    """Keeps its weight where saved-tensor hooks see nothing, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient @ ctx.weight, None


class CtxBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = InCtx.apply(x, self.up.weight)
        return x + InCtx.apply(F.gelu(h), self.down.weight) + (x @ self.lora_a) @ self.lora_b


class Halved(torch.Tensor):
    """A weight of two storages, as torchao's quantized classes are: half of it, and twice."""

    once: Tensor
    twice: Tensor

    @staticmethod
    def __new__(cls, once: Tensor, twice: Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, once.size(), strides=once.stride(), dtype=once.dtype, device=once.device)

    def __init__(self, once: Tensor, twice: Tensor) -> None:
        self.once, self.twice = once, twice

    def __tensor_flatten__(self) -> Any:
        return ["once", "twice"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["once"], parts["twice"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.t.default, aten._to_copy.default):
            parts = (args[0].once, args[0].twice)
            return cls(*(func(part, *args[1:], **(kwargs or {})) for part in parts))
        whole = [one.once * one.twice if isinstance(one, Halved) else one for one in args]
        return func(*whole, **(kwargs or {}))


class HalvedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        for linear in (self.up, self.down):
            twice = torch.full_like(linear.weight, 2.0)
            weight = Halved(linear.weight.detach() / 2, twice)
            linear.weight = nn.Parameter(weight, requires_grad=False)


MODELS = {
    "plain": Model,
    "twice": Twice,
    "layers dropped": Dropped,
    "checkpoint": functools.partial(Checkpointed, False),
    "reentrant checkpoint": functools.partial(Checkpointed, True),
    "dataclasses": Outs,
    "weights in ctx": functools.partial(Model, block=CtxBlock),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


# --- Training


@every_model
@pytest.mark.parametrize("high", [10, 8])
def test_training_in_a_budget_is_plain_torchs(make: Any, high: int) -> None:
    expected = plain(make)
    with watched() as seen:
        model = offloaded(make)
        _native.empty_cache()
        stagehand_alloc.reset_peak_stats()
        with leaves_nothing():
            assert trained(model, stagehand_alloc.pool(high=high * MIB)) == expected
            _native.drop_weights(DEVICE)
        del model
    assert seen.overshoot == 0
    assert seen.mapped_peak <= high * MIB
    assert seen.weights["loads"] > 0


@every_model
def test_training_without_a_pool_is_plain_torchs(make: Any) -> None:
    expected = plain(make)
    assert trained(offloaded(make)) == expected


@every_model
def test_training_with_all_evicted_that_can_be_is_plain_torchs(make: Any) -> None:
    expected = plain(make)
    model = offloaded(make)
    with evicting_everything():
        assert trained(model, stagehand_alloc.pool()) == expected


def test_tensor_subclasses_leave_with_all_their_storages() -> None:
    make = functools.partial(Model, block=HalvedBlock)
    expected = plain(make)
    model, other = offloaded(make), build(make)
    assert _native.weights(DEVICE)["bytes"] > 2 * 8 * 8 * WIDTH * WIDTH * 4
    for name, tensor in model.state_dict().items():
        saved, wanted = tensor, other.state_dict()[name]
        if isinstance(tensor, Halved):
            saved, wanted = tensor.once, wanted.once
        assert digest(saved) == digest(wanted)
    del other, tensor, saved, wanted
    assert trained(model, stagehand_alloc.pool(high=10 * MIB)) == expected
    with pytest.raises(RuntimeError, match=r"'layers\.2\.up\.weight' is on the host"):
        model.layers[2].up.weight.once.sum()


def test_tensor_subclasses_on_the_cpu_are_as_before_where_the_host_refuses_to_pin(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_offload, "target_of", lambda index: torch.device("cpu", index))
    make = functools.partial(Model, block=HalvedBlock)
    model = build(make)
    weight = model.layers[0].up.weight
    gpu.fail("cuMemHostRegister", nth=3, times=1)
    with pytest.raises(stagehand_alloc.OffloadError, match="refused to pin"):
        stagehand_alloc.offload(model)
    assert model.layers[0].up.weight is weight
    assert _native.weights(DEVICE)["bytes"] == 0
    assert trained(model) == plain(make)


def test_compiled_blocks_are_plain_torchs_and_are_compiled_once() -> None:
    torch._dynamo.reset()
    expected = plain()
    model = offloaded()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == expected
    # The first block's input asks for no gradient. Addresses change, and nothing is compiled again.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_regions_that_run_again_find_their_weights() -> None:
    expected = plain()
    model = offloaded()
    pool = stagehand_alloc.pool(recompute=model)
    with evicting_everything():
        assert trained(model, pool) == expected


def test_without_pressure_nothing_is_loaded_twice() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=64 * MIB)
    with watched() as first:
        trained(model, pool, steps=1)
    with watched() as later:
        trained(model, pool, steps=3)
    assert first.weights["loads"] == 8
    assert later.weights["loads"] == 0


def test_a_step_loads_what_must_move_and_no_more_and_the_host_waits_for_nothing() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=8 * MIB)
    trained(model, pool, steps=4)
    with watched() as seen:
        trained(model, pool, steps=4)
    assert seen.weights["late"] == 0
    # Of 8 groups at least four stay; each of the others comes once forward and once backward.
    assert 0 < seen.weights["loads"] <= 4 * 2 * 4
    assert seen.host_waits == 0


def test_several_backwards_for_one_optimizer_step() -> None:
    def run(model: nn.Module, pool: Any) -> Any:
        for step in range(6):
            with pool:
                first, second = model(tokens(step)), model(tokens(step + 50))
            first.backward()
            second.backward()
        return gradients(model)

    expected = run(build(), contextlib.nullcontext())
    model = offloaded()
    assert run(model, stagehand_alloc.pool(high=9 * MIB)) == expected


def test_two_models_in_turn() -> None:
    def run(models: list[nn.Module], pool: Any) -> Any:
        for step in range(4):
            with pool:
                losses = [model(tokens(step)) for model in models]
            sum(losses).backward()
        return [gradients(model) for model in models]

    expected = run([build(), build()], contextlib.nullcontext())
    models = [offloaded(), offloaded()]
    assert run(models, stagehand_alloc.pool(high=12 * MIB)) == expected


def test_sampling_between_steps_streams_too() -> None:
    model, other = offloaded(), build()
    pool = stagehand_alloc.pool(high=7 * MIB)
    for step in range(3):
        trained(model, pool, steps=1)
        trained(other, steps=1)
        with watched() as seen, torch.no_grad():
            assert digest(model(tokens(step))) == digest(other(tokens(step)))
        assert seen.weights["loads"] > 0
        with torch.inference_mode():
            model(tokens(step))


class Sampled(Block):
    """Without a LoRA, which stays: small tensors here and there keep pieces of 2 MiB mapped."""

    def __init__(self) -> None:
        super().__init__()
        del self.lora_a, self.lora_b

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_sampling_keeps_to_high_between_two_pools() -> None:
    model = offloaded(functools.partial(Model, block=Sampled))
    pool = stagehand_alloc.pool(high=4 * MIB)
    with pool, torch.no_grad():
        model(tokens(0))
    gc.collect()
    _native.empty_cache()
    stagehand_alloc.reset_peak_stats()
    with torch.no_grad():
        model(tokens(1))
    assert stagehand_alloc.stats().mapped_peak <= 4 * MIB


def test_two_threads_sample_from_one_model() -> None:
    model = offloaded()
    batches = [tokens(step) for step in range(8)]
    with torch.no_grad():
        expected = [digest(model(batch)) for batch in batches]
        with stagehand_alloc.pool(high=8 * MIB):
            pass

    def sample(batch: Tensor) -> str:
        with torch.no_grad():
            return digest(model(batch))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sample, batches)) == expected
    _native.drop_weights(DEVICE)
    assert _native.weights(DEVICE)["home"] == 0


def test_retaining_the_graph_and_going_back_again() -> None:
    def run(model: nn.Module, pool: Any) -> Any:
        with pool:
            loss = model(tokens(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    expected = run(build(), contextlib.nullcontext())
    assert run(offloaded(), stagehand_alloc.pool(high=7 * MIB)) == expected


def test_a_forward_that_fails_leaves_nothing_held() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=7 * MIB)

    class FailedError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise FailedError

    handle = model.layers[4].up.register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(FailedError), pool:
            model(tokens(0))
    handle.remove()
    _native.drop_weights(DEVICE)
    assert _native.weights(DEVICE)["home"] == 0
    expected = plain()
    assert trained(model, pool) == expected


def test_a_forward_that_is_interrupted_leaves_nothing_held_after_the_next_entry() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=7 * MIB)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[4].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), pool:
        model(tokens(0))
    handle.remove()
    with pool:
        pass
    _native.drop_weights(DEVICE)
    assert _native.weights(DEVICE)["home"] == 0


def test_a_pool_that_is_entered_inside_of_a_block_leaves_the_block_open() -> None:
    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            with stagehand_alloc.pool(high=8 * MIB):
                pass
            return super().forward(x)

    expected = plain(functools.partial(Model, block=Inner))
    assert trained(offloaded(functools.partial(Model, block=Inner))) == expected


def test_a_backward_that_fails_leaves_nothing_held_after_the_next_entry() -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=7 * MIB)
    with pool:
        x = model.embedding(tokens(0))
        for i, layer in enumerate(model.layers):
            x = layer(x)
            if i == 4:
                x.register_hook(lambda gradient: 1 / 0)
        loss = x.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss, x
    with pool:
        pass
    _native.drop_weights(DEVICE)
    assert _native.weights(DEVICE)["home"] == 0


def enter_a_pool(model: Any) -> None:
    with stagehand_alloc.pool(high=7 * MIB):
        pass


@pytest.mark.parametrize("then", [enter_a_pool, stagehand_alloc.restore])
def test_a_backward_that_failed_on_another_thread_leaves_nothing_held(then: Any) -> None:
    model = offloaded()
    groups = registry.within([model])
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with stagehand_alloc.pool(high=7 * MIB):
        x = model.layers[0](hidden)
        x.register_hook(lambda gradient: 1 / 0)
        loss = model.layers[2](model.layers[1](x)).sum()
    with ThreadPoolExecutor(1) as thread:  # as autograd has one for each GPU
        try:
            with pytest.raises(ZeroDivisionError):
                thread.submit(loss.backward).result()
            assert [group.native.open for group in groups] == [0] * 8  # its graph task is gone
            then(model)
        finally:
            thread.submit(_native.end_weights_here).result()


def test_the_graph_may_outlive_the_model() -> None:
    expected_model, model = build(), offloaded()
    batch = tokens(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    expected = expected_model.layers[1](expected_model.layers[0](hidden)).sum()
    expected.backward()
    wanted, hidden.grad = digest(hidden.grad), None
    with stagehand_alloc.pool(high=7 * MIB):
        loss = model.layers[1](model.layers[0](hidden)).sum()
    del model, batch
    gc.collect()
    loss.backward()
    assert digest(hidden.grad) == wanted
    del loss


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def ddp_first() -> nn.Module:
    return stagehand_alloc.offload(DDP(build()))


def ddp_in_resident() -> nn.Module:
    model = offloaded()
    with stagehand_alloc.resident(model):
        return DDP(model)


def ddp_of_what_is_trained() -> nn.Module:
    model = offloaded()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    DDP._set_params_and_buffers_to_ignore_for_model(model, frozen)
    return DDP(model)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("both", [ddp_first, ddp_in_resident, ddp_of_what_is_trained])
def test_ddp_trains_an_offloaded_model(both: Any) -> None:
    model = both()
    with watched() as seen:
        assert trained(model, stagehand_alloc.pool(high=8 * MIB))[-1] == plain()[-1]
    assert seen.weights["loads"] > 0


@pytest.mark.usefixtures("process_group")
def test_ddp_reads_the_weights_once_and_is_told_where_they_are() -> None:
    model = offloaded()
    with pytest.raises(RuntimeError, match=r"is on the host.*\n.*stagehand_alloc\.resident"):
        DDP(model)


@pytest.mark.parametrize("grad_in", ["the pool", "resident"])
def test_a_gradient_of_gradients_is_plain_torchs(grad_in: str) -> None:
    def run(model: Any, pool: Any, resident: Any) -> list[Any]:
        found = []
        trains = [p for p in model.parameters() if p.requires_grad]
        for step in range(3):
            with pool:
                loss = model(tokens(step))
                if grad_in == "the pool":
                    first = torch.autograd.grad(loss, trains, create_graph=True)
            with resident():
                if grad_in == "resident":
                    first = torch.autograd.grad(loss, trains, create_graph=True)
                sum(one.square().sum() for one in first).backward()
            found.append(gradients(model))
            model.zero_grad()
        return found

    expected = run(build(), contextlib.nullcontext(), contextlib.nullcontext)
    model = offloaded()
    resident: Any = contextlib.nullcontext
    if grad_in == "resident":
        resident = functools.partial(stagehand_alloc.resident, model)
    assert run(model, stagehand_alloc.pool(high=16 * MIB), resident) == expected


def test_a_gradient_of_gradients_that_finds_no_weights_raises() -> None:
    model = offloaded()
    with stagehand_alloc.pool(high=16 * MIB):
        loss = model(tokens(0))
    trains = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, trains, create_graph=True)
    with pytest.raises(RuntimeError, match="is on the host"):
        sum(one.square().sum() for one in first).backward()
    stagehand_alloc.restore(model)  # torch keeps the graph of gradients whose backward failed


def test_the_driver_refusing_a_copy_leaves_the_books_whole(gpu: Any) -> None:
    model = offloaded()
    pool = stagehand_alloc.pool(high=7 * MIB)
    expected = plain()
    gpu.fail("cuMemcpyHtoDAsync", nth=3)
    with contextlib.suppress(RuntimeError), pool:
        model(tokens(0))
    gpu.fail("cuMemcpyHtoDAsync", times=0)
    assert _native.check_invariants(DEVICE) == ""
    assert trained(model, pool) == expected


def test_offloading_may_end_between_forward_and_backward() -> None:
    expected = build()
    expected(tokens(0)).backward()
    model = offloaded()
    with stagehand_alloc.pool(high=16 * MIB):
        loss = model(tokens(0))
    stagehand_alloc.restore(model)
    loss.backward()
    assert gradients(model) == gradients(expected)


def test_an_interrupted_forward_of_a_dropped_model_leaves_nothing_held() -> None:
    model = offloaded()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model.layers[1].up.register_forward_pre_hook(interrupt)
    pool = stagehand_alloc.pool(high=16 * MIB)
    with contextlib.suppress(KeyboardInterrupt), pool:
        model(tokens(0))
    del model
    gc.collect()
    assert _native.weights(DEVICE)["bytes"] > 0  # the one that was interrupted
    kept = nn.Linear(1, 1)
    with pool:
        pass
    assert _native.weights(DEVICE)["bytes"] == 0
    gone = weakref.ref(kept)
    del kept
    assert gone() is None  # looking for who runs keeps nothing of who does


def test_a_leaf_that_a_block_hands_on_gets_no_hooks() -> None:
    class HandsOn(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), prompt

    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([HandsOn() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, _ = layer(x)
            return x.square().mean()

    prompt = torch.zeros(4, requires_grad=True)
    model = stagehand_alloc.offload(Handing())
    model(torch.randn(TOKENS, WIDTH)).backward()
    assert not prompt._backward_hooks


class Region(Model):
    """One region over all blocks but the first."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(tokens))
        x = stagehand_alloc.checkpoint(functools.partial(self.through, list(self.layers)[1:]), x)
        return F.cross_entropy(self.head(x) / WIDTH, tokens)

    @staticmethod
    def through(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x


def test_a_region_over_many_blocks_runs_again_with_few_of_them_at_home() -> None:
    expected = plain(Region)
    model = offloaded(Region)
    home = []
    for layer in model.layers:
        layer.down.register_forward_hook(lambda *_: home.append(_native.weights(DEVICE)["home"]))
    with evicting_everything():
        assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == expected
    assert len(home) > 4 * len(model.layers)
    assert max(home) <= 3 * _native.weights(DEVICE)["largest"]
