"""`pool()`: the context manager around forward that arms the budget and tags what is saved."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from stagehand_alloc import _driver
from stagehand_alloc._books import plan as _plan
from stagehand_alloc._books import shape as _shape
from stagehand_alloc._books import stats as _stats
from stagehand_alloc._books import telemetry as _telemetry
from stagehand_alloc._books.markup import escaped
from stagehand_alloc._books.markup import table as markup_table
from stagehand_alloc._books.stats import PoolStats
from stagehand_alloc._books.steps import Listener, OpenStep, StepStats
from stagehand_alloc._errors import (
    ConfigError,
    DriverError,
    NestedPoolError,
    PoolError,
    PoolThreadError,
    SizeError,
    StagehandError,
    in_one_line,
)
from stagehand_alloc._extension import native
from stagehand_alloc._settings import environment
from stagehand_alloc._settings.budget import Budget
from stagehand_alloc._settings.config import NODES, Config, DeviceLike, Mode, check_mode
from stagehand_alloc._settings.link import UNCHANGED, LaneLimits, Unchanged
from stagehand_alloc._settings.load import load_config
from stagehand_alloc._settings.sizes import UNLIMITED, Size, format_bytes, read_size, shown
from stagehand_alloc._step.device import Device, process
from stagehand_alloc._step.entry import (
    Entry,
    Exit,
    in_this_thread,
    remove_hooks,
    taken_exit,
)
from stagehand_alloc._step.module_names import ModuleWatch
from stagehand_alloc._step.quiet import follow, hooks_can_be_pushed
from stagehand_alloc._tell import warn
from stagehand_alloc._torch_side import install as _install
from stagehand_alloc._torch_side import modes as _modes
from stagehand_alloc._weights.groups import registry as _weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from stagehand_alloc._step.attach import Attached
    from stagehand_alloc._step.hooks import SavedTensorInfo
    from stagehand_alloc._step.marks import Marks

    KeepPredicate: TypeAlias = Callable[[SavedTensorInfo], bool]

_DEFAULTS = Config()


class Pool:
    """A budget for one device, entered around forward; made by `pool`. Reusable every step.

    Inside the ``with``, tensors that autograd saves may be moved to host memory when an allocation
    would cross ``high``. They come back in backward, which may run after the ``with`` has ended:
    the budget stays armed until the last of them is gone.
    """

    def __init__(
        self,
        config: Config,
        keep: KeepPredicate | None = None,
        marks: Marks | None = None,
        on_step: Listener | None = None,
    ) -> None:
        self.around_script = False  # of `run`'s: the script may have pools of its own
        self._mode_asked = check_mode(config.mode)
        self._on_step = on_step
        self._steps = 0  # that have begun
        self._first_asked = 0  # the one in which a module was a region first; 0: none yet
        self._last_step: StepStats | None = None  # that has ended
        self._marks = marks
        self._mode: Mode | None = None  # known from the first entry on
        self._mem_pools: list[Any] = []  # one at most
        self._config = config
        self._keep = keep
        self._device: Device | None = None  # known from the first entry on
        self._budget: Budget | None = None
        self._limits = LaneLimits.of(config)  # guarded by the device's lock, once there is one
        self._hooks: Any = None
        self._has_weights = False  # that are offloaded, in the newest step
        self._watch = ModuleWatch()
        self._start = PoolStats()
        self._entry: Entry | None = None  # guarded by the device's lock

    def __repr__(self) -> str:
        sizes: Config | Budget = self._budget or self._config
        high, low, limit = map(_shown, (sizes.high, sizes.low, sizes.limit))
        where = "not entered yet" if self._device is None else f"device {self._device.index}"
        inside = ", entered" if self._entry is not None else ""
        return f"<Pool high={high} low={low} limit={limit} mode={self._mode}, {where}{inside}>"

    def _repr_html_(self) -> str:
        """In a notebook: the budget, and what the newest step did inside it."""
        sizes: Config | Budget = self._budget or self._config
        said = {"high": sizes.high, "low": sizes.low, "limit": sizes.limit}
        rows = [(name, _shown(size)) for name, size in said.items() if size is not None]
        if step := self.step_stats():
            rows += [
                ("newest step", f"{step['step']:.0f}, {step['wall_time_ms']:.1f} ms"),
                ("mapped at most", format_bytes(int(step["mapped_peak"]))),
                ("over high", format_bytes(int(step["overshoot_bytes"]))),
                ("moved to the host", format_bytes(int(step["spill_bytes"]))),
                ("dropped", format_bytes(int(step["dropped_bytes"]))),
                ("waited for copies", f"{step['stall_time_ms']:.1f} ms"),
            ]
        where = "not entered yet" if self._device is None else f"device {self._device.index}"
        head = ("pool", where if self._mode is None else f"{where}, {self._mode}")
        return markup_table(head, [(name, escaped(text)) for name, text in rows])

    def _prepare(self) -> None:
        """What needs no entry: pinning takes a while, and starts as soon as the device is open.

        The device that is current now may not be the one at the first entry, which is the pool's.
        """
        if not self._config.enabled:
            return
        if _install.is_installed():
            self._config.budget(self._look_at_device()[1])
            if not process.has_host_memory():
                self._configure_host_memory()
            return
        if "torch" in sys.modules:
            _modes.watch_optimizers()
        if not process.has_host_memory() and _cuda_is_up():
            with contextlib.suppress(StagehandError, RuntimeError):  # the first entry says so
                _driver.start()
                device, _ = self._look_at_device()
                self._configure_host_memory()
                native.open_device(device)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same settings and was never entered: for models that hold a pool.

        It marks no modules that ``recompute`` named: they are not its own.
        """
        return _again, (
            self._config,
            self._keep,
            self._limits,
            self._on_step,
        )

    def __enter__(self) -> Pool:
        """Arm the budget.

        Raises ModeError, NestedPoolError, PoolThreadError, SizeError, or TorchTooOldError.
        """
        if not self._config.enabled:
            return self
        import torch

        _install.require_torch(torch)
        lasts = taken_exit(self)
        _driver.check_process()
        mode = _modes.resolve(self._mode_asked)
        entry, budget = self._claim(lasts)
        try:
            entry.device.steps.end()
            self._arm(entry, budget, mode)
            entry.entered = True
        except BaseException:
            self._release(entry, by_error=True)
            raise
        return self

    def _exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop tagging. What was tagged stays inside the budget until autograd drops it."""
        if not self._config.enabled:
            return
        entry = self._entry
        if entry is None:
            raise PoolError(
                "A pool was left that is not entered.",
                "Use one `with` per step; where __exit__ is called by hand, once per __enter__.",
            )
        if entry.thread != threading.get_ident():
            raise PoolThreadError(
                f"A pool was left on thread {threading.get_ident()}, but thread {entry.thread} "
                "entered it.",
                "Use one `with` per step, on the thread that runs forward.",
            )
        self._release(entry, by_error=kind is not None)
        if kind is None:
            entry.device.steps.end_if_over(self, asked=False)

    if TYPE_CHECKING:

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __exit__ = Exit()

    def attach(self, model: nn.Module) -> Attached:
        """Have ``model``'s own forward enter and leave the pool: for trainers that call it.

            attached = stagehand_alloc.pool(high="20GiB").attach(model)

        What is saved outside of that forward, such as of a loss that is computed from its output,
        stays outside of the pool. ``attached.remove()`` ends it. Raises ConfigError.
        """
        from stagehand_alloc._step.attach import Attached

        return Attached(self, model)

    def stats(self) -> PoolStats:
        """The device's books; counters since this pool was first entered. Waits for no GPU work."""
        if self._device is None:
            return PoolStats()
        found = _stats.stats(self._device.index).since(self._start)
        found = dataclasses.replace(found, mode=self._mode or "", trigger=_modes.trigger().state)
        return _stats.with_passed_through(found, self._passed_through())

    def step_stats(self) -> dict[str, float]:
        """The newest step that has ended, as flat numbers: for TensorBoard, W&B, Prometheus.

            wandb.log(pool.step_stats())

        The names are those of a telemetry line; sizes in bytes. Asked for after backward, it is the
        step just made; while what a step saved is alive, the one before. Empty before the first.
        What is asked for again is the same. Waits for no GPU work.
        """
        if self._device is not None:
            self._device.steps.end_if_over(self)
        return {} if self._last_step is None else self._last_step.numbers()

    def _told(self, step: StepStats) -> None:
        self._last_step = step
        if self._on_step is None:
            return
        try:
            self._on_step(step)
        except Exception as error:  # a logger that fails is no reason to end a training
            listener, self._on_step = self._on_step, None
            warn(_failed_text(listener, error, step))

    def plan(self) -> _plan.StepPlan:
        """What stays, moves and is dropped of what steps like the newest save, by what made it.

        ``print(pool.plan())`` is a table. For people: it takes some milliseconds of the host, and
        waits for no GPU work. Empty before a step has been learned.
        """
        return _plan.read(-1 if self._device is None else self._device.index)

    def plot(self) -> Figure:
        """A matplotlib figure of the memory over a step like the newest, against the watermarks.

        A notebook shows it; ``savefig`` writes it. Needs the extra "plot". Raises PoolError before
        a step has been learned, InstallError without matplotlib. Takes some milliseconds.
        """
        from stagehand_alloc._pictures import figures as _figures

        _figures.require()
        shape = None if self._device is None else _shape.read(self._device.index)
        if shape is None or self._budget is None:
            raise PoolError(
                "There is nothing to plot: no step has been learned.",
                "Train two steps, with their backward, first.",
            )
        budget = self._budget
        return _figures.memory(shape.curve, budget.high, budget.low, budget.limit, 720)

    @property
    def mem_pool(self) -> Any:
        """The torch.cuda.MemPool of mode "mempool", from the first entry on; None in others.

        It has no memory before something had to leave in a step: PyTorch's default pool serves
        until then.
        For what torch does with one: registering its segments, a snapshot of it. It goes with the
        Pool: its memory then serves the next one. A step that begins with more than ``high``
        reserved may put another one in its place.
        """
        return self._mem_pools[0] if self._mem_pools else None

    def limits(
        self,
        *,
        max_inflight_d2h: int | Unchanged | None = UNCHANGED,
        max_inflight_h2d: int | Unchanged | None = UNCHANGED,
        d2h_bytes_per_second: Size | Unchanged | None = UNCHANGED,
        h2d_bytes_per_second: Size | Unchanged | None = UNCHANGED,
        piece: Size | Unchanged | None = UNCHANGED,
    ) -> LaneLimits:
        """Change what the copies may take of the link, now or while running, from any thread.

        Only what is named changes; None is no limit. Holds from the next copy on, for this pool's
        steps and the backwards that follow them.

        Args:
            max_inflight_d2h, max_inflight_h2d: with so many copies queued on that lane and not yet
                finished, copies ahead of need (write-back, prefetch) hold back. A copy somebody
                waits for always goes.
            d2h_bytes_per_second, h2d_bytes_per_second: "10GB", "10GiB" or bytes, per second, over
                all copies of that lane, the awaited ones too.
            piece: copies of either lane go in parts of at most so many bytes ("1MiB"; 64 KiB at
                least), so that others' copies get in between; None, the default, is 16 MiB,
                or 64 where steps wait for weights that stream and no limit is set. The smaller,
                the sooner others get through and the slower the lane.

        Returns the limits now in force. Raises ConfigError, SizeError, ForkedError, or DriverError;
        then nothing has changed.
        """
        device = self._device
        if device is not None:
            _driver.check_process()
        with contextlib.nullcontext() if device is None else device.lock:
            before = self._limits
            self._limits = before.changed(
                max_inflight_d2h,
                max_inflight_h2d,
                d2h_bytes_per_second,
                h2d_bytes_per_second,
                piece,
            )
            if device is not None and device.is_latest(self):
                try:
                    self._set_limits(device.index)
                except DriverError:
                    self._limits = before
                    raise
            return self._limits

    def _set_limits(self, device: int) -> None:
        """Put them in force. A signal's handler may change them meanwhile: then its own are."""
        wanted = None
        while wanted is not self._limits:
            wanted = self._limits
            _set_lane_limits(device, wanted)

    def release_pinned(self, keep: int | str = 0) -> int:
        """Give host memory of the pinned pool back, down to ``keep``; returns the bytes given back.

        What saved tensors are in stays, and what a copy still uses. The next eviction may have to
        pin again, which is slow: for the end of training, or a long pause. Raises SizeError.
        """
        kept = min(int(read_size(keep, "keep", shares=False, zero=True)), UNLIMITED)
        if self._device is None or not native.device_open(self._device.index):
            return 0
        return int(native.release_pinned(self._device.index, kept))

    def _configure_host_memory(self) -> None:
        config = self._config
        wanted = (config.pinned_pool_classes_mb, config.slabs_per_class, config.host_limit)
        process.configure_host_memory(wanted, self._checked_host_memory)

    def _checked_host_memory(self) -> tuple[Any, ...]:
        """Raises SizeError where the limit counts weights, and they are more than it."""
        found, weights = self._host_memory, self._weights_pinned()
        if self._config.host_limit is not None and weights > (limit := found[2]):
            raise SizeError(
                f"host_limit is {format_bytes(limit)}, and the host copies of offloaded weights "
                f"are {format_bytes(weights)}.",
                "Raise host_limit, which counts both, offload fewer blocks, or leave it out: then "
                "what is evicted takes half of what the weights left.",
            )
        return found

    def _weights_pinned(self) -> int:
        return _stats.read(self._look_at_device()[0]).weights_pinned_bytes

    @functools.cached_property
    def _host_memory(self) -> tuple[list[int], list[int], int, bool, bool, list[int], int]:
        """As native takes it; the machine is asked once, since two pools may take turns."""
        # On the simulated GPU nothing runs that a seed does not decide.
        real = not _install.is_simulated()
        return (
            *self._config.pinned_classes(),
            self._config.host_limit_bytes(self._weights_pinned()),
            real,
            self._config.host_limit is not None,
            _driver.numa_nodes() if real else [],
            self._config.first_share(),
        )

    def _look_at_device(self) -> tuple[int, int]:
        """The device that is meant as things stand, and its bytes."""
        device = _stats.device_index(self._config.device)
        if _install.is_simulated():
            device = 0  # where its tensors are
        return device, process.bytes_of(device)

    def _resolve(self) -> tuple[Device, Budget]:
        """Device and budget, worked out once, at the first entry. Raises SizeError."""
        if self._device is None or self._budget is None:
            if not _install.is_installed():
                _driver.start()
                _start_torch()
            index, total = self._look_at_device()
            self._start = _stats.read(index)
            self._budget = self._config.budget(total)
            self._device = process.device(index)
        return self._device, self._budget

    def _claim(self, lasts: weakref.ref[Any] | None) -> tuple[Entry, Budget]:
        """Take this thread and the device for this pool, from whoever is over."""
        outer = in_this_thread.entry
        if outer is not None:
            if outer.surely_inside():
                raise _nested(self, outer.pool)
            outer.pool._release(outer)
        device, budget = self._resolve()
        for other in (self._entry, device.entry):
            if other is not None and not other.surely_inside():
                other.pool._release(other)
        entry = Entry(self, device, threading.get_ident(), lasts)
        in_this_thread.entry = entry  # first: an interrupt from here on is mended by the next entry
        try:
            device.take(entry)
        except PoolThreadError:
            in_this_thread.entry = None
            raise
        return entry, budget

    def _arm(self, entry: Entry, budget: Budget, mode: Mode) -> None:
        import torch

        device = entry.device.index
        self._mode = mode
        if self._hooks is None and self._config.build_trigger:
            self._build_libraries()
        if mode != "allocator":
            _modes.reach_torch(device, self._config)
        self._configure_host_memory()
        entry.device.begin(self, lambda: self._set_limits(device), self._config.debug_checksums)
        self._has_weights = _weights.begin_step(device, budget.high)
        quiet = entry.device.quiet.begin(
            device, budget.high, torch.is_grad_enabled(), self._may_be_quiet(device)
        )
        self._begin_step(entry.device, mode, quiet)
        if self.mem_pool is not None and _modes.outgrown(self.mem_pool, device, budget.high):
            _modes.give_up(self._mem_pools, device)
        native.set_budget(device, budget.high, budget.low, budget.limit)
        self._enter_torch(entry)
        self._make_hooks(entry.device)
        if not quiet:
            self._push_hooks(entry)
            return
        native.Hooks.end_step()  # what the step before has left to be looked at
        entry.above = native.count_hooks()
        entry.quiet = True
        if native.read_alarm(device)[0]:  # meanwhile
            follow(entry)

    def _build_libraries(self) -> None:
        """All that this pool loads, beside each other, where the process has not loaded it yet."""
        from stagehand_alloc._built import build, tensors, trigger
        from stagehand_alloc._step import proofs

        build.beside(
            tensors.LIBRARY,
            *((proofs.LIBRARY,) if self._recompute() else ()),
            *(trigger.needed() if self._mode != "allocator" else ()),
        )

    def _recompute(self) -> bool | str:
        """What may be made again, by the setting or by the mode."""
        if self._config.recompute is not None:
            return self._config.recompute
        # In a MemPool plans that drop go over high while they are tried.
        return NODES if self._mode != "mempool" else False

    def _may_be_quiet(self, device: int) -> bool:
        """Whether what a step saves may be left alone: nobody asked to be shown it, no module is to
        run as a region, the engine sees each request, and an alarm would be heard, which only the
        main thread does. A MemPool serves backward, too, for as long as something is alive that was
        shown to us."""
        config = self._config
        marks = self._marks
        marked = marks is not None and (marks.looking() or native.wants_regions(device))
        shown_to = self._keep is not None or marked
        shown_to = shown_to or config.telemetry_path is not None or config.debug_checksums
        followed = self._mode == "native" and _modes.trigger().state == "loaded"
        sees = self._mode == "allocator" or followed
        hears = threading.current_thread() is threading.main_thread()
        hears = hears and hooks_can_be_pushed()
        return sees and hears and not shown_to and not self._has_weights

    def _begin_step(self, device: Device, mode: Mode, quiet: bool) -> None:
        import torch

        listeners: tuple[Listener, ...] = (device.trouble.look,)
        if (path := self._config.telemetry_path) is not None:
            listeners = (_telemetry.writer_of(path).listen, *listeners)
        self._steps += 1
        step = OpenStep(
            self._steps,
            mode,
            torch.is_grad_enabled(),
            weakref.ref(self),
            listeners,
            self._passed_through(),
            quiet=quiet,
        )
        device.steps.begin(step)

    def _release(self, entry: Entry, by_error: bool = False) -> None:
        """Undo whatever was done of ``entry``; the thread-local part on its own thread only.

        It is forgotten last: interrupted, the next entry begins again. ``by_error``: one ended
        the `with`, and what checkpoints inside it left on the stack is nobody's any more.
        """
        entry.left = True
        if entry.hooked and entry.thread == threading.get_ident():
            remove_hooks(inner=by_error)
            native.Hooks.end_step()
            if self._marks is not None:
                self._marks.leave()
                self._marks.look_in(self._watch.roots())
            entry.hooked = False
        if self._entry is entry:  # else it was undone, and others may have come since
            self._watch.leave()
            entry.device.steps.left(self, by_error)
        if entry.allocating is not None:
            entry.allocating.close()
        if entry.device.entry is entry:
            native.clear_budget(entry.device.index)
        entry.device.give_up(entry)
        if in_this_thread.entry is entry:
            in_this_thread.entry = None

    def _enter_torch(self, entry: Entry) -> None:
        """Allocate from a MemPool of ours, in the mode of that name."""
        if self._mode == "mempool":
            _modes.fill(self._mem_pools, self, entry.device.index)
            entry.allocating = _modes.allocating_from(self.mem_pool, entry.device.index)
            next(entry.allocating)

    def _marks_regions(self, device: int) -> bool:
        """Whether a module that is named by ``recompute``, and called next, is run as a region."""
        # The first step that asks may be of another model than those that are remembered. And what
        # is written down is to tell of regions, too: advice rests on it.
        if self._first_asked == 0:
            self._first_asked = self._steps
        always = self._first_asked == self._steps or self._config.telemetry_path is not None
        return always or native.wants_regions(device)

    def _make_hooks(self, device: Device) -> None:
        """Before any is pushed: what may come in the middle of a step does no more than that."""
        from stagehand_alloc._built import tensors as _tensors
        from stagehand_alloc._step import hooks as _hooks
        from stagehand_alloc._step import proofs as _proofs

        recompute = self._recompute()
        if self._hooks is None:
            _tensors.load(self._config.build_trigger)
            if recompute:
                _proofs.load(self._config.build_trigger)
            self._hooks = _hooks.make_hooks(device.index, self._keep, self._watch, device.proofs)
        if recompute:
            device.proofs.collect()

    def _push_hooks(self, entry: Entry, late: bool = False) -> None:
        """What is saved from here on may leave. ``late``: something was saved before."""
        from torch._C import _autograd

        from stagehand_alloc._step import proofs as _proofs

        recompute = bool(self._recompute())
        away = self._has_weights or _proofs.sharded()
        self._hooks.begin_step(recompute, recompute and away, _proofs.ranks(), late)
        if self._keep is not None or (self._marks is not None and self._marks.looking()):
            self._watch.enter()
        entry.hooked = True
        if self._marks is not None:
            self._marks.enter()
        if late:
            native.put_hooks(self._hooks.pack, self._hooks.unpack, entry.above)
        else:
            _autograd._push_saved_tensors_default_hooks(self._hooks.pack, self._hooks.unpack)

    def _passed_through(self) -> dict[str, int]:
        return {} if self._hooks is None else dict(self._hooks.passed_through())


