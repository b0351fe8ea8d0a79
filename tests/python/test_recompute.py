"""Saved tensors that their autograd node makes again: bit by bit what plain torch trains with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import RECIPES, Recipe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import (
    Around,
    digest,
    evicting_everything,
    footprint,
    gradients,
    leaves_nothing,
    train,
)

import stagehand_alloc
from stagehand_alloc import PoolStats, StagehandWarning, _native
from stagehand_alloc._step import proofs as _recompute

pytestmark = pytest.mark.usefixtures("gpu")

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
SOME = 1 << 18  # floats: 1 MiB


def recomputing(**sizes: Any) -> stagehand_alloc.Pool:
    assert _recompute.load() == "loaded"
    return stagehand_alloc.pool(recompute="nodes", **sizes)


@contextlib.contextmanager
def dropping_everything() -> Iterator[None]:
    """Evict every retained block at every allocation, and poison what leaves."""
    _native.set_debug(evict_everything=True, poison=True)
    try:
        yield
    finally:
        _native.set_debug(evict_everything=False, poison=False)


def counted(before: PoolStats) -> PoolStats:
    return stagehand_alloc.stats().since(before)


# --- Whole models


@every_recipe
def test_training_equals_plain_torch_with_all_dropped_that_can_be(recipe: Recipe) -> None:
    expected = train(recipe)
    with leaves_nothing(), evicting_everything():
        assert train(recipe, recomputing()) == expected


@pytest.mark.parametrize("share", [0.75, 0.5])
@every_recipe
def test_training_equals_plain_torch_inside_a_budget(recipe: Recipe, share: float) -> None:
    expected = train(recipe)
    measured = footprint(recipe)
    high = measured.start + int(share * (measured.peak - measured.start))
    with leaves_nothing():
        assert train(recipe, recomputing(high=high), steps=3) == expected


# --- What a recipe needs to be trusted


class Block(nn.Module):
    """Saves what an elementwise op makes, and what a linear makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 512)
        self.down = nn.Linear(512, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def steps(
    around: Around, count: int = 6, meddle: bool = False, width: int = 256
) -> list[tuple[str, dict[str, str | None], int]]:
    """Loss, gradients and what was dropped of each step.

    `meddle`: some kernel changes a weight in place between forward and backward, and no version
    tells of it. Steps of another `width` are of another plan.
    """
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(6)]
    model = nn.Sequential(*blocks)
    found = []
    for _ in range(count):
        before = stagehand_alloc.stats()
        model.zero_grad()
        with around:
            loss = model(torch.randn(4, 512, width)).square().mean()
        if meddle:
            for block in blocks:
                block.up.weight.data.mul_(1.25)
        loss.backward()
        found.append((digest(loss), gradients(model), counted(before).drops))
    return found


def told(monkeypatch: pytest.MonkeyPatch, *, again: bool = False) -> list[bool]:
    """What proofs come to, as they do; `again`: those alone of what was proven before."""
    proofs: list[bool] = []
    tell = _native.proved

    def spy(device: int, what: tuple[int, int, int, bool, bool], same: bool) -> None:
        proofs.extend([same] if what[3] or not again else [])
        tell(device, what, same)

    monkeypatch.setattr(_native, "proved", spy)
    return proofs


def in_little(
    meddle: bool = False, width: int = 256
) -> list[tuple[str, dict[str, str | None], int]]:
    _native.empty_cache()
    return steps(recomputing(high="28MiB", low="24MiB"), meddle=meddle, width=width)


@contextlib.contextmanager
def other(setting: str) -> Iterator[None]:
    """The setting changed, one of kernels that are not used here: no bit changes."""
    settings = torch.backends.cuda.matmul
    before = getattr(settings, setting)
    setattr(settings, setting, not before)
    try:
        yield
    finally:
        setattr(settings, setting, before)


