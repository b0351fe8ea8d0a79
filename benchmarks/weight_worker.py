"""One process of weights.py: it measures one case.

All of it is deterministic. The model is made the same in each case; three steps are compared with
plain torch's, some more settle, and then steps are timed that follow each other.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import weight_anchors
import worker
from digest import seen_by_cublas
from torch import Tensor, nn
from weight_anchors import AbsentError, Setup
from weight_cases import GB, Case, Result
from weight_models import block_bytes, build

COMPARED = 3  # steps
PARTS = 3  # steps whose forward and backward are timed apart
SIMULATED_RATE = 55e6  # bytes per ms
SMALL = 1 << 18  # where all is trained, gradients of no more numbers are compared


class Place:
    """The GPU, or the simulated one: waiting for it, and its memory in bytes."""

    def __init__(self, simulated: bool) -> None:
        self.simulated = simulated
        self.device = torch.device("cpu") if simulated else torch.device("cuda", 0)
        if simulated:
            from stagehand_alloc import testing

            torch.set_num_threads(1)  # tiny models: threads would wait for each other
            testing.simulated_gpu(memory="1GiB")

    def timed(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """In ms, until what it queued to compute is done, as `loss.item()` would wait for it."""
        self.wait()
        began = time.perf_counter()
        found = function()
        self.wait()
        return (time.perf_counter() - began) * 1e3, found

    def wait(self) -> None:
        if not self.simulated:
            torch.cuda.current_stream().synchronize()

    def allocated(self) -> int:
        return self._stats().live if self.simulated else torch.cuda.memory_allocated()

    def empty_cache(self) -> None:
        if not self.simulated:
            torch.cuda.empty_cache()

    def peaks(self) -> tuple[int, int]:
        """Allocated, and taken from the GPU, since reset_peaks()."""
        if self.simulated:
            stats = self._stats()
            return stats.live_peak, stats.mapped_peak
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def reset_peaks(self) -> None:
        if self.simulated:
            import stagehand_alloc

            stagehand_alloc.reset_peak_stats()
        else:
            torch.cuda.reset_peak_memory_stats()

    def link(self) -> tuple[float, float]:
        """To the GPU and from it, in bytes per ms, of pinned memory."""
        if self.simulated:
            return SIMULATED_RATE, SIMULATED_RATE
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        rates = []
        for into, out in ((there, host), (host, there)):
            copy = functools.partial(into.copy_, out, non_blocking=True)
            copy()
            rates.append(host.nbytes / min(self.timed(copy)[0] for _ in range(5)))
        return rates[0], rates[1]

    @staticmethod
    def _stats() -> Any:
        import stagehand_alloc

        return stagehand_alloc.stats()


class CaseWorker:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.use_deterministic_algorithms(True)  # else attention's backward is not
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
        self.simulated = bool(settings["simulated"])

    def do(self, command: str, request: Mapping[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = getattr(self, command)(**request)
        return reply

    def place(self) -> dict[str, Any]:
        """Where this runs. The libraries against torch are built here, and in no case's time."""
        name = "CPU" if self.simulated else torch.cuda.get_device_name()
        place = Place(self.simulated)
        link = place.link()
        if not self.simulated:
            shape: dict[str, Any] = {"width": 128, "hidden": 512, "layers": 2, "heads": 4}
            tiny = Case("tiny", 32, kind="ours", offload=True, warm=0, steps=1, **shape)
            Measured(tiny, place, Result(tiny.name, high=GB))
        return {
            "device": name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "link": link,
        }

    def measure(self, case: Mapping[str, Any], high: int, patience: float) -> dict[str, Any]:
        """`high` in bytes. After `patience` seconds the process ends, and says where it was."""
        faulthandler.dump_traceback_later(patience, exit=True)
        one = Case(**{**case, "needs": tuple(case["needs"])})
        result = Result(one.name, high=high)
        try:
            Measured(one, Place(self.simulated), result)
        except AbsentError as error:
            result.absent = str(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return {"result": dataclasses.asdict(result)}


def ours(case: Case, place: Place, high: int) -> tuple[Setup, Any]:
    import stagehand_alloc

    model = build(case, place.device, torch.device("cpu") if case.offload else None)
    load, _ = place.timed(
        lambda: case.offload and stagehand_alloc.offload(model, trained=case.full)
    )
    place.empty_cache()
    pool = stagehand_alloc.pool(high=high)
    if case.link:
        pool.limits(h2d_bytes_per_second=int(case.link * GB))
    setup = Setup(model, around=pool, load=load)
    if not case.forward_only:
        setup.optimizer = weight_anchors.adamw(model)
        if case.full:
            stagehand_alloc.offload_optimizer(setup.optimizer)
    return setup, stagehand_alloc


def load_kernels(case: Case, place: Place) -> None:
    """A step of one block by itself, and its memory is given back.

    CUDA loads a kernel when it is first launched. That is 0.1 s of a first step, plain torch's too,
    and nothing that a first step is to be judged by.
    """
    model = build(dataclasses.replace(case, layers=1), place.device)
    with torch.set_grad_enabled(not case.forward_only):
        loss = model(batch_of(case, place))
    if not case.forward_only:
        loss.backward()
        weight_anchors.adamw(model).step()
    del model, loss
    place.empty_cache()


def batch_of(case: Case, place: Place) -> Tensor:
    torch.manual_seed(1)
    shape = (1, case.tokens, case.width)
    batch = torch.randn(shape, device=place.device, dtype=torch.bfloat16)
    return batch.requires_grad_(case.checkpoint)


def set_up(case: Case, place: Place, high: int) -> tuple[Setup, Any]:
    """And the package, where it is ours."""
    if case.mode == "allocator" and not place.simulated:
        import stagehand_alloc

        torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
    if case.expandable and not place.simulated:
        set_allocator: Any = torch.cuda.memory
        set_allocator._set_allocator_settings("expandable_segments:True")
    seen_by_cublas(place.device)
    load_kernels(case, place)
    if case.kind == "ours":
        return ours(case, place, high)
    library, _, level = case.kind.partition(" ")
    make = getattr(weight_anchors, library)
    if level:
        make = functools.partial(make, level)
    return make(case, place.device), None


def hashed(tensors: list[Tensor]) -> str:
    """Of their bits and their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        here = tensor.detach().cpu().contiguous()
        found.update(ctypes.string_at(here.data_ptr(), here.nbytes))
    return found.hexdigest()[:16]


class Measured:
    """Fills in a result."""

    def __init__(self, case: Case, place: Place, result: Result) -> None:
        self.case, self.place, self.result = case, place, result
        self.setup, stagehand = set_up(case, place, result.high)
        model = self.setup.model
        result.load = self.setup.load
        sizes = block_bytes(model, case.full)
        result.weights, result.group = sum(sizes), max(sizes)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.compared = [p for p in trained if not case.full or p.numel() <= SMALL]
        self.batch = batch_of(case, place)
        self._compare()
        for _ in range(case.warm):
            self._step()
        place.wait()
        before = stagehand.stats() if stagehand is not None else None
        result.start = place.allocated()
        place.reset_peaks()
        result.step = statistics.median(self._in_a_row(case.steps))
        if stagehand is not None:
            counted(result, stagehand.stats().since(before), case.steps)
            result.pinned = stagehand.stats().weights_pinned_bytes
        result.peak, result.reserved = place.peaks()
        self._parts()

    def _forward(self) -> Tensor:
        with torch.set_grad_enabled(not self.case.forward_only), self.setup.around:
            loss: Tensor = self.setup.model(self.batch)
        return loss

    def _backward(self, loss: Tensor) -> None:
        if not self.case.forward_only:
            loss.backward()

    def _update(self, step: bool = True) -> None:
        optimizer = self.setup.optimizer
        if optimizer is not None and step:
            optimizer.step()
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        else:
            self.setup.model.zero_grad(set_to_none=True)

    def _step(self) -> None:
        loss = self._forward()
        self._backward(loss)
        self._update()

    def _in_a_row(self, steps: int) -> list[float]:
        """ms of each, from its start to the next one's on the device's clock.

        Nobody waits in between, as in training: what a step still copies as it ends goes on beside
        the next one.
        """
        marks = worker.Marks(self.place.device)
        for _ in range(steps):
            marks.add()
            self._step()
        marks.add()
        self.place.wait()
        return marks.gaps_ms()

    def _forward_and_backward(self) -> Tensor:
        loss = self._forward()
        self._backward(loss)
        return loss

    def _compare(self) -> None:
        for i in range(COMPARED):
            took, loss = self.place.timed(self._forward_and_backward)
            self.result.first = self.result.first if i else took
            if i < self.setup.same_steps:
                found = [self._gradient(p) for p in self.compared]
                found = [gradient for gradient in found if gradient is not None]
                self.result.digests.append(hashed([loss.reshape(1), *found]))
                del found
            self._update()
            del loss

    def _gradient(self, p: nn.Parameter) -> Tensor | None:
        return self.setup.gradient(p)

    def _parts(self) -> None:
        parts = []
        for _ in range(PARTS):
            took, loss = self.place.timed(self._forward)
            self.result.held = self.place.allocated()
            parts.append((took, self.place.timed(functools.partial(self._backward, loss))[0]))
            self._update(step=False)
            del loss
        forward, backward = (statistics.median(one) for one in zip(*parts, strict=True))
        self.result.forward, self.result.backward = forward, backward


def counted(result: Result, stats: Any, steps: int) -> None:
    """What the package counted during so many steps."""
    result.overshoot = stats.overshoot_bytes
    result.host_waits, result.map_calls = stats.host_waits / steps, stats.map_calls / steps
    result.waited_ms = {
        what: round(getattr(stats, f"{what}_wait_ns") / 1e6 / steps, 3)
        for what in ("pinning", "copy", "gpu")
    }
    result.h2d, result.d2h = stats.h2d_bytes / steps, stats.d2h_bytes / steps
    result.dropped = stats.dropped_bytes / steps
    result.written = stats.weights_written_bytes / steps
    result.loads, result.late = stats.weights_loads / steps, stats.weights_late / steps
    result.loaded = stats.weights_loaded_bytes / steps


def main() -> int:
    make: Any = CaseWorker
    return worker.serve(make, ("place", "measure"))


if __name__ == "__main__":
    sys.exit(main())