def pool(
    high: Size | None = None,
    low: Size | None = None,
    *,
    limit: Size | None = None,
    mode: str | None = None,
    config: Config | dict[str, Any] | str | Path | None = None,
    keep: KeepPredicate | None = None,
    recompute: bool | str | nn.Module | Iterable[nn.Module] | None = None,
    telemetry: bool | str | Path | None = None,
    on_step: Listener | None = None,
    device: DeviceLike = None,
) -> Pool:
    """A budget to enter around forward: ``with stagehand_alloc.pool(high="20GiB"): ...``.

    Args:
        high: an allocation that would take mapped memory above this evicts first. Bytes, a text
            ("20GiB"), or a fraction of device memory in (0, 1]. Default: 0.90 of ``limit``.
        low: eviction goes on until occupied memory is at or below this. Default: 8/9 of ``high``,
            and no more than 0.80 of ``limit``.
        limit: beyond this ``torch.OutOfMemoryError`` is raised. Default: the device.
        mode: "allocator", the process allocator, which is the default where it is installed;
            "native", torch's own caching allocator as it is, which is the default elsewhere;
            "mempool", the same with a torch.cuda.MemPool of ours around the `with`.
        config: the same and further settings: a Config, a dict, or a file for `load_config`. The
            arguments here win over it.
        keep: called with a SavedTensorInfo for each saved tensor; True leaves it on the GPU.
        recompute: drop what is sooner made again than moved. "nodes": what autograd's own nodes can
            make, such as the output of a gelu. Modules, such as ``model.layers``, or the model,
            whose blocks are found: what their forward saves too, by running it again as
            ``torch.utils.checkpoint`` does, and only where it was dropped. They must compute the
            same each time. True: the blocks of the models that the first step calls. False: all of
            it is moved. Default: the config's, else "nodes"; False in mode "mempool".
        telemetry: a file to append one JSON line per step to; True takes the config's name for it.
        on_step: called with the `StepStats` of each step once it has ended: when the next one
            begins, or, where nothing that it saved is alive any more, when the pool is left or
            `Pool.step_stats` asked. On that thread. Where it raises, a StagehandWarning says so,
            training goes on, and it is not called again.
        device: default: the current CUDA device.

    What neither these nor the config say may stand in the environment: STAGEHAND_ALLOC_HIGH, _LOW,
    _LIMIT, _MODE, _RECOMPUTE (yes, no, nodes) and _TELEMETRY (a file).

    Raises SizeError and ConfigError for settings that cannot be, ModeError for a mode that is not
    available. The device's own size is checked here once the allocator is installed, and at the
    ``with`` at the latest.
    """
    for name, function in (("keep", keep), ("on_step", on_step)):
        if function is not None and not callable(function):
            what = {"keep": "SavedTensorInfo and returns a bool", "on_step": "StepStats"}[name]
            raise ConfigError(
                f"{name}={shown(function)} cannot be called.",
                f"Give a function that takes a {what}.",
            )
    settings = _DEFAULTS if config is None else config
    if not isinstance(settings, Config):
        settings = load_config(settings)
    given: dict[str, Any] = {"high": high, "low": low, "limit": limit, "mode": mode}
    given |= {"telemetry": telemetry, "device": device}
    marks = None
    if isinstance(recompute, bool) or (isinstance(recompute, str) and recompute == NODES):
        given["recompute"] = recompute
    elif recompute is not None:
        from stagehand_alloc._step import marks as _marks

        marks = _marks.Marks(_marks.modules_of(recompute))
        given["recompute"] = NODES
    said = {name: value for name, value in given.items() if value is not None}
    settings = environment.filled(dataclasses.replace(settings, **said))
    made = Pool(settings, keep, marks or _marks_found(settings), on_step)
    made._prepare()
    return made


