"""Offloaded weights outside of their block: every access raises, and there are ways to them."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lora import DEVICE, MIB, WIDTH, Block, Model, build, plain, tokens, trained
from torch import Tensor, nn
from training import digest

import stagehand_alloc
from stagehand_alloc import ConfigError, OffloadError, SizeError, _native
from stagehand_alloc._weights.groups import registry

pytestmark = pytest.mark.usefixtures("gpu", "leaves_no_weights")


@pytest.fixture
def model() -> Iterator[Any]:
    made = stagehand_alloc.offload(build())
    yield made
    for layer in made.layers:
        layer.requires_grad_(False)
    stagehand_alloc.restore(made)


def digests(model: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


# --- Every access to the data raises our text; what needs no data works

X = torch.randn(4, WIDTH)
ONE = torch.ones(4 * WIDTH, WIDTH)

RAISES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: F.linear(X, w),
    "mm": lambda w: X @ w.t(),
    "add": lambda w: w + 1,
    "layer_norm": lambda w: F.layer_norm(X, (WIDTH,), w[0]),
    "embedding": lambda w: F.embedding(torch.tensor([1, 2]), w),
    "clone": lambda w: w.clone(),
    "sum": lambda w: w.sum(),
    "print": str,
    "item": lambda w: w[0, 0].item(),
    "numpy": lambda w: w.numpy().sum(),
    "copy from": lambda w: torch.empty_like(w).copy_(w),
    "copy to": lambda w: w.copy_(ONE),
    "mul_": lambda w: w.mul_(2),
    "data.add_": lambda w: w.data.add_(1),
    "save": lambda w: torch.save(w, io.BytesIO()),
    "pickle": lambda w: pickle.dumps(w),
    "deepcopy": copy.deepcopy,
    "data_ptr": lambda w: w.data_ptr(),
    "storage.data_ptr": lambda w: w.untyped_storage().data_ptr(),
    "to bf16": lambda w: w.to(torch.bfloat16),
    "foreach": lambda w: torch._foreach_add_([w], [ONE]),
    "fused adamw": lambda w: torch._fused_adamw_(
        *([w], [ONE], [ONE.clone()], [ONE.clone()], [], [torch.tensor(1.0)]),
        lr=1e-3,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    ),
    "dlpack": torch.from_dlpack,
    "norm": lambda w: w.norm(),
    "equal": lambda w: w.equal(ONE),
    "a view of it": lambda w: w.view(-1)[3].item(),
    "an alias that was there before": lambda w: w.alias.sum(),
}
WORKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda w: (w.shape, w.stride(), w.dtype, w.device, w.numel(), w.nbytes),
    "view": lambda w: w.view(-1),
    "t": lambda w: w.detach().t(),
    "chunk": lambda w: w.chunk(2),
    "version": lambda w: w._version,
    "is leaf": lambda w: w.is_leaf,
}


@pytest.fixture
def weight(model: Any) -> Tensor:
    return model.layers[3].up.weight


@pytest.mark.parametrize("access", RAISES.values(), ids=RAISES)
def test_an_access_to_the_data_raises_our_error(access: Any) -> None:
    model = build()
    weight = model.layers[3].up.weight
    weight.alias = weight.detach()[:2]
    stagehand_alloc.offload(model)
    with pytest.raises(RuntimeError, match=r"'layers\.3\.up\.weight' is on the host") as raised:
        access(weight)
    assert "stagehand_alloc.resident" in str(raised.value)
    del raised
    # It is as usable as before.
    assert digest(model(tokens(0))) == digest(build()(tokens(0)))


@pytest.mark.parametrize("access", WORKS.values(), ids=WORKS)
def test_what_needs_no_data_works(weight: Tensor, access: Any) -> None:
    access(weight)


def test_a_weight_is_away_whether_or_not_there_is_room_for_it(model: Any) -> None:
    with stagehand_alloc.pool(high=64 * MIB):
        model(tokens(0))
    assert _native.weights(DEVICE)["home"] == _native.weights(DEVICE)["bytes"]
    with pytest.raises(RuntimeError, match="is on the host"):
        model.layers[0].up.weight.sum()


def test_it_stays_the_same_parameter(model: Any) -> None:
    weight = model.layers[2].up.weight
    before = (id(weight), weight.shape, weight.dtype, weight._version, weight.requires_grad)
    trained(model, stagehand_alloc.pool(high=8 * MIB), steps=2)
    assert model.layers[2].up.weight is weight
    after = (id(weight), weight.shape, weight.dtype, weight._version, weight.requires_grad)
    assert after == before


# --- Ways to them


def test_resident_reads_and_writes(model: Any) -> None:
    other = build()
    for layer in other.layers[:2]:
        layer.up.weight.data.mul_(0.5)
    with stagehand_alloc.resident(model.layers[0], model.layers[1].up.weight):
        for layer in model.layers[:2]:
            layer.up.weight.data.mul_(0.5)  # as PEFT merges: no version tells
    with pytest.raises(RuntimeError, match="is on the host"):
        model.layers[0].up.weight.sum()
    _native.drop_weights(DEVICE)
    assert digests(model) == digests(other)
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == trained(other)


def test_a_block_that_changes_a_weight_in_its_own_forward_keeps_the_change() -> None:
    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.down.bias.add_(0.01)
            return super().forward(x)

    def make() -> Any:
        return Model(block=Counting)

    other, model = build(make), stagehand_alloc.offload(build(make))
    for step in range(3):
        with torch.no_grad():
            assert digest(model(tokens(step))) == digest(other(tokens(step)))
        _native.drop_weights(DEVICE)


def test_visit_has_each_parameter_at_home(model: Any) -> None:
    other = dict(build().named_parameters())
    seen = {name: digest(p) for name, p in stagehand_alloc.visit(model)}
    assert seen == {name: digest(p) for name, p in other.items()}


def test_restore_ends_it(model: Any) -> None:
    expected = plain()
    trained(model, stagehand_alloc.pool(high=8 * MIB), steps=0)
    stagehand_alloc.restore(model)
    assert _native.weights(DEVICE)["bytes"] == 0
    assert digests(model) == digests(build())
    assert trained(model) == expected
    stagehand_alloc.restore(model)  # nothing is left to do
    stagehand_alloc.offload(model)


def test_restore_inside_of_resident_is_refused(model: Any) -> None:
    with (
        stagehand_alloc.resident(model.layers[0]),
        pytest.raises(OffloadError, match="is in use"),
    ):
        stagehand_alloc.restore(model)


# --- state_dict


def test_state_dict_is_that_of_the_model(model: Any) -> None:
    expected = digests(build())
    assert digests(model) == expected
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert {name: digest(tensor) for name, tensor in loaded.items()} == expected


def test_a_state_dict_outlives_the_model() -> None:
    model = stagehand_alloc.offload(build())
    state = model.state_dict()
    del model
    gc.collect()
    assert {name: digest(tensor) for name, tensor in state.items()} == digests(build())
    state.clear()


def test_a_state_dict_outlives_the_end_of_offloading() -> None:
    model = stagehand_alloc.offload(build())
    state = model.state_dict()
    stagehand_alloc.restore(model)
    assert {name: digest(tensor) for name, tensor in state.items()} == digests(build())


def test_a_state_dict_has_what_was_written_in_resident(model: Any) -> None:
    with stagehand_alloc.resident(model):
        model.layers[0].up.weight.data.mul_(3)
        inside = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    assert inside == {name: digest(tensor) for name, tensor in model.state_dict().items()}
    assert inside != digests(build())


def test_load_state_dict_reaches_the_host(model: Any) -> None:
    torch.manual_seed(77)
    other = Model()
    model.load_state_dict(other.state_dict())
    _native.drop_weights(DEVICE)
    assert digests(model) == digests(other)
    assert digest(model(tokens(0))) == digest(other(tokens(0)))
    with pytest.raises(RuntimeError, match="is on the host"):
        model.layers[0].up.weight.sum()


def test_load_state_dict_may_not_put_others_in_their_place(model: Any) -> None:
    before, parameters = digests(model), [id(one) for one in model.parameters()]
    torch.manual_seed(77)
    with pytest.raises(OffloadError, match="assign=True"):
        model.load_state_dict(Model().state_dict(), assign=True)
    # Above the blocks nothing was loaded either: the embedding comes before them.
    assert [id(one) for one in model.parameters()] == parameters
    assert digests(model) == before


def test_a_model_without_its_offloaded_block_loads_and_copies_as_ever(model: Any) -> None:
    model.layers = torch.nn.ModuleList()
    gc.collect()
    other = copy.deepcopy(model)
    torch.manual_seed(77)
    wanted = Model()
    wanted.layers = torch.nn.ModuleList()
    other.load_state_dict(wanted.state_dict(), assign=True)
    assert digests(other) == digests(wanted)


# --- What fails half-way is over


def holds(model: Any) -> list[int]:
    """How many hold each group of the model."""
    return [group.native.open for group in registry.within([model])]


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def load_until_the_fourth_block(model: Any) -> None:
    torch.manual_seed(77)
    state = Model().state_dict()
    model.layers[3].up._load_from_state_dict = fail
    with pytest.raises(ZeroDivisionError):
        model.load_state_dict(state)
    del model.layers[3].up._load_from_state_dict


def enter_a_pool(_: Any) -> None:
    with stagehand_alloc.pool(high=8 * MIB):
        pass


def reside(model: Any) -> None:
    with stagehand_alloc.resident(model.layers[6]):
        pass


THEN: dict[str, Callable[[Any], Any]] = {
    "pool": enter_a_pool,
    "forward": lambda model: model(tokens(0)),
    "resident": reside,
    "restore": stagehand_alloc.restore,
}


@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
def test_a_load_that_failed_is_over_at_the_next_use_and_keeps_what_it_loaded(
    model: Any, then: Any
) -> None:
    other = build()
    load_until_the_fourth_block(other)
    load_until_the_fourth_block(model)
    assert sum(holds(model)) == 1
    then(model)
    assert sum(holds(model)) == 0
    _native.drop_weights(DEVICE)
    assert digests(model) == digests(other)


def test_a_load_goes_on_while_another_thread_enters_a_pool(model: Any) -> None:
    torch.manual_seed(77)
    other = Model()

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=enter_a_pool, args=[model])
        thread.start()
        thread.join()

    model.layers[3].up.register_load_state_dict_pre_hook(meanwhile)
    model.load_state_dict(other.state_dict())
    assert sum(holds(model)) == 0
    assert digests(model) == digests(other)


def test_a_load_of_other_sizes_leaves_nothing_held(model: Any) -> None:
    state = build().state_dict()
    state["layers.3.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
    assert sum(holds(model)) == 0


def test_a_dropped_models_weights_stay_whole_until_a_load_that_failed_is_over() -> None:
    model = stagehand_alloc.offload(build())
    load_until_the_fourth_block(model)
    weight = model.layers[3].up.weight
    expected = digest(build().layers[3].up.weight)
    del model
    gc.collect()
    assert digest(weight) == expected
    enter_a_pool(None)
    with pytest.raises(RuntimeError, match="is on the host"):
        weight.sum()


def test_resident_that_fails_at_its_second_block_leaves_nothing_held(model: Any, gpu: Any) -> None:
    _native.drop_weights(DEVICE)
    gpu.fail("cuMemcpyHtoDAsync", nth=2)
    with pytest.raises(RuntimeError), stagehand_alloc.resident(model.layers[0], model.layers[5]):
        pass
    assert sum(holds(model)) == 0
    assert digest(model(tokens(0))) == digest(build()(tokens(0)))


def test_the_end_of_resident_that_fails_for_one_block_leaves_all_and_loses_no_write(
    model: Any, gpu: Any
) -> None:
    def write() -> None:
        with stagehand_alloc.resident(*model.layers[:3]):
            for layer in model.layers[:3]:
                layer.up.weight.data.mul_(0.5)
            gpu.fail("cuMemcpyDtoHAsync", nth=2)

    with pytest.raises(RuntimeError, match="driver"):
        write()
    assert sum(holds(model)) == 0
    _native.drop_weights(DEVICE)
    written = build()
    for layer in written.layers[:3]:
        layer.up.weight.data.mul_(0.5)
    assert digests(model) == digests(written)


# --- Copies of the model

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda module: torch.save(module, io.BytesIO()),
}


class Direct(Block):
    """Has a frozen parameter of its own, which a copy meets before any hook."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("which", ["model", "block"])
