"""Trains two tasks on shared features by Jacobian descent, with several aggregators of gradients."""

# /// script
# dependencies = ["torchjd[quadprog_projector]==0.18.0"]
# ///

import torch
from torch import nn
from torch.nn import functional as F
from torchjd.aggregation import IMTLG, MGDA, AlignedMTL, GradDrop, Mean, PCGrad, UPGrad
from torchjd.autojac import backward, jac_to_grad, mtl_backward

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = torch.stack([inputs[:, 0].sin(), (inputs[:, 1] * inputs[:, 0]).tanh()], 1)

for aggregator in (UPGrad(), MGDA(), PCGrad(), IMTLG(), AlignedMTL(), GradDrop(), Mean()):
    torch.manual_seed(1)
    shared = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
    optimizer = torch.optim.Adam([*shared.parameters(), *heads.parameters()], lr=1e-2)
    for step in range(15):
        batch = torch.randint(0, 256, (32,))
        features = shared(inputs[batch])
        losses = [F.mse_loss(head(features)[:, 0], targets[batch, i]) for i, head in enumerate(heads)]
        optimizer.zero_grad()
        mtl_backward(losses, features=features)
        jac_to_grad(shared.parameters(), aggregator)
        optimizer.step()
        if step % 7 == 0:
            print(aggregator, *(loss.item() for loss in losses))

# Instance-wise risk minimization: a row of the Jacobian for each example.
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
aggregator = UPGrad()
for step in range(20):
    batch = torch.randint(0, 256, (8,))
    losses = F.mse_loss(model(inputs[batch]), targets[batch], reduction="none").mean(1)
    optimizer.zero_grad()
    backward(losses, parallel_chunk_size=4)
    jac_to_grad(model.parameters(), aggregator)
    optimizer.step()
    if step % 5 == 4:
        print("instance-wise", losses.mean().item())
