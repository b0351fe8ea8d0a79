"""A model on the CPU: its blocks go straight into pinned memory, and never over the link."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from lora import DEVICE, MIB, WIDTH, Block, Model, build, plain, trained
from torch import Tensor, nn
from training import digest

import stagehand_alloc
from stagehand_alloc import OffloadError, _native

# The simulated GPU's tensors say that they are on the CPU, as those of a model on the CPU do. To
# torch `cpu:0` is somewhere else, and it copies.
pytestmark = pytest.mark.usefixtures("gpu", "elsewhere", "leaves_no_weights")


def of_all(model: Any) -> list[tuple[Any, ...]]:
    """Each parameter as it is, and the very memory that it has."""
    return [
        (name, id(p), p.data_ptr(), p._version, digest(p), p.size(), p.stride())
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def copied() -> int:
    found = stagehand_alloc.stats()
    return found.d2h_bytes + found.h2d_bytes


def test_no_byte_goes_over_the_link_and_none_is_on_the_gpu() -> None:
    model = build()
    before, live = copied(), stagehand_alloc.stats().live
    frozen = sum(p.nbytes for p in model.layers.parameters() if not p.requires_grad)
    stagehand_alloc.offload(model)
    assert copied() == before
    assert _native.weights(DEVICE)["home"] == 0
    assert _native.weights(DEVICE)["bytes"] >= frozen
    assert stagehand_alloc.stats().live <= live - frozen  # here both memories are one


def test_it_trains_as_plain_torch_does_inside_a_budget() -> None:
    model = stagehand_alloc.offload(build())
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == plain()


def test_what_is_trained_goes_straight_as_well() -> None:
    model = build()
    wanted = {name: digest(p) for name, p in model.named_parameters()}
    before = copied()
    stagehand_alloc.offload(model, trained=True)
    assert copied() == before
    assert {name: digest(t) for name, t in model.state_dict().items() if name in wanted} == wanted


@pytest.fixture
def copies_ahead(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each copy that is made ahead was made of."""
    made, copy = [], _native.HostCopy

    def told(*args: Any) -> Any:
        made.append(args)
        return copy(*args)

    monkeypatch.setattr(_native, "HostCopy", told)
    return made


def test_each_blocks_copy_but_the_first_is_made_ahead(copies_ahead: list[Any]) -> None:
    model = build()
    wanted = {name: digest(p) for name, p in model.layers.named_parameters()}
    stagehand_alloc.offload(model, trained=True)
    assert len(copies_ahead) == len(model.layers) - 1
    assert {name: digest(t) for name, t in model.layers.state_dict().items()} == wanted


def test_a_block_that_moves_in_its_own_way_has_no_copy_ahead(copies_ahead: list[Any]) -> None:
    model = build()
    own: Any = model.layers[2]
    own.to = functools.partial(nn.Module.to, own)
    stagehand_alloc.offload(model)
    # None of the first, of that one, and of what follows it.
    assert len(copies_ahead) == len(model.layers) - 3
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == plain()


def test_a_copy_ahead_that_fails_leaves_the_very_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise MemoryError("no memory for a copy ahead")

    model = build()
    before = of_all(model)
    monkeypatch.setattr(_native, "HostCopy", fails)
    with pytest.raises(MemoryError, match="copy ahead"):
        stagehand_alloc.offload(model)
    assert [one[:2] + one[3:] for one in of_all(model)] == [one[:2] + one[3:] for one in before]
    monkeypatch.undo()
    assert trained(stagehand_alloc.offload(model), stagehand_alloc.pool(high=8 * MIB)) == plain()


def test_a_parameter_stays_itself_and_so_do_its_version_shape_and_gradient() -> None:
    model = build()
    weight = model.layers[0].up.weight
    with torch.no_grad():
        weight.add_(1)
    weight.grad = torch.ones_like(weight)
    before = id(weight), weight._version, weight.size(), weight.stride(), weight.dtype
    stagehand_alloc.offload(model)
    now = model.layers[0].up.weight
    assert before == (id(now), now._version, now.size(), now.stride(), now.dtype)
    assert now is weight
    assert weight.grad is not None
    assert weight.grad.sum() == weight.numel()
    with pytest.raises(RuntimeError, match=r"'layers\.0\.up\.weight' is on the host"):
        weight.sum()


