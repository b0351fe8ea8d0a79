"""Step time against peak memory: ours at several budgets, beside what else saves memory.

    python benchmarks/suite.py [--quick] [--simulated] [--model gpt,gpt_32k,llama,vit,adapters]

For each model, in turn on one GPU: ours at budgets of 85 to 35 % of the activation memory (one
process, a pool per budget); plain torch, save_on_cpu, torch.utils.checkpoint on a growing share of
the blocks, and the OffloadActivations of torchtune and TRL where they can be imported (another
process). Beside each budget the bound: max(Tf, need / B) + max(Tb, need / B), of plain torch's
forward and backward and the link measured in the same run.

Peak memory is what torch had allocated at most, and for ours what was mapped at most, which is
more. A variant whose process dies is noted as such, and the next ones get a fresh process. Writes
benchmarks/results/suite-DEVICE-NUMBER.json and the same as suite.json, both after every model, and
where matplotlib can be imported suite.svg (else later: python benchmarks/plot.py RESULT.json). Both
are of the models of this call alone; plot.py draws those of several results together.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import plot
from harness import (
    RESULTS,
    Pace,
    Worker,
    WorkerError,
    ask_all,
    close_all,
    driver_version,
    refuse_without_gpu,
    write_result,
)
from measures import GIB, Budget, Link, agree, bound_ms, budget_of_share
from shapes import MODELS, TINY_ADAPTERS, TINY_GPT, Shape

SHARES = (0.85, 0.75, 0.60, 0.50, 0.35)
CHECKPOINTS = (0.25, 0.5, 1.0)
TOLERANCE = 1e-3  # of losses, relative
PACKAGES = {"llama": "transformers", "vit": "timm"}  # what a model needs beside torch
TITLES = {
    "gpt": "GPT, 12 layers, sequence 8192",
    "gpt_32k": "GPT, 6 layers, sequence 32768",
    "llama": "Hugging Face Llama, 16 layers, sequence 4096",
    "vit": "timm ViT-B/16, batch 256",
    "adapters": "Low-rank adapters, 636 saved of 0.9 MB",
}
TINY: dict[str, tuple[str, Shape]] = {
    "gpt": ("gpt", TINY_GPT),
    "adapters": ("adapters", TINY_ADAPTERS),
}


FULL, QUICK, SIMULATED = Pace(2, 3, 2, 0.5), Pace(1, 2, 2, 0.3), Pace(1, 1, 1, 0)
MOST_STEPS = {"gpt_32k": 2}  # of a turn: these steps take nearly a second each


class ModelRun:
    """One model's two processes, and what was measured in each mode."""

    def __init__(self, name: str, pace: Pace, simulated: bool) -> None:
        steps = min(pace.steps, MOST_STEPS.get(name, pace.steps))
        self.pace = dataclasses.replace(pace, steps=steps)
        self.name = name
        model, shape = (TINY if simulated else MODELS)[name]
        self.settings = {"model": model, "shape": shape, "simulated": simulated}
        self.plain = self._start(ours=False)
        self.ours = self._start(ours=True)
        self.ours_pins = False  # its process may hold pinned memory
        self.place: dict[str, Any] = {}
        self.budgets: dict[str, Budget] = {}
        self.links: list[Link] = []
        self.memory: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}

    def measure(self) -> None:
        self.place = ask_all([self.plain, self.ours], "build")[0]
        modes = ["native", "save_on_cpu", *(f"checkpoint:{share}" for share in CHECKPOINTS)]
        modes += self.plain.ask("modes")["modes"]
        self.ours.ask("steps", mode="default", count=2)
        whole = self.ours.ask("memory", mode="default")
        for share in SHARES:
            self.budgets[f"ours:{share}"] = budget_of_share(whole["start"], whole["peak"], share)
        self.ours.ask("budgets", budgets=self._pools())
        self.ours_pins = True
        self.memory["unbudgeted"] = whole
        modes += self.budgets
        for mode in modes:
            self._try(mode, self._warm)
        for at in range(self.pace.rounds):
            self.links.append(Link(**self._worker("native").ask("link")))
            for mode in modes if at % 2 == 0 else reversed(modes):
                if mode not in self.failed:
                    self._try(mode, self._turn)

    def close(self) -> None:
        close_all([self.plain, self.ours])

    def points(self) -> list[dict[str, Any]]:
        """A point per mode: peak memory, step time, and the bound for ours."""
        ways = ("d2h", "h2d")
        link = Link(*(statistics.median(getattr(x, way) for x in self.links) for way in ways))
        forward, backward = (self._median("native", f"{way}_ms") for way in ("forward", "backward"))
        native = self._median("native", "wall_ms")
        found = []
        for mode in self.steps:
            memory = self.memory[mode]
            point = {
                "mode": mode,
                "peak_gib": memory["mapped_peak" if mode in self.budgets else "peak"] / GIB,
                "reserved_gib": memory["mapped_peak"] / GIB,
                "step_ms": self._median(mode, "wall_ms"),
                "to_native": self._median(mode, "wall_ms") / native,
            }
            if mode in self.budgets:
                need = self.memory["unbudgeted"]["peak"] - self.budgets[mode].high
                bound = bound_ms(need, link, forward, backward)
                point.update(high_gib=self.budgets[mode].high / GIB, need_gib=need / GIB)
                point.update(bound_ms=bound, to_bound=point["step_ms"] / bound)
            found.append({k: v if k == "mode" else round(v, 4) for k, v in point.items()})
        return found

    def agrees(self) -> bool:
        losses = [loss for steps in self.steps.values() for one in steps for loss in one["loss"]]
        return agree(losses, TOLERANCE)

    def _start(self, ours: bool) -> Worker:
        who = "ours" if ours else "torch"
        return Worker(f"{self.name} {who}", {"ours": ours, **self.settings})

    def _pools(self) -> dict[str, tuple[int, int]]:
        return {name: (budget.high, budget.low) for name, budget in self.budgets.items()}

    def _worker(self, mode: str) -> Worker:
        """The mode's process: a fresh one where another mode, or its neighbour, was its end.

        Plain torch has the host's memory to itself.
        """
        if mode in self.budgets:
            if not self.ours.alive:
                self.ours.close()
                self.ours = self._start(ours=True)
                self.ours.ask("build", budgets=self._pools())
            self.ours_pins = True
            return self.ours
        if self.ours_pins and self.ours.alive:
            self.ours.ask("release_pinned")
        self.ours_pins = False
        if not self.plain.alive:
            self.plain.close()
            self.plain = self._start(ours=False)
            self.plain.ask("build")
        return self.plain

    def _try(self, mode: str, part: Callable[[str], None]) -> None:
        """Note a mode that fails, and go on; without plain torch there is nothing to compare."""
        try:
            part(mode)
        except WorkerError as error:
            if mode == "native":
                raise
            self.failed[mode] = str(error)
            self.steps.pop(mode, None)
            print(f"suite: {mode}: {error}", file=sys.stderr)

    def _warm(self, mode: str) -> None:
        """Steps that pin memory and learn, then the peaks."""
        worker = self._worker(mode)
        worker.ask("empty_cache")  # what another mode left would count to this one's memory
        worker.ask("steps", mode=mode, count=2)
        self.memory[mode] = worker.ask("memory", mode=mode)

    def _turn(self, mode: str) -> None:
        worker = self._worker(mode)
        worker.ask("empty_cache")
        self.steps.setdefault(mode, []).append(
            worker.ask("steps", mode=mode, count=self.pace.steps, **self.pace.lead())
        )

    def _median(self, mode: str, sample: str) -> float:
        return float(statistics.median(ms for one in self.steps[mode] for ms in one[sample]))


