"""Low-rank adapters on a frozen GPT-2: two of them trained in turn, mixed, saved, loaded and merged."""

# /// script
# dependencies = ["peft==0.21.2", "transformers==5.23.0"]
# ///

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

set_seed(0)


def base() -> nn.Module:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=4))


def words(task: str) -> torch.Tensor:
    start, place = torch.randint(0, 50, (16, 1)), torch.arange(20)
    return (start + place * (1 if task == "up" else 49)) % 50


options = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "task_type": "CAUSAL_LM"}
model = get_peft_model(base(), LoraConfig(target_modules=["c_attn", "c_proj"], **options), "up")
model.add_adapter("down", LoraConfig(target_modules=["c_attn", "c_fc"], use_rslora=True, **options))
trainable, total = model.get_nb_trainable_parameters()
print("trainable", trainable, "of", total)

for task in ("up", "down"):
    model.set_adapter(task)
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=50)
    for step in range(50):
        batch = words(task)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            print(task, loss.item())

model.eval()
batches = {task: words(task) for task in ("up", "down")}
with torch.no_grad():
    for adapter in ("up", "down"):
        model.set_adapter(adapter)
        for task, batch in batches.items():
            print(adapter, "on", task, model(input_ids=batch, labels=batch).loss.item())
    with model.disable_adapter():
        print("without", model(input_ids=batches["up"], labels=batches["up"]).loss.item())
    model.add_weighted_adapter(["up", "down"], [0.6, 0.4], "both", combination_type="svd", svd_rank=8)
    model.set_adapter("both")
    print("both", model(input_ids=batches["up"], labels=batches["up"]).loss.item())

model.save_pretrained("adapters", selected_adapters=["up"])
loaded = PeftModel.from_pretrained(base(), "adapters/up").eval()
merged = loaded.merge_and_unload()
with torch.no_grad():
    print("merged", merged(input_ids=batches["up"], labels=batches["up"]).loss.item())
