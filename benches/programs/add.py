"""A hundred additions of 8 by 8 matrices, to measure the cost of an op."""

from collections.abc import Callable

import torch
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

OPS = 100


class Add(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        b = a
        for _ in range(OPS):
            b = b + a
        return b


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step of additions on `device`, without training."""
    a = torch.randn(8, 8).to(device)
    add = compile(Add())

    @torch.no_grad()
    def step() -> torch.Tensor:
        return add(a)[0, 0]

    return step


if __name__ == "__main__":
    main(make, STEPS)
