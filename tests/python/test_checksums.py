"""debug_checksums: a host copy that changed behind our back reaches nobody's gradients."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import stagehand_alloc
from stagehand_alloc import ChecksumError, _native

pytestmark = pytest.mark.usefixtures("gpu")

CHECKED = {"debug_checksums": True}
WORDS = 1 << 19  # a saved tensor of 2 MiB, with contents found nowhere else


def writable_memory() -> Iterator[tuple[int, int]]:
    """Begin and end of each writable stretch of this process that has no file behind it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0\s*$", line)
        if found:
            yield int(found[1], 16), int(found[2], 16)


def flip_a_bit_wherever(contents: bytes) -> int:
    """Change all memory that holds `contents`, as bad memory would; returns how often it was.

    Memory that was freed may hold it too, before the copy that counts.
    """
    own = id(contents) + bytes.__basicsize__ - 1  # what is looked for stays as it is
    count = 0
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for begin, end in writable_memory():
            memory.seek(begin)
            try:
                found = memory.read(end - begin)
            except OSError:
                continue  # reserved, or gone meanwhile
            at = found.find(contents)
            while at >= 0:
                if begin + at != own:
                    ctypes.c_ubyte.from_address(begin + at).value ^= 1
                    count += 1
                at = found.find(contents, at + len(contents))
    return count


def test_a_host_copy_that_changed_raises_with_its_history_and_the_next_step_is_right() -> None:
    def forward() -> tuple[Tensor, Tensor]:
        leaf = torch.ones(WORDS, requires_grad=True)
        with stagehand_alloc.pool(config=CHECKED):
            saved = leaf * torch.arange(WORDS, dtype=torch.float32).mul_(1.37)
            return leaf, saved.square().sum()

    leaf, loss = forward()
    _native.set_debug(evict_everything=True, poison=True, checksums=True)
    try:
        torch.empty(1)  # everything saved leaves
    finally:
        _native.set_debug(evict_everything=False, poison=False, checksums=True)
    contents = torch.arange(WORDS, dtype=torch.float32).mul_(1.37)[1000:1064].numpy().tobytes()
    assert flip_a_bit_wherever(contents) > 0
    with pytest.raises(ChecksumError, match=r"evicted 1 times.*CRC") as caught:
        loss.backward()
    assert len(str(caught.value).splitlines()) == 2
    del loss, caught  # the error names the graph

    leaf, loss = forward()
    loss.backward()
    scale = torch.arange(WORDS, dtype=torch.float32).mul_(1.37)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * scale * scale)
    assert stagehand_alloc.stats().evicted == 0
