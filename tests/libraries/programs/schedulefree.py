"""Trains a regression with the schedule-free optimizers, which average iterates."""

# /// script
# dependencies = ["schedulefree==1.4.1"]
# ///

import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, ScheduleFreeWrapper, SGDScheduleFree
from torch import nn
from torch.nn import functional as F

inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :1] * inputs[:, 1:2]).tanh() + inputs[:, 2:3].sin()

optimizers = {
    "sgd": lambda p: SGDScheduleFree(p, lr=0.5, momentum=0.9, warmup_steps=10),
    "adamw": lambda p: AdamWScheduleFree(p, lr=1e-2, warmup_steps=10, weight_decay=1e-3),
    "radam": lambda p: RAdamScheduleFree(p, lr=1e-2),
    "wrapped": lambda p: ScheduleFreeWrapper(torch.optim.SGD(p, lr=0.3, weight_decay=1e-4), momentum=0.9),
}

for name, create in optimizers.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1))
    optimizer = create(model.parameters())
    for step in range(60):
        model.train()
        optimizer.train()
        batch = torch.randint(0, len(inputs), (64,))
        loss = F.mse_loss(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(name, step, loss.item())

    optimizer.eval()
    with torch.no_grad():
        for batch in inputs.split(64):  # statistics of batch norm belong to the averaged weights
            model(batch)
        model.eval()
        print(name, "evaluation", F.mse_loss(model(inputs), targets).item())
