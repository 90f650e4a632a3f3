"""A translator that learns to reverse sentences: recurrent encoder and decoder with attention.

Python loops over the words of sentences, whose length changes, and `random` decides at each word whether the
decoder gets the true previous word or its own prediction.
"""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 32
WORDS = 30
SIZE = 96
BEGIN, END = 0, 1
TEACHER_FORCING = 0.5


class GRUCell(nn.Module):
    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 3 * size)
        self.hidden = nn.Linear(size, 3 * size)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        x_reset, x_update, x_new = self.input(x).chunk(3, dim=1)
        h_reset, h_update, h_new = self.hidden(state).chunk(3, dim=1)
        new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
        update = torch.sigmoid(x_update + h_update)
        return new + update * (state - new)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.cell = GRUCell(SIZE, SIZE)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        words = self.words(source)
        state = words.new_zeros(len(source), SIZE)
        states = []
        for time in range(source.shape[1]):
            state = self.cell(words[:, time], state)
            states.append(state)
        return torch.stack(states, dim=1)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.cell = GRUCell(2 * SIZE, SIZE)
        self.out = nn.Linear(2 * SIZE, WORDS)

    def forward(
        self, word: torch.Tensor, state: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the next word, and the state after the last word."""
        weights = torch.softmax((memory @ state.unsqueeze(2)).squeeze(2), dim=1)
        context = (weights.unsqueeze(1) @ memory).squeeze(1)
        state = self.cell(torch.cat((self.words(word), context), dim=1), state)
        return self.out(torch.cat((state, context), dim=1)), state


class Translator(nn.Module):
    def __init__(self, rng: random.Random, teacher_forcing: float) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.rng = rng
        self.teacher_forcing = teacher_forcing

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the words of the target."""
        memory = self.encoder(source)
        state = memory[:, -1]
        word = torch.full_like(target[:, 0], BEGIN)
        loss = 0
        for time in range(target.shape[1]):
            scores, state = self.decoder(word, state, memory)
            loss = loss + F.cross_entropy(scores, target[:, time])
            teach = self.teacher_forcing == 1 or self.rng.random() < self.teacher_forcing
            word = target[:, time] if teach else scores.argmax(1)
        return loss / target.shape[1]


def sentences(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of sentences of one length, and their translations."""
    length = rng.randint(6, 14)
    source = torch.tensor([[rng.randrange(2, WORDS) for _ in range(length)] for _ in range(BATCH)])
    return source, F.pad(source.flip(1), (0, 1), value=END)


def make(
    device: str,
    compile: Callable = lambda model: model,
    function: Callable = lambda step: step,
    fused: bool | None = None,
    teacher_forcing: float = TEACHER_FORCING,
) -> Step:
    """A training step on `device`.

    `function` wraps the part that computes on tensors, which needs a fused optimizer.
    """
    rng = random.Random(0)
    model = Translator(rng, teacher_forcing).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=fused)
    forward = compile(model)

    @function
    def train(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = forward(source, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def step() -> torch.Tensor:
        source, target = sentences(rng)
        return train(source.to(device), target.to(device))

    return step


if __name__ == "__main__":
    main(make, STEPS)
