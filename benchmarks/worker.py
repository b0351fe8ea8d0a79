"""One configuration of a benchmark in its own process: trains when told to, replies on stdout.

Started by harness.Worker with its settings as JSON; then reads one JSON command a line.
Nothing of stagehand_alloc is touched where the configuration is plain torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
import traceback
from contextlib import AbstractContextManager
from typing import Any

import torch
from harness import REPLY

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from stagehand_alloc._demo_gpt import GPT, Shape, parameter_count

SEED = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """`kind`: "native", "save_on_cpu" or "stagehand". Watermarks in bytes, None: no budget."""

    kind: str
    shape: dict[str, Any]
    batch: int
    simulated: bool
    high: int | None = None
    low: int | None = None


class Worker:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ours = settings.kind == "stagehand"
        self.device = torch.device("cpu" if settings.simulated else "cuda")
        self.stagehand = self._install() if self.ours else None
        torch.manual_seed(SEED)
        shape = Shape(**settings.shape)
        dtype = torch.float32 if settings.simulated else torch.bfloat16
        with self.device:
            self.model = GPT(shape).to(dtype)
            tokens = torch.randint(shape.vocabulary, (settings.batch, shape.context + 1))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.pool = self._pool()

    def _install(self) -> Any:
        import stagehand_alloc

        if self.settings.simulated:
            from stagehand_alloc import testing

            testing.simulated_gpu(memory="1GiB", seed=SEED)
        else:
            torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
        return stagehand_alloc

    def _pool(self) -> AbstractContextManager[Any] | None:
        if self.stagehand is None:
            return None
        if self.settings.high is None:
            return self.stagehand.pool()
        return self.stagehand.pool(high=self.settings.high, low=self.settings.low)

    # --- Commands

    def describe(self) -> dict[str, Any]:
        """Where this runs."""
        name = "CPU" if self.settings.simulated else torch.cuda.get_device_name()
        return {"device": name, "torch": torch.__version__, "parameters": self._parameters()}

    def steps(self, count: int, armed: bool = True) -> dict[str, Any]:
        """Forward and backward `count` times, in the pool where there is one and `armed`."""
        timed = [self._step(armed) for _ in range(count)]
        reply = {key: [step[key] for step in timed] for key in timed[0]}
        return {**reply, "stats": self.stats()}

    def memory(self, armed: bool = True) -> dict[str, Any]:
        """One step with fresh peaks: bytes held at its start, and its peaks."""
        self.model.zero_grad(set_to_none=True)
        self._synchronize()
        if self.stagehand is None:
            if self.settings.simulated:
                return {}
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            self._step(armed)
            return {"start": start, "peak": torch.cuda.max_memory_allocated()}
        self.stagehand.reset_peak_stats()
        start = self.stagehand.stats().occupied
        self._step(armed)
        after = self.stagehand.stats()
        return {"start": start, "peak": after.occupied_peak, "mapped_peak": after.mapped_peak}

    def allocations(self, sizes: list[int], count: int) -> dict[str, Any]:
        """p50 in microseconds of one allocation and free that finds a free block, by size."""
        return {str(size): self._allocation_us(size, count) for size in sizes}

    def stats(self) -> dict[str, Any]:
        return {} if self.stagehand is None else dataclasses.asdict(self.stagehand.stats())

    # --- Parts

    def _step(self, armed: bool) -> dict[str, float]:
        self.model.zero_grad(set_to_none=True)
        self._synchronize()
        marks = _Marks(self.device)
        began = time.perf_counter()
        marks.add()
        with self._around(armed):
            loss = self.model(*self.batch)
        marks.add()
        loss.backward()
        marks.add()
        self._synchronize()
        wall_ms = (time.perf_counter() - began) * 1e3
        forward_ms, backward_ms = marks.gaps_ms()
        return {"wall_ms": wall_ms, "forward_ms": forward_ms, "backward_ms": backward_ms}

    def _around(self, armed: bool) -> AbstractContextManager[Any]:
        if self.settings.kind == "save_on_cpu":
            pin = not self.settings.simulated
            return torch.autograd.graph.save_on_cpu(pin_memory=pin)
        return self.pool if armed and self.pool is not None else contextlib.nullcontext()

    def _allocation_us(self, size: int, count: int) -> float:
        def allocate_and_free() -> None:
            torch.empty(size, dtype=torch.uint8, device=self.device)

        taken = []
        for _ in range(count):
            began = time.perf_counter_ns()
            allocate_and_free()
            taken.append(time.perf_counter_ns() - began)
        return sorted(taken)[count // 2] / 1e3

    def _parameters(self) -> int:
        return parameter_count(self.model)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Marks:
    """Points on the device's own clock; the host's clock where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[Any] = []

    def add(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._events.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        pairs = zip(self._events, self._events[1:], strict=False)
        return [a.elapsed_time(b) if self._cuda else (b - a) * 1e3 for a, b in pairs]


COMMANDS = ("describe", "steps", "memory", "allocations", "stats")


def reply(content: dict[str, Any]) -> None:
    print(REPLY + json.dumps(content), flush=True)


def main() -> int:
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            if command not in COMMANDS:
                raise ValueError(f"unknown command {command!r}")
            worker = worker or Worker(Settings(**json.loads(sys.argv[1])))
            reply(getattr(worker, command)(**request))
        except Exception as error:
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
