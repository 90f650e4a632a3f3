"""Classifies irregular time series with neural controlled differential equations."""

# /// script
# dependencies = ["torchcde==0.2.5"]
# ///

import torch
import torchcde
from torch import nn
from torch.nn import functional as F

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, hidden * channels), nn.Tanh()
        )
        self.shape = hidden, channels

    def forward(self, t, z):
        return self.layers(z).unflatten(-1, self.shape)


class NeuralCDE(nn.Module):
    def __init__(self, channels, hidden, interpolation, **solver):
        super().__init__()
        self.field = Field(channels, hidden)
        self.initial = nn.Linear(channels, hidden)
        self.readout = nn.Linear(hidden, 1)
        self.interpolation, self.solver = interpolation, solver

    def forward(self, coefficients):
        path = self.interpolation(coefficients)
        start = self.initial(path.evaluate(path.interval[0]))
        z = torchcde.cdeint(X=path, func=self.field, z0=start, t=path.interval, **self.solver)
        return self.readout(z[:, -1]).squeeze(-1)


def spirals(count, length=30):
    """Spirals that turn left or right, with some observations missing."""
    t = torch.linspace(0, 4 * torch.pi, length)
    label = torch.randint(0, 2, (count,))
    sign = (2 * label - 1).view(-1, 1)
    phase = torch.rand(count, 1) * 6
    x = torch.stack([(t + phase).cos() / (1 + t / 2), sign * (t + phase).sin() / (1 + t / 2)], -1)
    x = x + 0.02 * torch.randn_like(x)
    x[torch.rand(count, length) < 0.2] = float("nan")
    return torch.cat([(t / t[-1]).expand(count, -1).unsqueeze(-1), x], -1), label.float()


series, labels = spirals(64)
hermite = torchcde.hermite_cubic_coefficients_with_backward_differences(series)
linear = torchcde.linear_interpolation_coeffs(series)
natural = torchcde.natural_cubic_coeffs(series)
rectilinear = torchcde.linear_interpolation_coeffs(series, rectilinear=0)

runs = {
    "hermite rk4": (
        hermite,
        torchcde.CubicSpline,
        {"method": "rk4", "adjoint": False, "options": {"step_size": 2.0}},
    ),
    "linear adjoint": (
        linear,
        torchcde.LinearInterpolation,
        {"method": "midpoint", "options": {"step_size": 2.0}},
    ),
    "natural dopri5": (natural, torchcde.CubicSpline, {"rtol": 1e-3, "atol": 1e-4}),
    "rectilinear": (
        rectilinear,
        torchcde.LinearInterpolation,
        {"method": "rk4", "options": {"step_size": 4.0}},
    ),
}
for name, (coefficients, interpolation, solver) in runs.items():
    torch.manual_seed(1)
    model = NeuralCDE(3, 8, interpolation, **solver)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(15):
        batch = torch.randperm(64)[:32]
        loss = F.binary_cross_entropy_with_logits(model(coefficients[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(name, step, loss.item())
    with torch.no_grad():
        print(name, "accuracy", ((model(coefficients) > 0) == labels.bool()).float().mean().item())
