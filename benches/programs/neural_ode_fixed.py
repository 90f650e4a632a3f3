"""A neural ordinary differential equation learns a spiral, with torchdiffeq's Runge-Kutta method of fixed steps.

Unlike neural_ode.py, nothing that the solver computes decides in Python what it does next.
"""

from collections.abc import Callable

import torch
from _main import Step, main
from neural_ode import BATCH, POINTS, TIMES, Derivative, Spiral
from torch import nn
from torchdiffeq import odeint

STEPS = 20
COMPARABLE = None


def make(
    device: str,
    compile: Callable = lambda model: model,
    function: Callable = lambda step: step,
    fused: bool | None = None,
) -> Step:
    """A training step on `device`. `function` wraps what computes on tensors, which needs a fused optimizer."""
    times = torch.linspace(0.0, 25.0, POINTS)
    with torch.no_grad():
        path = odeint(Spiral(), torch.tensor([[2.0, 0.0]]), times, method="rk4").to(device)
    shuffle = torch.Generator().manual_seed(0)
    model: nn.Module = Derivative().to(device)
    derivative = compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    # The solver compares times on the host, where reading them takes no wait.
    batch_times = times[:TIMES]

    @function
    def train(starts: torch.Tensor) -> torch.Tensor:
        true = torch.stack([path[starts + i] for i in range(TIMES)])
        optimizer.zero_grad()
        predicted = odeint(derivative, path[starts], batch_times, method="rk4")
        loss = (predicted - true).abs().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step() -> torch.Tensor:
        return train(torch.randperm(POINTS - TIMES, generator=shuffle)[:BATCH].to(device))

    return step


if __name__ == "__main__":
    main(make, STEPS)