def test_a_proof_that_comes_while_others_are_read_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proved: list[tuple[Any, bool]] = []
    monkeypatch.setattr(_native, "proved", lambda _, what, same: proved.append((what, same)))
    proofs = _recompute.Proofs(0)
    one, other = torch.tensor(1), torch.tensor(2)
    sums = (1, 1, 0, True, True), (2, 1, 0, True, True)
    proofs.add(one, one, 0, sums[0], "gelu")
    proofs.add(torch.tensor(True), None, 0, (3, 1, 0, False, False), "mm")
    proofs.add(one, other, 0, sums[1], "gelu")
    late = proofs._new  # as a thread has it that was about to append
    proofs.collect()
    late.insert(0, _recompute._Proof(torch.tensor(False), None, 0, (4, 1, 0, False, False), "mm"))
    with pytest.warns(StagehandWarning, match="bit by bit"):
        proofs.collect()
    assert proved == [((3, 1, 0, False, False), False), (sums[0], True), (sums[1], False)]


def test_what_is_not_elementwise_is_dropped_once_it_was_seen_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = steps(contextlib.nullcontext())
    proofs = told(monkeypatch)
    with leaves_nothing():
        actual = in_little()
    assert [step[:2] for step in actual] == [step[:2] for step in expected]
    assert proofs
    assert all(proofs)
    assert actual[-1][2] > actual[0][2]


def test_what_does_not_come_back_bit_by_bit_is_moved_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = steps(contextlib.nullcontext(), meddle=True, width=224)
    proofs = told(monkeypatch)
    with (
        leaves_nothing(),
        pytest.warns(StagehandWarning, match="output of addmm") as warned,
    ):
        actual = in_little(meddle=True, width=224)
    assert [step[:2] for step in actual] == [step[:2] for step in expected]
    assert not all(proofs)
    assert len([one for one in warned if "bit by bit" in str(one.message)]) == 1


def test_a_proof_does_not_outlive_the_settings_it_rests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    in_little(width=240)
    proofs = told(monkeypatch)
    with other("allow_tf32"):
        in_little(width=240)
    assert proofs


# --- What cannot be seen from an op and its inputs


