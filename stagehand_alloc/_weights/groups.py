"""One offloaded block: its weight group, and the hooks by which it comes and goes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from stagehand_alloc._errors import OffloadError, SizeError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.sizes import format_bytes, shown
from stagehand_alloc._tell import warn_once
from stagehand_alloc._weights.blocks import Weight, parts_of, storage_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stagehand_alloc._weights.share import Share

FORWARD, SAMPLING, BACKWARD = range(3)  # core::UseKind

_COPIES = ("__deepcopy__", "__reduce_ex__")  # what copy.deepcopy, pickle and torch.save call


class _Thread(threading.local):
    """What is so on one thread."""

    def __init__(self) -> None:
        self.inside: list[Group] = []


_thread = _Thread()


def inside() -> list[Group]:
    """The blocks whose forward runs on this thread, the innermost last."""
    return _thread.inside


def end_forwards(outer: int) -> None:
    """End all but the ``outer`` first of them: what was cut short tells nobody."""
    _leave(inside()[outer:])


def end_cut_short() -> None:
    """End what was begun and is over: forwards of this thread, loads, and steps of optimizers.

    An exception out of `load_state_dict` tells no hook, and neither does one out of a step, or a
    KeyboardInterrupt out of a forward. Such a forward has no call on the stack; such a load, none
    on any thread's; such a step, none on its own.
    """
    if registry.loading and not _load_runs():
        with contextlib.ExitStack() as all_of_them:
            for group in list(registry.loading):
                all_of_them.callback(group.end_load)
    with contextlib.ExitStack() as all_steps:
        for step in list(registry.stepping):
            if not step.runs():
                all_steps.callback(step.end)
    if not inside():
        return
    running = set()
    # Methods alone, and never this frame: before Python 3.13 `f_locals` is a copy that the frame
    # keeps. Of this one it would be a cycle, and hold the groups that leave below.
    for frame in outward(sys._getframe(1)):
        if frame.f_code.co_varnames[:1] == ("self",):
            running.add(id(frame.f_locals.get("self")))
    over = [one for one in inside() if (block := one.block()) is None or id(block) not in running]
    _leave(over)


def _leave(groups: list[Group]) -> None:
    with contextlib.ExitStack() as innermost_first:  # all of them, whatever one raises
        for group in groups:
            innermost_first.callback(group.leave)


def _load_runs() -> bool:
    from torch import nn

    load = nn.Module.load_state_dict.__code__
    # Not by a name: among them is this frame.
    return any(f.f_code is load for one in sys._current_frames().values() for f in outward(one))


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """The calls that a frame is inside of, itself first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Group:
    """The weights of one block. They are to be had while it is entered, and only then."""

    def __init__(
        self,
        device: int,
        name: str,
        block: nn.Module,
        weights: list[Weight],
        make: Callable[[], Any],
        share: Share | None = None,
    ) -> None:
        """``make``: native's group of the weights; they may be gone from where they were once it
        is called, so nothing before it may be left to fail after it. ``share``: of the host copy.
        """
        import torch

        self.name = name
        self.device = device
        self.block = weakref.ref(block)
        self.names = [weight.name for weight in weights]
        self._parameters = [weakref.ref(p) for p in block.parameters() if not p.requires_grad]
        changing = {storage_of(weight.tensor) for weight in weights if weight.trained}
        self._trained = [
            weakref.ref(p)
            for p in block.parameters()
            if any(storage_of(part) in changing for part in parts_of(p))
        ]
        trained = self.trained()
        self._device_type = trained[0].device.type if trained else ""
        # Of them, what autocast would keep a copy of.
        self.cast_bytes = sum(p.nbytes for p in trained if p.dtype == torch.float32)
        self._told_of_autocast = False
        self._adapters = [weakref.ref(m) for m in block.modules() if hasattr(m, "merged")]
        self._written = self._writes()
        self._stepped = _versions(self._trained)
        self.storages = [storage_of(weight.tensor) for weight in weights]
        self.native = make()
        self.share = share
        self.native.before_leave = _weakly(self.after_backward)
        for how in _COPIES:  # each looks at the object first
            setattr(block, how, functools.partial(refuse_copy, name))
        enter, leave = _hooks(self)
        self._handles: list[Any] = [
            block.register_forward_pre_hook(enter, prepend=True),
            block.register_forward_hook(leave, always_call=True),
        ]

    @property
    def bytes(self) -> int:
        """Of the group, on the device and on the host."""
        return int(self.native.bytes)

    def enter(self) -> None:
        """A forward of the block begins on this thread. Raises OffloadError."""
        import torch

        self._check_frozen()
        if self.cast_bytes > 0 and torch.is_autocast_cache_enabled():
            self._tell_of_autocast()
        if self in registry.loading:
            end_cut_short()
        if torch._C._current_graph_task_id() >= 0:  # a checkpoint runs it again
            self.native.touch()
            self.native.enter(BACKWARD)
        else:
            self.native.enter(FORWARD if torch.is_grad_enabled() else SAMPLING)
        inside().append(self)

    def leave(self) -> None:
        """It has ended, if it had begun."""
        if self in (here := inside()):
            here.reverse()
            here.remove(self)
            here.reverse()
            try:
                self.keep_changes()
            finally:
                self.native.leave()

    def begin_load(self) -> None:
        """A load_state_dict writes to the weights. Raises as `enter` does."""
        self.end_load()  # one that was cut short
        self.native.enter(SAMPLING)
        registry.loading.add(self)

    def end_load(self) -> None:
        """It has ended, if it had begun; the host has what was loaded."""
        try:
            registry.loading.remove(self)
        except KeyError:  # or another thread has seen that first
            return
        try:
            self.write_back()
        finally:
            self.native.leave()

    def keep_changes(self) -> None:
        """What was written to a weight while it was at home is on the host too.

        Of what is trained: before it leaves.
        """
        if self._writes() != self._written:
            self._write_back()
        if _versions(self._trained) != self._stepped:
            self.wrote()

    def after_backward(self) -> None:
        """What ran in a backward that held it may have written to it, as `keep_changes` sees.

        What steps in hooks may do so through ``.data``, which no version shows: where a parameter
        has one, or no gradient any more, which also hooks that are gone, and those of autograd's
        nodes, leave behind. Not protected: a node's that keeps the gradient.
        """
        for p in self.trained():
            if p.grad is None or p._backward_hooks or p._post_accumulate_grad_hooks:
                self.wrote()
                break
        self.keep_changes()

    def write_back(self) -> None:
        """The same, whether a change shows or not."""
        self._write_back()
        self._stepped = _versions(self._trained)

    def _write_back(self) -> None:
        kept = self.native.write_back()
        self._written = self._writes()
        if not kept:
            raise self.refuse_write("so what was written to it is undone")

    def refuse_write(self, so: str) -> OffloadError:
        """Other processes read the same bytes."""
        name = "" if self.share is None else f" {shown(self.share.name)}"
        return OffloadError(
            f"The block {self.name!r} is a part of the shared copy{name}, which nobody writes to: "
            f"{so}.",
            "Write to the model before stagehand_alloc.offload(model, share=...), or offload it "
            "without share.",
        )

    def wrote(self) -> None:
        """An optimizer wrote to what is trained: it goes to the host before it leaves."""
        self.native.wrote()
        self._stepped = _versions(self._trained)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that leave with the block, and that an optimizer may write to."""
        return [p for one in self._trained if (p := one()) is not None]

    def add_handles(self, *handles: Any) -> None:
        """Of further hooks, which end with the others."""
        self._handles += handles

    def remove_hooks(self) -> None:
        """The block is a block like any other."""
        for handle in self._handles:
            handle.remove()
        if (block := self.block()) is not None:
            for how in _COPIES:
                vars(block).pop(how, None)
        self._parameters = []  # torch.utils.swap_tensors wants no weak references to them
        self._trained = []

    def _writes(self) -> tuple[int, list[bool]]:
        """What shows that weights were written to: versions, and which of PEFT's layers are merged,
        since those write through ``.data``, which no version shows.
        """
        adapters = [bool(m.merged) for one in self._adapters if (m := one()) is not None]
        return _versions(self._parameters), adapters

    def _tell_of_autocast(self) -> None:
        import torch

        if self._told_of_autocast or not torch.is_autocast_enabled(self._device_type):
            return
        self._told_of_autocast = True
        low = torch.get_autocast_dtype(self._device_type)
        copies = sum(group.cast_bytes for group in registry.on(self.device)) // 4 * low.itemsize
        warn_once(
            f"stagehand_alloc: autocast keeps {format_bytes(copies)} of {low} copies of trained "
            "weights on the GPU until it ends, whatever leaves meanwhile.\n"
            f'Use torch.autocast("{self._device_type}", cache_enabled=False), or weights in {low}.'
        )

    def _check_frozen(self) -> None:
        for one in self._parameters:
            if (parameter := one()) is not None and parameter.requires_grad:
                block = self.block()
                names = [] if block is None else list(block.named_parameters())
                name = next((n for n, p in names if p is parameter), "a parameter")
                raise OffloadError(
                    f"{name!r} of the offloaded block {self.name!r} asks for gradients now, and "
                    "only frozen weights are offloaded.",
                    "Set requires_grad before stagehand_alloc.offload(model); "
                    "stagehand_alloc.restore(model) ends what there is.",
                )


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, for somebody who must not keep its object."""
    this = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := this()) is not None:
            alive()

    return call


