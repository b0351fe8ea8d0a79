"""When the compute stream had nothing to do in a step, and what other streams did meanwhile.

Times are torch.profiler's, of kernels and copies on the device. The compute stream is the one whose
kernels take longest. A gap is time between two pieces of work there: the host had not queued the
next one yet, or it waited for an event, such as a restore's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# How the names of what does not compute begin: NCCL's kernels wait for other GPUs.
NO_KERNELS = ("Memcpy", "Memset", "nccl")
LEAST_NS = 2_000  # between two kernels that are queued already
LONGEST = 5
NAME = 60


@dataclasses.dataclass(frozen=True)
class Span:
    """One piece of work on the device."""

    name: str
    stream: int
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclasses.dataclass
class Recorded:
    """`calls`: the host's calls to CUDA that the profiler shows: count and ms by name."""

    spans: list[Span] = dataclasses.field(default_factory=list)
    calls: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def recorded() -> Iterator[Recorded]:
    """What the device and the host do while entered; known afterwards."""
    found = Recorded()
    with _profiler():  # the first of a process starts slowly
        torch.zeros(1, device="cuda")
    with _profiler() as profiler:
        yield found
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        name, start, ns = event.name(), event.start_ns(), event.duration_ns()
        if ns <= 0 or getattr(event, "is_user_annotation", bool)():  # a range that has a name
            continue
        if "CUDA" in str(event.device_type()):
            found.spans.append(Span(name, event.device_resource_id(), start, start + ns))
        elif name.startswith("cu"):
            one = found.calls.setdefault(name, {"calls": 0, "ms": 0.0})
            one["calls"] += 1
            one["ms"] = round(one["ms"] + ns / 1e6, 4)


def _profiler() -> Any:
    profile: Any = torch.profiler.profile
    return profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)


def described(recorded: Recorded) -> dict[str, Any]:
    """The compute stream's time, idle time and longest gaps, in milliseconds."""
    spans = recorded.spans
    stream = compute_stream(spans)
    if stream is None:
        return {"seen": False, "why": "no kernel was recorded"}
    mine = sorted((s for s in spans if s.stream == stream), key=lambda s: s.start_ns)
    others = [s for s in spans if s.stream != stream]
    began, reached = mine[0].start_ns, mine[0].end_ns
    found = []
    for span in mine[1:]:
        if span.start_ns - reached >= LEAST_NS:
            found.append((reached, span.start_ns, span.name))
        reached = max(reached, span.end_ns)
    longest = sorted(found, key=lambda gap: gap[0] - gap[1])[:LONGEST]
    return {
        "seen": True,
        "span_ms": _ms(reached - began),
        "idle_ms": _ms(sum(end - start for start, end, _ in found)),
        "gaps": len(found),
        "longest": [
            {
                "at_ms": _ms(start - began),
                "ms": _ms(end - start),
                "before": name[:NAME],
                "meanwhile": meanwhile(others, start, end),
            }
            for start, end, name in longest
        ],
        "other_streams_ms": meanwhile(others, began, reached, most=8),
        "host_calls": dict(sorted(recorded.calls.items(), key=lambda item: -item[1]["ms"])),
    }


def compute_stream(spans: Sequence[Span]) -> int | None:
    """The stream whose kernels take longest together."""
    total: dict[int, int] = {}
    for span in spans:
        if not span.name.startswith(NO_KERNELS):
            total[span.stream] = total.get(span.stream, 0) + span.ns
    return max(total, key=lambda stream: total[stream], default=None)


def meanwhile(spans: Sequence[Span], start: int, end: int, most: int = 3) -> dict[str, float]:
    """Milliseconds of other streams' work inside a time, by name, the longest first."""
    total: dict[str, int] = {}
    for span in spans:
        inside = min(span.end_ns, end) - max(span.start_ns, start)
        if inside > 0:
            name = f"stream {span.stream}: {span.name[:NAME]}"
            total[name] = total.get(name, 0) + inside
    longest = sorted(total.items(), key=lambda item: -item[1])[:most]
    return {name: _ms(ns) for name, ns in longest}


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
