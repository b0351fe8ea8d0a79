"""torchtune's activation offloading with a budget: its names and arguments, one import to change.

from stagehand_alloc.integrations.torchtune import get_act_offloading_ctx_manager
self.activations_handling_ctx = get_act_offloading_ctx_manager(model, True, high="20GiB")
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stagehand_alloc.integrations._offloading import OffloadActivations as OffloadActivations

if TYPE_CHECKING:
    from torch import nn

__all__ = ["OffloadActivations", "get_act_offloading_ctx_manager"]


def get_act_offloading_ctx_manager(
    model: nn.Module, enable_activation_offloading: bool, **arguments: Any
) -> OffloadActivations | AbstractContextManager[None]:
    """An `OffloadActivations` of ``arguments``; where not enabled a context that does nothing."""
    if not enable_activation_offloading:
        return contextlib.nullcontext()
    return OffloadActivations(**arguments)
