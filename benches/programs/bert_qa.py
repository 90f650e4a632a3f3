"""A small BERT from transformers learns extractive question answering: the answer's first and last token in
a padded pair of question and context.

A function of the script pads each batch to the length of its longest example, so that shapes change. A
schedule warms the learning rate up.
"""

import random
from collections.abc import Callable

import torch
from _main import Step, endless, main
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForQuestionAnswering, get_linear_schedule_with_warmup

STEPS = 20
COMPARABLE = None

PAD, CLS, SEP, FIRST, VOCABULARY = 0, 1, 2, 3, 1000


def examples(count: int) -> list[dict]:
    """Contexts of random words. The question has the answer's first word, and the answer's length."""
    made = []
    for _ in range(count):
        context = [random.randrange(FIRST, VOCABULARY) for _ in range(random.randint(50, 88))]
        start = random.randrange(len(context) - 8)
        length = random.randint(1, 6)
        question = [context[start], random.randrange(FIRST, VOCABULARY), length + FIRST]
        offset = len(question) + 2
        made.append(
            {
                "input_ids": [CLS, *question, SEP, *context, SEP],
                "token_type_ids": [0] * offset + [1] * (len(context) + 1),
                "start": offset + start,
                "end": offset + start + length - 1,
            }
        )
    return made


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    """Pad a batch to a multiple of 32 tokens."""
    longest = max(len(example["input_ids"]) for example in batch)
    width = -(-longest // 32) * 32

    def pad(key: str) -> torch.Tensor:
        return torch.tensor([example[key] + [PAD] * (width - len(example[key])) for example in batch])

    input_ids = pad("input_ids")
    return {
        "input_ids": input_ids,
        "token_type_ids": pad("token_type_ids"),
        "attention_mask": (input_ids != PAD).long(),
        "start_positions": torch.tensor([example["start"] for example in batch]),
        "end_positions": torch.tensor([example["end"] for example in batch]),
    }


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(examples(512), batch_size=8, shuffle=True, collate_fn=collate))
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    model = BertForQuestionAnswering(config).to(device)
    model.train()
    net = compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=10_000)

    def step() -> float:
        batch = {key: value.to(device) for key, value in next(batches).items()}
        loss = net(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
