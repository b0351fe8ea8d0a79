"""Every differentiable operator and module that torch's own tests list: the pool changes no bit.

`make test` asks each with its first samples in float64; STAGEHAND_JUDGEMENT=all asks all samples
and dtypes. A test is a chunk of the list, on its own, so that processes can share the work.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import judge
import listed
import pytest
import torch

WHOLE = os.environ.get("STAGEHAND_JUDGEMENT") == "all"
CHUNKS = 16 if WHOLE else 4
DTYPES = (
    (torch.float64, torch.float32, torch.complex128, torch.bfloat16) if WHOLE else (torch.float64,)
)
MODULE_DTYPES = DTYPES[:2]  # torch lists modules for real numbers only
SAMPLES = 10**6 if WHOLE else 2  # of each operator
SECOND = 6 if WHOLE else 1  # of those, the ones that are differentiated twice

pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of operators on their way out
        yield


def ask_all(chunk: int, dtype: torch.dtype, infos: list[Any], questions: Any) -> judge.Tally:
    """Ask every `CHUNKS`th of the list, from `chunk` on, and look at the books after each."""
    tally, wrong, before = judge.Tally(), [], judge.evictions()
    for info in infos[chunk::CHUNKS]:
        for at, question in enumerate(questions(info, dtype, SAMPLES)):
            tally.ask(question, second=at < SECOND, hold=at % 2 == 1)
        wrong += [f"{info.name} {dtype}: {line}" for line in judge.books_are_whole()]
    assert wrong == []
    assert tally.different == []
    assert tally.asked["gradients"] > 0
    assert judge.evictions() - before > tally.asked["gradients"]
    return tally


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_has_the_same_results_and_gradients(chunk: int, dtype: torch.dtype) -> None:
    ask_all(chunk, dtype, listed.operators(), listed.operator_questions)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("dtype", MODULE_DTYPES, ids=str)
def test_every_module_has_the_same_results_and_gradients(chunk: int, dtype: torch.dtype) -> None:
    ask_all(chunk, dtype, listed.modules(), listed.module_questions)


def test_the_operators_that_are_not_repeatable_answer_from_memory_they_never_wrote() -> None:
    """Plain torch twice, no pool: what the freed memory held before decides the last bits."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, n, dtype=torch.float64, generator=generator) for n in (3, 2))
    answers = []
    for left_behind in (0, 1):
        freed = [torch.full((128,), left_behind, dtype=torch.int32) for _ in range(200)]
        del freed
        answers.append(torch.linalg.lstsq(a, b).solution)
    assert set(listed.NOT_REPEATABLE) == {"linalg.lstsq"}
    assert not torch.equal(*answers)
    assert torch.allclose(*answers)
