"""A neural ordinary differential equation learns a spiral, with torchdiffeq's adaptive solver and adjoint.

The solver reads the estimated error after every step and decides in Python whether to accept the step and how
long the next one is. The gradient solves another equation backwards in time.
"""

from collections.abc import Callable

import torch
from _main import Step, main
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

STEPS = 20
COMPARABLE = 10

POINTS, BATCH, TIMES = 500, 20, 10


class Spiral(nn.Module):
    """The true derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y**3) @ self.matrix


class Derivative(nn.Module):
    """The learned derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for module in self.net:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.1)
                nn.init.zeros_(module.bias)

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y**3)


def make(
    device: str,
    compile: Callable = lambda model: model,
    function: Callable = lambda step: step,
    method: str | None = None,
) -> Step:
    """A training step on `device`.

    `method` is the solver, dopri5 by default. `function` wraps the part that computes on tensors. It needs
    another solver, because dopri5 removes duplicate times, whose number depends on data.
    """
    times = torch.linspace(0.0, 25.0, POINTS).to(device)
    with torch.no_grad():
        path = odeint(Spiral().to(device), torch.tensor([[2.0, 0.0]], device=device), times, method="rk4")
    shuffle = torch.Generator().manual_seed(0)
    model = Derivative().to(device)
    derivative = compile(model)
    derivative_parameters = tuple(model.parameters())
    # A function needs the optimizer's number of steps on the device, which PyTorch refuses on the CPU.
    capturable = method is not None and torch.device(device).type != "cpu"
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, capturable=capturable)
    average = None

    @function
    def train(starts: torch.Tensor) -> torch.Tensor:
        true = torch.stack([path[starts + i] for i in range(TIMES)])
        optimizer.zero_grad()
        predicted = odeint_adjoint(
            derivative,
            path[starts],
            times[:TIMES],
            rtol=1e-5,
            atol=1e-6,
            method=method,
            adjoint_params=derivative_parameters,
        )
        loss = (predicted - true).abs().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step() -> float:
        nonlocal average
        loss = train(torch.randperm(POINTS - TIMES, generator=shuffle)[:BATCH].to(device))
        average = loss.item() if average is None else 0.97 * average + 0.03 * loss.item()
        return average

    return step


if __name__ == "__main__":
    main(make, STEPS)
