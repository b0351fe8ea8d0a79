"""Blocks go to the host one by one, and all that has moved comes back where one of them cannot."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import OffloadError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.host_memory import available_host_bytes
from stagehand_alloc._settings.sizes import shown
from stagehand_alloc._weights import blocks as _blocks
from stagehand_alloc._weights import state as _state
from stagehand_alloc._weights.groups import Group, registry, text_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stagehand_alloc._weights.share import Share

_BLOCKS_AHEAD = 4  # that there must be host memory for, beside what is taken, to copy one ahead

Places = dict["nn.Module", dict[str, "torch.device"]]  # of a module's own tensors, by name


def move(
    model: nn.Module,
    weights: dict[str, list[_blocks.Weight]],
    index: int,
    node: int,
    target: torch.device,
    trained: bool,
    share: Share | None = None,
) -> list[Group]:
    """Make a group of each block. All or nothing: on failure all is where and what it was.

    ``target``: where the model is from here on, GPU ``index``. ``node``: of the host's memory.
    ``share``: where the host copies are, of blocks that need no way of their own to get there. Of
    ``weights`` nothing is left: a tensor in there would keep memory that its block gives up.
    """
    places = {module: {name: t.device for name, t in _own(module)} for module in model.modules()}
    made: list[tuple[Group, bool]] = []  # and whether its weights were on the GPU before
    try:
        # Both are over before anything is undone: that takes host memory.
        with contextlib.closing(_Left()) as left, contextlib.closing(_Ahead(node)) as ahead:
            for name in list(weights):
                before = weights.pop(name)
                block = model.get_submodule(name)
                place = _Place(index, node, target, name, share)
                was_there = all(weight.tensor.device == target for weight in before)
                if not was_there and goes_straight(block, before):
                    ready = ahead.take(before)
                    if weights and share is None:
                        following = next(iter(weights))
                        if goes_straight(model.get_submodule(following), weights[following]):
                            ahead.start(weights[following])
                    group, sources = _straight(block, before, place, places, ready)
                    made.append((group, False))
                    left.give_up(sources)
                    del group, sources
                else:
                    now = _by_the_gpu(model, name, block, before, target, trained)
                    make = functools.partial(place.group, [weight.tensor for weight in now], now)
                    made.append((Group(index, name, block, now, make, share), was_there))
                    del now, make
                del before
                registry.add(index, made[-1][0])
        for module in model.modules():  # what is in no block, and so stays, goes too
            if registry.of(module) is None and _elsewhere(module, target):
                _apply(module, lambda tensor: tensor.to(target))
    except BaseException:
        _undo(model, made, places)
        raise
    return [group for group, _ in made]


@dataclass
class _Place:
    """Where a block goes."""

    index: int
    node: int
    target: torch.device
    name: str
    share: Share | None

    def group(
        self,
        tensors: list[Tensor],
        weights: list[_blocks.Weight],
        sources: Sequence[tuple[int, int]] = (),
        ready: Any = None,
    ) -> Any:
        """Native's group of the tensors, whose weights these are. Raises ValueError, OffloadError.

        ``sources``: where the bytes are on the host; without any they are in the tensors.
        ``ready``: a copy of them to take.
        """
        try:
            return native.WeightGroup(
                self.index,
                tensors,
                [text_of(weight.name) for weight in weights],
                self.node,
                sum(weight.trained for weight in weights),
                list(sources),
                (-1, 0, False) if self.share is None else self.share.where(self.name),
                ready,
            )
        except ValueError as error:
            if self.share is None or "other bytes" not in str(error):
                raise
            raise OffloadError(
                f"The shared copy {shown(self.share.name)} has other weights in the block "
                f"{self.name!r} than this process.",
                "Load the same ones in all processes, or give these a name of their own: "
                'offload(model, share="another name").',
            ) from error


class _Left:
    """Memory that a block left goes back on a thread of its own, while the next block is copied:
    page by page it takes the kernel about as long as the copy. No more than one block's at a time.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "stagehand_alloc memory")
        self._last: Future[None] | None = None

    def give_up(self, sources: list[Any]) -> None:
        """Nobody else refers to the storages, or they stay; the list is empty soon."""
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(sources.clear)

    def close(self) -> None:
        self._thread.shutdown()


