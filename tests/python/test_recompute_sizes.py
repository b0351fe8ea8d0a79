"""What is elementwise, made again in steps of other sizes: bit by bit what plain torch trains with.

Each test has a process of its own: once something came back otherwise than when it was proven,
nothing is dropped in such steps any more, as long as the process lives.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_recompute import counted, recomputing, told
from training import Around, digest, leaves_nothing

import stagehand_alloc
from stagehand_alloc import StagehandWarning, _native

pytestmark = pytest.mark.usefixtures("gpu")

ALONE = "STAGEHAND_TESTS_ALONE"  # set there


def in_a_process_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if ALONE in os.environ:
            test(**fixtures)
            return
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"{__file__}::{test.__name__}"],
            env={**os.environ, ALONE: "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def sized_steps(
    around: Around, count: int, meddles: Callable[[int], bool] = lambda _: False
) -> list[tuple[dict[int, str], int]]:
    """The gradients of each step, whose inputs have other sizes each time, and what was dropped.

    In steps that meddle, some kernel changes what each gelu made, and no version tells of it.
    """
    torch.manual_seed(6)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(8)]
    found = []
    for step in range(count):
        rows = 9216 + 128 * (step * 7 % 11)
        y = torch.randn(rows, 64, generator=torch.Generator().manual_seed(step))
        before = stagehand_alloc.stats()
        for weight in weights:
            weight.grad = None
        with around:
            for weight in weights:
                made = F.gelu(y @ weight)
                if meddles(step):
                    made.data.clamp_(max=0.5)
                y = y + made @ weight
            loss = y.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            at: digest(weight.grad) for at, weight in enumerate(weights) if weight.grad is not None
        }
        found.append((gradients, counted(before).drops))
    return found


def in_a_share(count: int, meddles: Callable[[int], bool]) -> list[tuple[dict[int, str], int]]:
    _native.empty_cache()
    return sized_steps(recomputing(high="44MiB", low="41MiB"), count, meddles)


@in_a_process_of_its_own
def test_what_is_elementwise_is_dropped_in_steps_of_sizes_not_seen_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = sized_steps(contextlib.nullcontext(), 14)
    proofs = told(monkeypatch)
    with leaves_nothing():
        actual = in_a_share(14, lambda _: False)
    assert [one for one, _ in actual] == [one for one, _ in expected]
    assert proofs
    assert all(proofs)
    assert actual[0][1] == 0
    assert min(drops for _, drops in actual[-4:]) > 0


@in_a_process_of_its_own
def test_what_does_not_come_back_is_moved_whatever_the_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write behind autograd's back, in each layer and step."""
    expected = sized_steps(contextlib.nullcontext(), 11, lambda _: True)
    proofs = told(monkeypatch)
    with warnings.catch_warnings(), leaves_nothing():
        warnings.simplefilter("ignore", StagehandWarning)  # of what did not come back
        actual = in_a_share(11, lambda _: True)
    assert [one for one, _ in actual] == [one for one, _ in expected]
    assert proofs
    assert not any(proofs)
    assert not any(drops for _, drops in actual)


@in_a_process_of_its_own
def test_what_is_dropped_is_compared_and_nothing_is_dropped_once_it_differed() -> None:
    """In steps of other sizes: whoever writes behind autograd's back may do so at some sizes."""
    begins, ends = 14, 26

    def meddles(step: int) -> bool:
        return step >= begins and step % 4 == 0

    expected = sized_steps(contextlib.nullcontext(), ends, meddles)
    with pytest.warns(RuntimeWarning, match="no longer comes back bit by bit"):
        actual = in_a_share(ends, meddles)
    assert actual[begins - 1][1] > 0
    assert [drops for _, drops in actual[-6:]] == [0] * 6
    assert [one for one, _ in actual[-6:]] == [one for one, _ in expected[-6:]]
