"""What backward holds of offloaded weights, and for how long; what it must never be given."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lora import DEVICE, MIB, WIDTH, Block, Model, tokens
from torch import Tensor, nn

import stagehand_alloc
from stagehand_alloc import _native
from stagehand_alloc._weights.groups import registry

pytestmark = pytest.mark.usefixtures("gpu", "leaves_no_weights")


def held(model: nn.Module) -> int:
    return sum(group.native.open for group in registry.within([model]))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("backward of the user's")


class _FailsFirst(Model):
    """Its backward fails after those of all blocks but the first."""

    def run(self) -> list[Any]:
        return [self.layers[0], _Fails.apply, *self.layers[1:]]


class _Asks(torch.autograd.Function):
    """What is held when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Any) -> Tensor:
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ask()
        return gradients[0], None


@pytest.mark.parametrize("cloned", [False, True], ids=["returned", "another"])
def test_a_block_whose_backward_is_over_is_held_no_more(cloned: bool) -> None:
    class Asking(Model):
        def run(self) -> list[Any]:
            between = [lambda x: _Asks.apply(x.view_as(x) if cloned else x, ask)] * 7
            after = [*between, nn.Identity()]
            return [one for pair in zip(self.layers, after, strict=True) for one in pair]

    torch.manual_seed(1)
    model = stagehand_alloc.offload(Asking())
    seen: list[int] = []

    def ask() -> None:
        seen.append(held(model))

    with stagehand_alloc.pool(high=8 * MIB):
        loss = model(tokens(0))
    loss.backward()
    assert seen == [0] * 7


class _Keeps(torch.autograd.Function):
    """A frozen product that keeps its weight where no hook sees it, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ask: Any) -> Tensor:
        ctx.kept = weight, ask
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, ask = ctx.kept
        ask()
        return gradients[0] @ weight, None, None


def test_a_block_that_calls_itself_is_held_until_its_own_backward_is_over() -> None:
    class Nested(Block):
        ask: Any = None

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            x = x + _Keeps.apply(x, self.up.weight[:WIDTH], self.ask)
            return self(x, depth - 1) if depth else x

    model: Any = Model(2, Nested)
    stagehand_alloc.offload(model)
    seen: list[int] = []
    for layer in model.layers:
        (group,) = registry.within([layer])
        layer.ask = lambda group=group: seen.append(group.native.open)
    with stagehand_alloc.pool(high=8 * MIB):
        loss = model.head(model.layers[1](model.layers[0](torch.randn(4, WIDTH).requires_grad_())))
    loss.sum().backward()
    assert seen == [1] * 4
    stagehand_alloc.restore(model)


def test_an_input_made_on_another_thread_ends_no_block_too_early() -> None:
    class Branched(Block):
        """What is made first leads to no input, and is needed last."""

        ask: Any = None

        def forward(self, x: Tensor) -> Tensor:
            branch = _Keeps.apply(self.lora_a.t(), self.up.weight[:WIDTH], self.ask)
            return x @ self.down.weight + branch.sum()

    block: Any = Branched()
    model = nn.ModuleList([block])
    stagehand_alloc.offload(model, blocks=[block])
    (group,) = registry.within([block])
    seen: list[int] = []
    block.ask = lambda: seen.append(group.native.open)
    made: list[Tensor] = []

    def many_numbers() -> None:
        x = torch.randn(4, WIDTH).requires_grad_()
        for _ in range(200):
            x = x * 1.0
        made.append(x)

    def train() -> None:
        with stagehand_alloc.pool(high=8 * MIB):
            loss = block(made[0]).sum()
        loss.backward()

    for work in (many_numbers, train):  # a thread's numbers begin at 0
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [1]
    stagehand_alloc.restore(model)


def hooks_of(tensor: Tensor) -> list[Any]:
    return list((tensor._backward_hooks or {}).values())


def test_an_input_that_is_used_again_gathers_no_hooks() -> None:
    model: Any = stagehand_alloc.offload(Model(2))
    x = torch.randn(4, WIDTH).requires_grad_() * 1.0
    with torch.no_grad():
        for _ in range(3):
            model.layers[0](x)
    assert hooks_of(x) == []
    for _ in range(3):
        model.layers[0](x).sum().backward(retain_graph=True)
    (hook,) = hooks_of(x)
    assert len(hook.over) == 1
    stagehand_alloc.restore(model)


def test_an_input_that_lives_longer_keeps_no_model() -> None:
    model: Any = stagehand_alloc.offload(Model(2))
    x = torch.randn(4, WIDTH).requires_grad_() * 1.0
    model.layers[0](x).sum().backward(retain_graph=True)
    del model
    gc.collect()
    assert _native.weights(DEVICE)["bytes"] == 0
    x.sum().backward()  # its hooks still run


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "thread"])
def test_a_backward_that_failed_holds_nothing(elsewhere: bool) -> None:
    torch.manual_seed(1)
    model = stagehand_alloc.offload(_FailsFirst())
    with stagehand_alloc.pool(high=8 * MIB):
        losses = [model(tokens(0))]

    def backward() -> None:
        with pytest.raises(ValueError, match="of the user's"):
            losses.pop().backward()

    if elsewhere:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    gc.collect()
    assert held(model) == 0
    stagehand_alloc.restore(model)


class _Inner(torch.autograd.Function):
    """Runs a backward of its own inside its backward, between two uses of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inner: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.inner = inner
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            ctx.inner(x.detach().requires_grad_()).sum().backward()
        return gradients[0] @ weight, None, None