class _Ahead:
    """The next block's bytes are copied on a thread of its own while a block's copy is pinned: both
    take the host about as long.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._thread = ThreadPoolExecutor(1, "stagehand_alloc copies")
        self._next: tuple[list[tuple[int, int]], Future[Any]] | None = None

    def start(self, weights: list[_blocks.Weight]) -> None:
        """Of these weights, which stay where they are until `take`. Not where memory is short."""
        at = _places(weights)
        if available_host_bytes() > _BLOCKS_AHEAD * sum(size for _, size in at):
            storages = [weight.tensor.untyped_storage() for weight in weights]
            self._next = (at, self._thread.submit(self._copy, storages, at))

    def _copy(self, storages: list[torch.UntypedStorage], at: list[tuple[int, int]]) -> Any:
        """``storages`` are held meanwhile, whatever becomes of their tensors."""
        return native.HostCopy(at, self._node)

    def take(self, weights: list[_blocks.Weight]) -> Any:
        """The copy that was started of them, once it is made; None where none was."""
        started, self._next = self._next, None
        return None if started is None or started[0] != _places(weights) else started[1].result()

    def close(self) -> None:
        self._thread.shutdown()
        self._next = None


def _places(weights: list[_blocks.Weight]) -> list[tuple[int, int]]:
    """Where each storage's bytes are, and how many."""
    storages = [weight.tensor.untyped_storage() for weight in weights]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def _by_the_gpu(
    model: nn.Module,
    name: str,
    block: nn.Module,
    before: list[_blocks.Weight],
    target: torch.device,
    trained: bool,
) -> list[_blocks.Weight]:
    """The block on the GPU, moved in its own way: its weights there."""
    if any(_elsewhere(module, target) for module in block.modules()):
        block.to(target)  # parameters stay the same objects; what is in them does not
    names = {weight.name for weight in before}
    now = _blocks.weights_of(model, {name: block}, trained)[name]
    return [weight for weight in now if weight.name in names]


def goes_straight(block: nn.Module, weights: list[_blocks.Weight]) -> bool:
    """Whether bytes are all that moving the block takes, and they are on the CPU.

    Not where a class has a way of its own to move: bitsandbytes quantizes on the way, torchao may
    pack anew, an LSTM puts its weights side by side.
    """
    from torch import nn

    if type(block).to is not nn.Module.to:
        return False
    for module in block.modules():
        if type(module)._apply is not nn.Module._apply or {"_apply", "to"} & vars(module).keys():
            return False
    return all(
        type(parameter) is nn.Parameter and not parameter.is_conj() and not parameter.is_neg()
        for parameter in block.parameters()
    ) and all(weight.tensor.device.type == "cpu" for weight in weights)


def _straight(
    block: nn.Module, weights: list[_blocks.Weight], place: _Place, places: Places, ready: Any
) -> tuple[Group, list[torch.UntypedStorage]]:
    """From the CPU to the host copy: the storages on the GPU get no memory before they are used.

    What stays goes to the GPU. With the storages that the block had; on failure it has them again.
    ``ready``: of `_Ahead`, or None.
    """
    import torch

    sources = [weight.tensor.untyped_storage() for weight in weights]
    away = [torch.empty(0, dtype=torch.uint8, device=place.target) for _ in sources]
    storages = {}
    for source, tensor in zip(sources, away, strict=True):
        native.claim_storage(tensor, source.nbytes())
        storages[int(source._cdata)] = tensor.untyped_storage()
    over = {}  # by parameter, the same over those
    for parameter in block.parameters():
        if (storage := storages.get(_blocks.storage_of(parameter))) is not None:
            made = torch.empty(0, dtype=parameter.dtype, device=place.target)
            shape = parameter.storage_offset(), parameter.size(), parameter.stride()
            over[id(parameter)] = made.set_(storage, *shape)
    at = _places(weights)
    group = place.group(away, weights, at, ready)  # from here on they are sealed
    there = {int(storage._cdata) for storage in storages.values()}

    def go(tensor: Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) and _blocks.storage_of(tensor) in there:
            return tensor  # of two modules: it has gone
        made = over.get(id(tensor))
        return tensor.to(place.target) if made is None else made

    try:
        for module in block.modules():
            _apply(module, go)
        now = [
            _blocks.Weight(weight.name, tensor, weight.trained)
            for weight, tensor in zip(weights, away, strict=True)
        ]
        return Group(place.index, place.name, block, now, lambda: group, place.share), sources
    except BaseException:
        back = {}
        for source, tensor in zip(sources, away, strict=True):
            here = torch.empty(0, dtype=torch.uint8)
            back[_blocks.storage_of(tensor)] = here.set_(source)
        for module in block.modules():
            _put_back(module, places[module], back)
        raise


def _undo(model: nn.Module, made: list[tuple[Group, bool]], places: Places) -> None:
    while made:
        group, was_there = made.pop()
        copies: dict[int, Tensor] = {}
        if was_there:
            try:
                group.native.restore()
            except Exception:  # somebody has taken its memory: the block stays offloaded, and works
                _state.follow(group, model)
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
