"""What one call costs: pack, unpack, alloc and free, in microseconds, beside torch's own.

    python benchmarks/micro.py [--quick] [--simulated]

alloc   torch.empty of 4 MiB            free    dropping that tensor
pack    an operation that saves one tensor of 4 KiB, whose result finds a free block
unpack  reading what that operation saved, as backward does

hit: a free block fits, or the saved tensor is still on the device. grow: memory is mapped for it.
evict one, evict many: the budget is full, and the call evicts one saved tensor of 4 MiB, or 16 (by
asking for 64 MiB). restore: the saved tensor was evicted, and a free block fits. Beside each: the
same calls on torch's own allocator without hooks, which has hit and grow, and nothing else.

Times are the host's, of the call alone: the device is waited for in between, and torch's share of
each call is in both columns. "events" says how often the named thing really happened per call.
Writes benchmarks/results/micro.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness import REPLY, RESULTS, driver_version, refuse_without_gpu, write_result
from measures import percentiles

MIB = 1 << 20
MANY = 16
SMALL_BYTES = 4 << 10


class Micro:
    """The calls, timed in this process: on torch's own allocator, or on ours."""

    def __init__(self, ours: bool, simulated: bool, count: int) -> None:
        import torch

        self.torch = torch
        self.simulated = simulated
        self.count = count
        self.piece = (MIB // 4) if simulated else 4 * MIB
        self.stagehand: Any = None
        self.found: dict[str, Any] = {}
        if ours:
            import stagehand_alloc

            self.stagehand = stagehand_alloc
            if simulated:
                from stagehand_alloc import testing

                testing.simulated_gpu(memory="1GiB")
            else:
                torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
        self.device = torch.device("cpu" if simulated else "cuda")
        self.empty(SMALL_BYTES)

    def run(self) -> dict[str, Any]:
        self.hit()
        self.grow()
        self.saved()
        if self.stagehand is not None:
            self.evict(1)
            self.evict(MANY)
            self.restore()
        cuda = not self.simulated
        return {
            "device": self.torch.cuda.get_device_name() if cuda else "CPU",
            "torch": self.torch.__version__,
            "calls": self.found,
        }

    # --- The cases

    def hit(self) -> None:
        self.empty(self.piece)
        alloc, free = self._alloc_and_free(self.piece, self.count, keep=False)
        self._note("alloc", "hit", alloc)
        self._note("free", "hit", free)

    def grow(self) -> None:
        """Blocks of 64 MiB where nothing is free; each is mapped, or cut from what was."""
        size, batch = (MIB, 8) if self.simulated else (64 * MIB, 64)
        alloc: list[float] = []
        free: list[float] = []
        before = self._counter("grows")
        while len(alloc) < self.count // 40:
            self._settle()
            for found, more in zip(
                (alloc, free), self._alloc_and_free(size, batch, keep=True), strict=True
            ):
                found += more
        self._note("alloc", "grow", alloc, self._counter("grows") - before)
        self._note("free", "after grow", free)

    def saved(self) -> None:
        """pack and unpack of a tensor that stays."""
        x = self.empty(SMALL_BYTES).requires_grad_()
        pack: list[float] = []
        unpack: list[float] = []
        saved, found = self._counter("activations_saved"), self._counter("alias_hits")
        with self._pool():
            y = x * 1.0  # neither a leaf nor older than the pool: these are not packed
            for _ in range(self.count):
                z, took = timed(y.sin)
                pack.append(took)
                unpack.append(timed(lambda: z.grad_fn._saved_self)[1])  # noqa: B023
                self._wait(len(pack))
        self._note("pack", "hit", pack, self._counter("activations_saved") - saved)
        self._note("unpack", "hit", unpack, self._counter("alias_hits") - found)

    def evict(self, many: int) -> None:
        """A budget filled with saved tensors; then blocks that each need `many` of them to go."""
        retained = 4 * MANY
        alloc: list[float] = []
        free: list[float] = []
        evictions = 0
        while len(alloc) < self.count // 40:
            with self._full(retained):
                before = self._evictions()
                taken, freed = self._alloc_and_free(
                    self.piece * many, retained // many // 2, keep=True
                )
                evictions += self._evictions() - before
                alloc += taken
                free += freed
        case = "evict one" if many == 1 else "evict many"
        self._note("alloc", case, alloc, evictions)
        self._note("free", f"after {case}", free)

    def restore(self) -> None:
        """unpack of the last saved tensors after all were evicted, into blocks that are free."""
        unpack: list[float] = []
        restored = 0
        while len(unpack) < self.count // 40:
            with self._full(MANY) as nodes:
                room = self.empty(self.piece * (MANY - 2))
                self._synchronize()
                del room
                before = self._counter("restores")
                # Oldest first: prefetch, which follows the reverse order, brings nothing then.
                for node in nodes[: MANY // 4]:
                    unpack.append(timed(lambda: node._saved_self)[1])  # noqa: B023
                    self._synchronize()
                restored += self._counter("restores") - before
            del nodes, node  # or the graph would live into the next round
        self._note("unpack", "restore", unpack, restored)

    # --- Parts

    def empty(self, size: int) -> Any:
        return self.torch.empty(size // 4, dtype=self.torch.float32, device=self.device)

    @contextlib.contextmanager
    def _full(self, retained: int) -> Any:
        """Inside a budget that `retained` saved tensors fill; gives their nodes, oldest first."""
        self._settle()
        occupied = self.stagehand.stats().occupied
        # The leaf and the newest result are live, and stay.
        high = occupied + (retained + 2) * self.piece
        with self.stagehand.pool(high=high, low=high):
            x = self.empty(self.piece).requires_grad_()
            nodes = []
            y = x * 1.0
            for _ in range(retained):
                y = y.sin()
                nodes.append(y.grad_fn)
            self._synchronize()
            yield nodes
        del y, nodes, x

    def _alloc_and_free(self, size: int, count: int, keep: bool) -> tuple[list[float], list[float]]:
        """Microseconds of each allocation and each free; `keep`: all of them, then all frees."""
        alloc: list[float] = []
        free: list[float] = []
        held: list[Any] = []

        def drop() -> None:
            held.pop()

        for _ in range(count):
            tensor, took = timed(lambda: self.empty(size))
            alloc.append(took)
            held.append(tensor)
            del tensor
            if not keep:
                free.append(timed(drop)[1])
        while held:
            free.append(timed(drop)[1])
        self._synchronize()
        return alloc, free

    def _pool(self) -> AbstractContextManager[Any]:
        """One whose steps are never quiet: its telemetry is to show all that is saved."""
        if self.stagehand is None:
            return contextlib.nullcontext()
        pool: AbstractContextManager[Any] = self.stagehand.pool(telemetry=os.devnull)
        return pool

    def _settle(self) -> None:
        """What holds nothing is given back."""
        self._synchronize()
        if not self.simulated:
            self.torch.cuda.empty_cache()

    def _counter(self, name: str) -> int:
        return 0 if self.stagehand is None else int(getattr(self.stagehand.stats(), name))

    def _evictions(self) -> int:
        return self._counter("clean_evictions") + self._counter("dirty_evictions")

    def _wait(self, at: int) -> None:
        if at % 64 == 0:
            self._synchronize()

    def _synchronize(self) -> None:
        if not self.simulated:
            self.torch.cuda.synchronize()

    def _note(self, call: str, case: str, us: list[float], events: int | None = None) -> None:
        found = {**percentiles(us), "calls": len(us), "mean": round(statistics.mean(us), 3)}
        if events is not None and self.stagehand is not None:
            found["events"] = round(events / len(us), 2)
        self.found[f"{call}, {case}"] = found


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The call's result, and its microseconds."""
    began = time.perf_counter_ns()
    result = call()
    return result, (time.perf_counter_ns() - began) / 1e3


def measure_apart(ours: bool, simulated: bool, count: int) -> dict[str, Any]:
    """Run Micro in a process of its own: the allocator is chosen once per process."""
    settings = json.dumps({"ours": ours, "simulated": simulated, "count": count})
    command = [sys.executable, __file__, "--apart", settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(REPLY)]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"the measuring process ended with exit code {done.returncode}")
    reply: dict[str, Any] = json.loads(lines[-1][len(REPLY) :])
    return reply


def main(argv: list[str] | None = None) -> int:
    """0: measured and written; 1: a measuring process failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--simulated", action="store_true", help="few calls, no GPU")
    parser.add_argument("--out", type=pathlib.Path, help="result file")
    parser.add_argument("--apart", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.apart:
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
        print(REPLY + json.dumps(Micro(**json.loads(options.apart)).run()), flush=True)
        return 0
    refuse_without_gpu("micro", options.simulated)
    count = 200 if options.simulated else 2_000 if options.quick else 20_000
    try:
        plain, ours = (measure_apart(mine, options.simulated, count) for mine in (False, True))
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"micro: {error}", file=sys.stderr)
        return 1
    table = {
        call: {"ours": found, "torch": plain["calls"].get(call)}
        for call, found in ours["calls"].items()
    }
    print_table(table)
    if options.out is not None or not options.simulated:
        result = {
            "device": ours["device"],
            "torch": ours["torch"],
            "driver": driver_version(),
            "unit": "microseconds",
            "calls": table,
        }
        write_result(options.out or RESULTS / "micro.json", result)
    return 0


def print_table(table: dict[str, dict[str, Any]]) -> None:
    names = ("p50", "p99", "p99_9")
    print(f"{'':<24}" + "".join(f"{who + ' ' + n:>13}" for who in ("ours", "torch") for n in names))
    for call, found in table.items():
        cells = [found[who][n] if found[who] else None for who in ("ours", "torch") for n in names]
        texts = "".join(f"{'-' if cell is None else f'{cell:.2f}':>13}" for cell in cells)
        events = found["ours"].get("events")
        print(f"{call:<24}{texts}" + (f"   {events} per call" if events is not None else ""))


if __name__ == "__main__":
    sys.exit(main())
