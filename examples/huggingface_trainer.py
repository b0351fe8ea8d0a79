"""Hugging Face's Trainer: one callback. The model is small, random, and nothing is downloaded."""

import contextlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from stagehand_alloc.integrations.transformers import StagehandCallback

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("1600MiB", 1024, 64) if GPU else ("24MiB", 128, 8)


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(stack.enter_context(tempfile.TemporaryDirectory()))


def train(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 256}
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, use_cache=False, **sizes)
    tokens = torch.randint(256, (5 * ROWS, 128))
    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=not GPU,
    )
    callback = StagehandCallback(high=HIGH)
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )
    print(f"loss {trainer.train().training_loss:.3f}")
    stats, mib = callback.pool.stats(), 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
