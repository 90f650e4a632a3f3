"""SDPoint (Kuen et al., 2018): for regularization, a residual network downsamples its feature maps at one
random point, by a random ratio.

The point and the ratio are drawn with `random` for every iteration and stored on the model object. The
forward pass reads them and branches.
"""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
COMPARABLE = 2


class Block(nn.Module):
    """A residual block that can downsample its output."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short_cut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.short_cut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        self.downsampling_ratio = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.body(x) + self.short_cut(x))
        if self.downsampling_ratio < 1:
            size = round(x.shape[-1] * self.downsampling_ratio)
            x = F.adaptive_avg_pool2d(x, size)
        return x


class SDPointNet(nn.Module):
    """Six residual blocks. One of them, or none, is the downsampling point."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.blocks = nn.ModuleList(Block(*width) for width in widths)
        self.head = nn.Linear(64, classes)

    def choose_downsampling(self) -> None:
        """Draw this iteration's point and ratio."""
        for block in self.blocks:
            block.downsampling_ratio = 1.0
        point = random.randint(0, len(self.blocks))
        if point < len(self.blocks):
            self.blocks[point].downsampling_ratio = random.choice([0.5, 0.75])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def load() -> TensorDataset:
    """Digits as images of 32 by 32."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)
    return TensorDataset(F.interpolate(images, size=32, mode="bilinear"), torch.from_numpy(labels))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(load(), batch_size=16, shuffle=True, drop_last=True))
    model = SDPointNet(10).to(device)
    net = compile(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[500, 800])

    def step() -> float:
        images, labels = next(batches)
        images, labels = images.to(device), labels.to(device)
        model.choose_downsampling()
        loss = criterion(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
