"""`python -m stagehand_alloc demo`: one GPT trained twice, without a budget and under one.

The second run gets a budget that its activations do not fit. Every loss and every gradient of every
step is compared bit by bit with the first run's. On a GPU where there is one, in any mode, else CPU
torch on the simulated GPU: the bytes and the results are real there, the times are those of this
machine's CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import os
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import stagehand_alloc
from stagehand_alloc._cli.demo_gpt import GPT, Shape, parameter_count
from stagehand_alloc._errors import ModeError
from stagehand_alloc._extension import native
from stagehand_alloc._settings.config import MODES, Mode

MIB = 1 << 20
CORPUS_BYTES = 4 * MIB
SEED = 20
EXIT_DIFFERENT = 1
EXIT_NOT_RUN = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained, where, and the share of the activation memory the second run may use."""

    shape: Shape
    batch: int
    steps: int
    share: float
    device: torch.device
    place: str
    mode: Mode = "allocator"


@dataclasses.dataclass(frozen=True)
class Budget:
    """Watermarks in bytes."""

    high: int
    low: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run did. Sizes in bytes, times in seconds."""

    parameters: int
    losses: list[float]
    digests: list[dict[str, str]]  # per step: "loss" and every parameter's gradient -> sha256
    step_seconds: float
    start_bytes: int  # occupied at the start of a step: weights and optimizer state
    occupied_peak: int
    mapped_peak: int
    evicted_bytes: int
    restored_bytes: int
    over_bytes: int = 0  # of segments that were asked for above high
    trigger: str = ""  # whether the trigger library was in use, where the mode has one


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code.

    0: equal, and in mode "allocator" inside the budget; the others say by how much it was exceeded.
    1: a loss or a gradient differs, or the process allocator's budget was not kept. 2: it could not
    be run; the reason is on stderr.
    """
    options = _parse(argv)
    try:
        plan = _plan(options)
        corpus = _read_corpus()
        with _deterministic():
            free, capped, budget = _train_twice(plan, corpus)
    except (stagehand_alloc.StagehandError, OSError, RuntimeError, ValueError) as error:
        print(f"stagehand_alloc demo: {error}", file=sys.stderr)
        return EXIT_NOT_RUN
    return _report(plan, corpus, free, capped, budget)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stagehand_alloc demo",
        description="Train a GPT without a budget, then under one, and compare every gradient.",
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default: 12)")
    parser.add_argument(
        "--share",
        type=float,
        default=0.6,
        help="share of the activation memory the budget leaves (default: 0.6)",
    )
    parser.add_argument(
        "--simulated", action="store_true", help="use the simulated GPU even if there is a real one"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="allocator",
        help="the process allocator, whose budget is exact, or torch's own (default: allocator)",
    )
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step creates the optimizer's state")
    if not 0.0 < options.share < 1.0:
        parser.error("--share must lie between 0 and 1")
    return options


def _plan(options: argparse.Namespace) -> Plan:
    """Choose the device and the model that fits it; from here on allocations are the mode's."""
    mode: Mode = options.mode
    if torch.cuda.is_available() and not options.simulated:
        if mode == "allocator":
            torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
        shape = Shape(vocabulary=256, context=1024, width=512, heads=8, layers=8)
        place = torch.cuda.get_device_name(0)
        device = torch.device("cuda", 0)
        return Plan(shape, 16, options.steps, options.share, device, place, mode)
    if mode != "allocator":
        raise ModeError(
            f"--mode {mode} was asked for, but the simulated GPU has the process allocator only.",
            f"Run --mode {mode} on a machine with a GPU, without --simulated, or leave it out.",
        )
    from stagehand_alloc import testing

    testing.simulated_gpu(memory="512MiB", seed=SEED)
    shape = Shape(vocabulary=256, context=256, width=128, heads=4, layers=4)
    place = "the simulated GPU (bytes and results are real, times are this machine's CPU's)"
    return Plan(shape, 8, options.steps, options.share, torch.device("cpu"), place)


def _read_corpus() -> bytes:
    """Real text that every machine has: the sources of Python's standard library."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if len(text) < MIB:
        raise ValueError(f"less than 1 MiB of Python sources under {folder} to train on")
    return bytes(text)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Make two equal runs bitwise equal; leave torch's settings as they were."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic
    fill_before = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # it finds no fault of ours, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = fill_before


def _train_twice(plan: Plan, corpus: bytes) -> tuple[Run, Run, Budget]:
    free = _train(plan, corpus, None)
    activation_bytes = free.occupied_peak - free.start_bytes
    high = free.start_bytes + int(plan.share * activation_bytes)
    budget = Budget(high=high, low=high - activation_bytes // 10)
    return free, _train(plan, corpus, budget), budget


def _train(plan: Plan, corpus: bytes, budget: Budget | None) -> Run:
    """Train from the same seed; everything allocated here is given back before the return."""
    _settle(plan)
    before = stagehand_alloc.stats()
    torch.manual_seed(SEED)
    text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    model = GPT(plan.shape).to(plan.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    pool = None
    if budget is not None:
        pool = stagehand_alloc.pool(high=budget.high, low=budget.low, mode=plan.mode)
    losses, digests, seconds, start_bytes = [], [], [], 0
    progress = _Progress("without a budget" if pool is None else "under the budget", plan.steps)
    for step in range(plan.steps):
        progress.show(step)
        tokens, targets = _batch(plan, text)
        optimizer.zero_grad(set_to_none=True)
        start_bytes = _memory(plan).occupied
        began = time.perf_counter()
        loss = _forward_and_backward(model, tokens, targets, pool)
        _synchronize(plan.device)
        seconds.append(time.perf_counter() - began)
        digests.append(_digests(model, loss))
        optimizer.step()
        losses.append(loss.item())
    progress.clear()
    after, memory = stagehand_alloc.stats(), _memory(plan)
    parameters = parameter_count(model)
    del model, optimizer, loss, tokens, targets, text
    gc.collect()
    return Run(
        parameters=parameters,
        losses=losses,
        digests=digests,
        step_seconds=statistics.median(seconds[1:]),
        start_bytes=start_bytes,
        occupied_peak=memory.occupied_peak,
        mapped_peak=memory.mapped_peak,
        evicted_bytes=after.evicted_bytes - before.evicted_bytes,
        restored_bytes=after.restored_bytes - before.restored_bytes,
        over_bytes=after.overshoot_bytes - before.overshoot_bytes,
        trigger="" if pool is None or plan.mode == "allocator" else pool.stats().trigger,
    )


def _forward_and_backward(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    pool: stagehand_alloc.Pool | None,
) -> torch.Tensor:
    """Forward in the pool and backward after it."""
    with pool or contextlib.nullcontext():
        loss: torch.Tensor = model(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Sizes in bytes, by the books of whoever cuts the blocks. Peaks since `_settle`."""

    occupied: int
    occupied_peak: int
    mapped_peak: int


