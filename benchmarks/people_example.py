"""Runs an example with deterministic kernels, and writes what its steps came to, bit by bit.

    python benchmarks/people_example.py examples/plain_loop.py OUT.json [--plain]

--plain: as it would be without our line: no pool is entered, and nothing offloaded. Every loss that
backward is called of is digested, and every gradient and weight after each step of an optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import runpy
import sys
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]


class Watch:
    """What the example's training comes to."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.steps: list[str] = []
        self.over: list[int] = []  # bytes over high so far, after each step
        self.pools: list[Any] = []

    def losses_of(self, backward: Any) -> Any:
        def noted(loss: Any, *arguments: Any, **named: Any) -> Any:
            self.losses.append(bits([loss]))
            return backward(loss, *arguments, **named)

        return noted

    def stepped(self, optimizer: Any, *_: Any) -> None:
        weights = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [one.grad for one in weights if one.grad is not None]
        self.steps.append(bits([*gradients, *weights]))
        self.over.append(sum(pool.stats().overshoot_bytes for pool in self.pools))

    def found(self) -> dict[str, Any]:
        moved = 0
        for pool in self.pools:
            stats = pool.stats()
            moved += stats.evicted_bytes + stats.dropped_bytes + stats.weights_written_bytes
        return {
            "losses": self.losses,
            "steps": self.steps,
            "over": self.over,
            "moved": moved,
        }


def bits(tensors: list[Any]) -> str:
    """A digest, made on the host: on a simulated GPU it must take none of the budget's memory."""
    import torch

    import stagehand_alloc

    found = hashlib.sha256()
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP2's shard
        with stagehand_alloc.resident(tensor):  # which may be an offloaded weight
            host = own.detach().cpu().contiguous().reshape(-1)
            found.update(host.view(torch.uint8).numpy())
    return found.hexdigest()


def on_the_device(one: Any, **_: Any) -> Any:
    """A model as `offload` would have it used: whole, where the training is."""
    import torch

    gpu = isinstance(one, torch.nn.Module) and torch.cuda.is_available()
    return one.to("cuda") if gpu else one


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("example", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import stagehand_alloc
    from stagehand_alloc import Pool

    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # it has no deterministic kernels
    watch = Watch()
    torch.Tensor.backward = watch.losses_of(torch.Tensor.backward)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(watch.stepped)
    changed: Any = Pool
    if options.plain:
        changed.__enter__ = lambda pool: pool
        changed.__exit__ = lambda pool, *_: None
        for name in ("offload", "offload_optimizer"):
            setattr(stagehand_alloc, name, on_the_device)
    else:
        enter = Pool.__enter__

        def entered(pool: Pool) -> Pool:
            if pool not in watch.pools:
                watch.pools.append(pool)
            return enter(pool)

        changed.__enter__ = entered
    runpy.run_path(str(options.example), run_name="__main__")
    options.out.write_text(json.dumps(watch.found()), encoding="utf-8")


if __name__ == "__main__":
    main()
