"""Hugging Face's Trainer: one callback. The model is small, random, and nothing is downloaded."""

import contextlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stagehand_alloc
from stagehand_alloc.integrations.transformers import StagehandCallback

HIGH = "24MiB"


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(stack.enter_context(tempfile.TemporaryDirectory()))


def train(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256}
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, use_cache=False, **sizes)
    tokens = torch.randint(256, (40, 128))
    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
    )
    callback = StagehandCallback(high=HIGH)
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )
    print(f"loss {trainer.train().training_loss:.3f}")
    stats, mib = stagehand_alloc.stats(), 1 << 20
    print(
        f"peak {stats.mapped_peak / mib:.1f} MiB, high {callback.pool.stats().high / mib:.1f} MiB"
    )
    print(f"moved to the host: {callback.pool.stats().evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
