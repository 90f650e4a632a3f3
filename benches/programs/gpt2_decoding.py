"""A small GPT-2 from transformers continues prompts token by token, with a static key-value cache.

The program has its own loop: for each token, it calls the model with one word, the word's position, and the
cache.
"""

from collections.abc import Callable

import torch
from _main import Step, main
from transformers import GPT2Config, GPT2LMHeadModel, StaticCache

STEPS = 20
COMPARABLE = None

WORDS, BATCH, PROMPT, NEW = 256, 2, 8, 24


def make(
    device: str, compile: Callable = lambda model: model, function: Callable = lambda step: step
) -> Step:
    """A step on `device` that continues prompts, and returns the mean word. `function` wraps the call for a
    word.
    """
    config = GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).to(device).eval()
    net = compile(model)
    cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)
    prompts = torch.randint(WORDS, (16, BATCH, PROMPT)).to(device)
    number = 0

    @function
    @torch.no_grad()
    def decode(words: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = net(
            input_ids=words,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            cache_position=positions[0],
        )
        return outputs.logits[:, -1:].argmax(2), positions[:, -1:] + 1

    def step() -> torch.Tensor:
        nonlocal number
        cache.reset()
        words = prompts[number % len(prompts)]
        number += 1
        positions = torch.arange(PROMPT, device=device).expand(BATCH, -1)
        written = []
        for _ in range(NEW):
            words, positions = decode(words, positions)
            written.append(words)
        return torch.cat(written, dim=1).float().mean()

    return step


if __name__ == "__main__":
    main(make, STEPS)