def test_an_offloaded_model_cannot_be_copied_and_says_what_to_do(
    make_copy: Any, which: str
) -> None:
    model = stagehand_alloc.offload(build(lambda: Model(block=Direct)))
    copied = model if which == "model" else model.layers[2]
    with pytest.raises(OffloadError, match="is offloaded, and cannot be copied") as raised:
        make_copy(copied)
    assert "stagehand_alloc.restore(model)" in str(raised.value)
    with (
        stagehand_alloc.resident(model),
        pytest.raises(OffloadError, match="is offloaded, and cannot be copied"),
    ):
        make_copy(copied)
    stagehand_alloc.restore(model)
    make_copy(copied)
    assert vars(model.layers[2]).keys() == vars(build(lambda: Model(block=Direct)).layers[2]).keys()


def test_what_is_inside_of_a_block_is_copied_whole_in_resident(model: Any) -> None:
    with stagehand_alloc.resident(model.layers[2]):
        linear = copy.deepcopy(model.layers[2].up)
    assert digest(linear.weight) == digest(build().layers[2].up.weight)
    with torch.no_grad():
        linear.weight.zero_()
    assert digest(model.state_dict()["layers.2.up.weight"]) == digest(build().layers[2].up.weight)


# --- Bad input


def test_offload_again_does_nothing(model: Any) -> None:
    loads = _native.weights(DEVICE)["bytes"]
    assert stagehand_alloc.offload(model) is model
    assert _native.weights(DEVICE)["bytes"] == loads


