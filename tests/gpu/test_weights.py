"""Weights on the host: LoRA, and a model that is trained as a whole, are plain torch's bit by bit,
in a budget they do not fit.

On torch's own allocator and on the process allocator; the model is 12 blocks of 32 MiB.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import MIB, digest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workloads import LlamaSize, lora

WIDTH, BLOCKS, ROWS = 1024, 12, 2048


class Block(nn.Module):
    """An MLP of 32 MiB, frozen, and a LoRA of rank 8."""

    def __init__(self, times: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, times * WIDTH, bias=False)
        self.down = nn.Linear(times * WIDTH, WIDTH, bias=False)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.b = nn.Parameter(torch.randn(WIDTH, 8) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x))) + F.linear(F.linear(x, self.a), self.b)
        return x + y


class Model(nn.Module):
    """Twelve of them."""

    def __init__(self, marked: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.marked = marked

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.marked else layer(x)
        return x.square().mean()


def build(marked: bool = False, device: str = "cuda") -> Any:
    torch.manual_seed(3)
    return Model(marked).to(device)


class Streams(nn.Module):
    """As in Flux: text and image have a block each, and see each other by what they add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Block(), Block()

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        text = self.text(text + image.mean(0))
        return text, self.image(image + text.mean(0))


class Unequal(nn.Module):
    """Four blocks of 64 MiB with two streams, then eight of 24 MiB with one."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Streams() for _ in range(4)])
        self.single_transformer_blocks = nn.ModuleList([Block(times=3) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        text, image = x[: ROWS // 4], x[ROWS // 4 :]
        for block in self.transformer_blocks:
            text, image = block(text, image)
        x = torch.cat([text, image])
        for block in self.single_transformer_blocks:
            x = block(x)
        return x.square().mean()


def unequal() -> Any:
    torch.manual_seed(3)
    return Unequal().to("cuda")


class Language(nn.Module):
    """Hugging Face's Llama with PEFT's LoRA, eight layers of 22 MiB in bf16."""

    SIZE = LlamaSize(layers=8, sequence=512)

    def __init__(self) -> None:
        super().__init__()
        self.inner = lora(self.SIZE, torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


def language() -> Any:
    torch.manual_seed(3)
    return Language().to("cuda")


def tokens() -> Tensor:
    size = Language.SIZE
    return torch.randint(size.vocabulary, (2, size.sequence), device="cuda")


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)


def trained(
    model: nn.Module, pool: Any = None, steps: int = 5, batch: Callable[[], Tensor] = rows
) -> list[str]:
    """Losses and gradients of each step, and the trained weights at the end."""
    import contextlib

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = batch()
        with pool or contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        found += [digest(loss), *(digest(p.grad) for p in parameters if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found + [digest(p) for p in parameters]


def in_use() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def assert_streams(
    high: int, make: Callable[[], Any] = build, batch: Callable[[], Tensor] = rows
) -> None:
    """Right, and below `high` once learned."""
    import stagehand_alloc
    from stagehand_alloc import _native

    expected = trained(make(), batch=batch)
    model = stagehand_alloc.offload(make())
    pool = stagehand_alloc.pool(high=in_use() + high)
    assert trained(model, pool, batch=batch) == expected
    before, weights = stagehand_alloc.stats(), _native.weights(0)
    trained(model, pool, batch=batch)
    after, now = stagehand_alloc.stats(), _native.weights(0)
    assert now["loads"] > weights["loads"]
    assert after.overshoot_bytes == before.overshoot_bytes
    assert _native.check_invariants(0) == ""


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "checkpoint"])
def test_lora_on_torchs_allocator(torch_books: None, marked: bool) -> None:
    assert_streams(320 * MIB, functools.partial(build, marked))


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "checkpoint"])
def test_lora_on_the_process_allocator(books: None, marked: bool) -> None:
    assert_streams(320 * MIB, functools.partial(build, marked))


def test_unequal_blocks_on_torchs_allocator(torch_books: None) -> None:
    assert_streams(400 * MIB, unequal)


def test_unequal_blocks_on_the_process_allocator(books: None) -> None:
    assert_streams(400 * MIB, unequal)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Attention's backward adds in the same order each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_llama_with_lora_on_torchs_allocator(torch_books: None, deterministic: None) -> None:
    pytest.importorskip("peft")
    assert_streams(320 * MIB, language, tokens)


def test_a_llama_with_lora_on_the_process_allocator(books: None, deterministic: None) -> None:
    pytest.importorskip("peft")
    assert_streams(320 * MIB, language, tokens)


def test_lora_in_a_mem_pool(torch_books: None) -> None:
    import stagehand_alloc

    expected = trained(build())
    model = stagehand_alloc.offload(build())
    pool = stagehand_alloc.pool(high=in_use() + 384 * MIB, mode="mempool")
    assert trained(model, pool) == expected


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, pool: Any = None) -> list[str]:
    """Losses of some steps, then all weights and what the optimizer keeps."""
    import contextlib

    found = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        with pool or contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        found.append(digest(loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found += [digest(tensor) for tensor in model.state_dict().values()]
    return found + kept_by(optimizer)


def kept_by(optimizer: torch.optim.Optimizer) -> list[str]:
    state = optimizer.state_dict()["state"].values()
    return [digest(kept[key]) for kept in state for key in sorted(kept)]


def assert_trains_all(fused: bool) -> None:
    """Weights and gradients are 384 MiB each, the state twice that: more than the budget."""
    import stagehand_alloc
    from stagehand_alloc import _native

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)

    model = build().requires_grad_(True)
    expected = whole(model, adamw(model))
    del model
    before = in_use()
    model = stagehand_alloc.offload(build(device="cpu").requires_grad_(True), trained=True)
    optimizer = stagehand_alloc.offload_optimizer(adamw(model))
    weights = _native.weights(0)
    assert whole(model, optimizer, stagehand_alloc.pool(high=before + 900 * MIB)) == expected
    assert _native.weights(0)["written_bytes"] > weights["written_bytes"]
    kept = kept_by(optimizer)
    stagehand_alloc.restore(optimizer)
    assert all(one["exp_avg"].is_cuda for one in optimizer.state.values())
    assert kept_by(optimizer) == kept
    assert _native.check_invariants(0) == ""


@pytest.mark.parametrize("fused", [False, True])
def test_all_is_trained_on_torchs_allocator(torch_books: None, fused: bool) -> None:
    assert_trains_all(fused)


@pytest.mark.parametrize("fused", [False, True])
def test_all_is_trained_on_the_process_allocator(books: None, fused: bool) -> None:
    assert_trains_all(fused)


def test_a_model_on_the_cpu_goes_block_by_block(torch_books: None) -> None:
    import stagehand_alloc

    expected = trained(build(), steps=2)
    before = in_use()
    torch.cuda.reset_peak_memory_stats()
    counted = stagehand_alloc.stats()
    model = stagehand_alloc.offload(build(device="cpu"))
    assert torch.cuda.max_memory_allocated() - before < 32 * MIB
    moved = stagehand_alloc.stats().since(counted)
    assert (moved.h2d_bytes, moved.d2h_bytes) == (0, 0)
    assert trained(model, stagehand_alloc.pool(high=in_use() + 320 * MIB), steps=2) == expected
    state = model.state_dict()
    assert state["layers.3.up.weight"].device.type == "cpu"


def test_two_models_that_share_a_host_copy_are_plain_torchs(torch_books: None) -> None:
    import stagehand_alloc

    expected = trained(build(), steps=2)
    name = f"gpu test {os.getpid()}"
    models = [stagehand_alloc.offload(build(device="cpu"), share=name) for _ in range(2)]
    assert stagehand_alloc.stats().weights_pinned_bytes >= 2 * BLOCKS * 32 * MIB
    for model in models:
        assert trained(model, stagehand_alloc.pool(high=in_use() + 320 * MIB), steps=2) == expected


def test_a_model_that_finds_no_room_is_on_the_cpu_again(torch_books: None) -> None:
    import stagehand_alloc
    from stagehand_alloc import _native

    class Refusing(nn.Linear):
        def _apply(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

    model = build(device="cpu")
    model.layers[4].last = Refusing(2, 2)
    before = [(id(p), p.device, digest(p)) for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        stagehand_alloc.offload(model)
    assert [(id(p), p.device, digest(p)) for p in model.parameters()] == before
    assert _native.weights(0)["bytes"] == 0


def test_a_weight_that_is_away_raises_and_the_context_lives(torch_books: None) -> None:
    import stagehand_alloc

    model = stagehand_alloc.offload(build())
    weight = model.layers[2].up.weight
    for touch in (lambda: weight.sum(), lambda: weight.data_ptr(), lambda: weight.cpu()):
        with pytest.raises(RuntimeError, match=r"'layers\.2\.up\.weight' is on the host"):
            touch()
    with stagehand_alloc.resident(model.layers[2]):
        assert weight.sum().isfinite()
    stagehand_alloc.restore(model)
    assert weight.sum().isfinite()


def test_sampling_streams_and_is_plain_torchs(torch_books: None) -> None:
    import stagehand_alloc

    x = torch.randn(64, WIDTH, device="cuda")
    with torch.no_grad():
        expected = digest(build()(x))
        model = stagehand_alloc.offload(build())
        with stagehand_alloc.pool(high=in_use() + 160 * MIB):
            for _ in range(3):
                assert digest(model(x)) == expected
        assert digest(model(x)) == expected


def test_quantized_in_four_bits(torch_books: None) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    import stagehand_alloc

    class Quantized(Block):
        def __init__(self) -> None:
            super().__init__()
            kind = bitsandbytes.nn.Linear4bit
            self.up = kind(WIDTH, 4 * WIDTH, bias=False, compute_dtype=torch.float32)
            self.down = kind(4 * WIDTH, WIDTH, bias=False, compute_dtype=torch.float32)
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

    def made() -> Any:
        torch.manual_seed(3)
        model = Model()
        model.layers = nn.ModuleList([Quantized() for _ in range(BLOCKS)])
        return model.cuda()

    expected = trained(made())
    model = stagehand_alloc.offload(made())
    assert trained(model, stagehand_alloc.pool(high=in_use() + 128 * MIB)) == expected
