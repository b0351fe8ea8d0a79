"""Whether training inside a pool is plain torch's, also where it is interrupted; no GPU is needed.

    python benchmarks/engine_python.py accumulate|reused|lines|signals [--quick]

accumulate  a Function returns as a gradient what it saved, and autograd accumulates into that
reused      a tensor that backward only reads is used again after it
lines       a signal at each line of ours that entering and leaving a pool runs
signals     3,000 signals at random moments of a step

Prints how many were tried and how many went wrong as a line of JSON, last. For
benchmarks/engine.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import pathlib
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn

Around = Callable[[], AbstractContextManager[Any]]
SEED = 20
PATIENCE = 10  # seconds for steps that take milliseconds
SOON = 2e-5  # seconds; longer than a signal's handler takes
ENOUGH = 20  # that went wrong: no more are tried


class Tally:
    """What was tried, and what of it went wrong."""

    def __init__(self) -> None:
        self.tried = 0
        self.wrong: list[str] = []
        self.interrupted = 0

    def add(self, wrong: str | None) -> None:
        self.tried += 1
        if wrong is not None:
            self.wrong.append(wrong)

    def say(self) -> None:
        said = {"tried": self.tried, "wrong": len(self.wrong), "first": self.wrong[:5]}
        if self.interrupted:
            said["interrupted"] = self.interrupted
        print(json.dumps(said), flush=True)


def simulated() -> Any:
    """stagehand_alloc, on a simulated GPU from here on."""
    import stagehand_alloc
    from stagehand_alloc import testing

    testing.simulated_gpu(memory="256MiB", seed=SEED)
    return stagehand_alloc


# --- What is saved and returned


class Fixed(torch.autograd.Function):
    """Its gradient was computed in forward and saved, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class FusedLoss(torch.autograd.Function):
    """The loss of a tied weight; it saves the gradients of both, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(h.shape[0], w.shape[0])
        ctx.save_for_backward(ones @ w, ones.t() @ h)
        return (h @ w.t()).sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ctx.saved_tensors


def user_keeps_it(around: Around) -> list[torch.Tensor]:
    x = torch.randn(64, requires_grad=True)
    with around():
        g = torch.randn(64)
        y = x * 5 + Fixed.apply(x, g)
    y.sum().backward()
    return [g, x.grad]


def two_backwards(around: Around) -> list[torch.Tensor]:
    x = torch.randn(64, requires_grad=True)
    with around():
        y = (x * 5 + Fixed.apply(x, torch.randn(64))).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward()
    return [first, x.grad]


def saved_by_two(around: Around) -> list[torch.Tensor]:
    x = torch.randn(64, requires_grad=True)
    w = torch.randn(64, requires_grad=True)
    with around():
        g = torch.randn(64)
        first = w * g
        y = (first * 5 + Fixed.apply(first, g)).sum() + x.sum()
        del g, first
    y.backward()
    return [w.grad]


def tied_weight(around: Around) -> list[torch.Tensor]:
    w = torch.randn(16, 8, requires_grad=True)
    with around():
        h = nn.functional.embedding(torch.tensor([1, 2, 3]), w)
        loss = FusedLoss.apply(h.tanh(), w)
    loss.backward()
    return [w.grad]


def three_steps(around: Around) -> list[torch.Tensor]:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 32)
    for _ in range(3):
        optimizer.zero_grad()
        with around():
            y = model(x)
            weights = torch.softmax(x.sum(1, keepdim=True).expand(64, 32) + 0, 0)
            loss = y.pow(2).mean() + Fixed.apply(y, weights).sum()
        loss.backward()
        with torch.no_grad():
            model.bias -= 0.01 * weights.mean(0)  # type: ignore[misc]
        optimizer.step()
    return [model.weight.detach(), model.bias.detach(), weights]


def outcome(case: Callable[[Around], list[torch.Tensor]], around: Around, seed: int) -> Any:
    torch.manual_seed(seed)
    try:
        return [tensor.detach().clone() for tensor in case(around)]
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def same(one: Any, two: Any) -> bool:
    if isinstance(one, str) or isinstance(two, str):
        return isinstance(one, str) and isinstance(two, str)  # both refuse
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def beside_plain(cases: tuple[Callable[[Around], list[torch.Tensor]], ...], seeds: int) -> Tally:
    wanted = {
        (case, seed): outcome(case, contextlib.nullcontext, seed)
        for case in cases
        for seed in range(seeds)
    }
    stagehand = simulated()
    tally = Tally()
    for (case, seed), want in wanted.items():
        for high in ("64MiB", "3MiB"):
            got = outcome(case, lambda: stagehand.pool(high=high, low=high), seed)  # noqa: B023
            what = got if isinstance(got, str) else "other values than plain torch"
            tally.add(None if same(want, got) else f"{case.__name__}, high {high}: {what}")
    return tally


# --- Interrupts


class Steps:
    """A small model in a pool that evicts, and what its gradients must be."""

    def __init__(self) -> None:
        self.stagehand = simulated()
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        self.model = nn.Sequential(*layers)
        self.x = torch.randn(256, 64)
        self.pool = self.new_pool()
        self.want = self.step()
        self.hooks = len(nn.modules.module._global_forward_hooks)

    def new_pool(self) -> Any:
        return self.stagehand.pool(high="3MiB", low="2MiB")

    def step(self) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        with self.pool:
            loss = self.model(self.x).pow(2).sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def next_step(self, alarm: Alarm) -> str | None:
        """What is wrong with the next step of this pool, or of a new one."""
        try:
            alarm.patience()
            return self._next_step()
        finally:
            alarm.off()

    def _next_step(self) -> str | None:
        for what in ("the same pool", "a new pool"):
            try:
                if not torch.equal(self.step(), self.want):
                    return f"{what}: a wrong gradient"
            except Exception as error:
                self.pool = self.new_pool()
                return f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}"
            self.pool = self.new_pool()
        return None

    def left(self) -> str | None:
        """What is left once all is dropped."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        stats = self.stagehand.stats()
        if stats.records or stats.handles or stats.aliases:
            return f"left: {stats.records} records, {stats.handles} handles"
        if len(nn.modules.module._global_forward_hooks) != self.hooks:
            return "left: hooks on all modules"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "left: hooks on saved tensors"
        return None


