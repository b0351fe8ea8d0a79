"""What comes back from unpack is exactly what was saved, whatever kind of tensor it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from training import digest, evicting_everything, leaves_nothing

import stagehand_alloc

pytestmark = pytest.mark.usefixtures("gpu")

Seen = list[tuple[Any, ...]]


def describe(tensor: Tensor) -> tuple[Any, ...]:
    """All that a consumer can see of a tensor, and its contents."""
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.dtype, tuple(tensor.shape), digest(tensor.to_dense()))
    if tensor.is_quantized:
        return ("quantized", tensor.qscheme(), tuple(tensor.shape), digest(tensor.int_repr()))
    bits = (tensor.is_conj(), tensor.is_neg())
    return (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), bits, digest(tensor))


class Save(torch.autograd.Function):
    """Saves tensors, and in backward appends what came back to `seen`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Seen, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.seen.extend(describe(tensor) for tensor in ctx.saved_tensors)
        return (grad, None, *(None for _ in ctx.saved_tensors))


def activation(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor as a model makes them: no leaf where its dtype has gradients."""
    generator = torch.Generator().manual_seed(7)
    leaf = torch.randn(*shape, generator=generator, requires_grad=True)
    return (leaf * 3).to(dtype)


def comes_back_exactly(make: Callable[[], tuple[Tensor, ...]]) -> int:
    """Save what `make` returns, let it be evicted and poisoned; returns the records it took."""
    x = torch.ones(4, requires_grad=True)
    seen: Seen = []
    with leaves_nothing(), evicting_everything():
        with stagehand_alloc.pool():
            filler = activation(64, 64)
            loss = Save.apply(x, [], filler).sum()  # so that there always is something to evict
            before = stagehand_alloc.stats().records
            saved = make()
            expected = [describe(tensor) for tensor in saved]
            loss = loss + Save.apply(x, seen, *saved).sum()
            records = stagehand_alloc.stats().records - before
        del saved, filler
        for _ in range(3):
            torch.empty(1 << 12)
        loss.backward()
        del loss
        x.grad = None
    assert seen == expected
    return records


# --- Dtypes


FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOATING += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128]
INTEGRAL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_floating_and_complex_dtypes_are_carried(dtype: torch.dtype) -> None:
    assert comes_back_exactly(lambda: (activation(33, 17, dtype=dtype),)) == 1


@pytest.mark.parametrize("dtype", INTEGRAL, ids=str)
def test_integers_and_masks_come_back_exactly(dtype: torch.dtype) -> None:
    comes_back_exactly(lambda: ((activation(33, 17) * 20).to(dtype),))


# --- Layouts


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[5:20, 3:9],
    "strided": lambda t: t[::2, ::3],
    "offset": lambda t: t.flatten()[1:],
    "expanded": lambda t: t[:1].expand(7, -1),
    "overlapping": lambda t: t.flatten().unfold(0, 8, 3),
    "zero_dim": lambda t: t[4, 4],
    "one_row": lambda t: t[3],
    "as_strided": lambda t: t.as_strided((3, 5), (1, 2), 11),
    "channels_last": lambda t: t.reshape(2, 4, 5, 8).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_keep_their_exact_strides_and_contents(view: Callable[[Tensor], Tensor]) -> None:
    comes_back_exactly(lambda: (view(activation(40, 8)),))


def test_a_tensor_and_its_transpose_saved_together_share_one_record() -> None:
    def make() -> tuple[Tensor, ...]:
        tensor = activation(24, 40)
        return tensor, tensor.t()

    assert comes_back_exactly(make) == 1


def test_three_views_of_a_fused_projection_are_one_record() -> None:
    assert comes_back_exactly(lambda: activation(16, 96).chunk(3, dim=1)) == 1


def test_the_same_tensor_saved_many_times_is_one_record() -> None:
    def make() -> tuple[Tensor, ...]:
        tensor = activation(64)
        return (tensor,) * 5

    assert comes_back_exactly(make) == 1


def test_overlapping_views_of_one_storage_are_one_record() -> None:
    def make() -> tuple[Tensor, ...]:
        tensor = activation(64)
        return tensor[:40], tensor[20:], tensor.view(8, 8).t()

    assert comes_back_exactly(make) == 1


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 5000, (1 << 20) + 1])
def test_odd_sizes_come_back_exactly(size: int) -> None:
    assert comes_back_exactly(lambda: (activation(size),)) == 1


# --- Passed through: what a block of bytes cannot carry


class Labelled(torch.Tensor):
    """A subclass with nothing of its own."""


def _csr() -> Tensor:
    return activation(8, 8).detach().relu().to_sparse_csr()


NOT_CARRIED: dict[str, Callable[[], Tensor]] = {
    "conj": lambda: activation(8, 8, dtype=torch.complex64).conj(),
    "neg": lambda: activation(8, 8, dtype=torch.complex64).conj().imag,
    "sparse_coo": lambda: activation(8, 8).detach().relu().to_sparse(),
    "sparse_csr": _csr,
    "quantized": lambda: torch.quantize_per_tensor(activation(8, 8).detach(), 0.1, 3, torch.qint8),
    "subclass": lambda: activation(8, 8).detach().as_subclass(Labelled),
    "zero_size": lambda: activation(0, 8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", NOT_CARRIED.values(), ids=NOT_CARRIED.keys())
def test_what_cannot_be_carried_is_passed_through_exactly(make: Callable[[], Tensor]) -> None:
    assert comes_back_exactly(lambda: (make(),)) == 0


def test_what_is_passed_through_is_counted_by_reason() -> None:
    pool = stagehand_alloc.pool()
    x = torch.ones(4, requires_grad=True)
    before = sum(pool.stats().passed_through.values())
    with pool:
        Save.apply(x, [], activation(8, 8).detach().relu().to_sparse())
    assert sum(pool.stats().passed_through.values()) == before + 1


def test_a_storage_that_is_not_ours_is_passed_through() -> None:
    foreign = bytearray(range(256)) * 16
    assert comes_back_exactly(lambda: (torch.frombuffer(foreign, dtype=torch.uint8),)) == 0


# --- Left on the GPU by the user


def test_keep_leaves_a_tensor_on_the_gpu() -> None:
    assert comes_back_exactly(lambda: (stagehand_alloc.keep(activation(64, 64)),)) == 0


def test_a_keep_predicate_decides_by_what_it_is_told() -> None:
    x = torch.ones(4, requires_grad=True)
    pool = stagehand_alloc.pool(keep=lambda info: info.shape == (8,))
    with leaves_nothing(), pool:
        small, large = activation(8), activation(64, 64)
        loss = Save.apply(x, [], small, large).sum()
        assert stagehand_alloc.stats().records == 1
        assert pool.stats().passed_through["kept"] >= 1
        del loss, small, large


def test_what_existed_before_the_pool_is_not_tagged() -> None:
    """It would be held by its owner anyway: evicting it could free nothing."""
    x = torch.ones(4, requires_grad=True)
    older = activation(64, 64)
    with leaves_nothing(), stagehand_alloc.pool():
        loss = Save.apply(x, [], older).sum()
        assert stagehand_alloc.stats().records == 0
        del loss


# --- Every dtype torch has


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_a_saved_tensor_comes_back_with_the_dtype_it_had(dtype: torch.dtype) -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, q: Tensor) -> Tensor:
            ctx.save_for_backward(q)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (q,) = ctx.saved_tensors
            back.append((q.dtype, tuple(q.shape), bytes(q.view(torch.uint8).tolist())))
            return grad, None

    back: list[Any] = []
    x = torch.ones(4, requires_grad=True)
    with evicting_everything(), stagehand_alloc.pool() as pool:
        raw = torch.arange(64, dtype=torch.uint8) % 2
        try:
            q = raw.view(dtype)
        except RuntimeError as error:
            pytest.skip(f"torch makes none: {error}")
        shape = tuple(q.shape)
        y = Saves.apply(x, q)
        other = (x * 1).sin()  # something that may leave, whatever becomes of the other
        del q, raw
        torch.empty(1)
        torch.empty(1)
    del other
    y.sum().backward()
    assert back == [(dtype, shape, bytes(at % 2 for at in range(64)))]
    if re.fullmatch(r"torch\.u?int[1-7]", str(dtype)):
        assert pool.stats().passed_through["layout"] == 1
