"""The step of an optimizer writes to offloaded weights: at home for it, and dirty from then on."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import OffloadError, SizeError
from stagehand_alloc._settings.sizes import format_bytes
from stagehand_alloc._torch_side.optimizers import around_every_step
from stagehand_alloc._weights.groups import SAMPLING, Group, end_cut_short, outward, registry

if TYPE_CHECKING:
    import torch


def watch() -> None:
    """From here on every optimizer's step finds its weights at home."""
    registry.watched = registry.watched or around_every_step(_begin, _end)


class _Step:
    """One that runs, and what it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
        self.optimizer = optimizer
        self.thread = threading.get_ident()
        self._held: list[Group] = []
        try:
            for group in groups:
                group.native.enter(SAMPLING)
                self._held.append(group)
        except BaseException:
            self.end()
            raise
        registry.stepping.append(self)

    def runs(self) -> bool:
        """Whether it is still on its thread's stack. Not by a name: this frame has names, too."""
        import torch

        step = torch.optim.Optimizer.profile_hook_step(_Step.runs).__code__
        return any(
            frame.f_code is step and frame.f_locals.get("self") is self.optimizer
            for frame in outward(sys._current_frames().get(self.thread))
        )

    def end(self) -> None:
        """It may have written to any of them, also where it was cut short."""
        if self in registry.stepping:
            registry.stepping.remove(self)
        with contextlib.ExitStack() as all_of_them:
            for group in self._held:
                all_of_them.callback(leave_written, group)
            self._held = []


def leave_written(group: Group) -> None:
    """Leave a group that an optimizer may have written to: all trained, others by their version."""
    try:
        group.wrote()
        group.keep_changes()
    finally:
        group.native.leave()


def groups_of(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Those that the optimizer's parameters lie in, each once."""
    owners = registry.trained()
    if not owners:
        return []
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return list(dict.fromkeys(owners[id(p)] for p in parameters if id(p) in owners))


def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    end_cut_short()
    if (chunked := registry.chunked.get(optimizer)) is not None:
        if chunked.calls == 0:
            raise OffloadError(
                f"The step of this {type(optimizer).__name__} was taken before offload_optimizer() "
                "put another in its place.",
                "Call offload_optimizer(optimizer) before what wraps the optimizer, such as "
                "accelerator.prepare.",
            )
        return
    if groups := groups_of(optimizer):
        _check_fits(optimizer, groups)
        _Step(optimizer, groups)


def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    thread = threading.get_ident()
    for step in list(registry.stepping):
        if isinstance(step, _Step) and step.optimizer is optimizer and step.thread == thread:
            step.end()


def _check_fits(optimizer: torch.optim.Optimizer, groups: list[Group]) -> None:
    """Raise SizeError where the last pool's ``high`` is less than what the step holds."""
    high = min((registry.high[g.device] for g in groups if g.device in registry.high), default=None)
    wanted = sum(group.bytes for group in groups)
    if high is not None and wanted > high:
        raise SizeError(
            f"The step of {type(optimizer).__name__} needs all weights that it has at once: "
            f"{len(groups)} blocks of {format_bytes(wanted)}, and high is {format_bytes(high)}.",
            "Call stagehand_alloc.offload_optimizer(optimizer): it steps block by block.",
        )
