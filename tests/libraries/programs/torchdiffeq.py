"""A neural ODE fitted to a spiral by the adjoint method, then solved by other solvers and up to an event."""

# /// script
# dependencies = ["torchdiffeq==0.2.5"]
# ///

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint, odeint_event

torch.manual_seed(0)
start = torch.tensor([[2.0, 0.0]])
matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
times = torch.linspace(0.0, 4.0, 100)


class Spiral(nn.Module):
    def forward(self, t, y):
        return y**3 @ matrix


class Field(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        for layer in self.net[::2]:
            nn.init.normal_(layer.weight, std=0.1)
        self.evaluations = 0

    def forward(self, t, y):
        self.evaluations += 1
        return self.net(y**3)


with torch.no_grad():
    path = odeint(Spiral(), start, times, method="dopri5")
print("spiral", *path[-1].flatten().tolist())

field = Field()
optimizer = torch.optim.RMSprop(field.parameters(), lr=3e-3)
for step in range(60):
    first = torch.randint(0, 90, (12,))
    wanted = torch.stack([path[first + offset] for offset in range(8)])
    found = odeint_adjoint(field, wanted[0], times[:8], rtol=1e-4, atol=1e-5, method="dopri5")
    loss = (found - wanted).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(loss.item(), field.evaluations)

with torch.no_grad():
    for method in ("rk4", "midpoint", "bosh3", "dopri8", "adaptive_heun"):
        print(method, *odeint(field, start, times[:20], method=method)[-1].flatten().tolist())

# The backward pass through the solver, and the time at which a ball hits the ground.
fixed = Field()
optimizer = torch.optim.Adam(fixed.parameters(), lr=1e-2)
for _ in range(30):
    loss = (odeint(fixed, start, times[:10], method="rk4") - path[:10]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("through the solver", loss.item())

gravity = nn.Parameter(torch.tensor(9.8))
ball = (torch.tensor(10.0), torch.tensor(0.5))
hit, _ = odeint_event(
    lambda t, y: (y[1], -gravity), ball, torch.tensor(0.0), event_fn=lambda t, y: y[0], atol=1e-6, rtol=1e-6
)
hit.backward()
print("event", hit.item(), gravity.grad.item())