def test_a_write_behind_autograds_back_before_the_save_is_not_undone() -> None:
    """Elementwise too: a raw kernel may have changed what the op made before somebody saves it."""
    torch.manual_seed(1)
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(8)]

    def run(around: Around) -> list[str]:
        x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(2))
        for weight in weights:
            weight.grad = None
        with around:
            for weight in weights:
                made = F.gelu(x @ weight)
                made.data.clamp_(max=0.5)
                x = x + made @ weight
            loss = x.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return [digest(weight.grad) for weight in weights if weight.grad is not None]

    expected = run(contextlib.nullcontext())
    _native.empty_cache()
    pool = recomputing(high="30MiB", low="26MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StagehandWarning)  # of what did not come back
        for _ in range(8):
            assert run(pool) == expected


def region_steps(count: int, around: Around, meddle: Callable[[int], bool]) -> list[Any]:
    """The gradients of each step of six regions, and how many ran again in it.

    In steps that `meddle`, each region changes a tensor behind autograd's back.
    """
    torch.manual_seed(3)
    model = nn.ModuleList(Block(256) for _ in range(6))
    x = torch.randn(2048, 256)
    found = []
    for step in range(count):

        def forward(block: Block, y: Tensor, step: int = step) -> Tensor:
            up = F.gelu(block.up(y))
            if meddle(step):
                up.data.clamp_(max=0.5)
            return block.down(up) + y

        before = stagehand_alloc.stats()
        model.zero_grad()
        with around:
            y = x
            for block in model:
                y = stagehand_alloc.checkpoint(forward, block, y)
            loss = y.square().mean()
        loss.backward()
        found.append((gradients(model), counted(before).reruns))
    return found


@pytest.mark.parametrize("meddling", [False, True])
def test_in_a_region_recipes_serve_where_they_are_proven_and_the_region_where_not(
    meddling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a region does behind autograd's back, it does again when it runs again."""
    (expected, _), *_ = region_steps(1, contextlib.nullcontext(), lambda _: meddling)
    _native.empty_cache()
    proofs = told(monkeypatch)
    with warnings.catch_warnings(), leaves_nothing():
        warnings.simplefilter("ignore", StagehandWarning)  # of what did not come back
        found = region_steps(10, recomputing(high="40MiB", low="36MiB"), lambda _: meddling)
    assert [gradients for gradients, _ in found] == [expected] * len(found)
    assert found[0][1] > 0
    assert proofs
    assert all(proofs) != meddling


def test_what_comes_back_otherwise_than_when_it_was_proven_is_told_of() -> None:
    """One of what is dropped is compared every few steps, whatever was proven."""
    begins, ends = 60, 100
    looked_at = (begins - 1, ends - 1)

    def run(around: Around, steps: Iterable[int]) -> list[list[str]]:
        torch.manual_seed(4)
        weights = [torch.randn(248, 248, requires_grad=True) for _ in range(8)]
        x = torch.randn(1024, 248)
        found = []
        for step in steps:
            for weight in weights:
                weight.grad = None
            with around:
                y = x
                for weight in weights:
                    made = F.gelu(y @ weight)
                    if step >= begins:
                        made.data.clamp_(max=0.5)
                    y = y + made @ weight
                loss = y.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            if step in looked_at:
                found.append([digest(weight.grad) for weight in weights if weight.grad is not None])
        return found

    expected = run(contextlib.nullcontext(), looked_at)  # no weight changes from step to step
    _native.empty_cache()
    with pytest.warns(RuntimeWarning, match="no longer comes back bit by bit"):
        assert run(recomputing(high="17MiB", low="15MiB"), range(ends)) == expected


class Watched:
    """A pool whose later steps run forward under a dispatch mode, which notes what is called."""

    def __init__(self, pool: stagehand_alloc.Pool, after: int) -> None:
        self.seen: set[str] = set()
        self._pool = pool
        self._left = after
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._pool)
        self._left -= 1
        if self._left < 0:
            self._stack.enter_context(self.Mode(self.seen))

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    class Mode(TorchDispatchMode):
        def __init__(self, seen: set[str]) -> None:
            super().__init__()
            self._seen = seen

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self._seen.add(str(func))
            return func(*args, **(kwargs or {}))


def test_modes_of_others_do_not_see_what_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's selective checkpoint counts the ops of forward, and of the run that repeats it."""
    looked = told(monkeypatch, again=True)
    _native.empty_cache()
    watched = Watched(recomputing(high="28MiB", low="24MiB"), after=40)
    steps(watched, count=46, width=264)
    assert len(looked) > 3
    assert all(looked)
    assert any("addmm" in name for name in watched.seen)
    assert not any("sum" in name for name in watched.seen)


def test_a_weight_of_another_layout_is_another_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train_with(turned: bool) -> None:
        torch.manual_seed(0)
        weights = [torch.randn(256, 256) for _ in range(6)]
        weights = [(w.t().contiguous() if turned else w).requires_grad_() for w in weights]
        pool = recomputing(high="20MiB", low="16MiB")
        x = torch.randn(2048, 256)
        for _ in range(5):
            y = x
            with pool:
                for weight in weights:
                    y = y + F.gelu(y @ (weight.t() if turned else weight))
                loss = y.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]

    _native.empty_cache()
    train_with(False)
    proofs = told(monkeypatch)
    train_with(True)
    assert proofs


def test_a_proof_that_cannot_run_leaves_the_step_as_it_is() -> None:
    def run(around: Around) -> list[tuple[str, dict[str, str | None]]]:
        torch.manual_seed(0)
        blocks = [Block(208) for _ in range(6)]
        model = nn.Sequential(*blocks)
        found = []
        for _ in range(6):
            model.zero_grad()
            with around:
                loss = model(torch.randn(4, 512, 208)).square().mean()
            with torch.no_grad():
                for block in blocks:
                    block.up.bias.mul_(1.0)  # a new version of what autograd did not save
            loss.backward()
            found.append((digest(loss), gradients(model)))
        return found

    expected = run(contextlib.nullcontext())
    _native.empty_cache()
    with leaves_nothing():
        assert run(recomputing(high="27MiB", low="23MiB")) == expected


