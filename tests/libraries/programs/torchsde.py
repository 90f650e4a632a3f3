"""A latent stochastic differential equation fitted to paths by the adjoint method and through the solver."""

# /// script
# dependencies = ["torchsde==0.2.6"]
# ///

import numpy as np
import torch
import torchsde
from torch import nn

torch.manual_seed(0)
np.random.seed(0)  # seeds of Brownian motions
times = torch.linspace(0, 1, 12)


class Oscillator(torchsde.SDEIto):
    """A damped spring with noise that grows with its position."""

    def __init__(self) -> None:
        super().__init__(noise_type="diagonal")

    def f(self, t, y):
        return torch.stack([y[:, 1], -4 * y[:, 0] - 0.5 * y[:, 1]], dim=1)

    def g(self, t, y):
        return 0.1 + 0.05 * y.abs()


class Learned(nn.Module):
    sde_type = "ito"
    noise_type = "diagonal"

    def __init__(self, size: int = 2, width: int = 24) -> None:
        super().__init__()
        self.drift = nn.Sequential(nn.Linear(size + 1, width), nn.Softplus(), nn.Linear(width, size))
        self.prior = nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, size))
        self.spread = nn.Parameter(torch.full((size,), -1.5))

    def f(self, t, y):
        return self.drift(torch.cat([y, t.expand(len(y), 1)], dim=1))

    def h(self, t, y):
        return self.prior(y)

    def g(self, t, y):
        return self.spread.exp().expand_as(y)


with torch.no_grad():
    paths = torchsde.sdeint(Oscillator(), torch.randn(32, 2), times, method="milstein", dt=0.02)
print("paths", paths.mean().item(), paths.std().item())

model = Learned()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    found, divergence = torchsde.sdeint_adjoint(
        model, paths[0], times, dt=0.1, method="euler", logqp=True, names={"prior_drift": "h"}
    )
    loss = (found - paths).square().mean() + 0.01 * divergence.sum(0).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(loss.item())

for step in range(20):
    found = torchsde.sdeint(model, paths[0], times, dt=0.1, method="srk")
    loss = (found.mean(1) - paths.mean(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print("through the solver", loss.item())

with torch.no_grad():
    motion = torchsde.BrownianInterval(
        0.0, 1.0, size=(32, 2), entropy=7, levy_area_approximation="space-time"
    )
    print("motion", motion(0.0, 0.5).std().item(), motion(0.25, 0.75).mean().item())
    for method in ("euler", "milstein", "srk"):
        print(
            method,
            torchsde.sdeint(model, paths[0], times, bm=motion, dt=0.05, method=method)[-1].mean().item(),
        )
    tolerant = torchsde.sdeint(
        model, paths[0], times, bm=motion, adaptive=True, rtol=1e-2, atol=1e-2, dt_min=1e-2
    )
    print("adaptive", tolerant[-1].mean().item())
