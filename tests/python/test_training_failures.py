"""After a failed step nothing is lost: the next, right step has the gradients of plain torch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from models import BY_NAME
from torch import Tensor, nn
from training import Around, digest, evicting_everything, gradients, leaves_nothing, train

import stagehand_alloc

pytestmark = pytest.mark.usefixtures("gpu")

RECIPE = BY_NAME["dropout_mlp"]


class OnPurposeError(RuntimeError):
    """Raised on purpose."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert ctx.saved_tensors[0].shape == grad.shape
        raise OnPurposeError("in backward")


def model_and_batch() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(2)
    return RECIPE.build(), RECIPE.batch()


def forward_and_fail(model: nn.Module, batch: tuple[Tensor, ...], around: Around) -> None:
    with around:
        loss = model(*batch)
        raise OnPurposeError(f"in forward, while the graph of {loss} is alive")


# --- Exceptions


def test_after_an_exception_in_forward_the_next_step_is_right() -> None:
    expected = train(RECIPE)
    model, batch = model_and_batch()
    pool = stagehand_alloc.pool()
    with leaves_nothing(), evicting_everything():
        with pytest.raises(OnPurposeError):
            forward_and_fail(model, batch, pool)
        assert train(RECIPE, pool) == expected


def test_after_an_exception_in_backward_the_next_step_is_right() -> None:
    expected = train(RECIPE)
    model, (x, y) = model_and_batch()
    pool = stagehand_alloc.pool()
    with leaves_nothing(), evicting_everything():
        with pool:
            loss = model(FailsInBackward.apply(x.clone().requires_grad_() * 1), y)
        with pytest.raises(OnPurposeError, match="in backward"):
            loss.backward()
        del loss
        model.zero_grad()
        assert train(RECIPE, pool) == expected


def test_an_exception_in_forward_leaves_no_record() -> None:
    model, batch = model_and_batch()
    with leaves_nothing():
        with pytest.raises(OnPurposeError) as caught:
            forward_and_fail(model, batch, stagehand_alloc.pool())
        del caught  # its traceback holds the frame that holds the loss


def test_a_second_backward_through_a_freed_graph_raises_autograds_error() -> None:
    model, batch = model_and_batch()
    with leaves_nothing():
        with stagehand_alloc.pool():
            loss = model(*batch)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        del loss
        model.zero_grad()


# --- Out of memory


def limited_pool(room: int) -> stagehand_alloc.Pool:
    """A pool that refuses to grow more than `room` bytes over what is in use now."""
    gc.collect()
    stagehand_alloc._native.empty_cache()
    high = stagehand_alloc.stats().mapped + room
    return stagehand_alloc.pool(high=high, low=int(0.9 * high), limit=high)


def test_out_of_memory_is_torchs_own_error_and_says_what_to_change() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, limited_pool(32 << 20):
        torch.empty(64 << 20, dtype=torch.uint8)
    message = str(caught.value)
    for word in ("mapped", "occupied", "retained", "high", "limit"):
        assert word in message


def test_after_a_caught_out_of_memory_a_smaller_step_trains_right() -> None:
    model, (x, y) = model_and_batch()
    expected = model(x, y)
    expected.backward()
    plain = digest(expected), gradients(model)
    model.zero_grad(set_to_none=True)
    del expected
    pool = limited_pool(32 << 20)
    with leaves_nothing():
        with pytest.raises(torch.OutOfMemoryError) as caught, pool:
            model(x.repeat(64, 1), y.repeat(64, 1))
        del caught
        gc.collect()
        torch.manual_seed(2)
        RECIPE.build(), RECIPE.batch()  # draw what model_and_batch() drew: the same dropout masks
        with pool:
            loss = model(x, y)
        loss.backward()
        assert (digest(loss), gradients(model)) == plain
        del loss
        model.zero_grad(set_to_none=True)


def test_the_limit_ends_with_the_pool() -> None:
    with limited_pool(32 << 20):
        pass
    torch.empty(64 << 20, dtype=torch.uint8)