def _memory(plan: Plan) -> _Memory:
    if plan.mode == "allocator":
        found = stagehand_alloc.stats()
        return _Memory(found.occupied, found.occupied_peak, found.mapped_peak)
    cuda = torch.cuda
    return _Memory(cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.max_memory_reserved())


def _settle(plan: Plan) -> None:
    """Give back what is mapped from before, which would count to this run, and forget peaks."""
    if plan.mode == "allocator":
        native.empty_cache()
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    stagehand_alloc.reset_peak_stats()


def _batch(plan: Plan, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    context = plan.shape.context
    starts = torch.randint(len(text) - context - 1, (plan.batch,)).tolist()
    rows = torch.stack([text[at : at + context + 1] for at in starts]).long().to(plan.device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _digests(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, str]:
    """sha256 of the loss and of each gradient, by name."""
    named = {"the loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            named[f"the gradient of {name}"] = parameter.grad
    return {name: _digest(tensor) for name, tensor in named.items()}


def _digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().cpu().contiguous()
    raw = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
    return hashlib.sha256(raw).hexdigest()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Progress:
    """One line on stderr that is rewritten, and only where somebody is watching."""

    def __init__(self, label: str, steps: int) -> None:
        self._label = label
        self._steps = steps
        self._shown = sys.stderr.isatty()

    def show(self, step: int) -> None:
        self._write(f"\r{self._label}: step {step + 1} of {self._steps} ")

    def clear(self) -> None:
        self._write("\r" + " " * 60 + "\r")

    def _write(self, text: str) -> None:
        if self._shown:
            print(text, end="", file=sys.stderr, flush=True)


def _report(plan: Plan, corpus: bytes, free: Run, capped: Run, budget: Budget) -> int:
    shape = plan.shape
    print(f"On {plan.place}, {_way_in(plan, capped)}.")
    print(
        f"A byte-level GPT ({shape.layers} layers, {free.parameters / 1e6:.1f} M parameters) reads "
        f"{len(corpus) / 1e6:.1f} MB of Python's\nstandard library: {plan.steps} steps of "
        f"{plan.batch} x {shape.context} bytes.\n"
    )
    for row in _rows(plan, free, capped, budget):
        print(f"{row[0]:<28}{row[1]:>20}{row[2]:>20}")
    print()
    differences = _differences(free, capped)
    if differences:
        print(f"NOT EQUAL: {len(differences)} differ, the first is {differences[0]}")
        return EXIT_DIFFERENT
    over = _over(capped, budget)
    if plan.mode == "allocator" and over > 0:
        print(f"OVER THE BUDGET by {_mib(over)}")
        return EXIT_DIFFERENT
    gradients = len(free.digests[0]) - 1
    under = f"{_mib(over)} over" if over > 0 else "inside"
    print(
        f"{plan.steps} losses and {plan.steps} x {gradients} gradients are bitwise equal, "
        f"{under} a budget of {plan.share:.0%} of the activation memory."
    )
    return 0


def _over(capped: Run, budget: Budget) -> int:
    """Bytes over the budget while it was in force; without the trigger library at any time."""
    if capped.trigger == "loaded":
        return capped.over_bytes
    return max(0, capped.mapped_peak - budget.high)


def _way_in(plan: Plan, capped: Run) -> str:
    if plan.mode == "allocator":
        return "mode allocator"
    return f"mode {plan.mode} (trigger library {capped.trigger})"


def _rows(plan: Plan, free: Run, capped: Run, budget: Budget) -> list[tuple[str, str, str]]:
    def per_step(run: Run, total: int) -> str:
        return _mib(total // plan.steps) if run is capped else "-"

    def losses(run: Run) -> str:
        return f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}"

    return [
        ("", "without a budget", "under a budget"),
        ("budget (high)", "-", _mib(budget.high)),
        ("peak", _mib(free.mapped_peak), _mib(capped.mapped_peak)),
        ("evicted, each step", "-", per_step(capped, capped.evicted_bytes)),
        ("restored, each step", "-", per_step(capped, capped.restored_bytes)),
        ("step time", f"{free.step_seconds * 1e3:.0f} ms", f"{capped.step_seconds * 1e3:.0f} ms"),
        ("loss, first -> last", losses(free), losses(capped)),
    ]


def _differences(free: Run, capped: Run) -> list[str]:
    return [
        f"{name} at step {step}"
        for step, (one, other) in enumerate(zip(free.digests, capped.digests, strict=True), 1)
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
