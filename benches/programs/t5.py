"""A small T5 from transformers learns to sort digits, with transformers' Adafactor.

Adafactor computes its learning rate from the parameters, and keeps second moments of rows and columns only.
"""

import random
from collections.abc import Callable

import torch
from _main import Step, main
from torch.nn.utils.rnn import pad_sequence
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

STEPS = 20
COMPARABLE = None

BATCH, LONGEST = 8, 40
PADDING, END, FIRST = 0, 1, 2


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence of digits, and the digits in order."""
    digits = [random.randrange(10) + FIRST for _ in range(random.randrange(8, LONGEST))]
    return torch.tensor([*digits, END]), torch.tensor([*sorted(digits), END])


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    config = T5Config(
        vocab_size=FIRST + 10,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=PADDING,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    model = T5ForConditionalGeneration(config).to(device)
    model.train()
    net = compile(model)
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)

    def step() -> float:
        sources, targets = zip(*(example() for _ in range(BATCH)), strict=True)
        tokens = pad_sequence(sources, batch_first=True, padding_value=PADDING).to(device)
        labels = pad_sequence(targets, batch_first=True, padding_value=-100).to(device)
        loss = net(input_ids=tokens, attention_mask=tokens != PADDING, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
