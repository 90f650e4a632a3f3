"""A Music Transformer (Huang et al., 2018) learns random-walk melodies as MIDI events, with relative
attention by the skewing trick.

Each attention module caches its causal mask on the object and replaces it when a longer sequence arrives. A
curriculum object changes the length of the sequences and a dropout probability.
"""

import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

EVENTS, LONGEST, BATCH = 256, 96, 4


class RelativeAttention(nn.Module):
    """Causal self-attention with learned relative positions."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = nn.Parameter(torch.randn(LONGEST, width // heads) * 0.02)
        self.dropout = dropout
        self.mask_cache: torch.Tensor | None = None

    def mask(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the causal mask, which is true for later positions."""
        if self.mask_cache is None or len(self.mask_cache) < length:
            self.mask_cache = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        return self.mask_cache[:length, :length]

    def skew(self, x: torch.Tensor) -> torch.Tensor:
        """Convert (query, distance) to (query, key), by padding and reshaping."""
        batch, heads, length, _ = x.shape
        x = F.pad(x, (1, 0)).reshape(batch, heads, length + 1, length)
        return x[:, :, 1:, :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=-1))
        positions = self.skew(q @ self.relative[LONGEST - length :].t())
        scores = (q @ k.transpose(-2, -1) + positions) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(self.mask(length, x.device), -math.inf)
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RelativeAttention(width, heads, dropout)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class MusicTransformer(nn.Module):
    """Returns the logits of the next event for each event of a sequence."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(EVENTS, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, EVENTS)

    def forward(self, events: torch.Tensor) -> torch.Tensor:
        x = self.embedding(events) * math.sqrt(self.width)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Curriculum:
    """Lengthens the sequences every ten steps, and lowers the attention's dropout at every step."""

    def __init__(self, model: MusicTransformer) -> None:
        self.model = model
        self.length = LONGEST // 2
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % 10 == 0:
            self.length = min(LONGEST, self.length + 8)
        for layer in self.model.layers:
            layer.attention.dropout = 0.1 + 0.1 / (1 + self.steps / 10)


def melody(length: int) -> list[int]:
    """Note-on, time-shift and note-off events of a walk over the keys."""
    events: list[int] = []
    key = random.randrange(40, 88)
    while len(events) < length:
        key = min(107, max(20, key + random.choice([-4, -3, -2, -1, 1, 2, 3, 4])))
        events += [key, 216 + random.randrange(40), 108 + key]
    return events[:length]


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    melodies = torch.tensor([melody(LONGEST + 1) for _ in range(256)])
    model = MusicTransformer().to(device)
    net = compile(model)
    curriculum = Curriculum(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)

    def noam(step: int) -> float:
        return model.width**-0.5 * min((step + 1) ** -0.5, (step + 1) * 100**-1.5)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)

    def step() -> float:
        rows = torch.randint(len(melodies), (BATCH,))
        batch = melodies[rows, : curriculum.length + 1].to(device)
        logits = net(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        curriculum.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