def test_pools_made_anew_each_step_read_the_proofs_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proofs = told(monkeypatch)
    _native.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(192) for _ in range(6)])
    for _ in range(6):
        with recomputing(high="26MiB", low="22MiB"):
            loss = model(torch.randn(4, 512, 192)).square().mean()
        loss.backward()
    assert proofs


# --- Convolutions with normalization


class Stack(nn.Module):
    """The activation writes over what normalization makes, or makes another tensor of it."""

    def __init__(self, norm: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (3, 8, 8, 8, 8, 8):
            layers += [nn.Conv2d(inputs, 8, 3, padding=1), norm(), activation()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def stack_steps(around: Around, build: Callable[[], Stack]) -> list[Any]:
    """Loss, gradients, running statistics and what was dropped of each step."""
    torch.manual_seed(4)
    model = build()
    found = []
    for _ in range(6):
        before = stagehand_alloc.stats()
        model.zero_grad()
        with around:
            loss = model(torch.randn(4, 3, 128, 128)).square().mean()
        loss.backward()
        buffers = [digest(buffer) for buffer in model.buffers()]
        found.append((digest(loss), gradients(model), buffers, counted(before).drops))
    return found


STACKS: dict[str, Callable[[], Stack]] = {
    "batch_norm-relu_": lambda: Stack(lambda: nn.BatchNorm2d(8), lambda: nn.ReLU(inplace=True)),
    "batch_norm-leaky_relu_": lambda: Stack(
        lambda: nn.BatchNorm2d(8), lambda: nn.LeakyReLU(0.1, inplace=True)
    ),
    "batch_norm-silu": lambda: Stack(lambda: nn.BatchNorm2d(8), nn.SiLU),
    "group_norm-silu": lambda: Stack(lambda: nn.GroupNorm(2, 8), nn.SiLU),
}


@pytest.mark.parametrize("stack", STACKS)
def test_normalization_runs_again_and_running_statistics_move_once(
    stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stack_steps(contextlib.nullcontext(), STACKS[stack])
    _native.empty_cache()
    proofs = told(monkeypatch)
    with leaves_nothing():
        found = stack_steps(recomputing(high="22MiB", low="19MiB"), STACKS[stack])
    assert [step[:3] for step in found] == [step[:3] for step in expected]
    assert proofs
    assert all(proofs)
    assert found[-1][3] > 0


def by_checkpoint(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(F.relu, x, use_reentrant=False)
    return y


def beside_other_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return F.relu(x)


@pytest.mark.parametrize("relu", [F.relu, by_checkpoint, beside_other_hooks])
def test_what_was_written_to_after_relu_is_not_taken_for_relu_in_place(
    relu: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of version 1 too, and plain torch allows it: nobody asks for relu's own gradient.

    In the first steps nothing is changed, so that it would come back bit by bit.
    """
    torch.manual_seed(5)
    norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
    after = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
    images = torch.randn(4, 8, 128, 128)
    weights = [convolution.weight for convolution in after if isinstance(convolution, nn.Conv2d)]

    def run(around: Around, most: float) -> list[str]:
        with around:
            parts = []
            for norm, convolution in zip(norms, after, strict=True):
                made = relu(norm(images))
                with torch.no_grad():
                    made.clamp_(max=most)
                parts.append(convolution(made).square().mean())
            loss = torch.stack(parts).sum()
        return [digest(grad) for grad in torch.autograd.grad(loss, weights)]

    expected = {most: run(contextlib.nullcontext(), most) for most in (1e9, 0.5)}
    _native.empty_cache()
    proofs = told(monkeypatch)
    pool = recomputing(high="22MiB", low="19MiB")
    for most in [1e9] * 6 + [0.5] * 2:
        assert run(pool, most) == expected[most]
    assert not proofs
