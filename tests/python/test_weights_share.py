"""One host copy of frozen weights for several processes, which trust nothing but bytes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import DEVICE, MIB, Model, build, plain, tokens, trained
from torch import nn
from training import digest

import stagehand_alloc
from stagehand_alloc import ConfigError, OffloadError, _native
from stagehand_alloc._weights import offload as _offload
from stagehand_alloc._weights import share as _share
from stagehand_alloc._weights.groups import registry

pytestmark = pytest.mark.usefixtures("gpu", "leaves_nothing_behind")


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return f"test-{uuid.uuid4()}"


@pytest.fixture
def leaves_nothing_behind(name: str, tmp_path: Path) -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert _native.weights(DEVICE)["bytes"] == 0
    assert not list(tmp_path.glob("stagehand_alloc-*"))
    files = {n: Path(f"/proc/self/fd/{n}") for n in set(os.listdir("/proc/self/fd")) - before}
    assert not [f for f in files.values() if f.exists() and "memfd" in os.readlink(f)]


def inode(model: Any) -> tuple[int, int]:
    share = registry.of(model.layers[0]).share  # type: ignore[union-attr]
    found = os.fstat(share.fd)
    return found.st_dev, found.st_ino


def of_all(model: Any) -> list[tuple[Any, ...]]:
    return [(name, id(p), digest(p)) for name, p in model.named_parameters()]


def digests(model: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


class Other(Model):
    """The same names, shapes and dtypes, and one byte that is not."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = self.layers[5]
        layer.down.weight.data.view(torch.uint8).view(-1)[-1] ^= 1


# --- One copy


@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_models_that_share_have_one_copy_and_train_as_plain_torch_does(
    name: str, where: str, request: pytest.FixtureRequest
) -> None:
    if where == "cpu":
        request.getfixturevalue("elsewhere")
    first = stagehand_alloc.offload(build(), share=name)
    second = stagehand_alloc.offload(build(), share=name)
    assert inode(first) == inode(second)
    for model in (first, second):
        assert trained(model, stagehand_alloc.pool(high=8 * MIB), steps=1) == plain(steps=1)
    assert digests(first)["layers.3.up.weight"] == digest(build().layers[3].up.weight)


def test_the_copy_outlives_who_wrote_it(name: str) -> None:
    first = stagehand_alloc.offload(build(), share=name)
    second = stagehand_alloc.offload(build(), share=name)
    wanted = inode(first)
    del first
    gc.collect()
    third = stagehand_alloc.offload(build(), share=name)
    assert inode(third) == inode(second) == wanted
    stagehand_alloc.restore(second)
    assert trained(second, steps=1) == plain(steps=1)  # with memory of its own
    assert trained(third, stagehand_alloc.pool(high=8 * MIB), steps=1) == plain(steps=1)


def test_who_finds_the_copy_there_needs_no_more_host_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stagehand_alloc.offload(build(), share=name)
    monkeypatch.setattr(_offload, "available_host_bytes", lambda: 0)
    second = stagehand_alloc.offload(build(), share=name)
    assert inode(first) == inode(second)
    with pytest.raises(OffloadError, match="more of host memory"):
        stagehand_alloc.offload(build(), share=name + "2")


# --- Who is not let in


@pytest.mark.usefixtures("elsewhere")
def test_other_bytes_under_the_name_are_refused_and_nothing_has_moved(name: str) -> None:
    first = stagehand_alloc.offload(build(), share=name)
    other = build(Other)
    before = of_all(other)
    with pytest.raises(OffloadError, match=r"has other weights in the block 'layers\.5'"):
        stagehand_alloc.offload(other, share=name)
    assert of_all(other) == before
    assert digests(first) == digests(build())
    stagehand_alloc.offload(other, share=name + "2")


@pytest.mark.parametrize("what", ["bytes", "names", "dtypes", "blocks"])
def test_other_weights_on_the_gpu_are_refused_as_well(name: str, what: str) -> None:
    first = stagehand_alloc.offload(build(), share=name)
    other = build({"bytes": Other, "blocks": lambda: Model(7)}.get(what, Model))
    if what == "names":
        other = nn.Sequential(other)
    if what == "dtypes":
        other = other.half()
    before = of_all(other)
    with pytest.raises(OffloadError, match="other weights"):
        stagehand_alloc.offload(other, share=name)
    assert of_all(other) == before
    assert digests(first) == digests(build())


@pytest.mark.parametrize("share", ["", 3, b"name"])
def test_what_is_no_name(share: Any) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        stagehand_alloc.offload(build(), share=share)


