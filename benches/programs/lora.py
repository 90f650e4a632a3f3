"""peft's LoRA adapts a small GPT-2 from transformers to the characters of scikit-learn's descriptions."""

from collections.abc import Callable

import torch
from _main import Step, endless, main
from gpt2 import corpus
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.optimization import get_linear_schedule_with_warmup

STEPS = 20
COMPARABLE = None

BATCH, LENGTH, ACCUMULATION = 4, 64, 2


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """An update on `device`, from the gradients of `ACCUMULATION` batches."""
    base = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    )
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,
    )
    base_model = GPT2LMHeadModel(base)
    base_model.loss_type = "ForCausalLM"
    model = get_peft_model(base_model, config).to(device)
    model.train()
    net = compile(model)
    pieces = corpus().unfold(0, LENGTH, LENGTH).clone()
    batches = endless(DataLoader(pieces, batch_size=BATCH, shuffle=True, drop_last=True))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=10_000)

    def step() -> float:
        total = 0.0
        for _ in range(ACCUMULATION):
            batch = next(batches).to(device)
            loss = net(input_ids=batch, labels=batch).loss / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    main(make, STEPS)
