"""One configuration of a benchmark in its own process: trains when told to, replies on stdout.

Started by harness.Worker with its settings as JSON; then reads one JSON command a line. A step is
told its mode:

plain torch   "native" or "plain", "save_on_cpu", "checkpoint:SHARE", "torchtune", "trl"
ours          "plain" (no pool entered), "default" (pool() without arguments), or a budget's name

Nothing of stagehand_alloc is touched where the configuration is plain torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import models
import torch
from digest import digest, seen_by_cublas
from harness import REPLY
from measures import percentiles

SEED = 4
MOST_SETTLING_STEPS = 80
LINK_BYTES = 256 << 20
PINNED_SLABS = {16: 64, 64: 16, 256: 8}  # MiB: count, 4 GiB together
TINY_PINNED_SLABS = {1: 4, 4: 1}
PINNED_TIMEOUT_SECONDS = 4
OFFLOADERS = {
    "torchtune": ("torchtune.training", "OffloadActivations"),
    "trl": ("trl.models.activation_offloading", "OffloadActivations"),
}
COUNTED = (
    *("evicted_bytes", "restored_bytes", "overshoot_bytes", "clean_evictions", "dirty_evictions"),
    *("write_backs", "restores", "prefetches", "prefetch_hits", "prefetch_lates"),
    *("stall_count", "stall_ns", "host_waits", "pool_misses", "activations_saved"),
)
Watermarks = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Settings:
    """`ours`: through stagehand_alloc. `model` and `shape`: see models.py.

    `mode`: of the pools, on torch's own caching allocator; None is the process allocator.
    `around_backward`: the pool is entered around backward too. `use_on_oom`: of mode "mempool".
    """

    ours: bool
    model: str
    shape: dict[str, Any]
    simulated: bool
    mode: str | None = None
    around_backward: bool = False
    use_on_oom: bool = False


class Worker:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device("cpu" if settings.simulated else "cuda")
        if settings.simulated:
            torch.set_num_threads(1)  # tiny models: threads would wait for each other
        self.stagehand = self._install() if settings.ours else None
        self.pools: dict[str, Any] = {}
        self.pool_options: dict[str, Any] = {}  # of those that have a budget
        self._built: models.Training | None = None

    def _install(self) -> Any:
        import stagehand_alloc

        if self.settings.simulated:
            from stagehand_alloc import testing

            testing.simulated_gpu(memory="1GiB", seed=SEED)
        elif self.settings.mode is None:
            torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
        return stagehand_alloc

    def do(self, command: str, request: Mapping[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = getattr(self, command)(**request)
        return reply

    # --- Commands

    def build(self, budgets: Mapping[str, Watermarks] | None = None) -> dict[str, Any]:
        """Make the pools, then the model; says where this runs."""
        seen_by_cublas(self.device)
        self.budgets(budgets or {})
        torch.manual_seed(SEED)
        self._built = models.build(self.settings.model, self.settings.shape, self.device)
        self._synchronize()
        name = "CPU" if self.settings.simulated else torch.cuda.get_device_name()
        parameters = sum(p.numel() for p in self._built.model.parameters())
        return {"device": name, "torch": torch.__version__, "parameters": parameters}

    def budgets(self, budgets: Mapping[str, Watermarks]) -> dict[str, Any]:
        """Make a pool per budget, by name."""
        for name, (high, low) in budgets.items():
            assert self.stagehand is not None, "plain torch has no budget"
            self.pools[name] = self.stagehand.pool(
                high=high, low=low, mode=self.settings.mode, **self.pool_options
            )
        # In torch's cache the engine awaits an optimizer's first step. This one keeps nothing.
        self._optimizer = torch.optim.SGD([torch.zeros(1, device=self.device)], lr=0)
        self._optimizer.step()
        return {}

    def modes(self) -> dict[str, Any]:
        """Which ways of plain torch to save memory can be imported here."""
        return {"modes": [name for name in OFFLOADERS if _offloader(name) is not None]}

    def steps(
        self, mode: str, count: int, lead: int = 0, lead_seconds: float = 0
    ) -> dict[str, Any]:
        """`count` timed steps, after at least `lead` steps and `lead_seconds` that are not.

        Counters of the replied "gained" are of the timed steps alone.
        """
        began = time.perf_counter()
        led = 0
        while led < lead or time.perf_counter() - began < lead_seconds:
            self._step(mode)
            led += 1
        before = self._counters()
        timed = [self._step(mode) for _ in range(count)]
        stats = self.stats()
        gained = {name: stats[name] - value for name, value in before.items()}
        reply = {key: [step[key] for step in timed] for key in timed[0]}
        return {**reply, "stats": stats, "gained": gained}

    def until_settled(self, mode: str) -> dict[str, Any]:
        """Steps until no other plan is tried, at most MOST_SETTLING_STEPS; what they took."""
        before = self._counters()
        wall_ms: list[float] = []
        while len(wall_ms) < MOST_SETTLING_STEPS and not self.pools[mode].plan().settled:
            wall_ms.append(self._step(mode)["wall_ms"])
        return {"wall_ms": wall_ms, "gained": self._gained(before)}

    def memory(self, mode: str) -> dict[str, Any]:
        """One step with fresh peaks: bytes at its start, its peaks, its loss and gradient norm."""
        self._training.zero_grad()
        self._synchronize()
        if self._installed:
            assert self.stagehand is not None
            self.stagehand.reset_peak_stats()
            start = self.stagehand.stats().occupied
            step = self._step(mode)
            after = self.stagehand.stats()
            peaks = {"peak": after.occupied_peak, "mapped_peak": after.mapped_peak}
        elif self.settings.simulated:
            start, peaks = 0, {"peak": 1, "mapped_peak": 1}
            step = self._step(mode)
        else:
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            step = self._step(mode)
            reserved = torch.cuda.max_memory_reserved()
            peaks = {"peak": torch.cuda.max_memory_allocated(), "mapped_peak": reserved}
        return {"start": start, **peaks, "loss": step["loss"], **self._gradient()}

    def reserved(self) -> dict[str, Any]:
        """Peaks since the process started, or since `memory`; the largest segment of torch's."""
        mapped = self.stats().get("mapped_peak", 0)
        if self._installed or self.settings.simulated:
            return {"peak": mapped or 1, "mapped_peak": mapped, "largest_segment": 0}
        sizes = [segment["total_size"] for segment in torch.cuda.memory_snapshot()]
        peak = torch.cuda.max_memory_reserved()
        return {"peak": peak, "mapped_peak": mapped, "largest_segment": max(sizes, default=0)}

    def trigger(self) -> dict[str, Any]:
        """Whether the trigger library is in use, of the pools entered so far."""
        states = {pool.stats().trigger for pool in self.pools.values()}
        return {"states": sorted(states - {""})}

    def digests(self, mode: str, count: int) -> dict[str, Any]:
        """The loss and a digest of all gradients of each of `count` steps, bitwise comparable.

        torch is deterministic from here on, which is slower: after what is timed.
        """
        torch.use_deterministic_algorithms(True)
        filling: Any = torch.utils.deterministic
        filling.fill_uninitialized_memory = False
        before = self._counters()
        found = []
        for _ in range(count):
            loss = self._step(mode)["loss"]
            grads = [p.grad for p in self._training.model.parameters() if p.grad is not None]
            found.append([loss, digest(grads)])
        return {"steps": found, "gained": self._gained(before)}

    def empty_cache(self) -> dict[str, Any]:
        """Give back what holds nothing, of the device's memory and of what torch has pinned."""
        self._training.zero_grad()
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            if hasattr(torch.accelerator, "empty_host_cache"):  # newer torch
                torch.accelerator.empty_host_cache()
        return {}

    def release_pinned(self) -> dict[str, Any]:
        """Give back the pinned memory of our pools; what is needed is pinned again."""
        self._synchronize()
        return {"bytes": sum(pool.release_pinned() for pool in self.pools.values())}

    def link(self, count: int = 5) -> dict[str, Any]:
        """Bytes per second of pinned copies each way, the median of `count`."""
        size = 1 << 20 if self.settings.simulated else LINK_BYTES
        if not hasattr(self, "_link"):
            pin = not self.settings.simulated
            host = torch.ones(size, dtype=torch.uint8, pin_memory=pin)
            self._link = host, torch.ones(size, dtype=torch.uint8, device=self.device)
        host, far = self._link
        found = {}
        for name, to, source in (("d2h", host, far), ("h2d", far, host)):
            taken = []
            for _ in range(count + 1):
                marks = Marks(self.device)
                marks.add()
                to.copy_(source, non_blocking=True)
                marks.add()
                self._synchronize()
                taken += marks.gaps_ms()
            found[name] = size / statistics.median(taken[1:]) * 1e3
        return found

    def saved(self, mode: str) -> dict[str, Any]:
        """How many storages one forward makes records of; the graph is dropped after it."""
        assert self.stagehand is not None
        with self._around(mode):
            loss = self._training.loss()
        found = self.stagehand.stats().records
        del loss
        self._synchronize()
        return {"records": found}

    def foreign(self, mode: str, count: int, idle_seconds: float = 0.5) -> dict[str, Any]:
        """Times of small foreign copies, idle and while backward runs, in microseconds.

        The device is waited for between forward and backward, so that only backward is timed.
        """
        from foreign import ForeignCopies

        copies = ForeignCopies(self.settings.simulated)
        self._step(mode)
        with copies:
            idle_from = time.perf_counter_ns()
            time.sleep(idle_seconds)
            idle = [(idle_from, time.perf_counter_ns())]
            spans = [self._step(mode, apart=True)["backward_span"] for _ in range(count)]
        beside = [copies.between(found) for found in (idle, spans)]
        named = zip(("idle", "backward"), beside, strict=True)
        return {name: {**percentiles(us), "copies": len(us)} for name, us in named}

    def pinned(self) -> dict[str, Any]:
        """How long a pool of 4 GiB takes to be pinned, from its creation. Builds no model."""
        assert self.stagehand is not None
        sizes = TINY_PINNED_SLABS if self.settings.simulated else PINNED_SLABS
        target = sum(size * count for size, count in sizes.items()) << 20
        config = self.stagehand.Config(
            pinned_pool_classes_mb=tuple(sizes),
            slabs_per_class=tuple(sizes.values()),
            host_limit=2 * target,
        )
        torch.zeros(1, device=self.device)  # the context is not what is measured
        self._synchronize()
        reached, now = 0, 0.0
        began = time.perf_counter()
        with self.stagehand.pool(config=config):
            pass
        patience = 0.5 if self.settings.simulated else PINNED_TIMEOUT_SECONDS
        while reached < target and now < patience:
            reached = self.stagehand.stats().pinned_bytes
            now = time.perf_counter() - began
            time.sleep(2e-4)
        return {"seconds": now, "bytes": min(reached, target), "target": target}

    def allocations(self, sizes: list[int], count: int) -> dict[str, Any]:
        """p50 in microseconds of one allocation and free that finds a free block, by size."""
        return {str(size): self._allocation_us(size, count) for size in sizes}

    def stats(self) -> dict[str, Any]:
        return {} if self.stagehand is None else dataclasses.asdict(self.stagehand.stats())

    # --- Parts

    @property
    def _installed(self) -> bool:
        """Whether the process allocator is what torch allocates from."""
        return self.stagehand is not None and self.settings.mode is None

    @property
    def _training(self) -> models.Training:
        if self._built is None:
            raise RuntimeError("no model: build comes first")
        return self._built

    def _step(self, mode: str, apart: bool = False) -> dict[str, Any]:
        """Forward in `mode`, backward after it, timed by the host and by the device."""
        self._training.zero_grad()
        self._synchronize()
        marks = Marks(self.device)
        began = time.perf_counter()
        marks.add()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._around(mode))
            loss = self._training.loss()
            if self.settings.around_backward:  # on this thread: a MemPool is entered per thread
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            else:
                stack.close()
            if apart:
                self._synchronize()
            marks.add()
            backward_from = time.perf_counter_ns()
            torch.autograd.backward(loss)
            marks.add()
        self._synchronize()
        ended = time.perf_counter_ns()
        wall_ms = (time.perf_counter() - began) * 1e3
        forward_ms, backward_ms = marks.gaps_ms()
        return {
            "wall_ms": wall_ms,
            "forward_ms": forward_ms,
            "backward_ms": backward_ms,
            "loss": loss.item(),
            "backward_span": (backward_from, ended),
        }

    def _around(self, mode: str) -> AbstractContextManager[Any]:
        if mode in ("native", "plain"):
            return contextlib.nullcontext()
        if mode == "save_on_cpu":
            pin = not self.settings.simulated
            return torch.autograd.graph.save_on_cpu(pin_memory=pin)
        if mode.startswith("checkpoint:"):
            return models.Checkpointed(self._training.blocks, float(mode.split(":")[1]))
        if mode in OFFLOADERS:
            offloader: AbstractContextManager[Any] = _offloader(mode)()
            return offloader
        if mode == "default" and mode not in self.pools:
            assert self.stagehand is not None
            self.pools[mode] = self.stagehand.pool(mode=self.settings.mode)
        pool: Any = self.pools[mode]
        if self.settings.use_on_oom and pool.mem_pool is None:
            from stagehand_alloc._torch_side import modes as _modes

            pool._mem_pool = _modes.make_mem_pool(torch.cuda.current_device(), use_on_oom=True)
        entered: AbstractContextManager[Any] = pool
        return entered

    def _gradient(self) -> dict[str, float]:
        """The norm of all gradients: backward's own sums differ in their last bits between runs."""
        grads = [p.grad for p in self._training.model.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        return {"gradient_norm": torch.stack(norms).norm().item()}

    def _counters(self) -> dict[str, int]:
        if self.stagehand is None:
            return {}
        stats = self.stats()
        return {name: stats[name] for name in COUNTED}

    def _gained(self, before: Mapping[str, int]) -> dict[str, int]:
        after = self._counters()
        return {name: after[name] - value for name, value in before.items()}

    def _allocation_us(self, size: int, count: int) -> float:
        def allocate_and_free() -> None:
            torch.empty(size, dtype=torch.uint8, device=self.device)

        taken = []
        for _ in range(count):
            began = time.perf_counter_ns()
            allocate_and_free()
            taken.append(time.perf_counter_ns() - began)
        return sorted(taken)[count // 2] / 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _offloader(name: str) -> Any:
    """The class that offloads activations in another package, or None where that is missing."""
    module, attribute = OFFLOADERS[name]
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


class Marks:
    """Points on the device's own clock; the host's clock where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._event: Any = torch.cuda.Event
        self._events: list[Any] = []

    def add(self) -> None:
        if self._cuda:
            event = self._event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._events.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        pairs = zip(self._events, self._events[1:], strict=False)
        return [a.elapsed_time(b) if self._cuda else (b - a) * 1e3 for a, b in pairs]


COMMANDS = (
    *("build", "budgets", "modes", "steps", "until_settled", "memory", "reserved", "trigger"),
    "digests",
    "empty_cache",
    "release_pinned",
    *("link", "saved", "foreign", "pinned", "allocations", "stats"),
)


def reply(content: dict[str, Any]) -> None:
    print(REPLY + json.dumps(content), flush=True)


def serve(make: Callable[[dict[str, Any]], Worker], commands: Sequence[str]) -> int:
    """Answer one command a line; `make` is called for the first, with the settings."""
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            if command not in commands:
                raise ValueError(f"unknown command {command!r}")
            worker = worker or make(json.loads(sys.argv[1]))
            reply(worker.do(command, request))
        except Exception as error:
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})
    return 0


def main() -> int:
    return serve(lambda settings: Worker(Settings(**settings)), COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
