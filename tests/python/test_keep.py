"""keep= is told where a saved tensor comes from, and what it names stays on the GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import BY_NAME
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from training import evicting_everything, leaves_nothing, train

import stagehand_alloc
from stagehand_alloc import SavedTensorInfo, _native

pytestmark = pytest.mark.usefixtures("gpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.loose = [nn.Tanh()]  # in no named_modules()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.loose[0](self.up(x))).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.exp()


class Watching:
    """A predicate that keeps nothing and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[SavedTensorInfo] = []

    def __call__(self, info: SavedTensorInfo) -> bool:
        self.told.append(info)
        return False

    @property
    def places(self) -> list[tuple[str | None, str | None]]:
        return [(info.module, info.op) for info in self.told]


def activation() -> Tensor:
    """A tensor with a graph, which is not a leaf."""
    return torch.ones(4, 8, requires_grad=True) * 1.0


def no_hooks_left() -> bool:
    return not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


def test_module_and_op_say_where_a_saved_tensor_comes_from() -> None:
    watching = Watching()
    with stagehand_alloc.pool(keep=watching):
        Model()(activation()).sum()
    places = watching.places
    assert places[0] == ("blocks.0.up", "MulBackward0")
    assert ("blocks.0", "TanhBackward0") in places  # its Tanh is in no named_modules()
    assert ("blocks.0.down", "TanhBackward0") in places
    assert ("blocks.0", "AddmmBackward0") in places
    assert ("blocks.1.up", "SinBackward0") in places
    assert places[-1] == ("", "ExpBackward0")


def test_outside_of_modules_there_is_no_name_and_without_a_graph_no_op() -> None:
    watching = Watching()
    with stagehand_alloc.pool(keep=watching):
        weights = torch.ones(8)
        activation() * weights
    assert (None, None) in watching.places


def test_shape_dtype_and_bytes_are_the_tensor_s() -> None:
    watching = Watching()
    with stagehand_alloc.pool(keep=watching):
        activation().to(torch.float64).sin()
    info = watching.told[-1]
    assert (info.shape, info.dtype, info.bytes) == ((4, 8), torch.float64, 4 * 8 * 8)


def test_order_starts_again_at_each_entry() -> None:
    watching = Watching()
    pool = stagehand_alloc.pool(keep=watching)
    model = Model()
    for _ in range(2):
        with pool:
            model(activation())
    orders = [info.order for info in watching.told]
    half = len(orders) // 2
    assert half > 4
    assert orders == list(range(half)) * 2


@pytest.mark.parametrize("where", ["module", "op", "order"])
def test_what_is_kept_by_name_stays_and_gradients_are_bitwise_equal(where: str) -> None:
    recipe = BY_NAME["dropout_mlp"]
    expected = train(recipe)
    rules: dict[str, Callable[[SavedTensorInfo], bool]] = {
        "module": lambda info: info.module in ("layers.1", "layers.3"),
        "op": lambda info: info.op == "AddmmBackward0",
        "order": lambda info: info.order % 3 == 0,
    }
    pool = stagehand_alloc.pool(keep=rules[where])
    with leaves_nothing(), evicting_everything():
        assert train(recipe, pool) == expected
    assert pool.stats().passed_through["kept"] > 0


def test_only_what_is_named_stays_on_the_gpu() -> None:
    model = Model()

    def bytes_evicted(pool: stagehand_alloc.Pool) -> int:
        before = stagehand_alloc.stats().evicted_bytes
        with leaves_nothing(), evicting_everything():
            with pool:
                loss = model(activation()).sum()
            loss.backward()
            del loss
            model.zero_grad()
        return stagehand_alloc.stats().evicted_bytes - before

    everything = bytes_evicted(stagehand_alloc.pool(recompute=False))
    named = stagehand_alloc.pool(keep=lambda info: info.module == "blocks.1.up", recompute=False)
    assert bytes_evicted(named) == everything - 4 * 8 * 4  # its input, which nothing else saves
    assert named.stats().passed_through["kept"] == 1


