"""Softmax regression on images the size of MNIST's: one linear layer, SGD, a batch of 200.

A plain Python loop with very little work per op, so the framework's cost per op dominates.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, main
from sklearn.datasets import make_classification
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 200
PIXELS = 28 * 28


def make(
    device: str, compile: Callable = lambda model: model, function: Callable = lambda step: step
) -> Step:
    """A training step on `device`. `function` wraps the part that computes on tensors."""
    images, labels = make_classification(
        n_samples=10 * BATCH, n_features=PIXELS, n_informative=50, n_classes=10, random_state=0
    )
    images, labels = torch.from_numpy(images).float(), torch.from_numpy(labels)
    model = nn.Linear(PIXELS, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    forward = compile(model)
    start = 0

    @function
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(forward(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step() -> torch.Tensor:
        nonlocal start
        x, y = images[start : start + BATCH].to(device), labels[start : start + BATCH].to(device)
        start = (start + BATCH) % len(images)
        return train(x, y)

    return step


if __name__ == "__main__":
    main(make, STEPS)