def _cuda_is_up() -> bool:
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _marks_found(config: Config) -> Marks | None:
    """Those that a pool finds by itself, where it is to."""
    if config.recompute is not True:
        return None
    from stagehand_alloc._step import marks as _marks

    return _marks.Marks.found()


def _again(
    config: Config, keep: KeepPredicate | None, limits: LaneLimits, on_step: Listener | None
) -> Pool:
    """A pool as `Pool.__reduce__` names it; nothing is opened, whichever machine this is."""
    made = Pool(config, keep, _marks_found(config), on_step)
    made._limits = limits
    return made


def keep(tensor: Tensor) -> Tensor:
    """Leave ``tensor``'s storage on the GPU for as long as autograd keeps it; returns ``tensor``.

    Call it inside a pool, before the operation that saves it.
    """
    from stagehand_alloc._step import hooks as _hooks

    _hooks.keep(tensor)
    return tensor


def _nested(inner: Pool, outer: Pool) -> NestedPoolError:
    if inner.around_script or outer.around_script:
        return NestedPoolError(
            "`python -m stagehand_alloc run` enters a pool around each model, and the script "
            "enters one of its own.",
            "Start the script without `run`, or take the pool out of it.",
        )
    return NestedPoolError(
        "A pool was entered inside " + ("itself." if inner is outer else "another pool."),
        "Use one pool around the whole forward pass; it may be entered again every step.",
    )