def test_what_is_trained_cannot_be_shared(name: str) -> None:
    with pytest.raises(OffloadError, match="only read"):
        stagehand_alloc.offload(build(), share=name, trained=True)


@pytest.mark.usefixtures("elsewhere")
def test_what_moves_in_a_way_of_its_own_cannot_be_shared_from_the_cpu(name: str) -> None:
    model = build()
    model.layers[2].up.to = model.layers[2].up.to
    with pytest.raises(OffloadError, match=r"'layers\.2' goes to the GPU in a way of its own"):
        stagehand_alloc.offload(model, share=name)


# --- Nobody writes to it


@pytest.fixture
def both(name: str) -> Iterator[tuple[Any, Any]]:
    """The one that writes, and the one that must not see it."""
    made = [stagehand_alloc.offload(build(), share=name) for _ in range(2)]
    yield made[0], made[1]
    wanted = digests(build())
    assert [digests(model) for model in made] == [wanted, wanted]
    assert trained(made[0], stagehand_alloc.pool(high=8 * MIB), steps=1) == plain(steps=1)
    for model in made:
        stagehand_alloc.restore(model)


def in_resident(model: Any) -> None:
    with stagehand_alloc.resident(model.layers[3]), torch.no_grad():
        model.layers[3].up.weight.add_(1)


def behind_the_version(model: Any) -> None:
    with stagehand_alloc.resident(model.layers[3]):
        model.layers[3].up.weight.data[0, 0] += 1


def in_visit(model: Any) -> None:
    for name, parameter in stagehand_alloc.visit(model):
        if name.endswith("up.weight"):
            parameter.data.mul_(2)


def in_forward(model: Any) -> None:
    layer = model.layers[3]

    def change(*_: Any) -> None:
        layer.up.weight.add_(1)

    handle = layer.norm.register_forward_hook(change)
    try:
        with torch.no_grad():
            model(tokens(0))
    finally:
        handle.remove()


def while_it_is_saved(model: Any) -> None:
    with stagehand_alloc.resident(model.layers[3]):
        model.layers[3].up.weight.data.zero_()
        model.state_dict()


@pytest.mark.parametrize(
    "write", [in_resident, behind_the_version, in_visit, in_forward, while_it_is_saved]
)
def test_a_write_is_undone_and_said(both: tuple[Any, Any], write: Callable[[Any], None]) -> None:
    with pytest.raises(OffloadError, match="nobody writes to: so what was written to it is undone"):
        write(both[0])


def test_load_state_dict_is_refused(both: tuple[Any, Any]) -> None:
    state = {name: tensor + 1 for name, tensor in both[0].state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if "up" in name}
    with pytest.raises(OffloadError, match="nobody writes to: load_state_dict is refused"):
        both[0].load_state_dict(state, strict=False)


def test_reading_is_as_ever(both: tuple[Any, Any]) -> None:
    wanted = digest(build().layers[3].up.weight)
    with stagehand_alloc.resident(both[0]):
        assert digest(both[0].layers[3].up.weight) == wanted
    assert dict(stagehand_alloc.visit(both[0])).keys() == dict(build().named_parameters()).keys()


def test_a_state_dict_has_memory_that_cannot_be_written_to(both: tuple[Any, Any]) -> None:
    address = both[0].state_dict()["layers.3.up.weight"].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r--s"
            return
    raise AssertionError("it is nowhere")


# --- Who fails half-way


def test_a_copy_that_was_not_finished_is_nobodys_and_the_next_one_writes(
    name: str, gpu: Any
) -> None:
    model = build()
    before = of_all(model)
    gpu.fail("cuMemHostRegister", nth=3, times=1)
    with pytest.raises(OffloadError, match="refused to pin"):
        stagehand_alloc.offload(model, share=name)
    assert of_all(model) == before
    gc.collect()
    assert digests(stagehand_alloc.offload(build(Other), share=name)) == digests(build(Other))


# Processes without torch: what they do is what `offload` has them do, and they start at once.


