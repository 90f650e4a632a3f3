"""Trainer with a schedule, clipping and evaluation on a small Llama, which then generates in four ways."""

# /// script
# dependencies = ["transformers==5.23.0", "accelerate==1.15.0"]
# ///

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

set_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_dropout=0.1,
    bos_token_id=0,
    eos_token_id=63,
    pad_token_id=62,
)
model = LlamaForCausalLM(config)


def sentence(start: int, stride: int) -> dict:
    words = [(start + stride * place) % 60 for place in range(24)]
    return {"input_ids": words, "labels": words}


sentences = [sentence(start, stride) for start in range(60) for stride in (1, 2, 7)]
arguments = TrainingArguments(
    "output",
    max_steps=100,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    weight_decay=0.01,
    max_grad_norm=1.0,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=50,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=sentences[:160],
    eval_dataset=sentences[160:],
    data_collator=default_data_collator,
)
trainer.remove_callback(PrinterCallback)
trainer.train()
for entry in trainer.state.log_history:
    for key in ("loss", "grad_norm", "eval_loss"):
        if key in entry:
            print(key, entry[key])

prompts = torch.tensor([[5, 6, 7, 8], [10, 12, 14, 16], [3, 10, 17, 24]]).to(model.device)
mask = torch.ones_like(prompts)
ways = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 10, "top_p": 0.9, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "length_penalty": 0.5},
    "penalized": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}
model.eval()
for name, options in ways.items():
    for words in model.generate(prompts, attention_mask=mask, max_new_tokens=12, **options).tolist():
        print(name, *words)
