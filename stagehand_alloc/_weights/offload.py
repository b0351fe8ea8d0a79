"""`offload` and `restore`: a model's weights live on the host, and come when needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from stagehand_alloc import _driver
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._built import build as _build
from stagehand_alloc._built import storage as _storage
from stagehand_alloc._built import tensors as _tensors
from stagehand_alloc._built import trigger as _trigger
from stagehand_alloc._errors import ConfigError, OffloadError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.config import Config, DeviceLike
from stagehand_alloc._settings.host_memory import available_host_bytes
from stagehand_alloc._settings.sizes import format_bytes, shown
from stagehand_alloc._tell import warn
from stagehand_alloc._torch_side import install as _install
from stagehand_alloc._torch_side import modes as _modes
from stagehand_alloc._weights import blocks as _blocks
from stagehand_alloc._weights import share as _share
from stagehand_alloc._weights import state as _state
from stagehand_alloc._weights import steps as _steps
from stagehand_alloc._weights.groups import end_cut_short, registry
from stagehand_alloc._weights.move import goes_straight, move

if TYPE_CHECKING:
    import torch
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)

_ALIGNED = 512  # of each weight, in a group


def offload(
    model: Model,
    *,
    blocks: object = None,
    device: DeviceLike = None,
    trained: bool = False,
    share: str | None = None,
) -> Model:
    """Keep the weights of ``model``'s blocks on the host; returns ``model``.

        model = stagehand_alloc.offload(get_peft_model(model, lora))
        with stagehand_alloc.pool(high="12GiB"):
            loss = model(batch)
        loss.backward()

    Weights and saved activations share ``high``. A block's weights come before its forward and its
    backward, ahead of need where there is room, and leave for free. What is trained stays on the
    GPU without ``trained=True``, as do buffers and what a block shares with others. Losses and
    gradients are those of the model without it, bit by bit; so are those of `torch.no_grad`
    forwards.

    Outside of their block's forward and backward the weights cannot be touched: reading or writing
    them raises an error that names the parameter, in any budget. `resident` and `visit` bring them.

    Args:
        model: on the CPU or the GPU, after PEFT and quantization, before torch.compile; on the CPU
            its blocks go straight into their host copies, and are on ``device`` once they run.
            What moves in a way of its own, as quantized classes do, goes by the device, each block
            alone.
        blocks: what comes and goes as a whole. None: the entries of the model's outermost lists of
            modules of one class. Names, a regular expression for whole names, or modules.
        device: default: the GPU that the model is on, or the current CUDA device.
        trained: what is trained in the blocks leaves, too: by a copy, once it was written to. All
            that an optimizer has of it is at home at once for its step: `offload_optimizer` takes
            one chunk after the other.
        share: a name; all processes of this user on this host that offload the same weights under
            it have one host copy of them. Who comes first writes it, the others compare all of
            its bytes with their own, and give these up. Nobody writes to it afterwards: what
            `resident`, `visit` or a forward wrote is undone, with an OffloadError, and
            load_state_dict is refused. It is gone with the last process that has it.

    The host copies are pinned, and stay until the model goes or `restore`: they take as many bytes
    as the weights, and a ``host_limit`` that a pool was given counts them. Waits for the GPU.
    Called again for the same model it does nothing.

    Raises ConfigError where there are no blocks or ``share`` is no name, OffloadError for a model
    or a torch that this cannot be done with, or where the host has too little memory, and
    torch.OutOfMemoryError where the GPU has. Then the model is where and what it was.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise OffloadError(
            f"offload() was given a {type(model).__name__}, which is no torch.nn.Module.",
            "Give it the model.",
        )
    found = _blocks.find(model, blocks)
    _blocks.check_apart(found)
    offloaded = {name for name, block in found.items() if registry.of(block) is not None}
    if offloaded == set(found):
        return model
    if offloaded:
        missing = min(set(found) - offloaded)
        raise OffloadError(
            f"The block {min(offloaded)!r} is offloaded already, and {missing!r} is not.",
            "Call stagehand_alloc.restore(model) first.",
        )
    weights = _blocks.weights_of(model, found, trained)
    if not weights:
        raise OffloadError(
            f"The {len(found)} blocks of {type(model).__name__} have no "
            f"{'' if trained else 'frozen '}weights.",
            "Freeze the base model first, as PEFT does, or offload what is trained as well: "
            "offload(model, trained=True).",
        )
    _check_not_offloaded(weights)
    _check_share(share, trained)
    index = start(one_gpu(_blocks.devices_of(model), device))
    target = target_of(index)
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        warn(
            "stagehand_alloc: offload() was given a compiled model: one program reads all blocks, "
            "and their weights are away.\n"
            "Compile the blocks instead: for block in model.layers: block.compile()."
        )
    with contextlib.ExitStack() as written:
        shared = None
        if share is not None:
            layout = _layout(model, weights, target, share)
            shared = written.enter_context(_share.joined(share, layout))
        _check_host(weights, target, _stats.read(index), shared)
        _move(model, weights, index, trained, shared)
    if trained:
        _steps.watch()
    return model


