"""The arithmetic of the benchmarks: budgets, the bound they are held against, ratios, percentiles.

Pure functions. Sizes in bytes, times in milliseconds, rates in bytes per second.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

GIB = 1 << 30
LEAST_SHARE = 0.25  # of the activation memory: below it the working set of a layer does not fit


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes per second of pinned copies."""

    d2h: float
    h2d: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """The watermarks of one pool, in bytes."""

    high: int
    low: int


def budget_of_share(start: int, peak: int, share: float) -> Budget:
    """The budget that leaves `share` of the activation memory, peak - start, above the start.

    high - low is 1 GiB, and a tenth of the activation memory where that is less.
    """
    activations = peak - start
    high = start + int(share * activations)
    return Budget(high, high - min(GIB, activations // 10))


def budget_of_need(start: int, peak: int, need: float) -> Budget:
    """The budget that `need` bytes must leave to fit, at least LEAST_SHARE of the activations."""
    return budget_of_share(start, peak, max(LEAST_SHARE, 1 - need / (peak - start)))


def window_bytes(link: Link, forward_ms: float) -> float:
    """The free window: what the link carries away while forward computes."""
    return link.d2h * forward_ms / 1e3


def bound_ms(need: float, link: Link, forward_ms: float, backward_ms: float) -> float:
    """The least time of a step of which `need` bytes must leave, and come back.

    max(Tf, E / B) + max(Tb, E / B), with the bandwidth of each direction.
    """
    away, back = need / link.d2h * 1e3, need / link.h2d * 1e3
    return max(forward_ms, away) + max(backward_ms, back)


def ratio_in_turn(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> float:
    """Median over the rounds of (median of a round / median of the base's same round)."""
    ratios = [
        statistics.median(mine) / statistics.median(theirs)
        for mine, theirs in zip(rounds, base, strict=True)
    ]
    return statistics.median(ratios)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the least value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and p99.9."""
    named = {"p50": 50, "p99": 99, "p99_9": 99.9}
    return {name: round(percentile(values, at), 3) for name, at in named.items()}


def agree(values: Sequence[float], tolerance: float) -> bool:
    """Whether all values are finite and no two differ by more than `tolerance`, relative."""
    if not all(math.isfinite(value) for value in values):
        return False
    return max(values) - min(values) <= tolerance * max(abs(value) for value in values)
