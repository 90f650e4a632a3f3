"""A 3-layer MLP of width 8, where a step is nearly all overhead."""

from collections.abc import Callable

import torch
from torch import nn


def make(device: str) -> Callable[[], None]:
    """A training step on `device`."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(16, 8).to(device), torch.randn(16, 8).to(device)

    def step() -> None:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
