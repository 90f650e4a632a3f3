"""The training step of examples/digits.py, without data loading."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from _main import Step, main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from digits import Net, load

STEPS = 20
COMPARABLE = 10


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step on `device`. It returns the loss as a number, as the example does."""
    model = Net().to(device)
    net = compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = itertools.cycle(list(load(0, 64)[0]))

    def step() -> float:
        x, y = next(batches)
        loss = F.cross_entropy(net(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
