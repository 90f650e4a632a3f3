"""ResNet-50 from torchvision classifies small images, with label smoothing, SGD with momentum and a cosine
schedule, as the usual CIFAR script does.

Running meters read the loss and the accuracy as numbers at every step.
"""

from collections.abc import Callable

import torch
from _main import Step, endless, main
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet50

STEPS = 20
COMPARABLE = 2


class Meter:
    """Running average."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count

    @property
    def average(self) -> float:
        return self.total / self.count


def load() -> TensorDataset:
    """Handwritten digits as colour images of 32 by 32."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images / 8 - 1).float().reshape(-1, 1, 8, 8)
    images = nn.functional.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.from_numpy(labels))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(load(), batch_size=8, shuffle=True, drop_last=True))
    model = resnet50(num_classes=10, zero_init_residual=True).to(device)
    net = compile(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    losses, accuracy = Meter(), Meter()

    def step() -> float:
        images, labels = next(batches)
        images, labels = images.to(device), labels.to(device)
        outputs = net(images)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.update(loss.item(), len(labels))
        accuracy.update((outputs.argmax(1) == labels).float().mean().item(), len(labels))
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
