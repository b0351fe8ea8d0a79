"""FSDP2: gradients in the memory of the stream that computes.

from stagehand_alloc.integrations.fsdp2 import gradients_on_one_stream
gradients_on_one_stream(model)  # after fully_shard

`fully_shard` reduces gradients on a stream of its own, and they stay there until the optimizer is
done. torch's caching allocator keeps memory for each stream: what gradients take lies idle in
forward. Here each is copied, once it is reduced, to memory of the stream that computes, which
forward uses again. With or without a budget; in the process allocator, which lends memory between
streams, there is nothing to gain, and nothing is done. Where gradients accumulate, and a pool moves
what is saved, they get segments of their own from the optimizer's second step on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stagehand_alloc._errors import ConfigError
from stagehand_alloc._torch_side import install as _install

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["OneStream", "gradients_on_one_stream"]


def gradients_on_one_stream(model: nn.Module, stream: torch.cuda.Stream | None = None) -> OneStream:
    """Keep the sharded gradients of ``model`` in memory of ``stream``.

    ``stream``: the one that forward and the optimizer run on; default: the current one. To be
    called when the parameters are what is trained: after `fully_shard`, and after a model that was
    on "meta" has its memory. Values are the same, bit by bit. Costs the reducing stream a copy of
    each gradient, and the host some calls for each (backward's thread; it waits for nothing).

    Raises ConfigError where no parameter is sharded.
    """
    return OneStream(model, stream)


class OneStream:
    """What `gradients_on_one_stream` returns; `remove` ends it."""

    def __init__(self, model: nn.Module, stream: torch.cuda.Stream | None = None) -> None:
        from torch.distributed.tensor import DTensor

        trained = [p for p in model.parameters() if p.requires_grad]
        sharded: list[Any] = [p for p in trained if isinstance(p, DTensor)]
        if not sharded:
            raise ConfigError(
                "The model has no sharded parameter that is trained.",
                "Call fully_shard on its blocks and on the model first.",
            )
        # Where its gradient was put last, by parameter. An address may be another's since.
        self._placed: dict[int, StorageWeakRef] = {}
        self._handles: list[Any] = []
        self._device: torch.device = sharded[0].device
        if self._device.type == "cuda" and not _install.is_installed():
            self._stream = stream or torch.cuda.current_stream(self._device)
            self._handles = [p.register_post_accumulate_grad_hook(self._place) for p in sharded]

    def remove(self) -> None:
        """Gradients stay with the stream that reduces them from here on."""
        while self._handles:
            self._handles.pop().remove()

    # FSDP2 calls it on the stream that reduced the gradient: all of it is queued there.
    @torch.no_grad()
    def _place(self, parameter: Tensor) -> None:
        from torch.distributed.tensor import DTensor

        grad = parameter.grad
        if not isinstance(grad, DTensor) or grad.device != self._device:
            return  # on the host, where FSDP2 offloads it to
        local = grad.to_local()
        here = torch.cuda.current_stream(local.device)
        last = self._placed.get(id(parameter))
        accumulated = last is not None and last == _storage_of(local)
        if accumulated or here == self._stream or torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.stream(self._stream):
            mine = torch.empty_strided(
                local.size(), local.stride(), dtype=local.dtype, device=local.device
            )
        here.wait_stream(self._stream)  # for what it did in that memory before
        ours = DTensor.from_local(
            mine,
            grad.device_mesh,
            grad.placements,
            run_check=False,
            shape=grad.size(),
            stride=grad.stride(),
        )
        # Not record_stream: torch would hand the memory out again only once the GPU is there, and
        # forward begins long before that. Before the copy: should that fail, it is waited for too.
        weakref.finalize(ours.to_local(), _dropped, self._stream, here).atexit = False
        _copy(local, mine)
        local.record_stream(here)  # it may be of another one: of that before an all-reduce
        self._placed[id(parameter)] = _storage_of(mine)
        parameter.grad = ours


def _dropped(compute: torch.cuda.Stream, reducing: torch.cuda.Stream) -> None:
    """A gradient goes, whoever drops it, and when: ``compute`` gets its memory after ``reducing``.

    As FSDP2 has it at the end of a backward; not where one fails, or where a hook drops it before.
    """
    if not torch.cuda.is_current_stream_capturing():
        compute.wait_stream(reducing)


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    """While one has this, no other storage is equal to it, also once it is gone."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _copy(source: Tensor, target: Tensor) -> None:
    """By a kernel, as `copy_` does not: the copy engines have activations to move."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(source.itemsize)
    if bits is not None:  # the kernel computes with floats of 32 bits: a NaN would lose its own
        source, target = source.view(bits), target.view(bits)
    torch._foreach_copy_([target], [source])
