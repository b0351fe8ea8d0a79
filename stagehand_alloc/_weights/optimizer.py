"""`offload_optimizer`: what an optimizer keeps lives on the host, and its step runs in chunks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from stagehand_alloc._errors import OffloadError, SizeError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.host_memory import available_host_bytes
from stagehand_alloc._settings.sizes import format_bytes
from stagehand_alloc._tell import warn
from stagehand_alloc._weights import offload as _offload
from stagehand_alloc._weights.blocks import storage_of
from stagehand_alloc._weights.groups import SAMPLING, Group, end_cut_short, registry
from stagehand_alloc._weights.state import copies_of, on_host
from stagehand_alloc._weights.steps import leave_written, watch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

# Each computes a parameter from that parameter, its gradient and what is kept of it alone.
_KNOWN = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD"
_CHUNK = 64 << 20  # bytes of parameters that are in no offloaded block


def offload_optimizer(optimizer: Optimizer) -> Optimizer:
    """Keep what ``optimizer`` keeps of its parameters on the host; returns ``optimizer``.

        model = stagehand_alloc.offload(model, trained=True)
        optimizer = stagehand_alloc.offload_optimizer(torch.optim.AdamW(model.parameters()))

    Its `step` goes from one chunk of parameters to the next, a chunk being those of one offloaded
    block: their weights and what is kept of them come to the GPU, the optimizer's own step runs for
    them, and the next chunk comes meanwhile. Parameters and state are those of the optimizer
    without it, bit by bit. Parameters that are in no offloaded block are chunks as well.

    `state_dict()` has copies in plain host memory, and `load_state_dict()` loads chunk by chunk.
    `zero_grad`, schedulers, `clip_grad_norm_`, GradScaler and hooks of the optimizer are as ever;
    hooks are called once a step, and so is a closure, before the first chunk. Gradients stay on the
    GPU. A step that an exception ends has been done for the chunks before it, as torch's own has
    for some parameters.

    The host copies are pinned, and stay until the optimizer goes or `restore(optimizer)`. Where the
    host has no memory for them, what is kept stays on the GPU, with a warning.

    Raises OffloadError for optimizers that compute one parameter from others, such as LBFGS, or
    that nothing is known of. `step` raises SizeError where one chunk is more than the last pool's
    ``high``, and OffloadError where somebody calls the step that was there before. Called again for
    the same optimizer it does nothing.
    """
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OffloadError(
            f"offload_optimizer() was given a {type(optimizer).__name__}, which is no "
            "torch.optim.Optimizer.",
            "Give it the optimizer itself; one that is wrapped is often its `.optimizer`.",
        )
    if optimizer in registry.chunked:
        return optimizer
    _check_known(optimizer)
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    index = _offload.start(_offload.one_gpu(devices, None))
    if devices != {_offload.target_of(index)}:
        places = ", ".join(sorted(map(str, devices)))
        raise OffloadError(
            f"The parameters of {type(optimizer).__name__} are on {places}.",
            "Put the model on the GPU first: offload(model) does.",
        )
    steps = _Chunks(index)
    _install(optimizer, steps)
    registry.chunked[optimizer] = steps
    watch()
    steps.find(optimizer)
    for chunk in steps.chunks:
        steps.keep(optimizer, chunk)
    return optimizer


def _check_known(optimizer: torch.optim.Optimizer) -> None:
    import torch

    kind = type(optimizer)
    if kind not in {getattr(torch.optim, name, None) for name in _KNOWN.split()}:
        raise OffloadError(
            f"{kind.__name__} may compute one parameter from others, so its step cannot run in "
            "chunks.",
            f"Known are those of torch.optim: {', '.join(_KNOWN.split())}.",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OffloadError(
            f"{kind.__name__}(differentiable=True) keeps each step for backward.",
            "Make it without differentiable=True.",
        )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise OffloadError(
            f"The step of this {kind.__name__} was replaced by {getattr(own, '__module__', '?')}.",
            "Call offload_optimizer(optimizer) first.",
        )


def _install(optimizer: torch.optim.Optimizer, steps: _Chunks) -> None:
    """Put a step in chunks in the place of the optimizer's own, as schedulers do with theirs.

    It stays there for good: others may have taken it. Once chunks have ended it is the own one.
    """
    import torch

    kind: Any = type(optimizer)
    # Without the hooks around every step, which are called once for all chunks.
    own = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step
    this = weakref.ref(optimizer)  # which has it

    @functools.wraps(own)
    def in_chunks(self: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:  # each of the known ones begins so
            with torch.enable_grad():
                loss = closure()
        registry.chunked[self].step(self, own)  # held by nothing here: others keep functions
        return loss

    # Each chunk would be a program of its own. Twice: torch.compile(optimizer.step) looks into one.
    apart: Any = torch.compiler.disable
    steps.hooked = apart(torch.optim.Optimizer.profile_hook_step(in_chunks))

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        self: Any = this()
        self._opt_called = True  # what schedulers want to know
        now = registry.chunked.get(self)
        return kind.step(self, *args, **kwargs) if now is None else now.call(self, *args, **kwargs)

    made = apart(step)
    made._wrapped_by_lr_sched = True  # so they leave it as it is
    vars(optimizer)["step"] = made
    steps.handles = [
        optimizer.register_state_dict_post_hook(steps.saved, prepend=True),
        optimizer.register_load_state_dict_pre_hook(steps.begin_load),
        optimizer.register_load_state_dict_post_hook(steps.end_load, prepend=True),
    ]


@dataclass
class _Kept:
    """State that comes and goes together."""

    native: Any
    storages: list[int]


@dataclass
class _Chunk:
    parameters: list[nn.Parameter]
    kept: list[_Kept] = field(default_factory=list)


class _Chunks:
    """The chunks of one optimizer, which it does not keep."""

    def __init__(self, index: int) -> None:
        self.chunks: list[_Chunk] = []
        self.handles: list[Any] = []  # of hooks
        self.hooked: Any = None  # the step in chunks, with the hooks around every step
        self.calls = 0  # of it, that go on
        self._index = index
        self._node = _offload.node_of(index)
        self._known: set[int] = set()  # ids of parameters that are in a chunk
        self._host_is_full = False
        self._loading: tuple[dict[Any, Any], list[Any]] | None = None
        self._half_loaded = False  # what the optimizer kept is gone, and not all of the other there

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Make chunks of the parameters that are in none yet: a block's, or so many bytes."""
        new = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in self._known
        ]
        if not new:
            return
        owners = registry.trained()
        of_block: dict[Group, _Chunk] = {}
        rest: list[_Chunk] = []
        size = _CHUNK
        for parameter in new:
            self._known.add(id(parameter))
            owner = owners.get(id(parameter))
            if owner is not None:
                of_block.setdefault(owner, _Chunk([])).parameters.append(parameter)
                continue
            if size + parameter.nbytes > _CHUNK:
                rest.append(_Chunk([]))
                size = 0
            rest[-1].parameters.append(parameter)
            size += parameter.nbytes
        self.chunks += [*of_block.values(), *rest]

    # Its end ---------------------------------------------------------------------------------

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """All that is kept comes back for good, and the step is the optimizer's own again.

        What an error leaves behind stays as it is, and steps in chunks.
        """
        self._check_loaded(optimizer)
        inside = OffloadError(
            f"{type(optimizer).__name__} is in the middle of a step: what it keeps cannot be "
            "restored.",
            "Call restore() outside of its step.",
        )
        if self.calls > 0:  # also in a closure or a hook, where nothing is at home
            raise inside
        for chunk in self.chunks:
            while chunk.kept:
                if not chunk.kept[-1].native.restore():
                    raise inside
                chunk.kept.pop()
        for handle in self.handles:
            handle.remove()
        del registry.chunked[optimizer]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A step in chunks."""
        self.calls += 1
        try:
            return self.hooked(*args, **kwargs)
        finally:
            self.calls -= 1

    # Steps -------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, own: Callable[[Any], Any]) -> None:
        """The optimizer's own step, for one chunk after the other."""
        end_cut_short()
        self._check_loaded(optimizer)
        self.find(optimizer)
        owners = registry.trained()
        chunks = [c for c in self.chunks if any(p.grad is not None for p in c.parameters)]
        for chunk in chunks:
            self._check_fits(optimizer, chunk, _owners(chunk, owners))
        # Without a gradient a parameter has no step: all but the chunk's have none meanwhile.
        gradients = [(p, p.grad) for chunk in self.chunks for p in chunk.parameters]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            of = {id(parameter): gradient for parameter, gradient in gradients}
            for chunk in chunks:
                with contextlib.ExitStack() as held:
                    for group in _owners(chunk, owners):
                        group.native.enter(SAMPLING)
                        held.callback(leave_written, group)
                    for kept in chunk.kept:
                        kept.native.enter(SAMPLING)
                        held.callback(_leave, kept)
                    try:
                        for parameter in chunk.parameters:
                            parameter.grad = of[id(parameter)]
                        own(optimizer)
                    finally:
                        for parameter in chunk.parameters:
                            parameter.grad = None
                self.keep(optimizer, chunk)
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _check_fits(
        self, optimizer: torch.optim.Optimizer, chunk: _Chunk, groups: list[Group]
    ) -> None:
        """Raise SizeError where the chunk is more than the last pool's ``high``."""
        high = registry.high.get(self._index)
        wanted = sum(group.bytes for group in groups) + sum(k.native.bytes for k in chunk.kept)
        if high is not None and wanted > high:
            raise SizeError(
                f"A chunk of {type(optimizer).__name__}'s step is {format_bytes(wanted)} of "
                f"weights and state, needed at once, and high is {format_bytes(high)}.",
                "Raise high, or offload smaller blocks: offload(model, blocks=...).",
            )

    def keep(self, optimizer: torch.optim.Optimizer, chunk: _Chunk) -> None:
        """What the optimizer has made for the chunk's parameters, and keeps, goes to the host."""
        there = dict(self._state_of(optimizer, chunk))
        chunk.kept = [kept for kept in chunk.kept if not there.keys().isdisjoint(kept.storages)]
        known = {storage for kept in chunk.kept for storage in kept.storages}
        new = {storage: one for storage, one in there.items() if storage not in known}
        if not new or self._host_is_full:
            return
        texts = [_text(key) for key, _ in new.values()]
        tensors = [tensor for _, tensor in new.values()]
        wanted = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        try:
            if wanted > available_host_bytes():
                raise ValueError("no host memory")
            group = native.WeightGroup(self._index, tensors, texts, self._node, len(tensors))
        except ValueError as error:
            if "no host memory" not in str(error):
                raise
            self._host_is_full = True
            warn(
                f"stagehand_alloc: the host has no {format_bytes(wanted)} to pin for what "
                f"{type(optimizer).__name__} keeps of a chunk: this one and the next stay on the "
                "GPU.\nRaise host_limit or the limit of locked memory (ulimit -l), or free host "
                "memory."
            )
            return
        chunk.kept.append(_Kept(group, list(new)))

    def _state_of(
        self, optimizer: torch.optim.Optimizer, chunk: _Chunk
    ) -> Iterator[tuple[int, tuple[str, Tensor]]]:
        """By storage what is kept of the chunk's parameters, but for numbers, which are small."""
        import torch

        used = {
            storage_of(tensor)
            for parameter in chunk.parameters
            for tensor in (parameter, parameter.grad)
            if tensor is not None and tensor.layout == torch.strided
        }
        for parameter in chunk.parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if (
                    type(value) is torch.Tensor
                    and value.dim() > 0
                    and value.numel() > 0
                    and value.device == parameter.device
                    and value.layout == torch.strided
                    and (storage := storage_of(value)) not in used
                ):
                    yield storage, (str(key), value)

    # Saving and loading --------------------------------------------------------------------------

    def saved(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """All of this moment: of what is away copies on the host, and of the rest where it is."""
        self._check_loaded(optimizer)
        here: dict[int, Tensor] = {}
        for kept in (one for chunk in self.chunks for one in chunk.kept):
            kept.native.to_host()
            here.update(copies_of(kept.native, kept.storages))
        state = {
            number: {key: _copy(value, here) for key, value in one.items()}
            if isinstance(one, dict)
            else one
            for number, one in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def begin_load(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """torch loads all but the state, which is loaded chunk by chunk."""
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        self._loading = (state_dict["state"], ids)
        return {**state_dict, "state": {}}

    def end_load(self, optimizer: Any) -> None:
        """As Optimizer.load_state_dict does it, for one chunk after the other."""
        if self._loading is None:
            return
        (state, ids), self._loading = self._loading, None
        self._half_loaded = True
        self.find(optimizer)
        groups = optimizer.param_groups
        saved = iter(ids)
        numbered = [
            {**g, "params": list(itertools.islice(saved, len(g["params"])))} for g in groups
        ]
        parameters = [p for group in groups for p in group["params"]]
        number_of = {id(p): number for p, number in zip(parameters, ids, strict=True)}
        for number, value in state.items():
            if number not in number_of.values():
                optimizer.state[number] = value
        for chunk in self.chunks:
            chunk.kept = []
            for parameter in chunk.parameters:
                number = number_of.get(id(parameter))
                if number in state:
                    optimizer.state[parameter] = {
                        key: _loaded(optimizer, parameter, value, number, numbered, key)
                        for key, value in state[number].items()
                    }
            optimizer.__setstate__({})  # what it does for older checkpoints
            self.keep(optimizer, chunk)
        self._half_loaded = False

    def _check_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise OffloadError where what is kept is a part of what was to be loaded."""
        if self._half_loaded:
            raise OffloadError(
                f"load_state_dict() of this {type(optimizer).__name__} failed half-way: what it "
                "kept is gone, and a part of the other is there.",
                "Call load_state_dict() again.",
            )


def _loaded(
    optimizer: Any, parameter: Tensor, value: Any, number: Any, groups: list[Any], key: Any
) -> Any:
    """The value as the optimizer would load it, and nobody else's."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    made = optimizer._process_value_according_to_param_policy(parameter, value, number, groups, key)
    return made.clone() if storage_of(made) == storage_of(value) else made


def _copy(value: Any, here: dict[int, Tensor]) -> Any:
    import torch

    return on_host(value, here).clone() if isinstance(value, torch.Tensor) else value


def _owners(chunk: _Chunk, owners: dict[int, Group]) -> list[Group]:
    """The blocks that the chunk's parameters lie in now: they may have been restored meanwhile."""
    found = (owners.get(id(parameter)) for parameter in chunk.parameters)
    return list(dict.fromkeys(group for group in found if group is not None))


def _leave(kept: _Kept) -> None:
    try:
        kept.native.wrote()
    finally:
        kept.native.leave()


def _text(key: str) -> str:
    return (
        f"stagehand_alloc: {key!r} of an offloaded optimizer is on the host between its steps.\n"
        "Read it from optimizer.state_dict(), and write it with optimizer.load_state_dict()."
    )