def test_blocks_by_name_by_expression_and_as_modules() -> None:
    for blocks in (["layers.1", "layers.2"], r"layers\.[12]", lambda m: [m.layers[1], m.layers[2]]):
        model = build()
        stagehand_alloc.offload(model, blocks=blocks(model) if callable(blocks) else blocks)
        model.layers[0].up.weight.sum()
        with pytest.raises(RuntimeError, match="is on the host"):
            model.layers[1].up.weight.sum()
        assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == plain()
        del model
        gc.collect()


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ("nothing", "is the name of no module"),
        ("(", "is no regular expression"),
        (7, "is neither a name"),
        ([nn.Linear(2, 2)], "is neither a name"),
        ([], "blocks is empty"),
        (["layers", "layers.1"], "lies inside the block 'layers'"),
    ],
)
def test_blocks_that_are_none(blocks: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        stagehand_alloc.offload(build(), blocks=blocks)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ConfigError, match="no list of modules of one class"):
        stagehand_alloc.offload(nn.Linear(2, 2))


def test_a_model_of_which_all_is_trained_has_nothing_to_offload() -> None:
    with pytest.raises(OffloadError, match="no frozen weights"):
        stagehand_alloc.offload(build().requires_grad_(True))


def test_not_a_model() -> None:
    with pytest.raises(OffloadError, match=r"is no torch\.nn\.Module"):
        stagehand_alloc.offload(3)  # type: ignore[type-var]