def test_a_backward_inside_a_node_leaves_the_node_its_weights() -> None:
    class Outer(Block):
        other: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = _Inner.apply(x, self.up.weight, self.other)
            return x + self.down(F.gelu(y))

    def made() -> Any:
        torch.manual_seed(2)
        model: Any = Model(4)
        model.layers[1] = Outer()
        # The backward inside uses three more blocks, which are more than backward holds.
        others = [Block().requires_grad_(False) for _ in range(3)]
        model.others = nn.ModuleList(others)
        object.__setattr__(model.layers[1], "other", nn.Sequential(*others))
        return model

    def gradients(model: Any) -> list[Tensor]:
        with stagehand_alloc.pool(high=8 * MIB):
            loss = model(tokens(0))
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(made())
    model = stagehand_alloc.offload(made())
    assert all(map(torch.equal, gradients(model), expected))
    gc.collect()
    assert held(model) == 0


def test_a_dlpack_alias_of_a_weight_is_not_saved() -> None:
    class Aliased(Block):
        def forward(self, x: Tensor) -> Tensor:
            alias = torch.from_dlpack(self.up.weight.detach())
            y: Tensor = super().forward(x) * alias[0]
            return y

    torch.manual_seed(3)
    model = stagehand_alloc.offload(Model(3, Aliased))
    with (
        pytest.raises(RuntimeError, match="shares memory with an offloaded weight"),
        stagehand_alloc.pool(high=8 * MIB),
    ):
        model(tokens(0))
    stagehand_alloc.restore(model)


def test_an_adapter_that_unmerges_in_forward_is_written_back() -> None:
    class Adapter(Block):
        """As PEFT does where adapters are disabled while they are merged."""

        merged = True

        def forward(self, x: Tensor) -> Tensor:
            if self.merged:
                self.up.weight.data -= 1.0
                self.merged = False
            return super().forward(x)

    torch.manual_seed(4)
    expected = Model(3, Adapter)
    torch.manual_seed(4)
    model = stagehand_alloc.offload(Model(3, Adapter))
    with torch.no_grad():
        first = [one(tokens(0)) for one in (expected, model)]
        _native.drop_weights(DEVICE)
        second = [one(tokens(0)) for one in (expected, model)]
    assert torch.equal(*first)
    assert torch.equal(*second)
    stagehand_alloc.restore(model)
