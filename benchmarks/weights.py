"""LoRA on a frozen GPT whose weights and activations share a budget that fits neither; and all of
it trained, with its optimizer's state in the same budget.

    python benchmarks/weights.py [--out FILE] [--quick] [--mode native] [--only CASES]

A GPT of width 4096 and 12 layers in bf16 (4.8 GB), frozen, with LoRA beside its linear layers; one
sequence of 8192 tokens (9.6 GB saved), or of 1024. Every case is a process of its own and trains
the same steps; the losses and gradients of all must be those of plain torch, bit by bit, but for
what is checkpointed, which is compared with plain torch under checkpointing. Compared with:

* plain torch, where everything fits;
* activations alone moved (`pool` without `offload`);
* a ring of two blocks with checkpointing, written anew: frozen weights in flat pinned copies, two
  buffers on the GPU, the next block copied on a stream of its own while one computes, `param.data`
  pointed into the buffers. What others' block swap does at its best.

`--only load` measures `offload` alone, of a model on the CPU with 48 blocks, 37.8 GB in all: time,
GB/s, and pinned bytes over the weights'. Its bars are 4 s and 1.02. The host needs 45 GB.

Printed are the bars of docs/decisions/0038, and whether they hold. Sizes in GB of 1e9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from harness import earlier, write_result  # noqa: E402
from source_hash import source_hash  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

GB = 10**9
WARM, STEPS = 16, 8
MARK = "RESULT "


@dataclass
class Case:
    """One process."""

    name: str
    tokens: int
    high: float = 0  # GB; 0: no pool
    offload: bool = False
    ring: bool = False
    checkpoint: bool = False
    full: bool = False  # all is trained, and the optimizer's state streams
    load: bool = False  # `offload` of a model on the CPU, and nothing else
    mode: str = "native"
    width: int = 4096
    layers: int = 12
    heads: int = 32


@dataclass
class Result:
    """What it measured; times in ms, bytes of a step."""

    name: str
    step: float = 0
    forward: float = 0
    backward: float = 0
    first: float = 0
    start: int = 0
    held: int = 0  # at the end of forward
    peak: int = 0
    reserved: int = 0
    overshoot: int = 0
    host_waits: float = 0
    loads: float = 0
    late: float = 0
    loaded: float = 0
    h2d: float = 0
    d2h: float = 0
    dropped: float = 0
    written: float = 0  # weights and state
    map_calls: float = 0
    group: int = 0
    weights: int = 0
    pinned: int = 0  # host copies
    digests: list[str] = field(default_factory=list)
    error: str = ""


# --- The model


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained product of rank 16 beside it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(into, out, bias=False)
        self.base.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(16, into) * 0.02)
        self.b = nn.Parameter(torch.randn(out, 16) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return y


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for norm in (self.norm1, self.norm2):
            norm.requires_grad_(False)
        self.qkv, self.out = LoraLinear(width, 3 * width), LoraLinear(width, width)
        self.up, self.down = LoraLinear(width, 4 * width), LoraLinear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = (one.transpose(1, 2) for one in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, width))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class Gpt(nn.Module):
    """Blocks on random embeddings: what is measured is in the blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(case.width, case.heads) for _ in range(case.layers)])
        self.checkpoint = case.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        return x.float().square().mean()


# --- A ring of two


