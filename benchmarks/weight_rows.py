"""What weights.py claims of its cases, and the least times they are held against.

The least time of a step is max(forward, (W - R)+ / in, (A - R)+ / out) + max(backward, (W + A - R)+
/ in): W weights, A what is saved, R the budget less what stays, temporaries and one block
(docs/decisions/0038). No less than plain torch's step either: what that does outside of both parts
is mostly the host's, and copies may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness import Row
from weight_cases import GB, Case, Result

Rates = tuple[float, float]  # to the GPU and from it, bytes per ms


@dataclass(frozen=True)
class Missing:
    """A claim that what it needs is not there for."""

    claim: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        return {"claim": self.claim, "value": None, "bar": self.why, "holds": False}


@dataclass
class Bound:
    """The least a step takes, and the bytes that must come."""

    ms: float
    h2d: float


def bound(high: float, plain: Result, rates: Rates) -> Bound:
    """Of frozen weights. `high` in bytes; `plain` also says what the weights are."""
    into, out = rates
    fixed = plain.start - plain.weights
    saved = plain.held - plain.start
    temporaries = plain.peak - plain.held
    room = high - fixed - temporaries - plain.group
    over = max(0.0, plain.weights + saved - room)
    forward = max(0.0, plain.weights - room)
    ms = max(plain.forward, forward / into, max(0.0, saved - room) / out)
    ms += max(plain.backward, over / into)
    parts = max(plain.step, plain.forward + plain.backward) - plain.step  # waits between them
    return Bound(max(plain.step, ms - parts), forward + over)


def full_bound(high: float, plain: Result, rates: Rates) -> float:
    """The least ms of a step that trains all, in bf16: gradients are as much as the weights, and
    AdamW's state twice that. What is in use at once and does not fit comes in each of three parts.
    """
    into, out = rates
    weights, saved = plain.weights, plain.held - plain.start
    room = high - (plain.start - 3 * weights)
    forward = max(plain.forward, (weights - room) / into, (saved - room) / out)
    backward = max(plain.backward, (2 * weights + saved - room) / into)
    step = max(plain.step - plain.forward - plain.backward, (4 * weights - room) / into)
    return forward + backward + step


def least_ms(case: Case, high: float, plain: Result, rates: Rates) -> float:
    """Of a case of ours; `plain`: its base."""
    if case.link:
        rates = (min(rates[0], case.link * 1e6), rates[1])
    if case.full:
        return full_bound(high, plain, rates)
    if case.forward_only:
        room = high - (plain.peak - plain.weights) - plain.group
        return max(plain.step, (plain.weights - room) / rates[0])
    return bound(high, plain, rates).ms


class Rows:
    """Those of one mode. `found`: what is known by name; `fresh`: what was measured in this call.

    Plain torch's times are those of this call; what others made may be of an earlier one.
    """

    def __init__(
        self, mode: str, cases: dict[str, Case], found: dict[str, Result], fresh: set[str]
    ) -> None:
        self.mode, self.cases, self.found, self.fresh = mode, cases, found, fresh

    def all(self, rates: Rates) -> list[Row | Missing]:
        rows: list[Row | Missing] = [*self._fits(), *self._budgets(rates), *self._short(rates)]
        rows += [*self._blocks(rates), *self._full(rates), *self._ring(), *self._against()]
        return rows

    def _there(self, *names: str) -> list[Result]:
        """The results of all these, if one was measured in this call, and what is plain was."""
        there = [self.found.get(name) for name in names]
        results = [one for one in there if one is not None and one.measured]
        fresh = any(name in self.fresh for name in names if not name.startswith("plain"))
        plain = all(name in self.fresh for name in names if name.startswith("plain"))
        return results if len(results) == len(names) and fresh and plain else []

    def _with(self, name: str, base: str) -> list[Result]:
        return self._there(f"{self.mode} {name}", base)

    def _row(self, claim: str, value: float, at_most: float) -> Row:
        return Row(f"{self.mode}: {claim}", value, at_most=at_most)

    def _fits(self) -> Iterator[Row]:
        if pair := self._with("all fits", "plain 8192"):
            fits, plain = pair
            yield self._row("all fits, of plain", fits.step / plain.step, 1.01)
            yield self._row("all fits, loads a step", fits.loads, 0)

    def _held(self, title: str, one: Result) -> Iterator[Row]:
        """What holds of every budget."""
        yield self._row(f"{title}, GB over high", one.overshoot / GB, 0)
        yield self._row(f"{title}, host waits a step", one.host_waits, 0)
        yield self._row(f"{title}, reserved of high", one.reserved / one.high, 1.02)
        yield self._row(f"{title}, first step of a later", one.first / one.step, 1.5)

    def _budgets(self, rates: Rates) -> Iterator[Row]:
        for high in (12, 10, 8):
            if pair := self._with(f"{high}", "plain 8192"):
                one, plain = pair
                least = bound(one.high, plain, rates)
                if high == 12:
                    yield self._row("12 GB, of plain", one.step / plain.step, 1.03)
                yield self._row(f"{high} GB, of the bound", one.step / least.ms, 1.07)
                yield from self._held(f"{high} GB", one)

    def _short(self, rates: Rates) -> Iterator[Row]:
        if pair := self._with("1024 at 4", "plain 1024"):
            one, plain = pair
            least = bound(one.high, plain, rates)
            title = "1024 tokens at 4 GB"
            if one.h2d:
                yield self._row(f"{title}, of bytes / link", one.step / (one.h2d / rates[0]), 1.10)
            if least.h2d:
                came = one.h2d / least.h2d
                yield self._row(f"{title}, bytes of what must come", came, 1.03)
            yield from self._held(title, one)

    def _blocks(self, rates: Rates) -> Iterator[Row]:
        for name in ("48 blocks", "48 blocks at 25 GB/s"):
            if pair := self._with(name, "plain 48 blocks"):
                one, plain = pair
                least = least_ms(self.cases[one.name], one.high, plain, rates)
                yield self._row(f"{name}, 20 GiB, of the bound", one.step / least, 1.15)
                yield from self._held(f"{name}, 20 GiB", one)
                if name == "48 blocks":
                    yield self._row(f"{name}, loaded from the CPU, s", one.load / 1e3, 4)
                    claim = f"{name}, host bytes of the weights'"
                    yield self._row(claim, one.pinned / one.weights, 1.02)

    def _full(self, rates: Rates) -> Iterator[Row | Missing]:
        if pair := self._with("full 24", "plain full"):
            one, plain = pair
            least = full_bound(one.high, plain, rates)
            yield self._row("full AdamW at 24 GB, of the bound", one.step / least, 1.15)
            yield from self._held("full AdamW at 24 GB", one)
        yield from self._of(
            "full 24", "fsdp2 full", "full AdamW at 24 GB, of FSDP2 on the CPU", 0.6
        )
        yield from self._of(
            *("full as torchao", "torchao full"),
            "full AdamW, of torchao's CPUOffloadOptimizer at the same peak",
            1.0,
        )

    def _ring(self) -> Iterator[Row | Missing]:
        ring = "ring checkpoint"
        claim = "checkpointing, of a ring of two at the same peak"
        yield from self._of("checkpoint as ring", ring, claim, 1.0)
        yield from self._of("12", ring, "12 GB without checkpointing, of a ring of two", 0.75)
        claim = "12 GB, of activations alone"
        yield from self._of("12", f"{self.mode} activations 12", claim, 1.0)

    def _against(self) -> Iterator[Row | Missing]:
        for level in ("block", "leaf"):
            theirs = f"diffusers {level}"
            title = f"of diffusers' group offload by {level}, with a stream"
            claim = f"checkpointing, forward and backward, {title}"
            yield from self._of("checkpoint as ring", theirs, claim, 0.8, parts=True)
            claim = f"forward alone at 3 GB, {title}"
            yield from self._of("forward 3", f"{theirs} forward", claim, 0.8)
        claim = "no checkpointing, in as much memory as diffusers' group offload by block with it"
        yield from self._of("as diffusers", "diffusers block", claim, 0.8, parts=True)
        claim = "forward alone at 3 GB, of accelerate's cpu_offload"
        yield from self._of("forward 3", "accelerate forward", claim, 0.5)

    def _of(
        self, name: str, theirs: str, claim: str, at_most: float, parts: bool = False
    ) -> Iterator[Row | Missing]:
        """Time over theirs. `parts`: of forward and backward, where they make no step."""
        other = self.found.get(theirs)
        if theirs in self.fresh and other is not None and not other.measured:
            yield Missing(f"{self.mode}: {claim}", other.absent or other.error)
        elif other and other.bitwise is False and self.fresh & {theirs, f"{self.mode} {name}"}:
            yield Missing(f"{self.mode}: {claim}", "its gradients are not plain torch's")
        elif pair := self._there(f"{self.mode} {name}", theirs):
            mine, other = pair
            if parts:
                value = (mine.forward + mine.backward) / (other.forward + other.backward)
            else:
                value = mine.step / other.step
            yield self._row(claim, value, at_most)


def unlike_torch(found: dict[str, Result]) -> list[str]:
    """The cases whose losses or gradients are not plain torch's."""
    return [name for name, one in found.items() if one.bitwise is False]
