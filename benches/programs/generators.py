"""Training on a stream of batches, some of which are bad.

A Python generator creates the data. Exceptions of the program or of an operator skip a batch. Optional
tensors of a batch are None if they are missing.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 64
FEATURES = 32
SIZE = 256


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor | None
    mask: torch.Tensor | None

    def to(self, device: str) -> "Batch":
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))


class BadBatch(Exception):
    """A batch that is to be skipped."""


def stream(rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches endlessly. Some lack features, or have weights that are all zero."""
    teacher = rng.normal(size=FEATURES)
    while True:
        x = rng.normal(size=(BATCH, FEATURES))
        y = np.tanh(x @ teacher) + 0.1 * rng.normal(size=BATCH)
        weight = rng.integers(0, 3, size=BATCH) if rng.random() < 0.5 else None
        mask = rng.random((BATCH, FEATURES)) < 0.9 if rng.random() < 0.5 else None
        kind = rng.random()
        if kind < 0.1:
            x = x[:, :-1]
        elif kind < 0.2:
            weight = np.zeros(BATCH)
        x, y = torch.from_numpy(x).float(), torch.from_numpy(y).float()
        weight = None if weight is None else torch.from_numpy(weight).float()
        yield Batch(x, y, weight, None if mask is None else torch.from_numpy(mask))


class Model(nn.Module):
    """A regression with an optional memory of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.missing = nn.Parameter(torch.zeros(FEATURES))
        self.first = nn.Linear(FEATURES, SIZE)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(6))
        self.out = nn.Linear(SIZE, 1)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if mask is not None:
            x = torch.where(mask, x, self.missing)
        x = self.first(x)
        if memory is not None:
            x = x + memory
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.out(x).squeeze(1), 0.1 * x.mean(0)


def loss_of(out: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    errors = F.huber_loss(out, y, reduction="none")
    if weight is None:
        return errors.mean()
    if weight.sum() == 0:
        raise BadBatch("no example counts")
    return (errors * weight).sum() / weight.sum()


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`. It takes the next batch that does not have to be skipped."""
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = compile(model)
    batches = stream(np.random.default_rng(0))
    memory: torch.Tensor | None = None

    def try_step(batch: Batch) -> torch.Tensor:
        nonlocal memory
        out, new_memory = forward(batch.x, batch.mask, memory)
        loss = loss_of(out, batch.y, batch.weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory = new_memory.detach()
        return loss.detach()

    def step() -> torch.Tensor:
        nonlocal memory
        for batch in batches:
            try:
                return try_step(batch.to(device))
            except (BadBatch, RuntimeError):
                memory = None
        raise AssertionError("the stream has no end")

    return step


if __name__ == "__main__":
    main(make, STEPS)
