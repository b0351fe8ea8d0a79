"""`resident` and `visit`: offloaded weights for code outside of their block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stagehand_alloc._errors import OffloadError
from stagehand_alloc._extension import native
from stagehand_alloc._weights.groups import SAMPLING, Group, end_cut_short, registry

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextlib.contextmanager
def resident(*what: nn.Module | Tensor) -> Iterator[None]:
    """Have offloaded weights at home for a ``with``, to be read and written.

        with stagehand_alloc.resident(model.layers[3]):
            model.layers[3].merge_adapter()

    Args:
        what: modules, and parameters of offloaded blocks; those that are not offloaded are there
            anyway. All of their blocks are on the GPU at once.

    On the current stream of this thread. What was written is on the host too once the ``with`` has
    ended, which waits for the GPU. Raises torch.OutOfMemoryError where they do not fit.
    """
    end_cut_short()
    with contextlib.ExitStack() as held:  # whatever one raises, all of them leave
        for group in _groups(what):
            group.native.enter(SAMPLING)
            held.callback(_leave, group)
        yield


def visit(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters with their names, each at home while it is yielded: in any budget.

        for name, parameter in stagehand_alloc.visit(model):
            shadow[name].lerp_(parameter.float().cpu(), 0.01)

    What is written to them stays. One block is on the GPU at a time; as with `resident`, the GPU is
    waited for after each.
    """
    with contextlib.ExitStack() as stack:
        inside: Group | None = None
        owners = {
            id(parameter): registry.of(module)
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        for name, parameter in model.named_parameters():
            group = owners[id(parameter)]
            if group is not inside:
                stack.close()
                if group is not None:
                    block = group.block()
                    stack.enter_context(resident(*([] if block is None else [block])))
                inside = group
            yield name, parameter


def _leave(group: Group) -> None:
    try:
        group.write_back()
    finally:
        group.native.leave()


def _groups(what: tuple[nn.Module | Tensor, ...]) -> list[Group]:
    import torch

    modules = [one for one in what if isinstance(one, torch.nn.Module)]
    found = dict.fromkeys(registry.within(modules))
    for one in what:
        if isinstance(one, torch.nn.Module):
            continue
        if not isinstance(one, torch.Tensor):
            raise OffloadError(
                f"resident() was given a {type(one).__name__}.",
                "Give it modules, or parameters of offloaded blocks.",
            )
        if native.is_weight(one):
            found.update(dict.fromkeys(registry.of_tensor(one)))
    return list(found)
