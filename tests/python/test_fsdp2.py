"""FSDP2's gradients in the computing stream's memory: what of it needs no GPU. On one:
`tests/gpu/test_fsdp2.py` and `tests/gpu/test_devices_ranks.py`.

FSDP2 reduces on the host here, between streams that only tell who waited for whom.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from stagehand_alloc import ConfigError
from stagehand_alloc.integrations.fsdp2 import OneStream, gradients_on_one_stream

SIDE = 8
LAYERS = 3

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from stagehand_alloc.integrations.fsdp2 import gradients_on_one_stream

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
mesh = init_device_mesh("cpu", (1,))
for part in (*model, model):
    fully_shard(part, mesh=mesh)
rows = torch.randn(4, 8)

def gradients():
    model.zero_grad(set_to_none=True)
    model(rows).square().sum().backward()
    return [p.grad.to_local().clone() for p in model.parameters()]

before = gradients()
placed = gradients_on_one_stream(model)
assert all(torch.equal(one, two) for one, two in zip(before, gradients(), strict=True))
placed.remove()
dist.destroy_process_group()
print("the same")
"""


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no sharded parameter.*\n.*fully_shard"):
        gradients_on_one_stream(nn.Linear(2, 2))


def test_on_the_host_gradients_stay_as_fsdp2_leaves_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "the same" in done.stdout, done.stdout + done.stderr


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Training:
    """A model whose gradients are reduced on a stream of their own, and placed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing, self.reducing = Stream(), Stream()
        self.current: Any = self.reducing
        self.capturing = False
        self.recorded: list[StorageWeakRef] = []  # storages of another stream's memory
        self.allocated: list[Stream] = []  # the stream of each request for memory
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(
            Tensor, "record_stream", lambda it, _: self.recorded.append(storage(it)), raising=False
        )
        monkeypatch.setattr(torch, "empty_strided", self.counted(torch.empty_strided))
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)])
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(self.model, mesh=mesh)
        self.weights: list[Any] = list(self.model.parameters())
        self.rows = torch.randn(4, SIDE)
        self.placing = OneStream(self.model)
        monkeypatch.setattr(self.placing, "_stream", self.computing, raising=False)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def counted(self, allocate: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Tensor:
            if self.current is self.computing:
                self.allocated.append(self.current)
            return allocate(*args, **kwargs)

        return counting

    def hook(self) -> None:
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.placing._place)

    def backward(self) -> None:
        self.model(self.rows).square().sum().backward()

    def plain(self, backwards: int = 1) -> list[Tensor]:
        """The gradients that there are without hooks; none are left."""
        for _ in range(backwards):
            self.backward()
        found = [gradient(weight).clone() for weight in self.weights]
        self.drop()
        return found

    def drop(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def reduce(self, flat: Tensor, weights: list[Any] | None = None) -> None:
        """Gives each weight its gradient out of ``flat``, as FSDP2 does."""
        for index, weight in enumerate(self.weights):
            if weights is None or any(weight is one for one in weights):
                view = flat.as_strided((SIDE, SIDE), (SIDE, 1), index * SIDE * SIDE)
                self.give(weight, view)

    def give(self, weight: Any, local: Tensor) -> None:
        self.set_gradient(weight, local)
        self.placing._place(weight)

    def set_gradient(self, weight: Any, local: Tensor) -> None:
        weight.grad = DTensor.from_local(
            local,
            weight.device_mesh,
            weight.placements,
            shape=weight.size(),
            stride=weight.stride(),
        )

    def is_right(self, expected: list[Tensor]) -> bool:
        pairs = zip(self.weights, expected, strict=True)
        return all(torch.equal(gradient(weight), one) for weight, one in pairs)


def gradient(weight: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = weight.grad.to_local()
    return found


def storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def storages(weights: list[Any]) -> set[StorageWeakRef]:
    return {storage(gradient(weight)) for weight in weights}


def numbers() -> Tensor:
    return torch.randn(LAYERS * SIDE * SIDE)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def training(group: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    yield (made := Training(monkeypatch))
    made.drop()  # while its streams are there


def test_each_gradient_is_copied_to_memory_of_the_computing_stream(training: Training) -> None:
    expected = training.plain()
    training.hook()
    training.backward()
    assert training.is_right(expected)
    assert len(training.allocated) == len(storages(training.weights)) == LAYERS
    assert training.reducing.waited_for == LAYERS * [training.computing]
    assert len(training.recorded) == LAYERS
    assert not set(training.recorded) & storages(training.weights)


def test_what_gradients_were_reduced_in_is_not_kept(training: Training) -> None:
    flat = numbers()
    reduced = storage(flat)
    training.reduce(flat)
    del flat
    assert reduced.expired()
    placed = storage(gradient(training.weights[0]))
    training.drop()
    assert placed.expired()


def test_a_gradient_that_an_earlier_hook_changed_stays_changed(training: Training) -> None:
    expected = training.plain()
    expected[1] *= 2
    training.weights[1].register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(2))
    training.hook()
    training.backward()
    assert training.is_right(expected)


def test_a_gradient_may_be_used_and_dropped_by_a_later_hook(training: Training) -> None:
    expected = training.plain()
    used = []

    def use(weight: Any) -> None:
        used.append(gradient(weight).clone())
        weight.grad = None

    training.hook()
    for weight in training.weights:
        weight.register_post_accumulate_grad_hook(use)
    training.backward()
    assert all(any(torch.equal(one, other) for other in used) for one in expected)
    assert len(training.computing.waited_for) == LAYERS


def test_what_is_accumulated_stays_where_it_is(training: Training) -> None:
    expected = training.plain(backwards=2)
    training.hook()
    training.backward()
    before = storages(training.weights)
    training.backward()
    assert storages(training.weights) == before
    assert training.is_right(expected)
    training.drop()
    assert training.computing.waited_for == LAYERS * [training.reducing]


def test_what_is_accumulated_in_part_is_right(training: Training) -> None:
    twice, once = training.plain(backwards=2), training.plain()
    training.hook()
    training.backward()
    training.weights[1].grad = None
    training.backward()
    assert training.is_right([twice[0], once[1], twice[2]])
    training.drop()
    assert training.computing.waited_for == (LAYERS + 1) * [training.reducing]


def test_a_gradient_where_a_former_one_was_placed_is_placed_too(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = training.weights[0]
    memory = bytearray(numbers().nbytes)
    with monkeypatch.context() as patched:
        patched.setattr(
            torch,
            "empty_strided",
            lambda *_, **__: torch.frombuffer(memory, dtype=torch.float32)[: SIDE * SIDE].view(
                SIDE, SIDE
            ),
        )
        training.reduce(numbers(), [weight])
    address = gradient(weight).data_ptr()
    weight.grad = None
    gc.collect()
    flat = torch.frombuffer(memory, dtype=torch.float32)
    training.reduce(flat, [weight])
    assert flat.data_ptr() == address
    assert gradient(weight).data_ptr() != address


def test_a_storage_that_is_reduced_in_again_leaves_former_gradients_alone(
    training: Training,
) -> None:
    flat = numbers()
    before = flat.clone()
    training.reduce(flat)
    kept = [weight.grad for weight in training.weights]
    training.reduce(flat.fill_(1))
    assert not storages(training.weights) & {storage(one.to_local()) for one in kept}
    for grad, part in zip(kept, before.view(LAYERS, SIDE, SIDE), strict=True):
        assert torch.equal(grad.to_local(), part)
    assert training.is_right([torch.ones(SIDE, SIDE)] * LAYERS)


def test_a_backward_after_one_that_failed_half_way_is_right(training: Training) -> None:
    first, second, third = training.weights
    before, after = numbers(), numbers()
    parts, more = before.clone().view(LAYERS, SIDE, SIDE), after.view(LAYERS, SIDE, SIDE)
    training.reduce(before, [first])
    training.set_gradient(second, before.view(LAYERS, SIDE, SIDE)[1])  # its first hook fails
    for weight, part in zip((first, second), more, strict=False):
        gradient(weight).add_(part)
        training.placing._place(weight)
    training.reduce(after, [third])
    assert training.is_right([parts[0] + more[0], parts[1] + more[1], more[2]])
    training.drop()
    assert training.computing.waited_for == LAYERS * [training.reducing]


def test_a_copy_that_fails_gives_its_memory_back_in_order(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    flat = numbers()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            training.reduce(flat)
    gc.collect()
    assert training.computing.waited_for == [training.reducing]
    assert storage(gradient(training.weights[0])) == storage(flat)
    training.reduce(flat)
    assert training.is_right(list(flat.view(LAYERS, SIDE, SIDE)))


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(torch.randn(100 * SIDE, SIDE)[:SIDE], id="a view of something large"),
        pytest.param(torch.randn(SIDE, SIDE).t(), id="transposed"),
        pytest.param(torch.randn(SIDE, 2 * SIDE)[:, ::2], id="with gaps"),
    ],
)
def test_what_fsdp2_does_not_make_is_placed_too(training: Training, view: Tensor) -> None:
    weight = training.weights[0]
    training.give(weight, view)
    assert torch.equal(gradient(weight), view)
    assert storage(gradient(weight)) != storage(view)
    weight.grad = None
    assert training.computing.waited_for == [training.reducing]


def test_an_empty_shard_is_placed(training: Training) -> None:
    weight = training.weights[0]
    flat = numbers()
    training.reduce(flat, training.weights[1:])
    training.give(weight, flat[flat.numel() :].view(0, SIDE))
    assert gradient(weight).shape == (0, SIDE)
    assert storage(gradient(weight)) != storage(flat)


def test_nothing_is_placed_while_a_graph_is_captured(training: Training) -> None:
    flat = numbers()
    training.capturing = True
    training.reduce(flat)
    assert storages(training.weights) == {storage(flat)}
