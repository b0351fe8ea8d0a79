"""The pack and unpack hooks, as the pool enters them; the work is done in native/entry/hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import StagehandError
from stagehand_alloc._extension import native

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stagehand_alloc._step.module_names import ModuleWatch
    from stagehand_alloc._step.proofs import Proofs


@dataclass(frozen=True)
class SavedTensorInfo:
    """A tensor autograd is about to save, as the ``keep`` predicate sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    """Of the tensor's own elements; its storage may be larger."""
    order: int
    """Place among the tensors shown in this step, from 0 at each entry of the pool."""
    op: str | None
    """The autograd node that made it, such as "AddmmBackward0"; None for what has no graph."""
    module: str | None
    """The innermost module whose forward is running, as ``root.named_modules()`` has it; ``root``
    is the outermost one called inside the pool, itself "". None outside of any."""


def make_hooks(
    device: int | None,
    keep: Callable[[SavedTensorInfo], bool] | None,
    watch: ModuleWatch,
    proofs: Proofs | None = None,
) -> Any:
    """An object with ``begin_step``, ``pack``, ``unpack`` and ``passed_through`` for one device."""
    add = None if proofs is None else proofs.add
    return native.Hooks(device or 0, _raise_modified, _keep_caller(keep, watch), add)


def keep(tensor: Tensor) -> None:
    """Leave the tensor's storage on the GPU: nothing saved over it is tagged from now on."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise StagehandError(
            f"keep() was given a {kind}, which is not one tensor with a storage of its own.",
            "Call keep(tensor) with each tensor that should stay on the GPU.",
        )
    device = tensor.device.index or 0
    # Where its storage begins; a Python object of the storage would keep it on the GPU for good.
    first = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    if not native.keep(device, int(first)):
        raise StagehandError(
            "keep() was given a tensor whose memory is not of an allocator that is in use here.",
            "Give it a tensor made on the GPU, inside the pool or after the allocator was "
            "installed.",
        )


def _keep_caller(
    keep: Callable[[SavedTensorInfo], bool] | None, watch: ModuleWatch
) -> Callable[[Tensor, int], bool] | None:
    if keep is None:
        return None

    def call(tensor: Tensor, order: int) -> bool:
        node = tensor.grad_fn
        info = SavedTensorInfo(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            bytes=tensor.nbytes,
            order=order,
            op=None if node is None else node.name(),
            module=watch.current(),
        )
        return bool(keep(info))

    return call


def _raise_modified(
    tensor: Tensor | None,
    dtype: tuple[int, int, int],
    shape: list[int],
    is_cuda: bool,
    version: int,
    expected: int,
) -> None:
    """Raise the error autograd itself raises when a saved tensor was changed in place.

    ``tensor`` is None where the tensor's memory is ours; then ``dtype`` is its DLPack type (code,
    bits, lanes).
    """
    if tensor is not None:
        kind, shape = tensor.type(), [] if tensor.is_nested else list(tensor.shape)
    else:
        kind = ("torch.cuda." if is_cuda else "torch.") + _TYPE_NAMES.get(dtype[:2], "Tensor")
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind} {shape}] is at version {version}; expected version {expected} "
        "instead. Hint: enable anomaly detection to find the operation that failed to compute its "
        "gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


# torch's legacy type names by DLPack (code, bits): 0 int, 1 uint, 2 float, 4 bfloat, 5 complex,
# 6 bool.
_TYPE_NAMES = {
    (2, 64): "DoubleTensor",
    (2, 32): "FloatTensor",
    (2, 16): "HalfTensor",
    (4, 16): "BFloat16Tensor",
    (0, 64): "LongTensor",
    (0, 32): "IntTensor",
    (0, 16): "ShortTensor",
    (0, 8): "CharTensor",
    (1, 8): "ByteTensor",
    (5, 64): "ComplexFloatTensor",
    (5, 128): "ComplexDoubleTensor",
    (6, 8): "BoolTensor",
}