class Ring:
    """Two blocks' frozen weights on the GPU at a time.

    Needs checkpointing: what autograd saves of a weight points into a buffer that the next block
    but one overwrites.
    """

    def __init__(self, blocks: list[nn.Module], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.cuda = device.type == "cuda"
        self.weights = [[p for p in b.parameters() if not p.requires_grad] for b in blocks]
        self.shapes = [[p.shape for p in weights] for weights in self.weights]
        self.masters = [self._flat(weights) for weights in self.weights]
        like = self.masters[0]
        self.buffers = [torch.empty_like(like, device=device) for _ in range(2)]
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.inside: list[int | None] = [None, None]
        self.ready: list[Any] = [None, None]
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(self._enter, i))

    def _flat(self, weights: list[nn.Parameter]) -> Tensor:
        flat = torch.cat([p.detach().reshape(-1).cpu() for p in weights])
        for p in weights:
            p.data = torch.empty(0, dtype=p.dtype, device=self.device)
        return flat.pin_memory() if self.cuda else flat

    def _load(self, i: int, slot: int) -> None:
        if self.stream is None:
            self.buffers[slot].copy_(self.masters[i])
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.buffers[slot].copy_(self.masters[i], non_blocking=True)
            self.ready[slot] = self.stream.record_event()
        self.inside[slot] = i

    def _enter(self, i: int, *_: Any) -> None:
        if i not in self.inside:
            self._load(i, 0 if self.inside[1] in (i - 1, i + 1) else 1)
        slot = self.inside.index(i)
        if self.ready[slot] is not None:
            torch.cuda.current_stream().wait_event(self.ready[slot])
        at = 0
        for p, shape in zip(self.weights[i], self.shapes[i], strict=True):
            count = shape.numel()
            p.data = self.buffers[slot][at : at + count].view(shape)
            at += count
        following = i - 1 if torch._C._current_graph_task_id() >= 0 else i + 1
        if 0 <= following < len(self.blocks) and following not in self.inside:
            self._load(following, 1 - slot)


# --- One case


def digest(tensor: Tensor) -> str:
    raw = tensor.detach().contiguous().view(torch.uint8).cpu()
    return hashlib.sha256(bytes(raw.flatten().tolist())).hexdigest()[:16]


def build(case: Case, device: torch.device) -> nn.Module:
    """On the CPU, block by block to the GPU where it is to be there at all."""
    torch.manual_seed(0)
    with torch.device(device), dtype_of(torch.bfloat16):
        model = Gpt(case)
    return model.requires_grad_() if case.full else model


@contextlib.contextmanager
def dtype_of(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = function()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3, found


def run(case: Case) -> Result:
    device = torch.device("cuda", 0)
    result = Result(case.name)
    around: Any = contextlib.nullcontext()
    stagehand: Any = None
    if case.offload or case.high:
        import stagehand_alloc as stagehand

        if case.mode == "allocator":
            torch.cuda.memory.change_current_allocator(stagehand.allocator())
    model = build(case, device)
    if case.ring:
        Ring(list(model.layers), device)  # type: ignore[arg-type]
    if case.offload:
        stagehand.offload(model, trained=case.full)
    torch.cuda.empty_cache()
    if case.high:
        around = stagehand.pool(high=int(case.high * GB))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    if case.offload and case.full:
        stagehand.offload_optimizer(optimizer)
    compared = [p for p in parameters if p.numel() <= 1 << 18][:8]
    torch.manual_seed(1)
    batch = torch.randn(1, case.tokens, case.width, device=device, dtype=torch.bfloat16)
    batch.requires_grad_(case.checkpoint)

    def forward() -> Tensor:
        with around:
            loss: Tensor = model(batch)
        return loss

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    # Libraries load, kernels too: with little of the model, and nothing saved.
    layers: Any = model.layers
    with torch.no_grad():
        layers[0](batch[:, :128])
    for i in range(3):  # compared
        took, loss = timed(forward)
        took += timed(loss.backward)[0]
        result.first = result.first if i else took
        result.digests += [
            digest(loss.reshape(1)),
            *(digest(p.grad) for p in compared if p.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    counted = Counted(stagehand)
    result.start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result.step = statistics.median(timed(step)[0] for _ in range(STEPS))
    counted.into(result)
    result.peak = torch.cuda.max_memory_allocated()
    result.reserved = torch.cuda.max_memory_reserved()
    parts = []
    for _ in range(3):
        took, loss = timed(forward)
        result.held = torch.cuda.memory_allocated()
        parts.append((took, timed(loss.backward)[0]))
        optimizer.zero_grad(set_to_none=True)
        del loss
    result.forward, result.backward = (statistics.median(one) for one in zip(*parts, strict=True))
    return result


def load(case: Case) -> Result:
    """48 blocks from the CPU; `step` is the time of `offload` in ms."""
    import stagehand_alloc as stagehand

    result = Result(case.name)
    if case.mode == "allocator":
        torch.cuda.memory.change_current_allocator(stagehand.allocator())
    empty: Any = nn.utils.skip_init
    blocks = [
        empty(nn.Linear, case.width, 48 * 1024, dtype=torch.bfloat16) for _ in range(case.layers)
    ]
    model = nn.Sequential(*blocks).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(1)  # and with that the memory is there
    result.weights = sum(p.nbytes for p in model.parameters())
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))).requires_grad_(False)
    stagehand.restore(stagehand.offload(small.cuda()))  # libraries load, and CUDA starts
    before = stagehand.stats()
    result.step, _ = timed(lambda: stagehand.offload(model))
    now = stagehand.stats()
    result.pinned = now.weights_pinned_bytes
    result.h2d, result.d2h = now.h2d_bytes - before.h2d_bytes, now.d2h_bytes - before.d2h_bytes
    return result


