"""One process of workloads.py: a worker whose model makes steps of its own kind.

Torch's allocator: plain torch, checkpoints and mode "native" in one process, one after the other.
The process allocator: a process of its own. A mode is "plain", "checkpoint", or a budget's name,
whose pool is then entered. With several ranks this process is rank 0; it starts the others, and
each command goes to all.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import models
import torch
import worker
import workload_models
from digest import digest, seen_by_cublas
from harness import REPLY
from worker import SEED, Marks
from workload_cases import FREE

PATIENCE_SECONDS = 150  # of one command; a collective that one rank left never ends
SETTLING_STEPS = 20  # between two looks at whether other plans are tried
SETTLED_STEPS = 40  # after that; memory is mapped once for each hole that they come to need
SAMPLED_STEPS = 16
TOLD_BY_ALL = ("turn", "gaps", "digests")  # a rank waits for what another one does
PROVING_STEPS = 12  # until what is made again has been proven and planned
LEAD_NUMBERS = 5000  # steps that are not timed have numbers, so data, of their own
COUNTED = (
    *(*worker.COUNTED, "gathers", "grows", "map_calls", "misses", "pageable_copies"),
    *("dropped_bytes", "recomputes", "reruns", "pinning_wait_ns", "copy_wait_ns", "gpu_wait_ns"),
)


@dataclasses.dataclass(frozen=True)
class Settings(worker.Settings):
    deterministic: bool = False
    ranks: int = 1
    rank: int = 0
    meeting: str = ""  # the file where ranks find each other
    marked: str | None = None  # Case


class WorkloadWorker(worker.Worker):
    settings: Settings

    def __init__(self, settings: Settings) -> None:
        if settings.ranks > 1 and not settings.meeting:
            meeting = str(pathlib.Path(tempfile.mkdtemp()) / "meeting")
            settings = dataclasses.replace(settings, meeting=meeting)
        super().__init__(settings)
        self._others = [self._start(rank) for rank in range(1, settings.ranks) if not settings.rank]
        atexit.register(self._end_others)
        self._last: str | None = None  # the mode of the last step
        self._loss: torch.Tensor | None = None  # the last step's
        self._work: workload_models.Workload | None = None
        self._ours: Any = None  # what the modes with a pool add to the model
        self._budgets: Mapping[str, Any] = {}
        if settings.marked == "blocks":
            self.pool_options["recompute"] = True

    def do(self, command: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """On all ranks. The reply is rank 0's, some with the others'; an error of any is raised."""
        faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
        for other in self._others:
            assert other.stdin is not None
            other.stdin.write(json.dumps({"command": command, **request}) + "\n")
            other.stdin.flush()
        try:
            reply = super().do(command, request)
        finally:
            replies = [_read(other) for other in self._others]
            faulthandler.cancel_dump_traceback_later()
        for rank, theirs in enumerate(replies, 1):
            if "error" in theirs:
                raise RuntimeError(f"rank {rank}: {theirs['error']}")
        return {**reply, "others": replies} if replies and command in TOLD_BY_ALL else reply

    def _start(self, rank: int) -> subprocess.Popen[str]:
        settings = dataclasses.replace(self.settings, rank=rank)
        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(settings))]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def _end_others(self) -> None:
        for other in self._others:
            _end(other)

    # --- Commands

    def build(self, budgets: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self.settings.ranks > 1:
            self._meet()
        seen_by_cublas(self.device)
        if self.stagehand is not None:  # the first pool makes the libraries against torch
            with self.stagehand.pool(mode=self.settings.mode):
                pass
        if self.settings.deterministic:  # the compiler's choices too
            torch.use_deterministic_algorithms(True)
            _be_deterministic()
        self._again()
        if self.settings.deterministic:  # what is compiled is compiled here
            self.single("plain", 0)
        name = "CPU" if self.settings.simulated else torch.cuda.get_device_name()
        parameters = sum(p.numel() for p in self._workload.model.parameters())
        place = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
        return {**place, "parameters": parameters}

    def budgets(self, budgets: Mapping[str, Any]) -> dict[str, Any]:
        """Make a pool per budget, by name; FREE has no watermarks."""
        assert self.stagehand is not None
        self._budgets = budgets
        if FREE in budgets:
            self.pools[FREE] = self.stagehand.pool(mode=self.settings.mode)
        return super().budgets({name: one for name, one in budgets.items() if name != FREE})

    def single(self, mode: str, number: int) -> dict[str, Any]:
        """One step, waited for."""
        self._enter(mode)
        before = self._counters()
        began = time.perf_counter()
        loss = self._run(mode, number, lambda _: None)
        self._synchronize()
        wall_ms = (time.perf_counter() - began) * 1e3
        gained = self._gained(before)
        return {"wall_ms": wall_ms, "loss": loss.item(), "gained": gained, **self._peaks()}

    def link(self, count: int = 5) -> dict[str, Any]:
        """As measured with memory that is given back: budgets leave no room for it."""
        found = super().link(count)
        del self._link
        self._last = None
        return found

    def memory(self, mode: str) -> dict[str, Any]:
        """Bytes used at the start of step 0, the largest, and at its peak."""
        self._enter(mode)
        self._training.zero_grad()
        self._synchronize()
        self._reset_peaks()
        start = self._peaks()["peak"]
        self._run(mode, 0, lambda _: None)
        self._synchronize()
        return {"start": start, **self._peaks()}

    def turn(
        self, mode: str, number: int, count: int, lead: int, peaks: bool = False
    ) -> dict[str, Any]:
        """`count` steps from `number` on, back to back, after `lead` that are not timed.

        A step's time is from its start to the next one's on the device's clock; "host_ms" from its
        start until all of it is queued. Only the first starts with nothing queued before it.
        `peaks`: of each step, which costs the host a little.
        """
        self._lead(mode, number, lead)
        before = self._counters()
        self._reset_peaks()
        steps: list[dict[str, float]] = []
        phases: list[tuple[int, str]] = []
        marks = Marks(self.device)
        reserved = 0
        began = time.perf_counter()
        for at in range(count):
            self._mark(marks, phases, at, "forward")
            started = time.perf_counter()
            mark = functools.partial(self._mark, marks, phases, at)
            loss = self._run(mode, number + at, mark)
            steps.append({"ms": 0.0, "host_ms": (time.perf_counter() - started) * 1e3})
            if peaks:
                found = self._peaks()
                reserved = max(reserved, found["mapped_peak"])
                steps[-1].update(found)
                self._reset_peaks()
        marks.add()
        self._synchronize()
        wall_ms = (time.perf_counter() - began) * 1e3 / count
        for (at, phase), ms in zip(phases, marks.gaps_ms(), strict=True):
            for key in ("ms", f"{phase}_ms"):
                steps[at][key] = steps[at].get(key, 0.0) + ms
        found = self._peaks()
        found["mapped_peak"] = max(found["mapped_peak"], reserved)
        gained = self._gained(before)
        state = self.stats().get("plan_state", "")
        told = self.pools[mode].step_stats() if mode in self.pools else {}
        return {
            "number": number,
            "steps": steps,
            "wall_ms": wall_ms,
            "loss": loss.item(),
            "gained": gained,
            "plan_state": state,
            "quiet": int(told.get("quiet", 0)),
            **found,
        }

    def settle(self, mode: str, number: int, most: int) -> dict[str, Any]:
        """Steps that are not timed: until no other plan is tried and then some, or so many.

        Of several ranks so many: one may have settled while another has not.
        """
        ran, more = 0, most
        while more > 0:
            if self.settings.ranks == 1 and self.pools[mode].plan().settled:
                more = min(more, SETTLED_STEPS)
            steps = min(SETTLING_STEPS, more)
            self._lead(mode, number + ran, steps)
            ran, more = ran + steps, more - steps
        return {"settling_steps": ran}

    def calls(self, mode: str, number: int, lead: int) -> dict[str, Any]:
        """The calls to CUDA of one step. To be asked of all modes before "gaps" of any."""
        from driver_calls import DriverCalls, NotSeenError, mapping, summed

        if self.settings.simulated:
            return {"seen": False, "why": "there is no GPU"}
        self._lead(mode, number, lead)
        try:
            calls = DriverCalls()
            with calls:
                self._run(mode, number, lambda _: None)
                self._synchronize()
        except NotSeenError as error:
            return {"seen": False, "why": str(error)}
        rows = calls.found()
        training, elsewhere = summed(rows, True), summed(rows, False)
        return {
            "seen": bool(rows),
            "mapping": mapping(training),
            "mapping_elsewhere": mapping(elsewhere),
            "training": training,
            "elsewhere": elsewhere,
        }

    def samples(self, mode: str, number: int, lead: int) -> dict[str, Any]:
        """Where the host's time goes in some steps. To be asked of all modes before "gaps"."""
        from host_samples import NoSamplesError, sampled

        self._lead(mode, number, lead)
        try:
            with sampled() as found:
                for at in range(SAMPLED_STEPS):
                    self._run(mode, number + at, lambda _: None)
                self._synchronize()
        except NoSamplesError as error:
            return {"seen": False, "why": str(error)}
        return found

    def gaps(self, mode: str, number: int, lead: int) -> dict[str, Any]:
        """When the compute stream of one step was idle."""
        import gaps

        if self.settings.simulated:
            return {"seen": False, "why": "there is no GPU"}
        self._lead(mode, number, lead)
        with gaps.recorded() as found:
            self._run(mode, number, lambda _: None)
        return gaps.described(found)

    def digests(self, mode: str, count: int) -> dict[str, Any]:
        """Of `count` steps from the start, with a model made anew: losses, digests of gradients.

        torch is deterministic from here on, which is slower: after what is timed. Where blocks are
        made again, others come first, until what they make is relied on: that is what is compared.
        """
        _be_deterministic()
        self._again()
        again = mode in self.pools and self.settings.marked is not None
        if again:  # what is marked is of the model that the pool was made for
            self.budgets(self._budgets)
            self._lead(mode, 0, PROVING_STEPS)
        self._enter(mode)
        before = self._counters()
        found = []
        for number in range(count):
            loss = self._run(mode, number, lambda _: None)
            gradients = self._workload.compared()
            if not any(bool(one.any()) for one in gradients):
                raise RuntimeError("all gradients are zero: nothing would be compared")
            found.append([loss.item(), digest(gradients)])
        gained = self._gained(before)
        if again and gained["reruns"] == 0:
            raise RuntimeError("no block was made again in the steps that are compared")
        return {"steps": found, "gained": gained}

    # --- Parts

    @property
    def _workload(self) -> workload_models.Workload:
        if self._work is None:
            raise RuntimeError("no model: build comes first")
        return self._work

    @property
    def _training(self) -> Any:
        return self._workload

    @property
    def _on_cpu(self) -> bool:
        """Nobody counts the memory of plain torch there."""
        return self.settings.simulated and not self._installed

    def _meet(self) -> None:
        settings, dist = self.settings, torch.distributed
        if not settings.simulated:
            torch.cuda.set_device(settings.rank)
        dist.init_process_group(
            "gloo" if settings.simulated else "nccl",
            init_method=f"file://{settings.meeting}",
            rank=settings.rank,
            world_size=settings.ranks,
        )

    def _again(self) -> None:
        """The model anew, from the seed."""
        self._work = self._loss = None
        gc.collect()
        torch.manual_seed(SEED)
        settings = self.settings
        self._work = workload_models.build(settings.model, settings.shape, self.device)
        torch.manual_seed(SEED + 1)  # for dropout
        self._synchronize()
        self._last = None

    def _enter(self, mode: str) -> None:
        """Leave nothing of another mode in the cache, and the model as this mode has it."""
        if mode != self._last:
            if self._ours is not None:
                self._ours.remove()
            add = self._workload.ours if mode in self.pools else None
            self._ours = None if add is None else add()
            self._training.zero_grad()
            self._loss = None
            gc.collect()
            self.empty_cache()
            self._last = mode

    def _lead(self, mode: str, number: int, count: int) -> None:
        self._enter(mode)
        for at in range(max(count, self._forget_budgets()) if mode == FREE else count):
            self._run(mode, LEAD_NUMBERS + number + at, lambda _: None)
        self._synchronize()

    def _forget_budgets(self) -> int:
        """As in a process that has no other: after so many steps the next one is quiet."""
        from stagehand_alloc._step import device, quiet

        for one in device.process.devices():
            one.quiet.forget()
        return quiet.FEW + 1

    def _run(self, mode: str, number: int, phase: workload_models.Phase) -> torch.Tensor:
        """The step's loss, which is kept until the next step's is there, as most programs do."""
        self._workload.zero_grad()
        self._loss = self._workload.step(number, lambda: self._around(mode), phase)
        return self._loss

    def _around(self, mode: str) -> AbstractContextManager[Any]:
        if mode == "plain":
            return contextlib.nullcontext()
        if mode in self.pools and self.settings.marked == "checkpoints":
            return self._around_checkpoints(mode)
        return super()._around("checkpoint:1.0" if mode == "checkpoint" else mode)

    @contextlib.contextmanager
    def _around_checkpoints(self, mode: str) -> Iterator[None]:
        assert self.stagehand is not None
        blocks, when_needed = self._workload.blocks, self.stagehand.when_needed
        with models.Checkpointed(blocks, 1.0, when_needed), self.pools[mode]:
            yield

    def _mark(self, marks: Marks, phases: list[tuple[int, str]], at: int, phase: str) -> None:
        phases.append((at, phase))
        marks.add()

    def _reset_peaks(self) -> None:
        if self.stagehand is not None:
            self.stagehand.reset_peak_stats()
        if not self.settings.simulated and not self._installed:
            torch.cuda.reset_peak_memory_stats()

    def _peaks(self) -> dict[str, int]:
        """Since the last reset: bytes used at most, and mapped, or reserved by torch, at most."""
        if self._on_cpu:
            return {"peak": 0, "mapped_peak": 0}
        if self._installed:
            assert self.stagehand is not None
            stats = self.stagehand.stats()
            return {"peak": stats.occupied_peak, "mapped_peak": stats.mapped_peak}
        cuda = torch.cuda
        return {"peak": cuda.max_memory_allocated(), "mapped_peak": cuda.max_memory_reserved()}

    def _counters(self) -> dict[str, int]:
        stats = self.stats()
        return {name: stats[name] for name in COUNTED if name in stats}


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()


def _be_deterministic() -> None:
    torch.set_deterministic_debug_mode("error")  # the other way imports for seconds
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Another rank's reply."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(REPLY):
            reply: dict[str, Any] = json.loads(line[len(REPLY) :])
            return reply
        sys.stderr.write(line)
    return {"error": f"ended with exit code {process.wait()}"}


COMMANDS = (
    *("build", "budgets", "single", "memory", "turn", "calls", "samples", "gaps", "digests"),
    *("settle", "empty_cache", "link", "trigger", "stats"),
)


def main() -> int:
    if not json.loads(sys.argv[1])["simulated"]:
        # The first checkpoint and the first optimizer import it, which takes seconds: rather now.
        importlib.import_module("torch._dynamo")
    return worker.serve(lambda settings: WorkloadWorker(Settings(**settings)), COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
