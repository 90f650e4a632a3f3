"""A small transformer learns whether a text's first word is frequent in the text. Workers tokenize the texts.

A batch has the length of its longest text, so sizes change from step to step.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

COMPARABLE = 10

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY, WIDTH = 512, 96


class Texts(Dataset):
    """Random texts, tokenized by merging the most frequent pair of tokens repeatedly (byte pair encoding)."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = random.Random(index)
        words = ["".join(draw.choices(LETTERS, k=draw.randint(3, 6))) for _ in range(8)]
        chosen = draw.choices(words, k=draw.randint(24, 40))
        tokens = [LETTERS.index(letter) for word in chosen for letter in word]
        for _ in range(24):
            pair, count = Counter(itertools.pairwise(tokens)).most_common(1)[0]
            if count < 2:
                break
            tokens = merged(tokens, pair)
        return torch.tensor(tokens), int(chosen.count(chosen[0]) > 4)


def merged(tokens: list[int], pair: tuple[int, int]) -> list[int]:
    """Replace each occurrence of a pair by one token."""
    result: list[int] = []
    for token in tokens:
        if result and (result[-1], token) == pair:
            result[-1] = len(LETTERS) + hash(pair) % (VOCABULARY - len(LETTERS))
        else:
            result.append(token)
    return result


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad texts to the length of the longest text."""
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step on `device`."""
    loader = DataLoader(Texts(), 16, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=collate)
    batches = endless(loader)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCABULARY, WIDTH),
            "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "head": nn.Linear(WIDTH, 2),
        }
    ).to(device)
    encoder = compile(model["encoder"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        texts, labels = next(batches)
        texts, labels = texts.to(device), labels.to(device)
        hidden = encoder(model["embedding"](texts))
        loss = F.cross_entropy(model["head"](hidden.mean(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
