"""A recurrent classifier of sequences of different lengths.

The Python loop over time ends with the longest sequence of the batch, so its number of rounds changes from
step to step. A sequence that has ended keeps its state.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 32
INPUTS = 16
HIDDEN = 128
CLASSES = 4


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), HIDDEN)
        for time in range(x.shape[1]):
            alive = (time < lengths).unsqueeze(1)
            state = torch.where(alive, self.cell(x[:, time], state), state)
        return self.out(state)


def batch(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return padded random walks, their lengths, and the directions in which they drift."""
    lengths = rng.integers(8, rng.integers(20, 60), size=BATCH)
    labels = rng.integers(CLASSES, size=BATCH)
    drift = np.eye(CLASSES, INPUTS)[labels]
    x = rng.normal(size=(BATCH, lengths.max(), INPUTS)) + 0.3 * drift[:, None]
    return torch.from_numpy(x).float(), torch.from_numpy(lengths), torch.from_numpy(labels)


def make(
    device: str,
    compile: Callable = lambda model: model,
    function: Callable = lambda step: step,
    fused: bool | None = None,
) -> Step:
    """A training step on `device`.

    `function` wraps the part that computes on tensors, which needs a fused optimizer.
    """
    rng = np.random.default_rng(0)
    model = Classifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    forward = compile(model)

    @function
    def train(x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(forward(x, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def step() -> torch.Tensor:
        return train(*(tensor.to(device) for tensor in batch(rng)))

    return step


if __name__ == "__main__":
    main(make, STEPS)