def result_path(folder: pathlib.Path, device: str) -> pathlib.Path:
    """The next free suite-DEVICE-NUMBER.json in `folder`."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    number = 1
    while (path := folder / f"suite-{name}-{number}.json").exists():
        number += 1
    return path


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--simulated", action="store_true", help="tiny models, no GPU")
    parser.add_argument("--model", help="some of " + ",".join(MODELS))
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results")
    options = parser.parse_args(argv)
    known = TINY if options.simulated else MODELS
    options.models = options.model.split(",") if options.model else list(known)
    unknown = set(options.models) - set(known)
    if unknown:
        parser.error(f"--model: no model {sorted(unknown)[0]!r} among {', '.join(known)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """0: measured; 1: a model failed, or its losses differ between modes."""
    options = parse(argv)
    refuse_without_gpu("suite", options.simulated)
    pace = SIMULATED if options.simulated else QUICK if options.quick else FULL
    began = time.perf_counter()
    skipped = missing_packages(options.models)
    chosen = [name for name in options.models if name not in skipped]
    runs = {name: ModelRun(name, pace, options.simulated) for name in chosen}
    failed: dict[str, str] = {}
    models: dict[str, Any] = {}
    result = {
        "device": "not asked",
        "torch": "not asked",
        "driver": driver_version(),
        "pace": dataclasses.asdict(pace),
        "seconds": 0.0,
        "asked": options.models,
        "skipped": skipped,
        "failed": failed,
        "models": models,
    }
    out = options.out or (None if options.simulated else RESULTS)
    path: pathlib.Path | None = None
    try:
        for name, run in runs.items():
            model_began = time.perf_counter()
            try:
                run.measure()
                models[name] = {"title": TITLES[name], **describe(run)}
                if not run.agrees():
                    failed[name] = "losses differ between the modes"
            except WorkerError as error:
                failed[name] = str(error)
            run.close()
            print(f"{name}: {time.perf_counter() - model_began:.1f} s", flush=True)
            result.update({key: run.place[key] for key in ("device", "torch") if key in run.place})
            result["seconds"] = round(time.perf_counter() - began, 1)
            if models and out is not None:
                path = path or result_path(out, result["device"])
                write_result(path, result)
                write_result(out / "suite.json", result)
    finally:
        for run in runs.values():
            run.close()
    for name, model in models.items():
        print_model(name, model)
    for name, reason in {**skipped, **failed}.items():
        print(f"suite: {name}: {reason}", file=sys.stderr)
    if path is not None:
        draw(path, result)
    return 1 if failed else 0


def missing_packages(names: list[str]) -> dict[str, str]:
    """Why models cannot be built here, by name."""
    return {
        name: f"skipped, since {PACKAGES[name]} is not installed"
        for name in names
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None
    }


def describe(run: ModelRun) -> dict[str, Any]:
    return {
        "parameters": run.place["parameters"],
        "links": [dataclasses.asdict(link) for link in run.links],
        "points": run.points(),
        "unavailable": run.failed,
        "raw": {
            mode: [{k: v for k, v in one.items() if k != "stats"} for one in steps]
            for mode, steps in run.steps.items()
        },
    }


def print_model(name: str, model: dict[str, Any]) -> None:
    print(f"\n{model['title']} ({name})")
    print(f"{'mode':<16} {'peak GiB':>9} {'step ms':>9} {'/ native':>9} {'/ bound':>9}")
    for point in model["points"]:
        bound = f"{point['to_bound']:9.3f}" if "to_bound" in point else " " * 9
        numbers = f"{point['peak_gib']:9.2f} {point['step_ms']:9.1f} {point['to_native']:9.3f}"
        print(f"{point['mode']:<16} {numbers} {bound}")


def draw(path: pathlib.Path, result: dict[str, Any]) -> None:
    """The plot beside the result, where it can be drawn."""
    if plot.available():
        plot.draw(result, path.with_name("suite.svg"))
    else:
        print(f"matplotlib is missing: plot later with python benchmarks/plot.py {path}")


if __name__ == "__main__":
    sys.exit(main())
