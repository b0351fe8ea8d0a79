"""A model that holds a pool is copied and saved like any other."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stagehand_alloc

pytestmark = pytest.mark.usefixtures("gpu")


class Holder(nn.Module):
    """Enters its pool in forward, as a Trainer's model may."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        self.pool = stagehand_alloc.pool(high="64MiB", low="32MiB", limit=0.5, keep=keep_small)
        self.pool.limits(max_inflight_d2h=3, piece="1MiB")

    def forward(self, x: Tensor) -> Tensor:
        with self.pool:
            return self.body(x).pow(2).mean()


def keep_small(info: stagehand_alloc.SavedTensorInfo) -> bool:
    return info.bytes < 64


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return average.module


@pytest.mark.parametrize("inside", [False, True], ids=["after a step", "inside the pool"])
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        through_torch_save,
        averaged,
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["deepcopy", "copy", "torch.save", "AveragedModel", "pickle"],
)
def test_a_copy_of_a_model_that_holds_a_pool_trains_as_the_model(
    copied: Callable[[nn.Module], nn.Module], inside: bool
) -> None:
    torch.manual_seed(0)
    model, x = Holder(), torch.randn(4, 8)
    loss = model(x)
    loss.backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    if inside:
        with model.pool:
            found = copied(model)
    else:
        found = copied(model)
    assert isinstance(found, Holder)
    found.zero_grad()
    found(x).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(found.parameters(), want, strict=True))
    if copied is not copy.copy:  # which shares what the model holds
        assert found.pool is not model.pool


def test_a_copied_pool_has_the_same_settings_and_its_own_counts() -> None:
    pool = stagehand_alloc.pool(high="64MiB", low="32MiB", keep=keep_small)
    pool.limits(h2d_bytes_per_second="2GB")
    x = torch.ones(1 << 12, requires_grad=True)
    with pool:
        y = (x * 1).sin().sum()
    y.backward()
    found = copy.deepcopy(pool)
    assert found.stats() == stagehand_alloc.PoolStats()
    assert found.limits() == pool.limits()
    with found:
        assert (found.stats().high, found.stats().low) == (64 << 20, 32 << 20)
        assert found.stats().activations_saved == 0
