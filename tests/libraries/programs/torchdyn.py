"""Trains neural differential equations with several solvers and sensitivities, on augmented states."""

# /// script
# dependencies = ["torchdyn==1.0.6"]
# ///

import torch
from torch import nn
from torch.nn import functional as F
from torchdyn.core import NeuralODE
from torchdyn.nn import Augmenter, DepthCat

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def circles(count):
    label = torch.randint(0, 2, (count,))
    angle, radius = torch.rand(count) * 6.28, 0.5 + label + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


span = torch.linspace(0, 1, 3)
for name, options in {
    "autograd rk4": {"sensitivity": "autograd", "solver": "rk4"},
    "adjoint dopri5": {"sensitivity": "adjoint", "solver": "dopri5", "atol": 1e-3, "rtol": 1e-3},
    "interpolated": {"sensitivity": "interpolated_adjoint", "solver": "rk4", "solver_adjoint": "rk4"},
    "euler": {"sensitivity": "autograd", "solver": "euler"},
}.items():
    field = nn.Sequential(DepthCat(1), nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3))
    ode = NeuralODE(field, return_t_eval=False, **options)
    model = nn.ModuleList([Augmenter(augment_dims=1), ode, nn.Linear(3, 2)])

    def classify(x, model=model):
        return model[2](model[1](model[0](x), span)[-1])

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(20):
        x, label = circles(64)
        loss = F.cross_entropy(classify(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(name, step, loss.item())
    with torch.no_grad():
        x, label = circles(200)
        print(name, "accuracy", (classify(x).argmax(1) == label).float().mean().item())
        print(name, "trajectory", ode.trajectory(model[0](x[:2]), torch.linspace(0, 1, 4)).sum().item())