def test_a_model_goes_to_the_gpu_that_it_is_on_and_may_not_be_on_several() -> None:
    from stagehand_alloc._weights.offload import one_gpu

    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert one_gpu([cpu], None) is None
    assert one_gpu([cpu, second], None) == second
    assert one_gpu([cpu, second], 0) == 0
    with pytest.raises(OffloadError, match=r"is on 2 GPUs: cuda:0, cuda:1"):
        one_gpu([cpu, first, second], None)


def test_some_blocks_are_offloaded_already(model: Any) -> None:
    with pytest.raises(OffloadError, match="is offloaded already"):
        stagehand_alloc.offload(model, blocks=["layers.0", "head"])


@pytest.mark.parametrize("at_home", [False, True])
def test_a_weight_of_two_models_is_offloaded_with_one_of_them(model: Any, at_home: bool) -> None:
    other = build()
    for mine, others in zip(model.layers, other.layers, strict=True):
        others.up = mine.up
    at = stagehand_alloc.resident(model) if at_home else contextlib.nullcontext()
    with at, pytest.raises(OffloadError, match=r"'layers\.0\.up\.weight' is offloaded already"):
        stagehand_alloc.offload(other)
    assert digest(model(tokens(0))) == digest(build()(tokens(0)))


@pytest.mark.parametrize("share", [0.9, 1.9])  # of a block: backward holds two
def test_blocks_larger_than_the_budget(model: Any, share: float) -> None:
    block = _native.weights(DEVICE)["largest"]
    with pytest.raises(
        SizeError, match=r"The weights of 'layers.\d' and 'layers.\d' are 1\.01 MiB"
    ):
        stagehand_alloc.pool(high=int(share * block)).__enter__()
    assert sum(holds(model)) == 0


def test_without_gradients_one_block_has_to_fit(model: Any) -> None:
    block = _native.weights(DEVICE)["largest"]
    with torch.no_grad():
        with stagehand_alloc.pool(high=int(1.1 * block)):
            pass
        with pytest.raises(SizeError, match=r"The weights of 'layers.\d' are 515.50 KiB"):
            stagehand_alloc.pool(high=int(0.9 * block)).__enter__()


def test_weights_that_ask_for_gradients_later(model: Any) -> None:
    model.layers[1].up.weight.requires_grad_(True)
    with pytest.raises(OffloadError, match="asks for gradients now"):
        model(tokens(0))


