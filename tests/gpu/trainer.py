"""Trains one workload, and says what must be equal between processes.

python trainer.py WORKLOAD OUT.json                plain torch, its native caching allocator
python trainer.py WORKLOAD OUT.json --share 0.75   through stagehand_alloc, in a budget of 75 %
                                                   of the activation memory it measures first
    --mode allocator|mempool|native                by which way in; "allocator" if not said
    --recompute                                    what is cheaper to make again is dropped
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import torch
from torch import Tensor

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
from digest import digest
from workloads import BY_NAME, Workload, parameter_storages

STEPS = 3
SEED = 6
LEARNING_STEPS = 8  # until recipes are proven and a plan that drops is in use


def deterministic() -> None:
    """Two equal runs are bitwise equal from here on; what cannot be so raises."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def train(
    name: str, share: float | None = None, mode: str = "allocator", recompute: bool = False
) -> dict[str, Any]:
    """As the command line does, in a process that does nothing else."""
    if share is not None and mode == "allocator":
        import stagehand_alloc

        torch.cuda.memory.change_current_allocator(stagehand_alloc.allocator())
    deterministic()
    if share is None:
        return plain(BY_NAME[name])
    return budgeted(BY_NAME[name], share, mode, recompute)


class Training:
    """A model and its optimizer, from the seed."""

    def __init__(self, workload: Workload) -> None:
        torch.manual_seed(SEED)
        self.workload = workload
        with torch.device("cuda"):  # drawing millions of numbers takes the host long
            drawn = workload.build().cpu()
        torch.cuda.empty_cache()
        self.model = drawn.cuda()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(self, around: AbstractContextManager[Any]) -> Tensor:
        """Forward in `around`, backward after it. Gradients stay, the weights are not changed."""
        batch = tuple(tensor.cuda() for tensor in self.workload.batch())
        self.optimizer.zero_grad(set_to_none=True)
        with around:
            loss = self.workload.loss(self.model, batch)
        loss.backward()
        return loss.detach()

    def learn(self, around: AbstractContextManager[Any]) -> None:
        """Steps that leave weights and random numbers as they were."""
        for _ in range(LEARNING_STEPS):
            with torch.random.fork_rng():
                self.step(around)
        self.optimizer.zero_grad(set_to_none=True)

    def traced_steps(
        self, around: AbstractContextManager[Any], look: Callable[[], None] = lambda: None
    ) -> list[dict[str, str]]:
        """STEPS whole steps; for each the digests of the loss and of every gradient.

        `look` is called after each backward.
        """
        found = []
        for _ in range(STEPS):
            loss = self.step(around)
            look()
            named = {"loss": digest([loss])}
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    named[name] = digest([parameter.grad])
            found.append(named)
            self.optimizer.step()
        return found


def plain(workload: Workload) -> dict[str, Any]:
    return {"steps": Training(workload).traced_steps(contextlib.nullcontext())}


def budgeted(workload: Workload, share: float, mode: str, recompute: bool) -> dict[str, Any]:
    import stagehand_alloc
    from stagehand_alloc import _native

    start, peak = measure(workload)
    gc.collect()
    torch.cuda.empty_cache()
    stagehand_alloc.reset_peak_stats()
    torch.cuda.reset_peak_memory_stats()
    before = stagehand_alloc.stats()
    high = start + int(share * (peak - start))
    low = high - (peak - start) // 10
    training = Training(workload)
    again = training.model if recompute else False
    pool = stagehand_alloc.pool(high=high, low=low, mode=mode, recompute=again)
    if recompute:
        training.learn(pool)
    over: list[int] = []  # bytes over high so far, after each step
    segments: list[int] = []

    def look() -> None:
        over.append(stagehand_alloc.stats().overshoot_bytes - before.overshoot_bytes)
        segments.append(0 if mode == "allocator" else largest_segment())

    steps = training.traced_steps(pool, look)
    torch.cuda.synchronize()
    stats = pool.stats()
    after = stagehand_alloc.stats()
    return {
        "steps": steps,
        "mode": stats.mode,
        "trigger": stats.trigger,
        "high": high,
        "activation_bytes": peak - start,
        "mapped_peak": torch.cuda.max_memory_reserved(),
        "overshoot_live": _native.stats(0)["overshoot_live"],
        "overshoot_bytes": after.overshoot_bytes - before.overshoot_bytes,
        "over_by_step": [now - then for then, now in zip([0, *over], over, strict=False)],
        "largest_segment": max(segments),
        "evicted_bytes": after.evicted_bytes - before.evicted_bytes,
        "restored_bytes": after.restored_bytes - before.restored_bytes,
        "drops": after.drops - before.drops,
        "reruns": after.reruns - before.reruns,
        "recomputes": after.recomputes - before.recomputes,
        "left": {"records": after.records, "handles": after.handles, "retained": after.retained},
        "passed_through": dict(stats.passed_through),
        "broken": _native.check_invariants(0),
        **saved_storages(training, pool),
    }


def measure(workload: Workload) -> tuple[int, int]:
    """Bytes in use at the start and at the peak of a step without a budget.

    The second step is measured: the first creates the optimizer's state and cuBLAS's workspaces.
    Torch's functions answer in every mode; under the process allocator with our figures.
    """
    training = Training(workload)
    training.step(contextlib.nullcontext())
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    training.step(contextlib.nullcontext())
    return start, torch.cuda.max_memory_allocated()


def largest_segment() -> int:
    """Bytes of the largest segment in torch's cache."""
    return max(segment["total_size"] for segment in torch.cuda.memory_snapshot())


def saved_storages(training: Training, pool: AbstractContextManager[Any]) -> dict[str, int]:
    """How many storages a forward saves that are no weight's, and how many records it makes."""
    import stagehand_alloc

    weights = parameter_storages(training.model)
    held: list[Tensor] = []  # keeps every address from being used again

    def hold(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        return held[-1]

    hooks = torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor)
    batch = tuple(tensor.cuda() for tensor in training.workload.batch())
    loss = training.workload.loss
    state = torch.cuda.get_rng_state()
    with hooks:
        result = loss(training.model, batch)
    storages = {t.untyped_storage().data_ptr() for t in held if t.is_cuda and t.numel()}
    counted = {"saved_storages": len(storages - weights), "saved_weights": len(storages & weights)}
    del result
    held.clear()
    torch.cuda.set_rng_state(state)
    with pool:
        result = loss(training.model, batch)
    counted["records"] = stagehand_alloc.stats().records
    del result
    return counted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=BY_NAME)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--share", type=float)
    parser.add_argument("--mode", choices=("allocator", "mempool", "native"), default="allocator")
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args(argv)
    found = train(options.workload, options.share, options.mode, options.recompute)
    options.out.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
