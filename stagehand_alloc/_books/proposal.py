"""Which classes of pinned memory would have served what was asked: pure functions on sizes.

`slabs_for` says what `native/core/size_class` does, in Python.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIB = 1 << 20

_WASTE = 7  # at most one part in so many of a storage's slabs is empty
_UNDIVIDED = 64 << 10  # a storage of up to so many bytes takes one slab, whatever it wastes
_SMALLEST_CELL = 4 << 10
_MOST_CELLS = 8  # halvings of the smallest class


@dataclass(frozen=True)
class Proposal:
    """Classes (MiB) and counts that would have held all that was asked, with no slab to spare."""

    classes_mb: tuple[int, ...]
    slabs_per_class: tuple[int, ...]
    bytes: int  # of all these slabs
    waste: float  # the share of them that would have been empty, 0 to 1


def slab_sizes(classes: Sequence[int]) -> tuple[list[int], int]:
    """Every size a slab comes in, ascending, and how many of them are cells. Sizes in bytes."""
    cells: list[int] = []
    cell = classes[0] // 2
    while len(cells) < _MOST_CELLS and cell >= _SMALLEST_CELL and cell % 512 == 0:
        cells.append(cell)
        cell //= 2
    return [*reversed(cells), *classes], len(cells)


def slabs_for(size: int, classes: Sequence[int]) -> list[int]:
    """The slabs that a storage of ``size`` bytes takes from a pool with all of them free."""
    sizes, _ = slab_sizes(classes)
    found: list[int] = []
    left = size
    while left > 0:
        fit = next((i for i, slab in enumerate(sizes) if slab >= left), len(sizes) - 1)
        slab = sizes[fit]
        tight = (slab - left) * _WASTE <= size - left + slab
        if slab > left and fit > 0 and not tight and size > _UNDIVIDED:
            slab = sizes[fit - 1]
        found.append(slab)
        left -= slab
    return found


def propose_classes(demand: Iterable[tuple[int, int]], most: int = 5) -> Proposal:
    """The classes that would have served ``demand`` with no miss and the least waste.

    Args:
        demand: sizes in bytes, and how many storages of each held host memory at once at most
            (`pinned_demand`). Peaks of different sizes are taken to coincide.
        most: how many classes at most.

    The classes are those that hold each storage in one slab with the fewest bytes in all (exact,
    over whole MiB); their counts are what the pool's own choice of slabs then takes. Storages under
    half a MiB are held in parts of 1 MiB slabs. Raises ValueError for ``most`` below 1.
    """
    if most < 1:
        raise ValueError(f"most is {most}; at least one class is needed.")
    asked = [(size, count) for size, count in sorted(demand) if size > 0 and count > 0]
    if not asked:
        return Proposal((), (), 0, 0.0)
    whole: Counter[int] = Counter()  # MiB -> storages that one slab of so many would hold
    for size, count in asked:
        if 2 * size > MIB or most == 1:
            whole[-(-size // MIB)] += count
    small = any(2 * size <= MIB for size, _ in asked)
    if small and most > 1:
        whole.setdefault(1, 0)
    classes_mb = _fewest_bytes(sorted(whole.items()), most, keep_first=small and most > 1)
    counts = _counts(asked, [mb * MIB for mb in classes_mb])
    total = sum(mb * MIB * count for mb, count in zip(classes_mb, counts, strict=True))
    held = sum(size * count for size, count in asked)
    used = [(mb, count) for mb, count in zip(classes_mb, counts, strict=True) if count > 0]
    return Proposal(
        tuple(mb for mb, _ in used), tuple(count for _, count in used), total, 1 - held / total
    )


def _fewest_bytes(whole: list[tuple[int, int]], most: int, keep_first: bool) -> list[int]:
    """At most ``most`` of the sizes, ascending, the last among them, so that the least is wasted.

    Each storage goes to the smallest class that holds it: best[i] is the least for the sizes up
    to the i-th, where that one is a class.
    """
    sizes = [mb for mb, _ in whole]
    before = [0, *itertools.accumulate(count for _, count in whole)]
    best = [
        ([size], None if keep_first and i > 0 else size * before[i + 1])  # None: not allowed
        for i, size in enumerate(sizes)
    ]
    for _ in range(most - 1):
        longer = list(best)
        for i, size in enumerate(sizes):
            for j in range(i):
                classes, cost = best[j]
                if cost is None:
                    continue
                cost += size * (before[i + 1] - before[j + 1])
                least = longer[i][1]
                if least is None or cost < least:
                    longer[i] = ([*classes, size], cost)
        best = longer
    return best[-1][0]


def _counts(asked: Iterable[tuple[int, int]], classes: list[int]) -> list[int]:
    """How many slabs of each class the storages take together; cells share slabs of the first."""
    taken: Counter[int] = Counter()
    for size, count in asked:
        for slab in slabs_for(size, classes):
            taken[slab] += count
    sizes, cells = slab_sizes(classes)
    for cell in sizes[:cells]:
        taken[classes[0]] += -(-taken[cell] * cell // classes[0])
    return [taken[size] for size in classes]
