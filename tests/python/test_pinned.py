"""Proposals for the pinned pool's classes."""

from __future__ import annotations

import itertools

import pytest

from stagehand_alloc._books.proposal import MIB, Proposal, propose_classes, slabs_for

KIB = 1 << 10
DEFAULT = [mb * MIB for mb in (1, 4, 16, 64, 256)]


@pytest.mark.parametrize(
    ("size", "slabs"),
    [
        (5 * MIB, [4 * MIB, MIB]),
        (15 * MIB, [16 * MIB]),
        (900_000, [MIB]),
        (4 * MIB + 16 * KIB, [4 * MIB, 16 * KIB]),
        (40 * KIB, [64 * KIB]),
        (600 * MIB, [256 * MIB, 256 * MIB, 64 * MIB, 64 * MIB]),
    ],
)
def test_slabs_are_those_the_core_chooses(size: int, slabs: list[int]) -> None:
    # tests/native/test_size_class.cpp has the same table
    assert slabs_for(size, DEFAULT) == slabs


def test_nothing_asked_is_nothing_proposed() -> None:
    assert propose_classes([]) == Proposal((), (), 0, 0.0)


def test_sizes_that_classes_can_be_are_held_without_waste() -> None:
    found = propose_classes([(12 * MIB, 7), (3 * MIB, 40), (200 * MIB, 2)])
    assert found == Proposal((3, 12, 200), (40, 7, 2), (120 + 84 + 400) * MIB, 0.0)


def test_small_storages_share_slabs_of_one_mib() -> None:
    found = propose_classes([(16 * KIB, 640), (8 * MIB, 3)])
    assert found == Proposal((1, 8), (10, 3), 34 * MIB, 0.0)


def test_a_storage_that_fills_most_of_a_slab_takes_it_whole() -> None:
    found = propose_classes([(900_000, 422)])
    assert found.classes_mb == (1,)
    assert found.slabs_per_class == (422,)
    assert found.waste < 0.15


def test_one_class_alone_holds_everything() -> None:
    found = propose_classes([(100 * KIB, 10), (6 * MIB, 2)], most=1)
    assert len(found.classes_mb) == 1
    assert found.bytes >= 10 * 100 * KIB + 12 * MIB


def test_too_few_classes_waste_as_little_as_any_choice_of_them() -> None:
    demand = [(mb * MIB, count) for mb, count in ((3, 50), (7, 20), (9, 11), (30, 4), (33, 9))]
    sizes = [size // MIB for size, _ in demand]

    def in_one_slab_each(classes: tuple[int, ...]) -> int:
        return sum(min(c for c in classes if c * MIB >= size) * count for size, count in demand)

    for most in range(1, 6):
        choices = [
            (*some, sizes[-1])
            for k in range(most)
            for some in itertools.combinations(sizes[:-1], k)
        ]
        best = min(map(in_one_slab_each, choices))
        assert propose_classes(demand, most).bytes <= best * MIB


def test_the_proposal_serves_all_that_was_asked() -> None:
    demand = [(300 * KIB * n + n * n * 1000, 1 + n % 5) for n in range(1, 90)]
    for most in (1, 2, 3, 5, 8):
        found = propose_classes(demand, most)
        assert len(found.classes_mb) <= most
        assert list(found.classes_mb) == sorted(set(found.classes_mb))
        have = dict(zip(found.classes_mb, found.slabs_per_class, strict=True))
        classes = [mb * MIB for mb in found.classes_mb]
        for size, count in demand:
            for slab in slabs_for(size, classes):
                if slab in classes:
                    have[slab // MIB] -= count
        assert min(have.values()) >= 0
        held = sum(size * count for size, count in demand)
        assert found.bytes >= held
        assert found.waste == pytest.approx(1 - held / found.bytes)
        if most >= 5:
            assert found.waste < 0.15


def test_no_class_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        propose_classes([(1, 1)], most=0)
