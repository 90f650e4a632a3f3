"""A small Llama from transformers writes text with `generate()` and its key-value cache.

Prompts of different lengths are padded on the left. Each step samples continuations, scores them with the
model, and prints nothing: `generate()` itself decides after every token whether all sentences have ended.
"""

import random
from collections.abc import Callable

import torch
from _main import Step, main
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

STEPS = 20
COMPARABLE = 5

WORDS, BATCH, NEW = 256, 4, 24
BEGIN, END, PADDING = 1, 2, 0


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step on `device`, which continues a batch of prompts and scores the results."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    model = LlamaForCausalLM(config).to(device).eval()
    model.loss_type = "ForCausalLM"
    score = compile(model)
    sampling = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=True,
        top_k=20,
        top_p=0.95,
        temperature=0.8,
        repetition_penalty=1.1,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PADDING,
    )

    def prompts() -> tuple[torch.Tensor, torch.Tensor]:
        """Return random prompts and their attention mask."""
        lengths = [random.randrange(4, 32) for _ in range(BATCH)]
        rows = [[BEGIN, *(random.randrange(3, WORDS) for _ in range(n - 1))] for n in lengths]
        padded = torch.tensor([[PADDING] * (max(lengths) - len(row)) + row for row in rows])
        return padded.to(device), (padded != PADDING).long().to(device)

    @torch.no_grad()
    def step() -> float:
        tokens, mask = prompts()
        written = model.generate(input_ids=tokens, attention_mask=mask, generation_config=sampling)
        whole = torch.cat((mask, (written[:, tokens.shape[1] :] != PADDING).long()), dim=1)
        labels = written.masked_fill(whole == 0, -100)
        return score(input_ids=written, attention_mask=whole, labels=labels).loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
