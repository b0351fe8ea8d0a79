"""`state_dict` and `load_state_dict` of offloaded blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import OffloadError
from stagehand_alloc._weights.blocks import storage_of
from stagehand_alloc._weights.groups import Group, refuse_copy

if TYPE_CHECKING:
    from torch import Tensor, nn


def follow(group: Group, model: nn.Module) -> None:
    """Let the block, of that name in ``model``, save the host copies of its weights, and load into
    them. What is refused is so before any module above the block has loaded anything."""
    block: Any = group.block()
    check = _Check(group)
    above = [one.register_load_state_dict_pre_hook(check) for one in _above(group, model)]
    for handle in above:  # the module may live on without the block
        weakref.finalize(block, handle.remove)
    group.add_handles(
        *above,
        block.register_state_dict_post_hook(_Save(group)),
        block.register_load_state_dict_pre_hook(_Load(group)),
        block.register_load_state_dict_post_hook(_Loaded(group)),
    )


def _above(group: Group, model: nn.Module) -> Iterator[Any]:
    module = model
    for name in group.name.split("."):
        yield module
        module = module.get_submodule(name)


class _Save:
    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self._group.native.open:  # somebody may have written to them, as in `resident`
            self._group.write_back()
        self._group.native.to_host()
        copies = host_copies(self._group)
        changing = {id(parameter) for parameter in self._group.trained()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                here = on_host(parameter, copies)
                # The next step's copy out would change it while somebody reads it.
                state[prefix + name] = here.clone() if id(parameter) in changing else here


def _check_load(group: Group, metadata: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise OffloadError(
            f"load_state_dict(assign=True) puts other tensors in the place of those of the "
            f"offloaded block {group.name!r}.",
            "Load without assign=True, or before stagehand_alloc.offload(model).",
        )
    if group.native.shared:
        raise group.refuse_write("load_state_dict is refused")


class _Check:
    """Of a module above the block: what pickles or copies that comes by here first."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        _check_load(self._group, metadata)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy(self._group.name)


class _Load:
    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        _check_load(self._group, metadata)
        self._group.begin_load()


class _Loaded:
    def __init__(self, group: Group) -> None:
        self._group = group

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        self._group.end_load()


def host_copies(group: Group) -> dict[int, Tensor]:
    """The bytes of each storage on the host, by the address of torch's storage object.

    They share the host copy's memory, and keep it.
    """
    return copies_of(group.native, group.storages)


def copies_of(native: Any, storages: list[int]) -> dict[int, Tensor]:
    """The same of a native group."""
    import ctypes

    import torch

    copies = {}
    for storage, (address, size) in zip(storages, native.host(), strict=True):
        memory = (ctypes.c_char * size).from_address(address)
        memory._group = native
        copies[storage] = torch.frombuffer(memory, dtype=torch.uint8)
    return copies


def on_host(tensor: Any, copies: dict[int, Tensor]) -> Any:
    """``tensor`` over its host copy, or as it is where it has none."""
    import torch

    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = {name: on_host(getattr(tensor, name), copies) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    found = copies.get(storage_of(tensor))
    if found is None:
        return tensor.detach()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(
        found.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
