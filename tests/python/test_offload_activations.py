"""Pools in the place of TRL's and torchtune's `OffloadActivations`, and in TRL's trainers."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BY_NAME
from torch import nn
from trainers import STEPS, Watched, Watching, arguments, forget, kept_and_used, within_a_share
from training import digest, footprint, leaves_nothing, train
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stagehand_alloc import ConfigError, StagehandWarning
from stagehand_alloc.integrations import torchtune as for_torchtune
from stagehand_alloc.integrations import transformers as for_transformers
from stagehand_alloc.integrations import trl as for_trl

pytestmark = pytest.mark.usefixtures("gpu")
TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL needs Python 3.11")


# ---- the call shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("made", [for_trl, for_torchtune])
def test_a_forward_inside_it_trains_as_plain_torch_within_high(made: Any) -> None:
    recipe = BY_NAME["gpt"]
    high = footprint(recipe).high(0.5)
    expected = train(recipe)
    forget()
    offloading = made.OffloadActivations(
        use_pin_memory=True, use_streams=True, high=high, recompute=False
    )
    with warnings.catch_warnings(), leaves_nothing():
        warnings.simplefilter("error")
        assert train(recipe, offloading) == expected
    assert kept_and_used(offloading.pool, high)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"use_pin_memory": False}, "always pinned"),
        ({"use_streams": False}, "streams of their own"),
        ({"max_fwd_stash_size": 2}, "high says"),
        ({"min_offload_size": 1 << 20}, "under 64 KiB"),
    ],
)
def test_an_argument_that_chooses_nothing_is_taken_with_a_warning_that_says_why(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.warns(StagehandWarning, match=reason) as told:
        for_trl.OffloadActivations(**given, high="64MiB")
    assert len(told) == 1
    assert told[0].filename == __file__


def test_torchtunes_function_gives_a_context_that_does_nothing_where_it_is_not_enabled() -> None:
    made = for_torchtune.get_act_offloading_ctx_manager
    assert isinstance(made(nn.Linear(2, 2), True, high="64MiB"), for_torchtune.OffloadActivations)
    with made(nn.Linear(2, 2), enable_activation_offloading=False, high="64MiB") as nothing:
        assert nothing is None


@TRL
@pytest.mark.parametrize("name", ["OffloadActivations", "get_act_offloading_ctx_manager"])
def test_whatever_trls_takes_ours_takes(name: str) -> None:
    from trl.models import activation_offloading as theirs

    found = inspect.signature(getattr(theirs, name)).parameters
    known = inspect.signature(getattr(for_trl, name)).bind
    defaults = {key: one.default for key, one in found.items() if key != "model"}
    model = (nn.Linear(2, 2),) if "model" in found else ()
    known(*model, **defaults)
    getattr(for_trl, name)(*model, **defaults, high="64MiB")


# ---- TRL's trainers ------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"<end>": 0, **{f"w{at}": at for at in range(1, 128)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


def sft(folder: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ids = torch.randint(1, 128, (STEPS * 16, 64), generator=torch.Generator().manual_seed(5))
    settings = {"gradient_checkpointing": False, "per_device_train_batch_size": 8}
    return SFTTrainer(
        llama(),
        arguments(folder, SFTConfig, **settings),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def dpo(folder: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def text() -> str:
        return "".join(f"w{at} " for at in torch.randint(1, 128, (30,)).tolist())

    torch.manual_seed(5)
    pairs = {key: [text() for _ in range(STEPS * 16)] for key in ("prompt", "chosen", "rejected")}
    settings = {"gradient_checkpointing": False, "per_device_train_batch_size": 8}
    return DPOTrainer(
        llama(),
        llama(),  # the reference
        args=arguments(folder, DPOConfig, **settings),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def run(made: Callable[..., Any], folder: Path, ours: Any) -> Watched:
    """Train with a callback, with `OffloadActivations`, or with neither."""
    watched = Watched()
    callback = isinstance(ours, for_transformers.StagehandCallback)
    trainer = made(folder, [*([ours] if callback else []), Watching(watched)])
    if ours is not None and not callback:
        trainer.maybe_activation_offload_context = ours
    step = trainer.training_step

    def training_step(*given: Any, **named: Any) -> Any:
        loss = step(*given, **named)
        watched.losses.append(digest(loss))
        return loss

    trainer.training_step = training_step
    trainer.train()
    watched.end(trainer.model)
    return watched


@TRL
@pytest.mark.parametrize(
    ("made", "ours"),
    [
        (sft, for_transformers.StagehandCallback),
        (sft, for_trl.OffloadActivations),
        (dpo, for_trl.OffloadActivations),
    ],
)
def test_a_trainer_of_trl_with_a_pool_equals_one_without_inside_the_budget(
    tmp_path: Path,
    made: Callable[..., Any],
    ours: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its tile of logits, for real vocabularies, is larger than all that this model saves.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 256)
    expected, high = within_a_share(lambda _: run(made, tmp_path, None), 0.6)
    pool = ours(high=high)
    with leaves_nothing():
        assert run(made, tmp_path, pool).results() == expected.results()
    assert kept_and_used(pool.pool, high)


@TRL
def test_trls_own_offloading_and_a_pool_at_once_are_refused(tmp_path: Path) -> None:
    trainer = sft(tmp_path, [for_transformers.StagehandCallback(high="64MiB")])
    trainer.args.activation_offloading = True
    with pytest.raises(ConfigError, match="both move"):
        trainer.train()
