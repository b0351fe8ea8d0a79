"""Regions that torch's checkpoint marks: run again only where what they saved was dropped.

torch saves one thing of such a region itself, an empty *sentinel*; all else goes through the
pool's hooks. Unpacking the sentinel makes torch run the function again, with the inputs, random
numbers and autocast of the first time, under hooks that count (native/entry/regions.cpp).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from stagehand_alloc._errors import in_one_line
from stagehand_alloc._extension import native
from stagehand_alloc._guarded import Guarded, Once
from stagehand_alloc._step import quiet as _quiet
from stagehand_alloc._step.entry import in_this_thread
from stagehand_alloc._tell import warn_once
from stagehand_alloc._weights import groups as _groups

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stagehand_alloc._step.entry import Entry

_SMALL = 1 << 20  # bytes; larger buffers are left in their place in a re-run
_OF_TORCH = ("/torch/", "/stagehand_alloc/")


class _Thread(threading.local):
    """What is so on one thread."""

    again = 0  # re-runs that are going on


_thread = _Thread()
_fault = Once[str]()  # why torch's checkpoint is left as it is; "" where it need not be


class Stop(BaseException):
    """Ends a re-run that has made all that was wanted; no Exception, which functions catch."""


def when_needed() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A ``context_fn``: checkpointed inside a pool, a function runs again only where it must.

        torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False, context_fn=when_needed)

    What the function saves is kept while there is room, moved or dropped where there is not; for
    what was dropped the function runs once more, as far as it has to. Outside of a pool, and where
    torch's checkpoint works in a way not known here, it is torch's as it is.

    The function must compute the same each time it runs, as torch's checkpoint asks, too. What it
    writes to buffers of its modules up to 1 MiB, such as BatchNorm's statistics, counts once.
    """
    entry = _entry_here()
    if entry is not None:  # who calls such a function does so in each step
        entry.device.quiet.refuse()
    return _contexts(entry, sys._getframe(1))


def of_module() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The same for a module that its pool marks, which quiet steps do not."""
    return _contexts(_entry_here(), sys._getframe(1))


def _contexts(
    entry: Entry | None, caller: FrameType
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if entry is not None:
        _quiet.follow(entry)
    if entry is None or not entry.hooked:
        return contextlib.nullcontext(), contextlib.nullcontext()
    function = _function_of(caller)
    call = native.Call(entry.device.index, _name_of(function))
    call.collect()
    return _First(call, entry.pool._hooks), _Again(call, function, tuple(_groups.inside()))


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] | None = None,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` with `when_needed`, for those who take a function.

    It takes the same arguments. ``use_reentrant=True`` runs as False, with one warning: the
    results are the same. A ``context_fn`` of one's own, or ``debug``, makes it torch's as it is.
    """
    from torch.utils import checkpoint as torch_checkpoint

    if use_reentrant:
        warn_once(
            "stagehand_alloc.checkpoint was called with use_reentrant=True, and runs as with "
            "False: torch records no graph of a reentrant one."
        )
    if debug:
        kwargs["debug"] = True
    elif context_fn is None:
        context_fn = when_needed
    if context_fn is not None:
        kwargs["context_fn"] = context_fn
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def run_again(sentinel: Any) -> None:
    """Unpack what the node that made ``sentinel`` has saved, which runs the function."""
    from torch import _C

    before = _C._get_graph_exec_group()
    # torch refuses a second run in one backward otherwise.
    _C._set_graph_exec_group(object())  # type: ignore[arg-type]
    try:
        _ = sentinel.grad_fn._saved_self
    finally:
        _C._set_graph_exec_group(before)


def where() -> str:
    """The line of the user's that runs, for an error; the stack is that of a re-run."""
    from torch import nn

    line = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        name = frame.f_code.co_filename.replace("\\", "/")
        if not any(part in name for part in _OF_TORCH) and not line:
            line = f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        module = frame.f_locals.get("self")
        if line and isinstance(module, nn.Module):
            return f" ({line} of {type(module).__name__})"
        frame = frame.f_back
    return f" ({line})" if line else ""


def _entry_here() -> Entry | None:
    """Of the pool that this thread is in, where regions can be taken over."""
    import torch

    entry = in_this_thread.entry
    if entry is None or entry.left or not torch.is_grad_enabled():
        return None
    if not entry.hooked and not entry.quiet:
        return None
    # Inside a re-run they stay hidden, as they were in the first run.
    if _thread.again or torch.compiler.is_compiling():
        return None
    # What is found out under a mode of somebody's says nothing of torch.
    unusual = torch._C._len_torch_dispatch_stack() > 0 or not _quiet.hooks_can_be_pushed()
    if unusual or torch._C._are_functorch_transforms_active() or not _works():
        return None
    return entry