def restore(model: nn.Module | torch.optim.Optimizer) -> None:
    """Bring the weights of ``model`` back for good: it is as before `offload`, on the GPU.

    Of an optimizer what it keeps: it is as before `offload_optimizer`. Where neither was done this
    does nothing.

    Frees the host copies. Raises OffloadError inside of a forward, a `resident` or a step, and
    torch.OutOfMemoryError where they do not fit; what has come back by then stays.
    """
    import torch

    end_cut_short()
    if isinstance(model, torch.optim.Optimizer):
        if (steps := registry.chunked.get(model)) is not None:
            steps.restore(model)
        return
    native.end_weights_here()
    for group in registry.within([model]):
        if not group.native.restore():
            raise OffloadError(
                f"The block {group.name!r} is in use: its weights cannot be restored.",
                "Call restore() outside of the model's forward, backward and resident().",
            )
        group.remove_hooks()
        registry.remove(group)


def _check_not_offloaded(weights: dict[str, list[_blocks.Weight]]) -> None:
    """Raise OffloadError where another model's block has one: two would have a copy of it each."""
    for weight in (one for group in weights.values() for one in group):
        if native.is_weight(weight.tensor):
            raise OffloadError(
                f"{weight.name!r} is offloaded already: it is a weight of another block, too.",
                "Restore the model that has it first, or offload one module that holds both.",
            )


def one_gpu(devices: Iterable[torch.device], asked: DeviceLike) -> DeviceLike:
    """Where a model goes that is on ``devices`` now. Raises OffloadError for several GPUs."""
    gpus = {device for device in devices if device.type == "cuda"}
    if len(gpus) > 1:
        raise OffloadError(
            f"The model is on {len(gpus)} GPUs: {', '.join(sorted(map(str, gpus)))}.",
            "Put it on one of them, or leave it on the CPU: offload() moves it. One that is made "
            'with device_map="auto" is split.',
        )
    return next(iter(gpus), None) if asked is None else asked


def start(device: DeviceLike) -> int:
    """The device, with the engine reached the way pools will. Raises OffloadError, ModeError."""
    by_trigger = () if _install.is_installed() else _trigger.needed()
    _build.beside(_storage.LIBRARY, _tensors.LIBRARY, *by_trigger)  # a pool wants the others
    _storage.load()
    if _install.is_simulated():
        return 0
    import torch

    if not _install.is_installed():
        _modes.resolve(None)
        _driver.start()
        cuda: Any = torch.cuda
        cuda.init()
    index = _stats.device_index(device)
    native.open_device(index)
    if not _install.is_installed():
        _modes.reach_torch(index, Config())
        if _modes.trigger().state != "loaded":
            raise OffloadError(
                "Weights cannot be offloaded without the trigger library: "
                f"{_modes.trigger().why or _modes.trigger().state}.",
                "Install a C++ compiler, or use stagehand_alloc.allocator() before CUDA starts.",
            )
    return index


def node_of(index: int) -> int:
    """The NUMA node that is next to the device; -1: nobody knows."""
    nodes = [] if _install.is_simulated() else _driver.numa_nodes()
    return nodes[index] if index < len(nodes) else -1


def target_of(index: int) -> torch.device:
    """Where its tensors are."""
    import torch

    return torch.device("cpu") if _install.is_simulated() else torch.device("cuda", index)