def _failed_text(listener: Listener, error: Exception, step: StepStats) -> str:
    """Raises nothing, whatever the listener and its error are."""
    return (
        f"on_step={_name_of(listener)} raised {type(error).__name__}: {in_one_line(error)} "
        f"{_place_of(error)}at the end of step {step.step}. Training goes on.\n"
        "Mend it and make another pool: this one does not call it again."
    )


def _name_of(listener: Listener) -> str:
    try:
        return str(listener.__qualname__)
    except Exception:  # it has none, or its class raises where it is asked
        return shown(listener)


def _place_of(error: Exception) -> str:
    """Where it was raised; nothing where that is this file, which called something of C's."""
    ours, place = _place_of.__code__.co_filename, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        place = "" if file == ours else f"({file}, line {line}) "
    return place


def _shown(size: Size | None) -> str:
    return format_bytes(size) if isinstance(size, int) else str(size)


def _start_torch() -> None:
    """The trigger library and the device's number need torch's CUDA initialised."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]


def _set_lane_limits(device: int, limits: LaneLimits) -> None:
    if not native.set_lane_limits(device, *limits.for_native()):
        raise DriverError(
            f"The driver refused the page of pinned memory that rates need on device {device}.",
            "Leave d2h_bytes_per_second and h2d_bytes_per_second out, or free host memory.",
        )