def _versions(parameters: Iterable[weakref.ref[nn.Parameter]]) -> int:
    alive = [p for one in parameters if (p := one()) is not None]
    return sum(p._version for p in alive if not p.is_inference())


def refuse_copy(name: str, *_: Any) -> None:
    """Instead of a module with the block's hooks, and so its group, and other weights."""
    raise OffloadError(
        f"The block {name!r} is offloaded, and cannot be copied or pickled.",
        "Copy the model before stagehand_alloc.offload(model), or after "
        "stagehand_alloc.restore(model). To save it, save model.state_dict().",
    )


def _hooks(group: Group) -> tuple[Any, Any]:
    """What comes before and after the block's forward; neither is compiled with it."""
    import torch

    def enter(module: nn.Module, inputs: Any) -> None:
        group.enter()
        if torch.is_grad_enabled() and inside().count(group) == 1:  # not a call of its own
            _tell_of_end(inputs, group.native)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        group.leave()
        # For what keeps a weight where no hook sees it, as bitsandbytes does.
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:  # a leaf's backward is not this block's
                tensor.register_hook(_Gradient(begins=group.native))

    apart: Any = torch.compiler.disable
    return apart(enter), apart(leave)


@dataclasses.dataclass
class _Gradient:
    """The gradient of what a block was given is there, and of what another returned.

    Autograd runs what was made last first: all of the former's backward came before, also what
    leads to its other inputs. So its end is told first: it may be the same block, which runs twice.
    """

    begins: Any = None
    over: list[Any] = dataclasses.field(default_factory=list)  # weak: the tensor may live longer

    def __call__(self, gradient: Tensor) -> None:
        for one in self.over:
            if (group := one()) is not None:
                group.over()
        if self.begins is not None:
            self.begins.touch()


