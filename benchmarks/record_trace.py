"""Records one training step of plain torch as the core would see it, for tests to replay.

    python benchmarks/record_trace.py MODEL OUT [NUMBER]
    python benchmarks/record_trace.py lora OUT [TOKENS]
    torchrun --nproc-per-node 2 benchmarks/record_trace.py fsdp2 OUT

MODEL is one of shapes.py (gpt, llama, ...) or a workload (pipeline, moe, ...). NUMBER is the
step's, whose data the workload makes. `lora` is the model of weights.py, which has frozen blocks,
with so many tokens. Of several ranks the first one writes.

Saved tensors are not kept meanwhile: pack keeps their shapes, unpack makes new ones of the same
sizes, so that torch frees what it would free with us, and allocates once more what we would restore
or hand back. What they hold is garbage, and so are the gradients.

A line an event, in torch's own order; sizes in bytes, times in microseconds since the step began:

a BLOCK BYTES [STREAM]    torch allocates          f BLOCK   torch frees
s RECORD BLOCK FROM TO    a storage is saved       h RECORD  the last saved variable over it is gone
u RECORD ALIAS            backward asks for it     d ALIAS   and is done with it
e BLOCK HOW               a frozen block: 0 entered, 1 left, 2 entered by backward
t GPU HOST                clocks: what was queued so far has run then on the GPU; the host's now

STREAM is 1, 2, ... for memory of other streams than the compute stream.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from typing import Any

import torch
import workload_models
from shapes import MODELS
from weight_cases import Case
from weight_models import build
from workload_cases import CASES

WARM_STEPS = 3
MARK = 10007  # bytes of an allocation that nothing else makes: a place in torch's own order


class Recorder:
    """Saved-tensor hooks that write down what happens, between marks in torch's history."""

    def __init__(self, before: set[int]) -> None:
        self.before = before  # storages there before the step
        self.notes: list[tuple[Any, ...]] = []
        self.marks: list[torch.cuda.Event] = []

    def mark(self, *note: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)
        self.notes.append(note)
        torch.empty(MARK, dtype=torch.uint8, device="cuda")

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        parameter = tensor._base if tensor._base is not None else tensor
        if parameter.is_leaf and parameter.requires_grad:
            return tensor
        if storage.data_ptr() in self.before or storage.nbytes() == 0:
            return tensor
        first = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        last = first + span * tensor.element_size()
        self.mark("s", storage.data_ptr(), first, last)
        return _Handle(self, len(self.notes) - 1, storage.nbytes(), tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self.mark("u", packed.note)
        flat = torch.empty(packed.bytes, dtype=torch.uint8, device="cuda")
        if not packed.dtype.is_floating_point:
            flat.zero_()  # an index must be one
        again = torch.empty(0, dtype=packed.dtype, device="cuda")
        return again.set_(flat.untyped_storage(), packed.offset, packed.shape, packed.stride)


class _Handle:
    def __init__(self, recorder: Recorder, note: int, size: int, tensor: torch.Tensor) -> None:
        self.recorder = recorder
        self.note = note
        self.bytes = size
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()

    def __del__(self) -> None:
        self.recorder.mark("h", self.note)


class Lora:
    """A step of weights.py's model, whose blocks the recorder is told of."""

    def __init__(self, tokens: int) -> None:
        case = Case("recorded", tokens)
        device = torch.device("cuda")
        self.model = build(case, device)
        self.batch = torch.randn(1, tokens, case.width, device=device, dtype=torch.bfloat16)
        self.recorder: Recorder | None = None
        layers: Any = self.model.layers
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._note, i, 0))
            layer.register_forward_hook(functools.partial(self._left, i))

    def _note(self, block: int, how: int, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.mark("e", block, how)

    def _left(self, block: int, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self._note(block, 1)
        output.register_hook(functools.partial(self._note, block, 2))

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def step(self, number: int, hooks: Any, done: Any) -> None:
        with hooks():
            loss = self.model(self.batch)
        loss.backward()


def record(work: Any, number: int) -> list[str]:
    """One step's lines."""
    for warm in range(WARM_STEPS):
        work.zero_grad()
        work.step(number + 1 + warm, contextlib.nullcontext, lambda _: None)
    work.zero_grad()
    torch.cuda.synchronize()
    before = {
        block["address"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python", context=None)
    recorder = Recorder(before)
    if isinstance(work, Lora):
        work.recorder = recorder
    recorder.mark("begin")
    hooks = functools.partial(
        torch.autograd.graph.saved_tensors_hooks, recorder.pack, recorder.unpack
    )
    work.step(number, hooks, lambda _: None)
    recorder.mark("end")
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return lines(recorder, history)


def lines(recorder: Recorder, history: list[dict[str, Any]]) -> list[str]:
    """torch's history with the recorder's notes at the marks in it."""
    found: list[str] = []
    blocks: dict[int, str] = {}  # by address: "f 3", what its end is called
    record_of: dict[int, int] = {}  # by the note that saved
    alive: dict[int, int] = {}  # the record over a block
    handles: dict[int, int] = {}
    serial = aliases = records = 0
    notes = iter(enumerate(zip(recorder.notes, recorder.marks, strict=True)))
    wanted: int | None = None  # the record whose unpacked tensor is allocated next
    start_us = None
    streams: dict[int, int] = {}  # the compute stream is the first mark's
    for event in history:
        action, size, address = event["action"], event["size"], event["addr"]
        if action == "alloc" and size == MARK:
            streams.setdefault(event["stream"], 0)
            index, (note, mark) = next(notes)
            start_us = event["time_us"] if start_us is None else start_us
            gpu = recorder.marks[0].elapsed_time(mark) * 1e3
            found.append(f"t {gpu:.0f} {event['time_us'] - start_us}")
            blocks[address] = ""
            if note[0] == "s":
                block = int(blocks[note[1]].split()[1])
                if block not in alive:
                    records += 1
                    alive[block] = records
                number = alive[block]
                record_of[index] = number
                handles[number] = handles.get(number, 0) + 1
                found.append(f"s {number} {block} {note[2]} {note[3]}")
            elif note[0] == "e":
                found.append(f"e {note[1]} {note[2]}")
            elif note[0] == "u":
                wanted = record_of[note[1]]
            elif note[0] == "h":
                number = record_of[note[1]]
                handles[number] -= 1
                if handles[number] == 0:
                    found.append(f"h {number}")
                    alive = {b: r for b, r in alive.items() if r != number}
        elif action == "alloc" and wanted is not None:
            aliases += 1
            blocks[address] = f"d {aliases}"
            found.append(f"u {wanted} {aliases}")
            wanted = None
        elif action == "alloc":
            serial += 1
            blocks[address] = f"f {serial}"
            stream = streams.setdefault(event["stream"], len(streams))
            found.append(f"a {serial} {size} {stream}" if stream else f"a {serial} {size}")
        elif action == "free_requested":
            ended = blocks.pop(address, "")
            if ended:
                found.append(ended)
    return found


def main() -> int:
    name, out, *number = sys.argv[1:]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    if "LOCAL_RANK" in os.environ:
        torch.distributed.init_process_group("nccl")
    torch.manual_seed(0)
    wanted = int(number[0]) if number else 0
    if name == "lora":
        found = record(Lora(wanted or 8192), 0)
    else:
        builder, shape = (CASES[name].model, CASES[name].shape) if name in CASES else MODELS[name]
        work = workload_models.build(builder, shape, torch.device("cuda"))
        found = record(work, wanted)
    if rank == 0:
        pathlib.Path(out).write_text("\n".join(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
