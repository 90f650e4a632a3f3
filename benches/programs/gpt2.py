"""A small GPT-2 from transformers learns the characters of scikit-learn's descriptions of its data sets.

Every step draws a new length of the sequences.
"""

import random
from collections.abc import Callable

import torch
from _main import Step, main
from sklearn import datasets
from transformers import GPT2Config, GPT2LMHeadModel

STEPS = 20
COMPARABLE = None

BATCH = 4


def corpus() -> torch.Tensor:
    """The texts, as bytes."""
    loaders = (datasets.load_iris, datasets.load_wine, datasets.load_diabetes, datasets.load_breast_cancer)
    text = "\n\n".join(load().DESCR for load in loaders)
    return torch.tensor(list(text.encode()))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    data = corpus()
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).to(device)
    model.loss_type = "ForCausalLM"
    model.train()
    net = compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    def get_batch() -> torch.Tensor:
        length = random.randrange(32, 128)
        starts = [random.randrange(len(data) - length) for _ in range(BATCH)]
        return torch.stack([data[start : start + length] for start in starts]).to(device)

    def step() -> float:
        batch = get_batch()
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
