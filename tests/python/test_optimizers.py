"""What the hooks around optimizers' first steps do to the steps. The rest is in tests/gpu."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from stagehand_alloc._torch_side.optimizers import FirstSteps


@pytest.fixture(scope="module", autouse=True)
def first_steps() -> FirstSteps:
    steps = FirstSteps()
    steps.watch()
    steps.await_on(0)
    return steps


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(4))
    made.grad = torch.ones(4)
    return made


def test_a_forked_childs_optimizer_steps() -> None:
    optimizer = torch.optim.Adam([parameter()])
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_optimizers_that_compare_by_value_and_have_no_hash_step() -> None:
    class Equal(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    for _ in range(2):
        stepped = parameter()
        Equal([stepped], lr=0.5).step()
        assert stepped.tolist() == [0.5] * 4


def test_a_closure_is_called_as_often_as_without_hooks(first_steps: FirstSteps) -> None:
    calls: list[Any] = []

    def closure() -> float:
        calls.append(None)
        return 3.0

    assert torch.optim.SGD([parameter()], lr=0.5).step(closure) == 3.0
    assert torch.optim.SGD([parameter()], lr=0.5).step(closure=closure) == 3.0
    assert len(calls) == 2


def test_an_optimizer_that_is_gone_is_awaited_again(first_steps: FirstSteps) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.5)
    optimizer.step()
    assert len(first_steps) == 1
    del optimizer
    assert len(first_steps) == 0


def test_what_a_first_steps_closure_is_given_back_is_its_own(first_steps: FirstSteps) -> None:
    optimizer = torch.optim.LBFGS([parameter()], max_iter=2)
    seen: list[int] = []

    def closure() -> torch.Tensor:
        seen.append(len(first_steps))
        return torch.ones((), requires_grad=True)

    optimizer.step(closure)
    optimizer.step(closure)
    assert seen[0] == 0  # the first step has not ended
    assert seen[-1] == 1
