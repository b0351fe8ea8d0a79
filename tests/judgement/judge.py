"""Plain torch against the pool: one call run both ways, and everything that differs between them.

The pool runs with every allocation evicting and poisoning everything retained, and the call's
arguments are copies made inside it, so that only the graph holds what it saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import stagehand_alloc
from stagehand_alloc import _native, testing

DEVICE = 0
Around = AbstractContextManager[Any]
Results = list[tuple[str, Any]]  # what a run yields, each part by its name

torch.set_num_threads(1)  # calls are small: threads would wait for each other, not compute


@dataclasses.dataclass(frozen=True)
class Question:
    """One call, which may be asked any number of times with the same answer."""

    name: str
    arguments: Any  # a tree; tensors in it are copied for every run
    prepare: Callable[[], tuple[Callable[[Any], Any], Sequence[Tensor]]]
    """Returns what takes the tree and returns a tree, and the parameters it owns."""
    twice_differentiable: bool = True
    repeatable: bool = True
    """False where plain torch's outputs do not repeat: they are then compared to a tolerance."""


# --- Bits


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes in logical order: NaN equals NaN, and 0.0 is not -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    flat = plain.contiguous().flatten()
    return flat.as_strided((flat.numel(),), (1,)).view(
        torch.uint8
    )  # a length of 1 may have stride 0


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """What must be the same beside the bits. Strides say nothing where a length is 1 or 0."""
    steps: tuple[int, ...] = ()
    if tensor.layout == torch.strided and tensor.numel():
        steps = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return tensor.dtype, tensor.layout, tuple(tensor.shape), steps, tensor.requires_grad


def _same(expected: Any, actual: Any, exactly: bool) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return type(expected) is type(actual) and bool(expected == actual)
    if _layout(expected) != _layout(actual):
        return False
    if exactly or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(bits(expected), bits(actual))
    return torch.allclose(expected, actual, rtol=1e-4, atol=1e-6, equal_nan=True)


def differences(expected: Results, actual: Results, *, repeatable: bool = True) -> list[str]:
    """The names of the parts in which two runs differ; outputs may, a little, if not `repeatable`.

    Gradients may not.
    """
    if [name for name, _ in expected] != [name for name, _ in actual]:
        return ["which results there are"]
    return [
        name
        for (name, one), (_, other) in zip(expected, actual, strict=True)
        if not _same(one, other, repeatable or not name.startswith("output"))
    ]


# --- Running a call


def seed_everything(seed: int = 20) -> None:
    """torch's, Python's and numpy's generators: sample generators use all three."""
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def differentiable(tree: Any) -> list[Tensor]:
    """The tensors of a tree through which gradients flow."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _weighed(tensors: Sequence[Tensor]) -> Tensor:
    """One real number that depends on every element, on each with another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
        value = (dense * torch.randn(dense.shape, dtype=dense.dtype)).sum()
        total = total + (value.real + value.imag if value.is_complex() else value)
    return total


@dataclasses.dataclass
class _Forward:
    loss: Tensor
    leaves: list[Tensor]
    results: Results
    held: tuple[list[Tensor], list[Tensor]] | None


def _forward(question: Question, *, shared: bool, hold: bool) -> _Forward:
    """Ask the question with copies of its arguments; only the graph holds them afterwards."""
    call, parameters = question.prepare()
    leaves: list[Tensor] = [*parameters]

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.requires_grad:
            return leaf.clone()
        leaves.append(leaf.detach().requires_grad_())
        return leaves[-1].clone()

    arguments = tree_map(copied, question.arguments)
    inputs = differentiable(arguments)
    # Made before the call, so that in backward the call's own gradients are the first to arrive
    # and the second consumer's are added to them.
    others = _weighed(inputs) if shared and inputs else torch.zeros((), dtype=torch.float64)
    outputs = call(arguments)
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    results: Results = [(f"output {at}", one.detach().clone()) for at, one in enumerate(tensors)]
    loss = _weighed(differentiable(tensors)) + others
    held = (tensors + inputs, [one.detach().clone() for one in tensors + inputs]) if hold else None
    return _Forward(loss, leaves, results, held)


def _gradients(name: str, values: Sequence[Tensor | None]) -> Results:
    return [(f"{name} {at}", value) for at, value in enumerate(values)]