class Alarm:
    """The process's timer: interrupts once, or says that nothing has happened for too long.

    The signal is a real one, so that it comes where Python looks for signals, and not where a
    tracer could raise and no signal ever does.
    """

    def __init__(self) -> None:
        self.interrupts = False
        signal.signal(signal.SIGALRM, self._rang)

    def interrupt_in(self, seconds: float) -> None:
        self.interrupts = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def patience(self) -> None:
        self.interrupts = False
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def off(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.interrupts = False

    def _rang(self, _: int, frame: FrameType | None) -> None:
        mine = (At.__call__, Alarm.interrupt_in, Alarm.off, Alarm._rang)
        if self.interrupts and frame is not None and frame.f_code in [m.__code__ for m in mine]:
            return self.interrupt_in(SOON)  # not yet in what is to be interrupted
        was, self.interrupts = self.interrupts, False
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        raise KeyboardInterrupt if was else TimeoutError(f"nothing happened for {PATIENCE} s")


class At:
    """Sets the alarm off as soon as the `line`-th line of ours runs."""

    def __init__(self, line: int, folder: str, alarm: Alarm) -> None:
        self.left = line
        self.folder = folder
        self.alarm = alarm

    def __call__(self, frame: FrameType, event: str, _: Any) -> At | None:
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.alarm.interrupt_in(SOON)
        return self


def at_each_line(most: int) -> Tally:
    steps = Steps()
    folder = str(pathlib.Path(steps.stagehand.__file__).parent)
    alarm = Alarm()
    tally = Tally()
    for line in range(1, most):
        at = At(line, folder, alarm)
        wrong = None
        try:
            try:
                alarm.patience()
                sys.settrace(at)
                with steps.pool:
                    pass
            finally:
                sys.settrace(None)
                alarm.off()
        except KeyboardInterrupt:
            alarm.off()
            tally.interrupted += 1
        except Exception as error:
            wrong = f"entry: {type(error).__name__}"
        if at.left > 0:
            break  # entry and exit have no more lines than that
        wrong = wrong or steps.next_step(alarm) or steps.left()
        tally.add(None if wrong is None else f"line {line}: {wrong}")
        if len(tally.wrong) >= ENOUGH:
            break
    return tally


def at_random(count: int) -> Tally:
    steps = Steps()
    began = time.perf_counter()
    steps.step()
    took = time.perf_counter() - began
    alarm = Alarm()
    moments = random.Random(SEED)
    tally = Tally()
    for _ in range(count):
        wrong = None
        try:
            try:
                alarm.interrupt_in(moments.uniform(5e-5, took))
                for _ in range(3):
                    steps.step()
            finally:
                alarm.off()
        except KeyboardInterrupt:
            alarm.off()
            tally.interrupted += 1
        except Exception as error:
            wrong = f"while interrupted: {type(error).__name__}"
        tally.add(wrong or steps.next_step(alarm))
        if len(tally.wrong) >= ENOUGH:
            break
    if wrong := steps.left():
        tally.wrong.append(wrong)
    return tally


def main() -> int:
    """0, whatever went wrong: the last line says what."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("check", choices=("accumulate", "reused", "lines", "signals"))
    parser.add_argument("--quick", action="store_true", help="a tenth of the interrupts")
    options = parser.parse_args()
    if options.check == "accumulate":
        tally = beside_plain((user_keeps_it, two_backwards, saved_by_two, tied_weight), seeds=3)
    elif options.check == "reused":
        tally = beside_plain((three_steps,), seeds=3)
    elif options.check == "lines":
        tally = at_each_line(10_000)
    else:
        tally = at_random(300 if options.quick else 3_000)
    tally.say()
    return 0


if __name__ == "__main__":
    sys.exit(main())
