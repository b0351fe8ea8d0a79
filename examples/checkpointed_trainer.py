"""Gradient checkpointing on in Hugging Face's Trainer: blocks run again where memory is short."""

import contextlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import stagehand_alloc
from stagehand_alloc.integrations.transformers import StagehandCallback

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("2100MiB", 1024, 64) if GPU else ("32MiB", 128, 8)


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
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "context_fn": stagehand_alloc.when_needed,  # without it every block runs again
        },
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
        use_cpu=not GPU,
    )
    callback = StagehandCallback(high=HIGH)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[callback])
    print(f"loss {trainer.train().training_loss:.3f}")
    stats, mib = callback.pool.stats(), 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")
    print(f"dropped: {stats.dropped_bytes / mib:.1f} MiB; blocks run again: {stats.reruns}")


if __name__ == "__main__":
    main()