def test_host_memory_that_is_not_there_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagehand_alloc._weights import offload as _offload

    monkeypatch.setattr(_offload, "available_host_bytes", lambda: MIB)
    model = build()
    with pytest.raises(OffloadError, match="of host memory for good, and"):
        stagehand_alloc.offload(model)
    assert digests(model) == digests(build())


def test_the_driver_refusing_to_pin_moves_nothing(gpu: Any) -> None:
    model = build()
    gpu.fail("cuMemHostRegister", nth=3, times=1)
    with pytest.raises(OffloadError, match="refused to pin"):
        stagehand_alloc.offload(model)
    assert digests(model) == digests(build())
    assert trained(model) == plain()


# The simulated GPU's tensors say that they are on the CPU, as those of a model on the CPU do. To
# torch `cpu:0` is somewhere else, and it copies.


@pytest.mark.usefixtures("elsewhere")
def test_a_model_on_the_cpu_moves_and_is_plain_torchs() -> None:
    model = stagehand_alloc.offload(build())
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == plain()


@pytest.mark.usefixtures("elsewhere")
def test_a_model_on_the_cpu_needs_host_memory_for_two_blocks_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stagehand_alloc._weights import offload as _offload

    monkeypatch.setattr(_offload, "available_host_bytes", lambda: MIB // 4)
    with pytest.raises(OffloadError, match=r"need 1\.01 MiB more of host memory"):
        stagehand_alloc.offload(build())
    monkeypatch.setattr(_offload, "available_host_bytes", lambda: 2 * MIB)
    stagehand_alloc.offload(build())


def of_all(model: Any) -> list[tuple[Any, ...]]:
    return [(name, id(p), digest(p), p.device) for name, p in model.named_parameters()]


class Refusing(nn.Linear):
    """Finds no room on the GPU."""

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")


@pytest.mark.usefixtures("elsewhere")
def test_a_model_on_the_cpu_is_as_before_where_the_host_refuses_to_pin(gpu: Any) -> None:
    model = build()
    before = of_all(model)
    gpu.fail("cuMemHostRegister", nth=3, times=1)
    with pytest.raises(OffloadError, match="refused to pin"):
        stagehand_alloc.offload(model)
    assert of_all(model) == before
    assert _native.weights(DEVICE)["bytes"] == 0
    assert trained(model) == plain()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("where", ["a block", "the rest"])
def test_a_model_on_the_cpu_is_as_before_where_the_gpu_has_no_room(where: str) -> None:
    model = build()
    if where == "a block":
        model.layers[4].last = Refusing(2, 2)
    else:
        model.last = Refusing(2, 2)
    before = of_all(model)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        stagehand_alloc.offload(model)
    assert of_all(model) == before
    assert _native.weights(DEVICE)["bytes"] == 0


def test_a_block_that_cannot_come_back_stays_offloaded_and_works(gpu: Any) -> None:
    model = build()
    gpu.fail("cuMemHostRegister", nth=3, times=1)
    gpu.fail("cuMemcpyHtoDAsync", nth=1, times=1)
    with pytest.raises(OffloadError, match="refused to pin"):
        stagehand_alloc.offload(model)
    assert [group.name for group in registry.within([model])] == ["layers.1"]
    assert digests(model) == digests(build())
    assert trained(model) == plain()


def test_what_is_shared_and_what_is_trained_stays() -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers[3].up.weight = self.layers[5].up.weight  # of two blocks

    model = stagehand_alloc.offload(build(Shared))
    model.layers[3].up.weight.sum()
    model.layers[3].lora_a.sum()
    model.head.weight.sum()
    with pytest.raises(RuntimeError, match="is on the host"):
        model.layers[3].down.weight.sum()
    assert trained(model, stagehand_alloc.pool(high=8 * MIB)) == plain(Shared)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
class OneModule(Model):
    """Its blocks have one module in common."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = self.layers[0].up  # type: ignore[union-attr]


def test_a_module_of_several_blocks_stays() -> None:
    expected = plain(OneModule, steps=2)
    model = stagehand_alloc.offload(build(OneModule))
    model.layers[3].up.weight.sum()
    assert trained(model, stagehand_alloc.pool(high=8 * MIB), steps=2) == expected


def test_a_forked_child_is_told(model: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            model.layers[0](torch.ones(1))
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_is_forked_inside_of_a_pool_does_not_ask_the_engine(model: Any) -> None:
    x = torch.ones(1, WIDTH, requires_grad=True)
    with stagehand_alloc.pool(high=8 * MIB), stagehand_alloc.resident(model):
        child = os.fork()
        if child == 0:
            F.linear(x, model.layers[0].up.weight)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
