"""TRL's activation offloading with a budget: its names and arguments.

from stagehand_alloc.integrations.trl import OffloadActivations
trainer = DPOTrainer(...)  # activation_offloading is off
trainer.maybe_activation_offload_context = OffloadActivations(high="20GiB")

The pool is around forward, loss and backward. SFTTrainer's loss is computed in the model's forward:
the callback of `stagehand_alloc.integrations.transformers` serves it as well, and logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagehand_alloc.integrations._offloading import OffloadActivations as OffloadActivations

if TYPE_CHECKING:
    from torch import nn

__all__ = ["OffloadActivations", "get_act_offloading_ctx_manager"]


def get_act_offloading_ctx_manager(
    model: nn.Module, *, warn_if_no_head: bool = True, **arguments: Any
) -> OffloadActivations:
    """An `OffloadActivations` of ``arguments``. It needs to know no head of the model."""
    return OffloadActivations(**arguments)
