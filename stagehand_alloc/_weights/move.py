"""Blocks go to the host one by one, and all that has moved comes back where one of them cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagehand_alloc._weights import blocks as _blocks
from stagehand_alloc._weights import state as _state
from stagehand_alloc._weights.groups import Group, registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Places = dict["nn.Module", dict[str, "torch.device"]]  # of a module's own tensors, by name


def move(
    model: nn.Module,
    weights: dict[str, list[_blocks.Weight]],
    index: int,
    node: int,
    target: torch.device,
    trained: bool,
) -> list[Group]:
    """Make a group of each block. All or nothing: on failure all is where and what it was.

    ``target``: where the model is from here on, GPU ``index``. ``node``: of the host's memory.
    """
    places = {module: {name: t.device for name, t in _own(module)} for module in model.modules()}
    made: list[tuple[Group, bool]] = []  # and whether its weights were on the GPU before
    try:
        for name, before in weights.items():
            block = model.get_submodule(name)
            if any(_elsewhere(module, target) for module in block.modules()):
                block.to(target)  # parameters stay the same objects; what is in them does not
            now = _blocks.weights_of(model, {name: block}, trained)[name]
            names = {weight.name for weight in before}
            was_there = all(weight.tensor.device == target for weight in before)
            now = [weight for weight in now if weight.name in names]
            made.append((Group(index, name, block, now, node), was_there))
            registry.add(index, made[-1][0])
        for module in model.modules():  # what is in no block, and so stays, goes too
            if registry.of(module) is None and _elsewhere(module, target):
                _apply(module, lambda tensor: tensor.to(target))
    except BaseException:
        _undo(model, made, places)
        raise
    return [group for group, _ in made]


def _undo(model: nn.Module, made: list[tuple[Group, bool]], places: Places) -> None:
    while made:
        group, was_there = made.pop()
        copies: dict[int, Tensor] = {}
        if was_there:
            try:
                group.native.restore()
            except Exception:  # somebody has taken its memory: the block stays offloaded, and works
                _state.follow(group)
                continue
        else:  # not by way of the GPU, which may be what is full
            copies = {key: raw.clone() for key, raw in _state.host_copies(group).items()}
        group.remove_hooks()
        registry.remove(group)
        block = group.block()
        del group  # and with it the pinned copy: one block at a time is on the host twice
        for module in [] if block is None else block.modules():
            _put_back(module, places[module], copies)
    for module in model.modules():
        if registry.of(module) is None:
            _put_back(module, places[module], {})


def _put_back(
    module: nn.Module, places: dict[str, torch.device], copies: dict[int, Tensor]
) -> None:
    """Where the module's tensors were, with the bytes of those that are among ``copies``."""
    there: dict[int, torch.device] = {}
    for name, tensor in _own(module):
        there[id(tensor)] = there[id(tensor.grad)] = places[name]

    def is_away(tensor: Tensor) -> bool:
        return any(_blocks.storage_of(part) in copies for part in _blocks.parts_of(tensor))

    def back(tensor: Tensor) -> Any:
        here = _state.on_host(tensor, copies) if is_away(tensor) else tensor
        return here.to(there[id(tensor)])

    if any(is_away(tensor) or tensor.device != there[id(tensor)] for _, tensor in _own(module)):
        _apply(module, back)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in own if tensor is not None]


def _elsewhere(module: nn.Module, target: torch.device) -> bool:
    return any(tensor.device != target for _, tensor in _own(module))


def _apply(module: nn.Module, change: Any) -> None:
    apply: Any = module._apply
    apply(change, recurse=False)