class Counted:
    """What the package counted since this was made."""

    def __init__(self, stagehand: Any) -> None:
        self.stagehand = stagehand
        if stagehand is not None:
            self.before, self.weights = stagehand.stats(), self._weights()

    def _weights(self) -> dict[str, int]:
        from stagehand_alloc import _native

        return _native.weights(0)

    def into(self, result: Result) -> None:
        if self.stagehand is None:
            return
        stats, weights = self.stagehand.stats().since(self.before), self._weights()
        result.overshoot = stats.overshoot_bytes
        result.host_waits = stats.host_waits / STEPS
        result.h2d, result.d2h = stats.h2d_bytes / STEPS, stats.d2h_bytes / STEPS
        result.dropped, result.map_calls = stats.dropped_bytes / STEPS, stats.map_calls / STEPS
        result.written = stats.weights_written_bytes / STEPS
        result.loads = (weights["loads"] - self.weights["loads"]) / STEPS
        result.late = (weights["late"] - self.weights["late"]) / STEPS
        result.loaded = (weights["loaded_bytes"] - self.weights["loaded_bytes"]) / STEPS
        result.group, result.weights = weights["largest"], weights["bytes"]


def in_a_process(case: Case) -> Result:
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=560, check=False, env=environment
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Result(**json.loads(line[len(MARK) :]))
    return Result(case.name, error=(done.stderr.strip().splitlines() or ["no word"])[-1])


