"""LoRA with PEFT: the model's own forward enters the pool. The model is small and random."""

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import stagehand_alloc

GPU = torch.cuda.is_available()
HIGH, WIDTH, ROWS = ("1200MiB", 1024, 64) if GPU else ("18MiB", 128, 8)
STEPS = 5


def main() -> None:
    with contextlib.ExitStack() as stack:
        if not GPU:
            from stagehand_alloc import testing

            stack.enter_context(testing.simulated_gpu())
        train(torch.device("cuda" if GPU else "cpu"))


def train(device: torch.device) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 256}
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, use_cache=False, **sizes)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora).to(device)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    pool = stagehand_alloc.pool(high=HIGH)
    attached = pool.attach(model)
    for step in range(STEPS):
        tokens = torch.randint(256, (ROWS, 128), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    attached.remove()
    stats, mib = pool.stats(), 1 << 20
    print(f"peak {stats.mapped_peak / mib:.1f} MiB, high {stats.high / mib:.1f} MiB")
    print(f"moved to the host: {stats.evicted_bytes / mib:.1f} MiB")


if __name__ == "__main__":
    main()
