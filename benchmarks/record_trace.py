"""Records one training step of plain torch as the core would see it, for tests to replay.

    python benchmarks/record_trace.py MODEL OUT      MODEL: gpt, gpt_32k, llama, vit, adapters

Saved tensors are not kept meanwhile: pack keeps their shapes, unpack makes new ones of the same
sizes, so that torch frees what it would free with us, and allocates once more what we would restore
or hand back. What they hold is garbage, and so are the gradients.

A line an event, in torch's own order; sizes in bytes, times in microseconds since the step began:

a BLOCK BYTES             torch allocates          f BLOCK   torch frees
s RECORD BLOCK FROM TO    a storage is saved       h RECORD  the last saved variable over it is gone
u RECORD ALIAS            backward asks for it     d ALIAS   and is done with it
t GPU HOST                clocks: what was queued so far has run then on the GPU; the host's now
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import models
import torch
from shapes import MODELS

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


def record(training: models.Training) -> list[str]:
    """One step's lines."""
    for _ in range(WARM_STEPS):
        training.zero_grad()
        training.loss().backward()
    training.zero_grad()
    torch.cuda.synchronize()
    before = {
        block["address"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, stacks="python", context=None)
    recorder = Recorder(before)
    recorder.mark("begin")
    with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
        loss = training.loss()
    loss.backward()
    del loss
    recorder.mark("end")
    torch.cuda.synchronize()
    history = torch.cuda.memory._snapshot()["device_traces"][0]
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
    for event in history:
        action, size, address = event["action"], event["size"], event["addr"]
        if action == "alloc" and size == MARK:
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
            found.append(f"a {serial} {size}")
        elif action == "free_requested":
            ended = blocks.pop(address, "")
            if ended:
                found.append(ended)
    return found


def main() -> int:
    name, out = sys.argv[1:]
    builder, shape = MODELS[name]
    torch.manual_seed(0)
    training = models.build(builder, shape, torch.device("cuda"))
    pathlib.Path(out).write_text("\n".join(record(training)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