def _tell_of_end(inputs: Any, group: Any) -> None:
    """Of the block's backward, when the gradient of what it is given is there.

    Autograd runs what was made last first, by numbers that each thread counts. So all of the
    block's backward comes before, if what it is given has a lower one than what this thread makes
    next. A leaf may outlive many steps, and would keep their hooks.
    """
    import torch

    given = next((one for one in _tensors(inputs) if one.grad_fn is not None), None)
    if given is None or given.grad_fn._sequence_nr() >= torch._C._autograd._get_sequence_nr():
        return
    this = weakref.ref(group)
    for hook in list((given._backward_hooks or {}).values()):  # others may add theirs
        if isinstance(hook, _Gradient):
            if this not in hook.over:
                hook.over.append(this)
            return
    given.register_hook(_Gradient(over=[this]))


def _tensors(output: Any) -> Iterator[Any]:
    """Of what a block returned: pytrees, and dataclasses that torch has no word for."""
    import torch

    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for one in output.values():
            yield from _tensors(one)
    elif isinstance(output, list | tuple):
        for one in output:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name, None))


def text_of(name: str) -> str:
    """Of the error that an access to the weight raises while it is away."""
    return (
        f"stagehand_alloc: {name!r} is on the host: it belongs to an offloaded block, whose "
        "weights are on the GPU while the block runs.\n"
        "Use it inside `with stagehand_alloc.resident(model)`, or end this with "
        "stagehand_alloc.restore(model)."
    )