def twice_through_a_retained_graph(question: Question, around: Around, hold: bool) -> Results:
    """Two backwards of one graph in which every input has a second consumer."""
    seed_everything()
    with around:
        run = _forward(question, shared=True, hold=hold)
    results, loss = run.results, run.loss
    if loss.requires_grad:
        first = torch.autograd.grad(loss, run.leaves, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, run.leaves, allow_unused=True)
        results += _gradients("gradient", first) + _gradients("gradient again", again)
    if run.held is not None:
        for at, (tensor, before) in enumerate(zip(*run.held, strict=True)):
            results.append((f"held {at} after backward", torch.equal(bits(tensor), bits(before))))
    return results


def double_backward(question: Question, around: Around) -> Results:
    """Gradients of gradients, both graphs made inside `around`."""
    seed_everything()
    with around:
        run = _forward(question, shared=False, hold=False)
        results, loss, leaves = run.results, run.loss, run.leaves
        if not loss.requires_grad:
            return results
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        results += [
            (name, None if value is None else value.detach().clone())
            for name, value in _gradients("first gradient", first)
        ]
        slope = _weighed(differentiable(first))
        del first, loss
    if slope.requires_grad:
        results += _gradients(
            "second gradient", torch.autograd.grad(slope, leaves, allow_unused=True)
        )
    return results


# --- Comparing


@contextlib.contextmanager
def evicting_everything() -> Iterator[None]:
    """Every allocation evicts everything retained, and poisons where it was."""
    _native.set_debug(evict_everything=True, poison=True)
    try:
        yield
    finally:
        _native.set_debug(evict_everything=False, poison=False)


def small_pool() -> stagehand_alloc.Pool:
    """A pool whose budget the smallest of calls fills."""
    return stagehand_alloc.pool(high="8MiB", low="4MiB")


def outcome(program: Callable[[Around], Results], around: Around) -> Results:
    """What the program returns, or which error it raises."""
    try:
        return program(around)
    except Exception as error:
        return [("error", type(error).__name__)]


@dataclasses.dataclass
class Tally:
    """What a chunk of questions came to."""

    asked: Counter[str] = dataclasses.field(default_factory=Counter)
    different: list[str] = dataclasses.field(default_factory=list)

    def ask(self, question: Question, *, second: bool, hold: bool) -> None:
        """Compare plain torch with the pool for one question; `second`: its double backward too."""

        def twice(around: Around) -> Results:
            return twice_through_a_retained_graph(question, around, hold)

        answered = self._compare(question, "gradients", twice)
        if answered and second and question.twice_differentiable:
            self._compare(question, "second", lambda around: double_backward(question, around))

    def _compare(self, question: Question, kind: str, program: Callable[[Around], Results]) -> bool:
        """Returns whether plain torch answers at all."""
        expected = outcome(program, contextlib.nullcontext())
        with evicting_everything():
            actual = outcome(program, small_pool())
        names = differences(expected, actual, repeatable=question.repeatable)
        if names:
            self.different.append(f"{question.name}, {kind}: {', '.join(names)}")
        raised = any(name == "error" for name, _ in expected)
        graded = any("gradient" in name for name, _ in expected)
        self.asked["plain raises" if raised else kind if graded else "no gradient"] += 1
        return not raised


def books_are_whole() -> list[str]:
    """Hazards, broken invariants and records left, in words; none is right."""
    stats = stagehand_alloc.stats()
    if stats.records or stats.handles or stats.aliases:
        # torch keeps the graph whose backward failed until the next backward, with any hooks; and
        # an error's traceback is a cycle.
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        with stagehand_alloc.pool():
            pass  # what backward handed on as a gradient is looked at again at a pool's entry
        stats = stagehand_alloc.stats()
    assert testing._running.found is not None
    wrong = testing._running.found.hazards()
    wrong += [broken for broken in [_native.check_invariants(DEVICE)] if broken]
    if stats.records or stats.handles or stats.aliases or stats.retained:
        wrong.append(f"left: {stats.records} records, {stats.handles} handles")
    return wrong


def evictions() -> int:
    """How many records have left so far, in this process."""
    stats = stagehand_alloc.stats()
    return stats.clean_evictions + stats.dirty_evictions + stats.drops
