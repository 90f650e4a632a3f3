"""A small network fitted with L-BFGS.

The optimizer calls a closure as often as its line search requires, and branches on values that it reads.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, main
from sklearn.datasets import make_friedman1
from torch import nn

STEPS = 20
COMPARABLE = 3


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """One call of the optimizer on `device`: up to ten iterations of L-BFGS."""
    x, y = make_friedman1(n_samples=500, random_state=0)
    x, y = torch.from_numpy(x).float().to(device), torch.from_numpy(y).float().to(device)
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model.to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    forward = compile(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(forward(x).squeeze(1), y)
        loss.backward()
        return loss

    def step() -> torch.Tensor:
        return optimizer.step(closure).detach()

    return step


if __name__ == "__main__":
    main(make, STEPS)
