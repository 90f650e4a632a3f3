"""Learns an initialization by MAML, and learning rates by differentiating through unrolled optimizers."""

# /// script
# dependencies = ["higher==0.2.1"]
# ///

import higher
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def tasks(count):
    """Sine waves with their own amplitudes and phases: support and query points."""
    amplitude, phase = torch.rand(count, 1, 1) * 4 + 1, torch.rand(count, 1, 1) * 3
    x = torch.rand(count, 20, 1) * 10 - 5
    return x, amplitude * (x + phase).sin()


model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
meta = torch.optim.Adam(model.parameters(), lr=5e-3)
inner = torch.optim.SGD(model.parameters(), lr=0.02)

for step in range(40):
    meta.zero_grad()
    total = 0.0
    for x, y in zip(*tasks(2), strict=True):
        with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, optimizer):
            for _ in range(2):
                optimizer.step(F.mse_loss(fast(x[:10]), y[:10]))
            query = F.mse_loss(fast(x[10:]), y[10:])
            query.backward()
            total += query.detach()
    meta.step()
    if step % 8 == 7:
        print("maml", step, total.item() / 2)

rates = nn.ParameterList([nn.Parameter(torch.tensor(-3.0)), nn.Parameter(torch.tensor(-3.0))])
meta = torch.optim.Adam(rates.parameters(), lr=0.1)
for step in range(20):
    classifier = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    groups = [
        {"params": classifier[0].parameters()},
        {"params": [*classifier[1].parameters(), *classifier[3].parameters()]},
    ]
    adam = torch.optim.Adam(groups, lr=0.01)
    overrides = {"lr": [rate.exp() for rate in rates]}
    x = torch.randn(64, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    with higher.innerloop_ctx(classifier, adam, override=overrides, track_higher_grads=True) as (
        fast,
        optimizer,
    ):
        for _ in range(4):
            optimizer.step(F.cross_entropy(fast(x[:32]), y[:32]))
        loss = F.cross_entropy(fast(x[32:]), y[32:])
        meta.zero_grad()
        loss.backward()
    meta.step()
    if step % 4 == 3:
        print("rates", step, loss.item(), [rate.exp().item() for rate in rates])
