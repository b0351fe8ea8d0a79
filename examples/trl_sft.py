"""TRL's SFTTrainer: the callback of its base, Hugging Face's Trainer. Nothing is downloaded."""

import contextlib
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from stagehand_alloc.integrations.transformers import StagehandCallback

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("3GiB", 1024, 128) if GPU else ("216MiB", 256, 8)


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(stack.enter_context(tempfile.TemporaryDirectory()))


def train(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 256}
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    rows = torch.randint(256, (5 * ROWS, 128)).tolist()
    callback = StagehandCallback(high=HIGH)
    trainer = SFTTrainer(
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **sizes)),
        SFTConfig(
            folder,
            max_steps=5,
            per_device_train_batch_size=ROWS,
            gradient_checkpointing=False,  # TRL's default is True: see checkpointed_trainer.py
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
            bf16=GPU,
            use_cpu=not GPU,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>"),
        callbacks=[callback],
    )
    print(f"loss {trainer.train().training_loss:.3f}")
    stats, mib = callback.pool.stats(), 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
