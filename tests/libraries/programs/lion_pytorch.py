"""Trains a small convolutional network with Lion, whose updates are signs of the momentum."""

# /// script
# dependencies = ["lion-pytorch==0.2.5"]
# ///

import torch
from lion_pytorch import Lion
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def images(count):
    """Gratings in four orientations, with noise."""
    label = torch.randint(0, 4, (count,))
    angle = label * torch.pi / 4
    y, x = torch.meshgrid(torch.linspace(-3, 3, 16), torch.linspace(-3, 3, 16), indexing="ij")
    phase = torch.rand(count, 1, 1) * 6
    wave = torch.sin(4 * (x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)) + phase)
    return (wave + 0.5 * torch.randn_like(wave)).unsqueeze(1), label


model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(32, 4),
)  # fmt: skip
decay, rest = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim <= 1]
optimizer = Lion([{"params": decay, "weight_decay": 1e-2}, {"params": rest}], lr=3e-4, betas=(0.9, 0.99))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)

for step in range(120):
    x, y = images(32)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 10 == 9:
        print("step", step, loss.item(), scheduler.get_last_lr()[0])

model.eval()
x, y = images(200)
print("accuracy", (model(x).argmax(1) == y).float().mean().item())
print("momentum", sum(optimizer.state[p]["exp_avg"].abs().sum() for p in model.parameters()).item())
