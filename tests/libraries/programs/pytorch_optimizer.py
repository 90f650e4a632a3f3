"""Trains the same small network with optimizers, losses and schedulers of the collection."""

# /// script
# dependencies = ["pytorch-optimizer==4.1.0"]
# ///

import torch
from pytorch_optimizer import (
    SAM,
    AdaBelief,
    BCEFocalLoss,
    CosineAnnealingWarmupRestarts,
    JaccardLoss,
    Lookahead,
    Muon,
    create_optimizer,
)
from torch import nn
from torch.nn import functional as F

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(256, 12, generator=generator)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))


def batches(count):
    for _ in range(count):
        index = torch.randint(0, 256, (64,))
        yield inputs[index], labels[index]


names = [
    "adabelief", "adan", "adafactor", "ademamix", "adopt", "came", "diffgrad",
    "lamb", "lars", "lion", "madgrad", "prodigy", "radam", "ranger21",
    "schedulefreeadamw", "shampoo", "soap", "sophiah", "tiger", "yogi",
]  # fmt: skip
for name in names:
    model = network()
    options = {"num_iterations": 8} if name == "ranger21" else {}
    optimizer = create_optimizer(model, name, lr=5e-3, weight_decay=1e-3, **options)
    hessian = name == "sophiah"
    for x, y in batches(6):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward(create_graph=hessian)
        optimizer.step()
    print(name, loss.item(), sum(p.abs().sum() for p in model.parameters()).item())

model = network()
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, adaptive=True, lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
for x, y in batches(10):
    criterion(model(x), y).backward()
    optimizer.first_step(zero_grad=True)
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.second_step(zero_grad=True)
print("sam", loss.item())

model = network()
optimizer = Lookahead(AdaBelief(model.parameters(), lr=1e-2), k=3, alpha=0.5)
schedule = CosineAnnealingWarmupRestarts(optimizer.optimizer, 5, max_lr=1e-2, min_lr=1e-4, warmup_steps=2)
focal, jaccard = BCEFocalLoss(), JaccardLoss(mode="binary")
for x, y in batches(12):
    score = model(x)[:, 1]
    loss = focal(score, y.float()) + jaccard(score.view(-1, 1, 1), y.view(-1, 1, 1).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print("lookahead", loss.item(), schedule.get_lr())

model = network()
hidden = [p for p in model.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if p.ndim != 2]
optimizer = Muon(
    [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False, "lr": 1e-3}], lr=0.02
)
for x, y in batches(10):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("muon", loss.item())