def takes_over() -> bool:
    """Whether `checkpoint` would mark a region here, rather than be torch's as it is."""
    return _entry_here() is not None


def worth_marking() -> bool:
    """Whether a module that a pool marks is to run as a region: not while all steps had room."""
    entry = _entry_here()  # first: of what comes then a compiler should see nothing
    return entry is not None and not entry.quiet and entry.pool._marks_regions(entry.device.index)


class _First:
    """Around the function's first run, inside of what torch's checkpoint hides it behind."""

    def __init__(self, call: Any, hooks: Any) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        self._call = call
        self._hooks = saved_tensors_hooks(hooks.pack, hooks.unpack)

    def __enter__(self) -> None:
        sentinel = _save_sentinel()
        self._hooks.__enter__()
        try:
            self._call.begin(sentinel)
        except BaseException:
            self._hooks.__exit__(None, None, None)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._call.end()
        finally:
            self._hooks.__exit__(None, None, None)


class _Again:
    """Around each re-run. torch's frame holds it, and the call holds that: so this one is weak."""

    def __init__(self, call: Any, function: Any, weights: tuple[_groups.Group, ...]) -> None:
        self._call = weakref.ref(call)
        self._function = function
        self._weights = weights  # of the blocks that it was called in
        self._running: contextlib.ExitStack | None = None
        self._capture: Any = None

    def __enter__(self) -> None:
        import torch
        from torch.autograd.graph import saved_tensors_hooks

        call = self._call()
        self._capture = None if call is None else call.capture()
        if self._capture is None:
            raise RuntimeError(
                "stagehand_alloc: internal error: torch runs a region again by itself.\n"
                "Please report it, with the version of torch."
            )
        with contextlib.ExitStack() as stack:
            _thread.again += 1
            stack.callback(_one_less)
            # torch has taken the group of this run by now; backwards inside it have others.
            outer = torch._C._get_graph_exec_group()
            stack.callback(torch._C._set_graph_exec_group, outer)
            torch._C._set_graph_exec_group(None)
            _spare_buffers(self._function, stack)
            _hold_weights(self._weights, stack)
            stack.enter_context(saved_tensors_hooks(self._capture.pack, self._capture.unpack))
            self._running = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        running, capture = self._running, self._capture
        self._running = self._capture = None
        if running is not None:
            running.close()
        stopped = isinstance(error, Stop) or (
            capture.done() and isinstance(error, Exception)  # what a function made of our stop
        )
        if error is not None and not stopped:
            return False
        if error is not None:
            # What the function had made lives in there, and the error lives until torch's own ends.
            traceback.clear_frames(trace)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        _save_sentinel()  # torch's frame has all it waits for, and ends the run
        return True


def _one_less() -> None:
    _thread.again -= 1


@functools.cache
def _empty() -> Tensor:
    """What the sentinel saves."""
    import torch

    with torch.inference_mode(False), torch.device("cpu"):
        return torch.empty(0, requires_grad=True)


def _save_sentinel() -> Tensor:
    """A tensor made by a node that has saved an empty one, through whatever hooks are on top.

    The tensor, and not its node, is what keeps the saved one: where the last tensor of a node
    goes, torch before 2.13 frees what it has saved, though Python holds the node. An operation of
    torch's takes a tenth of the host's time that a function in Python takes.
    """
    import torch

    with torch.enable_grad(), torch._C.DisableTorchFunction():
        return _empty().sin()


# --- Buffers


def _spare_buffers(function: Any, stack: contextlib.ExitStack) -> None:
    """Let a re-run write to copies. Versions do not tell: BatchNorm raises none of its buffers'."""
    for root in _modules_of(function):
        for module in root.modules():
            _aside.begin(module)
            stack.callback(_aside.end, module)


def _hold_weights(weights: tuple[_groups.Group, ...], stack: contextlib.ExitStack) -> None:
    """A re-run is outside of the blocks that the function was called in; others enter as ever."""
    stack.callback(_groups.end_forwards, len(_groups.inside()))
    for group in dict.fromkeys(weights):
        group.enter()


class _Spared:
    """A module's buffers, which lie aside while any re-run of it goes on, on any thread."""

    def __init__(self, module: nn.Module) -> None:
        import torch

        self.runs = 0
        self.buffers: dict[str, Any] = {}
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.nbytes <= _SMALL:
                self.buffers[name] = buffer
                with torch.no_grad():
                    module._buffers[name] = buffer.clone()