class Step(Protocol):
    """An optimizer's step that holds weights."""

    def runs(self) -> bool:
        """Whether it is still on its thread's stack."""

    def end(self) -> None:
        """It is over."""


class Chunked(Protocol):
    """An optimizer's steps in chunks."""

    calls: int  # that go on

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A step, as the optimizer's own is called."""

    def step(self, optimizer: torch.optim.Optimizer, own: Callable[[Any], Any]) -> None:
        """The optimizer's own step, for one chunk after the other."""

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Its step is its own again."""


class Registry:
    """The groups there are, by module and by device. Everything with the GIL."""

    def __init__(self) -> None:
        self._of_module: weakref.WeakKeyDictionary[nn.Module, Group] = weakref.WeakKeyDictionary()
        self._groups: dict[int, weakref.WeakSet[Group]] = {}
        self.loading: set[Group] = set()  # that a load_state_dict is inside of, on any thread
        self.stepping: list[Step] = []  # of optimizers, on any thread
        self.high: dict[int, int] = {}  # by device, of the last pool
        self.watched: list[Any] = []  # torch's hooks around every optimizer's step, for good
        # Of optimizers whose step runs in chunks: it holds what it needs itself.
        self.chunked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Chunked] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, device: int, group: Group) -> None:
        """A block is offloaded: each module in it is of that group."""
        self._groups.setdefault(device, weakref.WeakSet()).add(group)
        block = group.block()
        for module in [] if block is None else block.modules():
            self._of_module[module] = group

    def remove(self, group: Group) -> None:
        """It is restored."""
        for groups in self._groups.values():
            groups.discard(group)
        for module in [m for m, one in self._of_module.items() if one is group]:
            del self._of_module[module]

    def on(self, device: int) -> list[Group]:
        """All groups of the device."""
        return list(self._groups.get(device, ()))

    def of(self, module: nn.Module) -> Group | None:
        """The group of the block that the module is or lies in."""
        return self._of_module.get(module)

    def of_tensor(self, tensor: Tensor) -> list[Group]:
        """The group whose storage the tensor is over."""
        storage = storage_of(tensor)
        groups = [group for groups in self._groups.values() for group in groups]
        return [group for group in groups if storage in group.storages]

    def trained(self) -> dict[int, Group]:
        """The groups of all parameters that are trained and leave, by their ids."""
        groups = [group for groups in self._groups.values() for group in groups]
        return {id(p): group for group in groups for p in group.trained()}

    def within(self, modules: Iterable[nn.Module]) -> list[Group]:
        """The groups that any of the modules, or of those in them, lies in; each once."""
        found = [self.of(one) for module in modules for one in module.modules()]
        return list(dict.fromkeys(group for group in found if group is not None))

    def begin_step(self, device: int, high: int) -> bool:
        """A pool is entered on this thread; whether there are weights. Raises SizeError."""
        end_cut_short()  # also of models that are gone
        self.high[device] = high
        groups = self.on(device)
        if not groups:
            return False
        import torch

        if torch._C._current_graph_task_id() < 0:
            native.end_weights_here()
        # Backward holds the newest two it needed, in whatever order blocks run (`touch`); without
        # gradients one is open at a time.
        held = 2 if torch.is_grad_enabled() else 1
        largest = sorted(groups, key=lambda group: group.bytes)[-held:]
        if (wanted := sum(group.bytes for group in largest)) > high:
            names = " and ".join(repr(group.name) for group in reversed(largest))
            raise SizeError(
                f"The weights of {names} are {format_bytes(wanted)}, needed at once, and "
                f"high is {format_bytes(high)}.",
                "Raise high, or offload smaller blocks: offload(model, blocks=...).",
            )
        return True


registry = Registry()