def link_rates() -> tuple[float, float]:
    """H2D and D2H in bytes per ms, of pinned memory."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    rates = []
    for into, out in ((there, host), (host, there)):
        copy = functools.partial(into.copy_, out, non_blocking=True)
        copy()
        rates.append(host.nbytes / min(timed(copy)[0] for _ in range(5)))
    return rates[0], rates[1]


# --- The bars


@dataclass
class Bound:
    """The least a step takes, and the bytes that must come, by the closed form of decision 38."""

    ms: float
    h2d: float


def bound(
    high: float, plain: Result, weights: int, group: int, rates: tuple[float, float]
) -> Bound:
    into, out = rates
    fixed = plain.start - weights
    saved = plain.held - plain.start
    temporaries = plain.peak - plain.held
    room = high * GB - fixed - temporaries - group
    over = max(0.0, weights + saved - room)
    forward = max(0.0, weights - room)
    ms = max(plain.forward, forward / into, max(0.0, saved - room) / out)
    return Bound(
        ms + max(plain.backward, over / into) + plain.step - plain.forward - plain.backward,
        forward + over,
    )


def full_bound(high: float, plain: Result, weights: int, rates: tuple[float, float]) -> float:
    """The least ms of a step that trains all, in bf16: gradients are as much as the weights, and
    AdamW's state twice that. What is in use at once and does not fit comes in each of three parts.
    """
    into, out = rates
    saved = plain.held - plain.start
    room = high * GB - (plain.start - 3 * weights)
    forward = max(plain.forward, (weights - room) / into, (saved - room) / out)
    backward = max(plain.backward, (2 * weights + saved - room) / into)
    step = max(plain.step - plain.forward - plain.backward, (4 * weights - room) / into)
    return forward + backward + step


def bar(text: str, value: float, most: float) -> str:
    return f"{'ok  ' if value <= most else 'MISS'} {text}: {value:.3f} (at most {most})"


def cases(modes: list[str], quick: bool) -> list[Case]:
    small: dict[str, Any] = {"width": 1024, "heads": 8} if quick else {}
    scale = 16 if quick else 1
    long, short = (2048, 256) if quick else (8192, 1024)
    made = [
        Case("plain 8192", long, **small),
        Case("plain 1024", short, **small),
        Case("plain checkpoint", long, checkpoint=True, **small),
        Case("ring checkpoint", long, ring=True, checkpoint=True, **small),
        Case("plain full", long, full=True, **small),
    ]
    for mode in modes:
        of = {"mode": mode, **small}
        made += [Case(f"{mode} all fits", long, 40 / scale, True, **of)]
        made += [Case(f"{mode} {high}", long, high / scale, True, **of) for high in (12, 10, 8)]
        made += [
            Case(f"{mode} activations 12", long, 12 / scale, **of),
            Case(f"{mode} 1024 at 4", short, 4 / scale, True, **of),
            Case(f"{mode} checkpoint 4", long, 4 / scale, True, checkpoint=True, **of),
            Case(f"{mode} full 24", long, 24 / scale, True, full=True, **of),
            # Only where it is asked for: 8192 x 49152 in bf16, 0.8 GB a block.
            Case(f"{mode} load", 0, load=True, mode=mode, width=8192 // scale, layers=48),
        ]
    return made


def bars(
    mode: str, found: dict[str, Result], rates: tuple[float, float], scale: float
) -> list[str]:
    """Of the cases that ran."""

    def ran(*names: str) -> list[Result]:
        cases = [found.get(name) for name in names]
        there = [case for case in cases if case is not None and not case.error]
        return there if len(there) == len(names) else []

    lines = []
    for one in ran(f"{mode} load"):
        rate = one.weights / one.step / 1e6
        lines += [
            f"     {one.weights / GB:.1f} GB from the CPU in {one.step:.0f} ms, {rate:.1f} GB/s",
            bar("load, s for 37.8 GB", one.step / 1e3 * 37.8 / (one.weights / GB), 4),
            bar("load, host bytes of the weights'", one.pinned / one.weights, 1.02),
            bar("load, GB over the link", (one.h2d + one.d2h) / GB, 0),
        ]
    if not ran("plain 8192", f"{mode} all fits"):
        return lines
    plain, fits = found["plain 8192"], found[f"{mode} all fits"]
    weights, group = fits.weights, fits.group
    lines += [
        bar("all fits, of plain", fits.step / plain.step, 1.01),
        bar("all fits, loads a step", fits.loads, 0),
    ]
    for high in (12, 10, 8):
        for one in ran(f"{mode} {high}"):
            least = bound(high / scale, plain, weights, group, rates)
            if high == 12:
                lines.append(bar("12 GB, of plain", one.step / plain.step, 1.03))
            lines += [
                bar(f"{high} GB, of the bound", one.step / least.ms, 1.07),
                bar(f"{high} GB, GB over high", one.overshoot / GB, 0),
                bar(f"{high} GB, host waits a step", one.host_waits, 0),
                bar(f"{high} GB, reserved of high", one.reserved / (high / scale * GB), 1.02),
                bar(f"{high} GB, first step of a later", one.first / one.step, 1.5),
            ]
    if cases := ran(f"{mode} 1024 at 4", "plain 1024"):
        one, short = cases
        least = bound(4 / scale, short, weights, group, rates)
        lines += [
            bar("1024 tokens at 4 GB, of bytes / link", one.step / (one.h2d / rates[0]), 1.10),
            bar("1024 tokens at 4 GB, bytes of what must come", one.h2d / least.h2d, 1.03),
        ]
    if cases := ran(f"{mode} checkpoint 4", "ring checkpoint"):
        lines.append(bar("checkpointing, of ring of two", cases[0].step / cases[1].step, 1.00))
    if cases := ran(f"{mode} 12", "ring checkpoint"):
        lines.append(bar("12 GB, of ring of two", cases[0].step / cases[1].step, 0.75))
    if cases := ran(f"{mode} 12", f"{mode} activations 12"):
        lines.append(bar("12 GB, of activations alone", cases[0].step / cases[1].step, 1.0))
    if cases := ran(f"{mode} full 24", "plain full"):
        one, whole = cases
        least_ms = full_bound(24 / scale, whole, weights, rates)
        lines += [
            bar("full AdamW at 24 GB, of the bound", one.step / least_ms, 1.15),
            bar("full AdamW at 24 GB, GB over high", one.overshoot / GB, 0),
            bar("full AdamW at 24 GB, host waits a step", one.host_waits, 0),
        ]
    like = {
        "plain full": [f"{mode} full 24"],
        "plain 8192": [f"{mode} all fits", *(f"{mode} {high}" for high in (12, 10, 8))],
        "plain 1024": [f"{mode} 1024 at 4"],
        "plain checkpoint": [f"{mode} checkpoint 4", "ring checkpoint"],
    }
    pairs = [(name, ran(name, to)) for to, names in like.items() for name in names]
    wrong = [name for name, pair in pairs if pair and pair[0].digests != pair[1].digests]
    count = sum(1 for _, pair in pairs if pair)
    text = ", ".join(wrong) or f"all {count}"
    return [*lines, f"{'MISS' if wrong else 'ok  '} bitwise plain torch's: {text}"]


def write(out: pathlib.Path, found: dict[str, Result], lines: list[str], modes: list[str]) -> None:
    """One section for the modes that ran; those of other modes stay if of the same sources."""
    head = {"sources": source_hash(), "device": torch.cuda.get_device_name()}
    runs = earlier(out, head, head, "runs")
    cases = {name: asdict(one) for name, one in found.items()}
    runs[" ".join(modes)] = {"cases": cases, "bars": lines}
    write_result(out, {**head, "runs": runs})


def main() -> int:
    parser = argparse.ArgumentParser(description="LoRA with weights and activations in one budget.")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="a model of a sixteenth")
    parser.add_argument("--mode", action="append", choices=["native", "allocator"])
    parser.add_argument(
        "--only",
        help="cases, with commas: 12,8,1024 at 4; plain 8192 and all fits run anyway; or load",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        torch.use_deterministic_algorithms(True)  # else attention's backward is not
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False
        case = Case(**json.loads(arguments.case))
        print(MARK + json.dumps(asdict(load(case) if case.load else run(case))))
        return 0
    modes = arguments.mode or ["native", "allocator"]
    rates = link_rates()
    torch.cuda.empty_cache()
    found: dict[str, Result] = {}
    only = arguments.only.split(",") if arguments.only else None
    for case in cases(modes, arguments.quick):
        short = case.name.removeprefix("native ").removeprefix("allocator ")
        if case.load != (only == ["load"]):
            continue
        if only is not None and short not in (*only, "plain 8192", "all fits"):
            continue
        one = found[case.name] = in_a_process(case)
        print(
            f"{case.name:24} {one.error or ''}step {one.step:7.1f} ms  peak {one.peak / GB:6.2f}  "
            f"reserved {one.reserved / GB:6.2f} GB  loads {one.loads:4.1f} (late {one.late:.1f})  "
            f"h2d {one.h2d / GB:5.2f} d2h {one.d2h / GB:5.2f} dropped {one.dropped / GB:5.2f} GB  "
            f"over {one.overshoot / GB:.2f}  maps {one.map_calls:.0f}",
            flush=True,
        )
    lines = []
    for mode in modes:
        lines += [f"-- {mode}, link {rates[0] / 1e6:.1f} GB/s in, {rates[1] / 1e6:.1f} GB/s out"]
        lines += bars(mode, found, rates, 16 if arguments.quick else 1)
    print("\n".join(lines))
    if arguments.out:
        write(arguments.out, found, lines, modes)
    return 1 if any(line.startswith("MISS") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
