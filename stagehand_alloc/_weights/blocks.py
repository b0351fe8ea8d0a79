"""Which modules are blocks, and which of their tensors leave with them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import ConfigError, OffloadError
from stagehand_alloc._settings.sizes import shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_LISTED = 6  # lists of modules that an error names, at most


@dataclass(frozen=True)
class Weight:
    """A tensor whose storage leaves: a parameter, or a part of one that has several."""

    name: str
    tensor: Tensor
    trained: bool = False


def find(model: nn.Module, asked: object) -> dict[str, nn.Module]:
    """The blocks by their names in ``model``, in order. Raises ConfigError.

    ``asked``: None for the entries of the model's outermost lists of two or more modules of one
    class; names, a regular expression for whole names, or modules of the model.
    """
    from torch import nn

    names = {id(module): name for name, module in model.named_modules()}
    if asked is None:
        found = {names[id(block)]: block for block in _listed(model)}
        if not found:
            raise ConfigError(
                f"{type(model).__name__} has no list of modules of one class, so there are no "
                f"blocks to offload{_lists(model)}.",
                'Name them: offload(model, blocks=["encoder", "decoder"]), a regular expression, '
                "or the modules.",
            )
        return found
    if isinstance(asked, str):
        return _matching(model, asked)
    if isinstance(asked, nn.Module):
        asked = _listed(asked) or [asked]
    if not isinstance(asked, Iterable):
        raise _neither(asked)
    found = {}
    for one in asked:
        if isinstance(one, str):
            found.update(_matching(model, re.escape(one)))
        elif isinstance(one, nn.Module) and id(one) in names:
            found[names[id(one)]] = one
        else:
            raise _neither(one)
    if not found:
        raise ConfigError(
            "blocks is empty, so nothing would leave.",
            "Name modules of the model, or leave blocks out.",
        )
    return found


def check_apart(blocks: dict[str, nn.Module]) -> None:
    """Raise ConfigError where one block lies inside another."""
    of = {id(block): name for name, block in blocks.items()}
    for name, block in blocks.items():
        for inner in block.modules():
            if inner is not block and id(inner) in of:
                raise ConfigError(
                    f"blocks={shown(of[id(inner)])} lies inside the block {name!r}.",
                    "Name one of the two: a block comes and goes as a whole.",
                )


def weights_of(
    model: nn.Module, blocks: dict[str, nn.Module], trained: bool
) -> dict[str, list[Weight]]:
    """What leaves with each block: parameters whose storages are in that block alone.

    Those that are trained first, or, where not even ``trained`` ones leave, only frozen ones.
    Buffers stay, and so does what the block shares with others. Raises OffloadError for parameters
    that somebody else moves already.
    """
    uses: dict[int, set[str]] = {}
    changing: set[int] = set()  # that any parameter over them is trained in
    block_of = {id(block): name for name, block in blocks.items()}
    owners: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # one may be in two blocks
        owner = block_of.get(id(module), owners.get(name.rpartition(".")[0], ""))
        owners[name] = owner
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            _check(f"{name}.{key}" if name else key, tensor)
            leaves = key in module._parameters and (trained or not tensor.requires_grad)
            for part in parts_of(tensor):
                uses.setdefault(storage_of(part), set()).add(owner if leaves else "")
                if tensor.requires_grad:
                    changing.add(storage_of(part))
    found: dict[str, list[Weight]] = {}
    taken: set[int] = set()
    for name, block in blocks.items():
        found[name] = []
        for key, parameter in block.named_parameters(prefix=name):
            for part in parts_of(parameter):
                storage = storage_of(part)
                if uses[storage] == {name} and storage not in taken and part.numel() > 0:
                    taken.add(storage)
                    found[name].append(Weight(key, part, storage in changing))
        found[name].sort(key=lambda weight: not weight.trained)
    return {name: weights for name, weights in found.items() if weights}


def devices_of(model: nn.Module) -> set[torch.device]:
    """Of its parameters and buffers."""
    return {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}


def _listed(module: nn.Module) -> list[nn.Module]:
    from torch import nn

    if isinstance(module, nn.ModuleList | nn.Sequential):
        children = list(dict.fromkeys(module.children()))
        if len(children) > 1 and len({type(child) for child in children}) == 1:
            return children
    return [block for child in module.children() for block in _listed(child)]


def _lists(model: nn.Module) -> str:
    from torch import nn

    lists = [
        f"{name} ({', '.join(sorted({type(child).__name__ for child in module.children()}))})"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name
    ]
    return f"; there are {', '.join(lists[:_LISTED])}" if lists else ""


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    try:
        found = {
            name: module
            for name, module in model.named_modules()
            if name and re.fullmatch(pattern, name)
        }
    except re.error as error:
        raise ConfigError(
            f"blocks={shown(pattern)} is no regular expression: {error}.",
            r'Write one for whole names, such as r"transformer_blocks\.\d+".',
        ) from error
    if not found:
        raise ConfigError(
            f"blocks={shown(pattern)} is the name of no module{_lists(model)}.",
            "Take names from model.named_modules().",
        )
    return found


def _neither(asked: object) -> ConfigError:
    return ConfigError(
        f"blocks={shown(asked)} is neither a name, nor a regular expression, nor a module of the "
        "model.",
        "Take names or modules from model.named_modules().",
    )


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The tensors with storages that make up a tensor: itself, or those of a torchao subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts_of(getattr(tensor, name))


def storage_of(tensor: Tensor) -> int:
    """Names the tensor's storage, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def _check(name: str, tensor: Any) -> None:
    import torch

    kind = type(tensor).__name__
    if hasattr(tensor, "ds_id") or kind in ("DTensor", "FlatParameter"):
        raise OffloadError(
            f"{name!r} is moved by FSDP or DeepSpeed ({kind}).",
            "Offload the model without it: one of the two moves the weights.",
        )
    if tensor.is_meta:
        raise OffloadError(
            f"{name!r} is on the meta device: it has no weights.", "Load the weights first."
        )
    if tensor.layout != torch.strided:
        raise OffloadError(
            f"{name!r} has the layout {tensor.layout}, which has no storage of its own.",
            "Name blocks without it: offload(model, blocks=[...]).",
        )