def _check_share(share: object, trained: bool) -> None:
    """Raise ConfigError for what is no name, OffloadError where all would write to the copy."""
    if share is None:
        return
    if not isinstance(share, str) or not share:
        raise ConfigError(
            f"share={shown(share)} is no name.",
            'Give all processes that have these weights the same one: share="base-7b".',
        )
    if trained:
        raise OffloadError(
            f"offload(share={shown(share)}) was asked for with trained=True: each process writes "
            "to what is trained, and a shared copy is only read.",
            "Leave one of the two out. What is trained stays on the GPU without trained=True.",
        )


def _layout(
    model: nn.Module,
    weights: dict[str, list[_blocks.Weight]],
    target: torch.device,
    share: str,
) -> list[tuple[str, int, Any]]:
    """What all processes that share must have alike: blocks, their bytes, and their weights.

    Raises OffloadError for a block that is not moved byte by byte: only then it is known.
    """
    found = []
    for name, group in weights.items():
        there = all(weight.tensor.device == target for weight in group)
        if not there and not goes_straight(model.get_submodule(name), group):
            raise OffloadError(
                f"The block {name!r} goes to the GPU in a way of its own, as quantized classes "
                f"do, so its bytes are not known yet, and cannot be shared as {shown(share)}.",
                "Put the model on the GPU first, or leave share out.",
            )
        said = [
            (
                weight.name,
                str(tensor.dtype),
                list(tensor.shape),
                list(tensor.stride()),
                tensor.storage_offset(),
                tensor.untyped_storage().nbytes(),
            )
            for weight in group
            for tensor in [weight.tensor]
        ]
        found.append((name, sum(_padded(weight) for weight in group), said))
    return found


def _padded(weight: _blocks.Weight) -> int:
    return -(-weight.tensor.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED


def _check_host(
    weights: dict[str, list[_blocks.Weight]],
    target: torch.device,
    now: _stats.PoolStats,
    share: _share.Share | None,
) -> None:
    """Raise OffloadError where the host has too little memory for the pinned copies, or the limit
    that was set for them and for saved activations.

    What is in plain host memory is there already, and goes as its copy comes, a block behind: two
    blocks more, at the worst. A file that is mapped counts as available memory, and is no such.
    A ``share`` that another process wrote takes none.
    """
    copies = all_of_them = 0
    moving = [0, 0]  # the last two blocks
    here = 0
    for group in weights.values():
        plain = 0
        for weight in group:
            storage, size = weight.tensor.untyped_storage(), _padded(weight)
            all_of_them += size
            if storage.device.type == "cpu" and storage.device != target and storage.resizable():
                plain += size
            else:
                copies += size
        moving = [moving[1], plain]
        here = max(here, sum(moving))
    taken = now.pinned_bytes + now.weights_pinned_bytes
    if now.host_limit and taken + all_of_them > now.host_limit:
        raise OffloadError(
            f"The host copies of {len(weights)} blocks are {format_bytes(all_of_them)}, and "
            f"host_limit is {format_bytes(now.host_limit)}, of which saved activations have "
            f"{format_bytes(now.pinned_bytes)} and other weights "
            f"{format_bytes(now.weights_pinned_bytes)}.",
            "Raise host_limit, offload fewer blocks (blocks=...), or give memory back first: "
            "pool.release_pinned().",
        )
    if share is not None and not share.writes:
        return  # the copy is there
    if copies + here > (there := available_host_bytes()):
        raise OffloadError(
            f"The weights of {len(weights)} blocks need {format_bytes(copies + here)} more of host "
            f"memory for good, and {format_bytes(there)} is available.",
            "Offload fewer blocks (blocks=...), quantize the model, or free host memory.",
        )


def _move(
    model: nn.Module,
    weights: dict[str, list[_blocks.Weight]],
    index: int,
    trained: bool,
    share: _share.Share | None,
) -> None:
    try:
        made = move(model, weights, index, node_of(index), target_of(index), trained, share)
    except ValueError as error:
        if "no host memory" not in str(error):
            raise
        raise OffloadError(
            f"The host refused to pin the weights of {type(model).__name__}.",
            "Raise the limit of locked memory (ulimit -l), or free host memory.",
        ) from error
    native.presume_weights(index, [group.native.id for group in made])
    for group in made:
        _state.follow(group, model)