class _Aside(Guarded):
    """The modules whose buffers lie aside."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[nn.Module, _Spared] = {}  # guarded by the lock

    def begin(self, module: nn.Module) -> None:
        """A re-run of it begins."""
        with self.lock:
            spared = self.modules.get(module)
            if spared is None:
                spared = self.modules[module] = _Spared(module)
            spared.runs += 1

    def end(self, module: nn.Module) -> None:
        """It ended."""
        with self.lock:
            spared = self.modules[module]
            spared.runs -= 1
            if spared.runs == 0:
                module._buffers.update(spared.buffers)
                del self.modules[module]


_aside = _Aside()


def _modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function is, is bound to, closes over, names, or is given.

    Those it reaches in another way are not found, such as through two objects.
    """
    import torch
    from torch import nn

    found: list[nn.Module] = []
    seen: set[int] = set()
    todo = [function]
    while todo:
        one = todo.pop()
        if id(one) in seen or one is None or isinstance(one, str | int | float | torch.Tensor):
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found.append(one)
        elif isinstance(one, functools.partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, list | tuple | set):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, FunctionType):
            todo.append(getattr(one, "__wrapped__", None))
            names = one.__code__.co_names
            todo += [one.__globals__[name] for name in names if name in one.__globals__]
            for cell in one.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty one
                    todo.append(cell.cell_contents)
        elif not isinstance(one, type | ModuleType):
            todo.append(getattr(one, "__self__", None))
            todo.append(getattr(one, "__wrapped__", None))
            held = getattr(one, "__dict__", {})
            todo += [
                value
                for value in held.values()
                if isinstance(value, list | tuple | dict | nn.Module)
            ]
    return found


def _function_of(frame: FrameType | None) -> Any:
    """The function that torch's checkpoint is about to run, as a partial with what it is given.

    None where its code is another.
    """
    for _ in range(4):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            here = frame.f_locals
            function = here.get("fn")
            if not callable(function):
                return None
            return functools.partial(function, *here.get("args", ()), **here.get("kwargs", {}))
        frame = frame.f_back
    return None


def _name_of(function: Any) -> str:
    """The class of the module whose method it is, or its own name."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    found = type(owner).__name__ if owner is not None else getattr(function, "__qualname__", "")
    return str(found)


# --- Whether torch's checkpoint is the one that is known here


def _works() -> bool:
    if fault := _fault.get(_look):
        warn_once(
            "torch's checkpoint works in another way than stagehand_alloc.when_needed knows, and "
            f"is left as it is: {fault}."
        )
    return not fault


def _look() -> str:
    try:
        return _try_out()
    except Exception as error:  # of a torch nobody has seen yet
        return in_one_line(error)


def _try_out() -> str:
    """Take over one tiny region, without a pool, and run it twice in a row."""
    import torch
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    told: list[str] = []
    first, again = _Probe(told, "first"), _Probe(told, "again")

    def contexts() -> tuple[Any, Any]:
        found = _function_of(sys._getframe(1))
        right = found is not None and found.func is function and found.args == (x,)
        told.append("asked" if right else "asked by another")
        return first, again

    def function(x: Tensor) -> Tensor:
        return x.sin().exp()

    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        x = torch.ones(1, requires_grad=True) * 1
        with _telling(told, "outer"):
            y = torch_checkpoint(
                function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
        run_again(first.sentinel)
        run_again(first.sentinel)
        (gradient,) = torch.autograd.grad(y, x)
    outer = ["outer"] * told.count("outer")  # torch before 2.13 saves a tensor of its own, too
    right = ["asked", *outer, "first"] + ["inner"] * 2
    rerun = [*(f"{one} again" for one in outer), "again", *["inner"] * 2, "end"]
    if told != right + 2 * rerun + ["inner again"] * 2:
        return "it told " + ", ".join(told)
    return "" if bool((gradient == (x.sin().exp() * x.cos())).all()) else "a gradient is wrong"


class _Probe:
    """What `_First` and `_Again` are to `_try_out`."""

    def __init__(self, told: list[str], what: str) -> None:
        self._told = told
        self._what = what
        self.sentinel: Any = None
        self._hooks: Any = None

    def __enter__(self) -> None:
        self._told.append(self._what)
        if self._what == "first":
            self.sentinel = _save_sentinel()
        self._hooks = _telling(self._told, "inner")
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(None, None, None)
        if self._what == "again":
            self._told.append("end")
            _save_sentinel()


def _telling(told: list[str], what: str) -> Any:
    from torch.autograd.graph import saved_tensors_hooks

    def pack(x: Tensor) -> Tensor:
        told.append(what)
        return x.detach()  # not itself: what it saved would hold the node that saved it

    def unpack(x: Tensor) -> Tensor:
        told.append(f"{what} again")
        return x

    return saved_tensors_hooks(pack, unpack)