def process(code: str, name: str, tmp_path: Path) -> subprocess.Popen[str]:
    start = f"""
    import os, sys, time, tempfile, mmap
    tempfile.tempdir = {str(tmp_path)!r}
    from stagehand_alloc._weights import share
    name = {name!r}
    layout = [("a", 4096, [["w", "torch.int8", [4096]]])]
    """
    whole = textwrap.dedent(start) + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path[1:]))}
    return subprocess.Popen(
        [sys.executable, "-c", whole],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


LAYOUT: list[tuple[str, int, Any]] = [("a", 4096, [["w", "torch.int8", [4096]]])]

WRITES = """
with share.joined(name, layout) as made:
    assert made.writes
    os.pwrite(made.fd, b"x" * 4096, made.offsets["a"])
print("written", flush=True)
sys.stdin.read()
"""
DIES = """
with share.joined(name, layout) as made:
    os.pwrite(made.fd, b"y" * 2048, 0)
    print("half", flush=True)
    sys.stdin.read()
"""


def said(other: subprocess.Popen[str], text: str) -> None:
    assert other.stdout is not None
    assert other.stdout.readline().strip() == text


def end(other: subprocess.Popen[str], how: int = signal.SIGKILL) -> None:
    other.send_signal(how)
    other.communicate()


def test_another_process_finds_the_bytes_and_keeps_them_when_the_writer_is_killed(
    name: str, tmp_path: Path
) -> None:
    other = process(WRITES, name, tmp_path)
    said(other, "written")
    with _share.joined(name, LAYOUT) as found:
        assert not found.writes
    end(other)
    assert os.pread(found.fd, 4096, 0) == b"x" * 4096
    third = process(
        "with share.joined(name, layout) as f: print(f.writes, flush=True)", name, tmp_path
    )
    said(third, "False")  # it has them from us
    third.communicate()
    found.close()


@pytest.mark.parametrize(("does", "says"), [(WRITES, "written"), (DIES, "half")])
def test_of_a_process_that_was_killed_nothing_is_left_to_find_or_to_wait_for(
    does: str, says: str, name: str, tmp_path: Path
) -> None:
    other = process(does, name, tmp_path)
    said(other, says)
    end(other)
    with _share.joined(name, LAYOUT) as found:
        assert found.writes
        assert os.pread(found.fd, 4096, 0) == bytes(4096)
    found.close()


def test_a_writer_that_hangs_is_named_after_a_while(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_share, "TIMEOUT_S", 0.1)
    other = process(DIES, name, tmp_path)
    said(other, "half")
    try:
        with (
            pytest.raises(OffloadError, match=rf"process {other.pid} is writing 2\.00 MiB of it"),
            _share.joined(name, LAYOUT),
        ):
            pass
    finally:
        end(other)
    for left in tmp_path.glob("stagehand_alloc-*"):
        left.unlink()


def test_a_number_that_is_another_files_by_now_is_not_taken_for_the_copy(name: str) -> None:
    with _share.joined(name, LAYOUT) as found:
        pass
    kept = _share.place_of(name).read_bytes()
    found.close()
    with open(os.devnull, "rb+") as file:
        os.dup2(file.fileno(), found.fd)
        try:
            _share.place_of(name).write_bytes(kept)
            with _share.joined(name, LAYOUT) as again:
                assert again.writes
        finally:
            os.close(found.fd)
    again.close()


def test_a_number_that_is_another_files_by_now_is_not_even_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _share.joined(name, LAYOUT) as found:
        pass
    kept = _share.place_of(name).read_bytes()
    found.close()
    opened: list[str] = []
    real = os.open

    def seen(path: Any, *how: Any) -> int:
        opened.append(str(path))
        return real(path, *how)

    with open(tmp_path / "other", "wb+") as file:  # it may be a device, where opening does more
        os.dup2(file.fileno(), found.fd)
        try:
            _share.place_of(name).write_bytes(kept)
            monkeypatch.setattr(os, "open", seen)
            with _share.joined(name, LAYOUT) as again:
                assert again.writes
        finally:
            os.close(found.fd)
    assert not [path for path in opened if path.startswith("/proc/")]
    again.close()


def test_a_file_that_has_another_name_too_is_not_written_to(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("what was there")
    os.link(theirs, _share.place_of(name))  # as others may, where hard links are not protected
    with pytest.raises(OffloadError, match="has another name"), _share.joined(name, LAYOUT):
        pass
    assert theirs.read_text() == "what was there"
    _share.place_of(name).unlink()


def test_a_full_disk_loses_the_name_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        first = stagehand_alloc.offload(build(), share=name)
    second = stagehand_alloc.offload(build(), share=name)
    assert inode(first) != inode(second)
    assert digests(first) == digests(second) == digests(build())


def test_nobody_can_cut_the_copy_short(name: str) -> None:
    with _share.joined(name, LAYOUT) as found, pytest.raises(PermissionError):
        os.ftruncate(found.fd, 0)
    found.close()
