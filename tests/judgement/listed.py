"""The questions: every differentiable operator and every module that torch's own tests list."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from judge import Question, seed_everything
from torch import Tensor

# Operators whose outputs plain torch itself does not repeat, and why. Their gradients it does.
NOT_REPEATABLE = {
    "linalg.lstsq": "the default driver, LAPACK's gelsy, is given a list of pivots that was never "
    "written and is read: test_the_operators_that_are_not_repeatable",
}


@functools.cache
def operators() -> list[Any]:
    """torch's list. Takes seconds to import, so not before a test asks."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

    # Each list of samples searches the stack for a unittest.TestCase. There is none, and the search
    # is most of the time: it is not made.
    common_utils.extract_test_fn = lambda: None
    gc.collect()
    gc.freeze()  # hundreds of thousands of objects, which no later collection need walk
    return [op for op in op_db if op.supports_autograd]


@functools.cache
def modules() -> list[Any]:
    """torch's list of modules."""
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def full_name(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def operator_questions(op: Any, dtype: torch.dtype, most: int) -> Iterator[Question]:
    """An operator's first `most` samples, each in its in-place form too where it has one."""
    if dtype not in op.supported_backward_dtypes("cpu"):
        return
    seed_everything()
    samples = op.sample_inputs("cpu", dtype, requires_grad=True)
    for at, sample in enumerate(itertools.islice(samples, most)):
        tree = (sample.input, list(sample.args), dict(sample.kwargs))
        yield Question(
            name=f"{full_name(op)}[{at}] {dtype}",
            arguments=tree,
            prepare=functools.partial(_call_of, op.op, sample.output_process_fn_grad),
            twice_differentiable=op.supports_gradgrad,
            repeatable=op.name not in NOT_REPEATABLE,
        )
        inplace = op.get_inplace()
        if inplace is not None and op.supports_inplace_autograd and not sample.broadcasts_input:
            yield Question(
                name=f"{full_name(op)}[{at}] in place {dtype}",
                arguments=tree,
                prepare=functools.partial(_call_of, inplace, sample.output_process_fn_grad),
                twice_differentiable=op.supports_gradgrad,
            )


def _call_of(op: Any, process: Any) -> tuple[Any, Sequence[Tensor]]:
    return lambda tree: process(op(tree[0], *tree[1], **tree[2])), ()


def module_questions(info: Any, dtype: torch.dtype, most: int) -> Iterator[Question]:
    """A module's first `most` inputs, each in training and in evaluation where that differs."""
    if dtype not in info.dtypes:
        return
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed_everything()
        inputs: Iterable[Any] = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for at, one in enumerate(itertools.islice(inputs, most)):
            if one.forward_input is None:
                continue
            yield Question(
                name=f"{info.name}[{at}] {'train' if training else 'eval'} {dtype}",
                arguments=(list(one.forward_input.args), dict(one.forward_input.kwargs)),
                prepare=functools.partial(
                    _module_of, info.module_cls, one.constructor_input, dtype, training
                ),
                twice_differentiable=info.supports_gradgrad,
            )


def _module_of(
    kind: Any, made_with: Any, dtype: torch.dtype, training: bool
) -> tuple[Any, Sequence[Tensor]]:
    module = kind(*made_with.args, **made_with.kwargs).to(dtype).train(training)

    def call(tree: Any) -> Any:
        return module(*tree[0], **tree[1]), list(module.buffers())

    return call, [one for one in module.parameters() if one.requires_grad]