def test_hooks_are_there_only_inside_a_pool_with_a_predicate() -> None:
    with stagehand_alloc.pool():
        assert no_hooks_left()
    with stagehand_alloc.pool(keep=Watching()):
        assert not no_hooks_left()
    assert no_hooks_left()


class Fails(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error("on purpose")


class Survives(nn.Module):
    """Catches what its inner module raises, and goes on."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.inner = nn.Sequential(Fails(error))
        self.after = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(self.inner[0].error):  # type: ignore[call-overload]
            self.inner(x)
        return self.after(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_forward_does_not_shift_the_names(error: type[BaseException]) -> None:
    watching = Watching()
    with stagehand_alloc.pool(keep=watching):
        (Survives(error)(activation()) + 1).sin()
    assert watching.places == [("after", "TanhBackward0"), (None, "AddBackward0")]


def test_an_exception_out_of_the_pool_leaves_no_hooks_and_no_names() -> None:
    watching = Watching()
    pool = stagehand_alloc.pool(keep=watching)
    with pytest.raises(ValueError, match="on purpose"), pool:
        nn.Sequential(Fails(ValueError))(activation())
    assert no_hooks_left()
    with pool:
        activation().sin()
    assert watching.told[-1].module is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
def test_recomputing_a_checkpoint_is_named_or_left_alone(reentrant: bool, inside: bool) -> None:
    watching = Watching()
    torch.manual_seed(3)
    model = Model()
    x = activation().detach().requires_grad_()

    def forward() -> Tensor:
        h: Tensor = x.sin()
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return h.sum()

    forward().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    x.grad = None
    with leaves_nothing():
        with stagehand_alloc.pool(keep=watching):
            loss = forward()
            if inside:
                loss.backward()
        told = len(watching.told)
        if not inside:
            loss.backward()
        assert len(watching.told) == told > 0
        actual = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, actual, expected))
        del loss, actual
        model.zero_grad(set_to_none=True)
        x.grad = None


def test_a_recomputed_module_has_the_name_it_has_in_its_root() -> None:
    watching = Watching()
    model = Model()
    with stagehand_alloc.pool(keep=watching):
        model(activation())
        model.blocks[1](activation())
    assert watching.told[-1].module == "blocks.1"


class Owner:
    """As a trainer: it has a pool that asks it."""

    def __init__(self) -> None:
        self.pool = stagehand_alloc.pool(keep=self.rule)

    def rule(self, info: SavedTensorInfo) -> bool:
        return info.order > 1000


def test_a_pool_whose_owner_is_its_predicate_goes_with_it() -> None:
    owner = Owner()
    with owner.pool:
        loss = activation().sin().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gone = weakref.ref(owner)
    del owner, loss
    gc.collect()
    assert gone() is None


def test_another_root_has_names_of_its_own() -> None:
    watching = Watching()
    with stagehand_alloc.pool(keep=watching):
        Model()(activation())
        nn.Sequential(nn.Tanh())(activation())
    assert watching.told[-1].module == "0"


def test_compiled_blocks_are_compiled_once_under_a_predicate() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="aot_eager")
    try:
        compiled(activation()).sum().backward()
    except Exception as error:  # whatever keeps torch.compile from working here
        pytest.skip(f"torch.compile does not work here: {error}")
    pool = stagehand_alloc.pool(keep=Watching())
    counts: list[Any] = []
    for _ in range(4):
        with pool:
            loss = compiled(activation()).sum()
        loss.backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(counts[1:])) == 1


def test_a_predicate_that_raises_is_heard_and_the_next_step_is_right() -> None:
    def fails(info: SavedTensorInfo) -> bool:
        raise ZeroDivisionError(info.module)

    with leaves_nothing():
        with pytest.raises(ZeroDivisionError), stagehand_alloc.pool(keep=fails):
            nn.Sequential(nn.Tanh())(activation())
        assert no_hooks_left()
        with stagehand_alloc.pool():
            y = activation().sin()
        y.sum().backward()
        del y
    assert _native.check_invariants(0) == ""
