"""What is cheaper to make again than to move is dropped: step times beside the alternatives.

    python benchmarks/recompute.py [--quick] [--simulated] [--only gpt,llama,vit] [--out FILE]

For each model, in one process under the process allocator: plain steps; `recompute=model` with room
for all; torch.utils.checkpoint on a quarter, half and all of the blocks, and selective, keeping
what products and attention make; at each budget, moving alone and `recompute=model`; and at one
budget of the GPT, the same with a link of 12 GB/s. Plain steps run before and after each, and every
ratio is to the median of the two beside it. Nothing is timed before the GPU has worked without a
pause for a while: its first steps after one are up to 3 % quicker (so is a first step of ours,
which is told beside). A variant of ours first runs until its plans were tried out; what that took
is reported. Gradients are compared with plain torch's, bit by bit, in steps with deterministic
kernels of their own.

Beside the time of a step stands the host's, of forward and of backward: a step here begins behind a
wait for the GPU, so the host has no lead, and a forward that takes it longer is as much longer.

Peaks are of what was occupied, by our own books, checkpointing too. Writes
benchmarks/results/recompute.json; with --quick, without the variants that only move.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness import (
    CUBLAS,
    RESULTS,
    Row,
    driver_version,
    print_rows,
    refuse_without_gpu,
    write_result,
)
from measures import GIB
from shapes import MODELS, TINY_GPT, Shape

os.environ.update(CUBLAS)

# By model: budgets in GiB, and how much of plain torch's time a settled step may take there.
BARS: dict[str, dict[float, float]] = {
    "gpt": {13.0: 1.03, 11.8: 1.035, 11.1: 1.04},
    "llama": {10.6: 1.05, 8.8: 1.09, 6.7: 1.14, 5.4: 1.22},
    "vit": {12.9: 1.04, 8.8: 1.10, 4.4: 1.22},
}
WITH_ROOM = 1.005
SLOW_LINK = "12GB"
SLOWED: dict[str, dict[float, float]] = {"gpt": {13.0: 1.06}}
CHECKPOINTS = (0.25, 0.5, 1.0)
TRIED = 40  # steps, by which plans were tried out
TIMED = 8
BESIDE = 4  # plain steps, before and after
WARM_S = 1.5  # of steps without a pause, by which a GPU has the clock that it keeps


class Bench:
    """One model, and its steps."""

    def __init__(self, kind: str, shape: Shape, simulated: bool) -> None:
        import models
        import torch
        from digest import seen_by_cublas

        torch.manual_seed(0)
        self._device = torch.device("cpu" if simulated else "cuda")
        seen_by_cublas(self._device)
        self.training = models.build(kind, shape, self._device)
        self.plain = contextlib.nullcontext
        self.host: list[tuple[float, float]] = []  # of each step: ms of forward and of backward
        for _ in range(3):
            self.step(self.plain())
        self.rest()
        self.start, self.peak = self.peak_of(self.plain)
        self._expected = self.bits(self.plain(), 1)[0]
        self._before: list[float] = []  # plain steps, before what is measured next

    def synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def rest(self) -> None:
        """Give back what nobody uses, so that each variant begins alike."""
        import torch

        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def step(
        self, around: AbstractContextManager[Any], then: Callable[[], object] = lambda: None
    ) -> float:
        """Forward in ``around``, backward, and what comes ``then``, in ms."""
        self.training.zero_grad()
        self.synchronize()
        began = time.perf_counter()
        with around:
            loss = self.training.loss()
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.host.append(((forward - began) * 1e3, (time.perf_counter() - forward) * 1e3))
        self.synchronize()
        then()
        return (time.perf_counter() - began) * 1e3

    def peak_of(self, around: Callable[[], AbstractContextManager[Any]]) -> tuple[int, int]:
        """Bytes occupied when a step begins, and at most."""
        import stagehand_alloc

        self.training.zero_grad()
        self.synchronize()
        stagehand_alloc.reset_peak_stats()
        start = stagehand_alloc.stats().occupied
        self.step(around())
        return start, stagehand_alloc.stats().occupied_peak

    def bits(self, around: AbstractContextManager[Any], count: int) -> list[str]:
        """A digest of the gradients of each of some steps with deterministic kernels."""
        import torch
        from digest import digest

        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
        found = []
        for _ in range(count):
            self.step(around)
            parameters = self.training.model.parameters()
            found.append(digest(p.grad for p in parameters if p.grad is not None))
        torch.use_deterministic_algorithms(False)
        return found

    def host_ms(self) -> list[float]:
        """Of the last steps, forward and backward, in the median."""
        return [round(statistics.median(one), 2) for one in zip(*self.host[-TIMED:], strict=True)]

    def beside(self, measure: Callable[[], list[float]]) -> tuple[list[float], float]:
        """Times of a variant, and the median of the plain steps before and after it."""
        before = self._before or self._plainly()
        times = measure()
        self._before = self._plainly()
        return times, statistics.median(before + self._before)

    def _plainly(self) -> list[float]:
        self.rest()
        self.warm(self.plain)
        return [self.step(self.plain()) for _ in range(BESIDE)]

    def warm(
        self, around: Callable[[], AbstractContextManager[Any]], least: int = 1
    ) -> list[float]:
        """Steps, some at least, until the GPU keeps its clock."""
        began = time.perf_counter()
        times = [self.step(around()) for _ in range(least)]
        while self._device.type == "cuda" and time.perf_counter() - began < WARM_S:
            times.append(self.step(around()))
        return times

    def checkpointed(self, share: float, selective: bool = False) -> dict[str, Any]:
        from models import Checkpointed, products_kept

        def around() -> Checkpointed:
            return Checkpointed(self.training.blocks, share, products_kept if selective else None)

        def measure() -> list[float]:
            self.warm(around)
            return [self.step(around()) for _ in range(TIMED)]

        times, plain = self.beside(measure)
        _, peak = self.peak_of(around)
        return {
            "share": share,
            "selective": selective,
            "peak_gib": peak / GIB,
            "ratio": statistics.median(times) / plain,
        }

    def ours(
        self, high: int, recompute: bool, steps: int, rate: str | None = None
    ) -> dict[str, Any]:
        import stagehand_alloc

        again = self.training.model if recompute else False
        rates = {"d2h_bytes_per_second": rate, "h2d_bytes_per_second": rate}
        plans: list[list[float]] = []

        def heard(step: stagehand_alloc.StepStats) -> None:
            found = step.numbers()
            moved, dropped = found["spill_bytes"] / GIB, found["dropped_bytes"] / GIB
            plans.append([round(moved, 3), round(dropped, 3), round(found["stall_time_ms"], 2)])

        config = rates if rate else None
        pool = stagehand_alloc.pool(high=high, recompute=again, config=config, on_step=heard)
        tried: list[float] = []
        gained = []

        def measure() -> list[float]:
            self.rest()
            tried.extend(self.warm(lambda: pool, steps))
            before = stagehand_alloc.stats()
            times = [self.step(pool) for _ in range(TIMED)]
            gained.append((stagehand_alloc.stats().since(before), self.host_ms()))
            return times

        times, plain = self.beside(measure)
        plain_host = self.host_ms()
        found, host = gained[0]
        bits = self.bits(pool, 3)
        return {
            "high_gib": high / GIB,
            "recompute": recompute,
            "bytes_per_second": rate,
            "ratio": statistics.median(times) / plain,
            "plain_ms": plain,
            "timed": [round(ms / plain, 3) for ms in times],
            "host_ms": host,  # forward, backward
            "plain_host_ms": plain_host,
            "host_waits": found.host_waits / TIMED,
            "first": tried[0] / plain,
            "tried": [round(ms / plain, 3) for ms in tried],
            "tried_plans": plans[: len(tried)],  # GiB moved, GiB dropped, ms late
            "dropped_gib": found.dropped_bytes / TIMED / GIB,
            "evicted_gib": found.evicted_bytes / TIMED / GIB,
            "reruns": found.reruns / TIMED,
            "over_bytes": found.overshoot_bytes,
            "late_restores": found.prefetch_lates / TIMED,
            "map_calls": found.map_calls / TIMED,
            "bitwise": all(one == self._expected for one in bits),
        }


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    simulated = options.simulated
    bench = Bench(*(("gpt", TINY_GPT) if simulated else MODELS[name]), simulated)
    result: dict[str, Any] = {"start_gib": bench.start / GIB, "peak_gib": bench.peak / GIB}
    room = bench.peak * 2
    bench.ours(room, True, 1)  # builds the libraries where they are not kept
    result["with_room"] = bench.ours(room, True, 3 if simulated else TIMED)
    result["checkpointed"] = [
        *(bench.checkpointed(share) for share in CHECKPOINTS),
        bench.checkpointed(1.0, selective=True),
    ]
    highs = [int(high * GIB) for high in BARS[name]]
    if simulated:
        highs = [bench.start + (bench.peak - bench.start) * 3 // 4]
    ways = (True,) if options.quick else (False, True)
    result["ours"] = [
        bench.ours(high, way, (3 if simulated else TRIED) if way else 6)
        for high in highs
        for way in ways
    ]
    result["slowed"] = [
        bench.ours(int(high * GIB), True, TRIED, SLOW_LINK)
        for high in ({} if simulated else SLOWED.get(name, {}))
    ]
    return result


def claims(name: str, model: dict[str, Any]) -> list[Row]:
    with_room = model["with_room"]
    rows = [
        Row(f"{name}: room for all", with_room["ratio"], at_most=WITH_ROOM),
        Row(f"{name}: room for all, made again", with_room["reruns"], at_most=0),
    ]
    for one in model["checkpointed"]:
        kind = "selective checkpoint" if one["selective"] else "checkpoint"
        what = f"{kind} {one['share']:.0%} of the blocks, {one['peak_gib']:.1f} GiB"
        rows.append(Row(f"{name}: {what}", one["ratio"]))
    for one, bar in zip(
        (one for one in model["ours"] if one["recompute"]), BARS[name].values(), strict=False
    ):
        at = f"{name}: {one['high_gib']:.1f} GiB"
        rows += [
            Row(f"{at}, settled", one["ratio"], at_most=bar),
            Row(f"{at}, first step over a settled one", one["first"] / one["ratio"]),
            Row(f"{at}, map calls", one["map_calls"], at_most=0),
            Row(f"{at}, late restores", one["late_restores"], at_most=0),
            Row(f"{at}, bytes over high", one["over_bytes"], at_most=0),
            Row(f"{at}, bitwise", float(one["bitwise"]), at_least=1),
        ]
    for one in (one for one in model["ours"] if not one["recompute"]):
        rows.append(Row(f"{name}: {one['high_gib']:.1f} GiB, moving alone", one["ratio"]))
    for one, bar in zip(model["slowed"], SLOWED.get(name, {}).values(), strict=False):
        at = f"{name}: {one['high_gib']:.1f} GiB, {one['bytes_per_second']}/s"
        rows.append(Row(at, one["ratio"], at_most=bar))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="without what only moves")
    parser.add_argument("--simulated", action="store_true", help="a tiny model, no GPU")
    parser.add_argument("--only", default=",".join(BARS), help="models")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "recompute.json")
    options = parser.parse_args(argv)
    refuse_without_gpu("recompute.py", options.simulated)
    import torch

    import stagehand_alloc

    with contextlib.ExitStack() as stack:
        if options.simulated:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu(memory="1GiB", seed=1))
        else:
            torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
            torch.backends.cuda.enable_cudnn_sdp(False)  # it has no deterministic kernels
        device = "simulated" if options.simulated else torch.cuda.get_device_name()
        result: dict[str, Any] = {
            "device": device,
            "driver": driver_version(),
            "torch": torch.__version__,
            "models": {},
        }
        for name in options.only.split(","):
            model = run_model(name, options)
            rows = claims(name, model)
            print_rows(rows)
            result["models"][name] = {**model, "rows": [row.as_dict() for row in rows]}
            write_result(options.out, result)  # after each: the next may not end
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
