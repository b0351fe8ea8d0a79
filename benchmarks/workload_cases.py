"""The workloads of workloads.py: their sizes, budgets and bars. Without torch."""

from __future__ import annotations

import dataclasses

from shapes import GPT_8K, LLAMA, TINY_ADAPTERS, TINY_GPT, TINY_LLAMA, Shape

SHARES = {"80": 0.80, "75": 0.75, "50": 0.50}  # of the activation memory
FREE = "free"  # the pool at its defaults, far above the peak
OURS = ("allocator", "native")


@dataclasses.dataclass(frozen=True)
class Bar:
    """`to`: what the step time is a multiple of: "plain", "bound", or "larger" of the two."""

    at_most: float | None = None
    to: str = "plain"
    modes: tuple[str, ...] = OURS


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload. `bars`: by budget, what its step time is held against.

    `varying`: each step has other shapes, so times and bounds are of the same steps. `peaks`: how
    often a step reaches its peak; what does not fit must leave as often. `both_ways`: copies in
    both directions can overlap with all the rest. `checkpoint`: it makes sense there.
    `shorter`: turns of so many times fewer steps, and as many more of them: where the host sets the
    pace, which drifts within seconds. `deterministic`: from the start, since changing it would
    compile again. `expandable`: torch's segments are. `same_budget`: ours may not map more than
    torch's allocator reserves under the same budget. `marked`: ours makes blocks again; "blocks" is
    `recompute=True` of the pool, "checkpoints" is `when_needed` in a checkpoint around each.
    """

    title: str
    model: str
    shape: Shape
    tiny: Shape
    bars: dict[str, Bar]
    varying: bool = False
    peaks: int = 1
    both_ways: bool = False
    checkpoint: bool = True
    shorter: int = 1
    deterministic: bool = False
    expandable: bool = True
    same_budget: tuple[str, ...] = ()
    ranks: int = 1
    marked: str | None = None


GPT_2K: Shape = {**GPT_8K, "context": 16384, "width": 2048, "heads": 16, "layers": 24}
GPT_4K: Shape = {**GPT_8K, "context": 4096, "layers": 8}
GPT_RANKS: Shape = {**GPT_8K, "context": 12288, "width": 2560, "heads": 20, "layers": 16}
LSTM: Shape = {"width": 2048, "layers": 4, "batch": 256, "longest": 640, "shortest": 256}
TINY_LSTM: Shape = {"width": 64, "layers": 4, "batch": 32, "longest": 24, "shortest": 12}
TINY_SMALL: Shape = {**TINY_GPT, "layers": 2, "batch": 2}

# The compiled one is first: it compiles while the processes of the next ones start.
CASES = {
    "compiled": Case(
        "GPT of width 4096, 8 layers, each compiled",
        *("compiled", {**GPT_8K, "layers": 8, "backend": "inductor"}),
        {**TINY_SMALL, "backend": "aot_eager"},
        {"75": Bar(1.02, "larger")},
        deterministic=True,
    ),
    "gpt": Case(
        "GPT of width 2048, 24 layers, sequence 16384",
        *("gpt", GPT_2K, TINY_GPT),
        {"75": Bar(1.02)},
    ),
    "video": Case(
        "video transformer, low-rank adapters on every projection",
        *("video", {"tokens": 2048, "width": 5120, "heads": 40, "layers": 28}),
        {"tokens": 64, "width": 64, "heads": 4, "layers": 3},
        {"75": Bar(1.04)},
    ),
    # 256 rows of 1792 numbers in bf16 are 917504 bytes, of which two are saved per block.
    "small": Case(
        "low-rank adapters, 1,340 saved tensors of 0.9 MB, host-bound",
        "adapters",
        {"rows": 256, "width": 1792, "blocks": 670, "depth": 3, "sets": 4},
        TINY_ADAPTERS,
        {"75": Bar(1.10), FREE: Bar(1.02)},
        shorter=4,
    ),
    "moe": Case(
        "mixture of experts, nonzero and index, other shapes each step",
        *("moe", {**GPT_8K, "width": 2048, "heads": 16, "layers": 8, "experts": 8}),
        {**TINY_SMALL, "experts": 4},
        {"75": Bar(1.15, "bound")},
        varying=True,
    ),
    "pipeline": Case(
        "pipeline order F0 F1 B0 F2 B1 F3 B2 B3",
        *("pipeline", GPT_4K, TINY_SMALL),
        {"75": Bar(1.05), "50": Bar(1.15, "bound")},
        peaks=3,
        both_ways=True,
    ),
    "accumulation": Case(
        "four micro-batches, dropout, optimizer, evaluation",
        *("accumulation", {**GPT_4K, "layers": 6, "dropout": 0.1}),
        {**TINY_SMALL, "dropout": 0.1},
        {"75": Bar()},
        peaks=4,
    ),
    "cycles": Case(
        "four micro-batches, a pool around each forward, optimizer; no expandable segments",
        *("cycles", {**GPT_4K, "layers": 6, "dropout": 0.1}),
        {**TINY_SMALL, "dropout": 0.1},
        {"75": Bar()},
        peaks=4,
        expandable=False,
    ),
    "gan": Case(
        "GAN, two live graphs",
        *("gan", {"widths": [512, 512, 256, 128], "side": 16, "batch": 64}),
        {"widths": [32, 16], "side": 8, "batch": 8},
        {"75": Bar()},
        checkpoint=False,
    ),
    "unet": Case(
        "3-D U-Net",
        *("unet3d", {"width": 64, "depth": 4, "side": 96, "batch": 2}),
        {"width": 8, "depth": 3, "side": 16, "batch": 2},
        {"75": Bar(1.10, modes=("native",))},
    ),
    "lstm": Case(
        "cuDNN LSTM, lengths that differ",
        "lstm",
        LSTM,
        TINY_LSTM,
        {"75": Bar(), "50": Bar(1.20, "bound")},
        varying=True,
        same_budget=("50",),
    ),
    "lstm_blocks": Case(
        "cuDNN LSTM, lengths that differ, its layers made again",
        "lstm",
        LSTM,
        TINY_LSTM,
        {"50": Bar(1.20, "bound")},
        varying=True,
        marked="blocks",
    ),
    "lengths": Case(
        "Llama, lengths that differ, checkpoints with when_needed",
        "lengths",
        {**LLAMA, "shortest": 2048, "multiple": 16},
        {**TINY_LLAMA, "shortest": 128, "multiple": 16},
        {"75": Bar(), "50": Bar()},
        varying=True,
        marked="checkpoints",
    ),
    "fsdp2_alone": Case(
        "one rank of two of FSDP2, alone; its collectives copy",
        *("fsdp2_alone", GPT_RANKS, TINY_SMALL),
        {"80": Bar(1.03)},
    ),
    "fsdp2": Case(
        "FSDP2, GPT of width 2560, sequence 12288, two GPUs; ours with gradients_on_one_stream",
        *("fsdp2", GPT_RANKS, TINY_SMALL),
        {"80": Bar(1.03)},
        ranks=2,
    ),
    "ddp": Case(
        "DDP, GPT of width 2560, sequence 12288, two GPUs",
        *("ddp", GPT_RANKS, TINY_SMALL),
        {"80": Bar(1.02)},
        ranks=2,
    ),
}