class Odd(Block):
    """One parameter of two modules, two that are views of one storage, and one turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.again.weight = self.up.weight
        both = torch.randn(2 * WIDTH, WIDTH) * 0.05
        self.first = nn.Parameter(both[:WIDTH], requires_grad=False)
        self.second = nn.Parameter(both[WIDTH:], requires_grad=False)
        self.turned = nn.Parameter((torch.randn(8, WIDTH) * 0.05).t(), requires_grad=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + self.down(self.again(x)) * self.scale
        return x + x @ self.first @ self.second + x @ self.turned @ self.turned.t()


class OddModel(Model):
    def __init__(self) -> None:
        super().__init__(4, Odd)


def test_ties_views_and_strides_stay_and_views_share_one_copy() -> None:
    model = build(OddModel)
    layer = model.layers[0]
    weights = [p for p in layer.parameters() if not p.requires_grad]
    bytes_of = sum(
        {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in weights}.values()
    )
    stagehand_alloc.offload(model)
    assert layer.again.weight is layer.up.weight
    assert layer.turned.stride() == (1, WIDTH)
    assert layer.first.untyped_storage()._cdata == layer.second.untyped_storage()._cdata
    assert layer.second.storage_offset() == WIDTH * WIDTH
    assert _native.weights(DEVICE)["largest"] < bytes_of + 512 * len(weights)
    layer.scale.sum()  # a buffer stays on the GPU
    assert trained(model, stagehand_alloc.pool(high=8 * MIB), steps=2) == plain(OddModel, steps=2)


def test_memory_that_is_not_torchs_own_is_read_and_let_go_of() -> None:
    numpy = pytest.importorskip("numpy")
    model = build()
    theirs = numpy.ones((4 * WIDTH, WIDTH), dtype=numpy.float32)
    model.layers[0].up.weight = nn.Parameter(torch.from_numpy(theirs), requires_grad=False)
    model.layers[1].up.weight = nn.Parameter(
        torch.from_dlpack(torch.full((4 * WIDTH, WIDTH), 2.0)), requires_grad=False
    )
    stagehand_alloc.offload(model)
    theirs[:] = 7
    saved = model.state_dict()
    assert saved["layers.0.up.weight"].unique().tolist() == [1]
    assert saved["layers.1.up.weight"].unique().tolist() == [2]


def test_a_file_that_is_mapped_is_read_and_stays_as_it_is(tmp_path: Any) -> None:
    torch.save(build().state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", mmap=True)
    model = build()
    model.load_state_dict(loaded, assign=True)
    for parameter in model.layers.parameters():
        parameter.requires_grad_(parameter.shape[-1] == 4 or parameter.shape[0] == 4)
    model.embedding.requires_grad_(False)
    model.head.weight = model.embedding.weight
    before = copied()
    stagehand_alloc.offload(model)
    assert copied() == before
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == plain()
    assert digest(torch.load(tmp_path / "model.pt")["layers.0.up.weight"]) == digest(
        build().layers[0].up.weight
    )


def test_restore_gives_each_weight_memory_on_the_gpu() -> None:
    model = build()
    wanted = [(row[0], row[1], *row[3:]) for row in of_all(model)]
    stagehand_alloc.restore(stagehand_alloc.offload(model))
    assert [(row[0], row[1], *row[3:]) for row in of_all(model)] == wanted
    assert trained(model) == plain()


# --- Where it cannot be done all is as before: what was a block's own memory is so again


@pytest.mark.parametrize("nth", [1, 3])
def test_the_host_refusing_to_pin_leaves_every_byte(gpu: Any, nth: int) -> None:
    model = build(OddModel)
    before = of_all(model)
    gpu.fail("cuMemHostRegister", nth=nth, times=1)
    with pytest.raises(OffloadError, match="refused to pin"):
        stagehand_alloc.offload(model)
    now = of_all(model)
    first = len([row for row in now if not row[0].startswith(("layers.0", "layers.1"))])
    assert [(r[0], r[1], *r[3:]) for r in now] == [(r[0], r[1], *r[3:]) for r in before]
    if nth == 1:
        assert now == before
    assert first > 0
    assert trained(model, steps=2) == plain(OddModel, steps=2)


def test_what_stays_finding_no_room_on_the_gpu_leaves_the_very_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(OddModel)
    before = of_all(model)
    to = torch.Tensor.to

    def refuse(tensor: Tensor, *where: Any, **how: Any) -> Tensor:
        if tensor is model.layers[0].scale:  # after the block's parameters went
            raise torch.OutOfMemoryError("no room")
        return to(tensor, *where, **how)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            stagehand_alloc.offload(model)
    frozen = {row[0] for row in before if not model.get_parameter(row[0]).requires_grad}
    assert [r for r in of_all(model) if r[0] in frozen] == [r for r in before if r[0] in frozen]
    assert [r[:2] for r in of_all(model)] == [r[:2] for r in before]
    assert trained(model, steps=2) == plain(OddModel, steps=2)


# --- What has a way of its own to move goes by the GPU


class OwnWay(nn.Linear):
    def _apply(self, *how: Any, **which: Any) -> Any:
        self.moves = getattr(self, "moves", 0) + 1
        return super()._apply(*how, **which)


class OwnParameter(nn.Parameter):
    pass


@pytest.mark.parametrize("what", ["module", "block", "parameter", "object"])
def test_what_moves_in_a_way_of_its_own_is_let_to(what: str) -> None:
    class OwnTo(Block):
        def to(self, *where: Any, **how: Any) -> Any:
            return super().to(*where, **how)

    model = build(lambda: Model(4, OwnTo if what == "block" else Block))
    layer = model.layers[2]
    if what == "module":
        layer.up.__class__ = OwnWay
    elif what == "parameter":
        weight = layer.up.weight
        layer.up.weight = OwnParameter(weight.data, requires_grad=False)
    elif what == "object":
        layer.to = layer.to
    before = stagehand_alloc.stats().d2h_bytes
    stagehand_alloc.offload(model)
    group = _native.weights(DEVICE)["largest"]
    moved = stagehand_alloc.stats().d2h_bytes - before
    assert (3 if what == "block" else 0) * MIB // 2 < moved <= (4 if what == "block" else 1) * group
    if what == "module":
        assert layer.up.moves >= 1
    assert trained(model, stagehand_alloc.pool(high=8 * MIB), steps=2) == plain(
        lambda: Model(4), steps=2
    )


@pytest.mark.parametrize("how", ["swap", "overwrite"])
def test_torchs_other_ways_to_put_tensors_in_place(how: str) -> None:
    setting = {"swap": "swap_module_params", "overwrite": "overwrite_module_params"}[how]
    change = getattr(torch.__future__, f"set_{setting}_on_conversion")
    model = build(OddModel)
    before = copied()
    change(True)
    try:
        stagehand_alloc.offload(model)
    finally:
        change(False)
    assert copied() == before
    # Where parameters are overwritten, a tie is of two of them, as after `model.to`.
    assert (
        trained(model, stagehand_alloc.pool(high=8 * MIB), steps=2)[-1]
        == plain(OddModel, steps=2)[-1]
    )


# --- One limit for what is pinned


def limited(size: str) -> Any:
    return stagehand_alloc.pool(
        high=8 * MIB,
        config={"host_limit": size, "pinned_pool_classes_mb": [1], "slabs_per_class": 1},
    )


def test_a_limit_that_leaves_too_little_for_weights_moves_none() -> None:
    with limited("3MiB"):
        pass
    model = build()
    before, copies = of_all(model), copied()
    with pytest.raises(OffloadError, match=r"are 4\.\d+ MiB, and host_limit is 3\.00 MiB, of"):
        stagehand_alloc.offload(model)
    assert of_all(model) == before
    assert copied() == copies


def test_a_limit_below_the_weights_that_are_there_is_refused_and_a_larger_one_counts_them() -> None:
    model = stagehand_alloc.offload(build())
    with pytest.raises(stagehand_alloc.SizeError, match=r"host_limit is 3\.00 MiB, and the host"):
        limited("3MiB").__enter__()
    pool = limited("8MiB")
    assert trained(model, pool, steps=2) == plain(steps=2)
    found = stagehand_alloc.stats()
    assert found.host_limit == 8 * MIB
    assert found.weights_pinned_bytes == found.weights_bytes > 4 * MIB
    assert found.pinned_bytes + found.weights_pinned_bytes <= 8 * MIB
    assert pool.step_stats()["host_limit"] == 8 * MIB


def test_without_a_limit_weights_take_nothing_from_saved_activations() -> None:
    with stagehand_alloc.pool(high=8 * MIB):
        pass
    model = stagehand_alloc.offload(build())
    assert stagehand_alloc.stats().host_limit == 0
    assert stagehand_alloc.stats().weights_pinned_bytes == _native.weights(DEVICE)["bytes"]
    saved = model.state_dict()
    stagehand_alloc.restore(model)
    assert stagehand_alloc.stats().weights_pinned_bytes > 0  # the state_dict keeps them
    del saved
    gc.collect()
    assert stagehand_alloc.stats().weights_pinned_bytes == 0
