"""Trains a classifier of spirals and evaluates it with an exponential moving average of its parameters."""

# /// script
# dependencies = ["torch-ema==0.3"]
# ///

import torch
from torch import nn
from torch.nn import functional as F
from torch_ema import ExponentialMovingAverage

torch.manual_seed(0)


def spirals(count):
    label = torch.randint(0, 3, (count,))
    radius = torch.rand(count)
    angle = 4 * radius + label * 2 * torch.pi / 3 + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label


model = nn.Sequential(
    nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
ema = ExponentialMovingAverage(model.parameters(), decay=0.95)
validation_points, validation_labels = spirals(500)

for step in range(120):
    points, labels = spirals(64)
    loss = F.cross_entropy(model(points), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()

    if step % 10 == 0:
        model.eval()
        raw = F.cross_entropy(model(validation_points), validation_labels)
        with torch.no_grad(), ema.average_parameters():
            averaged = F.cross_entropy(model(validation_points), validation_labels)
        model.train()
        print("loss", loss.item(), "validation", raw.item(), "averaged", averaged.item())

state = ema.state_dict()
restored = ExponentialMovingAverage(model.parameters(), decay=0.5)
restored.load_state_dict(state)
restored.store()
restored.copy_to()
model.eval()
accuracy = (model(validation_points).argmax(1) == validation_labels).float().mean()
print("accuracy of the average", accuracy.item())
restored.restore()
print("accuracy", (model(validation_points).argmax(1) == validation_labels).float().mean().item())
