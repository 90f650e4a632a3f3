"""A 3-layer MLP of width 8. Nearly all of its step is overhead."""

from collections.abc import Callable

import torch
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None


def make(
    device: str, compile: Callable = lambda model: model, function: Callable = lambda step: step
) -> Step:
    """A training step on `device`. `function` wraps the part that computes on tensors."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    net = compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(16, 8).to(device), torch.randn(16, 8).to(device)

    def step() -> torch.Tensor:
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return function(step)


if __name__ == "__main__":
    main(make, STEPS)
