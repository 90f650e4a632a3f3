"""A residual network with DropBlock learns scikit-learn's digits.

A scheduler object changes the `drop_prob` attribute of every DropBlock module during training. The modules
decide in Python, by this attribute, whether and how much they drop.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
COMPARABLE = 5


class DropBlock2D(nn.Module):
    """Drops square blocks of all channels (Ghiasi et al., 2018)."""

    def __init__(self, drop_prob: float, block_size: int) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self.block_size = block_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_prob == 0.0:
            return x
        mask = (torch.rand(x.shape[0], *x.shape[2:], device=x.device) < self.gamma(x)).float()
        block_mask = F.max_pool2d(
            mask[:, None], kernel_size=self.block_size, stride=1, padding=self.block_size // 2
        )
        if self.block_size % 2 == 0:
            block_mask = block_mask[:, :, :-1, :-1]
        block_mask = 1 - block_mask
        return x * block_mask * (block_mask.numel() / block_mask.sum())

    def gamma(self, x: torch.Tensor) -> float:
        """Return the rate of block centres for which a share of `drop_prob` of the features is dropped."""
        size = x.shape[-1]
        return self.drop_prob / self.block_size**2 * size**2 / (size - self.block_size + 1) ** 2


class LinearScheduler:
    """Raises a module's drop probability from `start` to `stop` in `steps` steps, and leaves it there."""

    def __init__(self, dropblock: DropBlock2D, start: float, stop: float, steps: int) -> None:
        self.dropblock = dropblock
        self.values = [start + (stop - start) * step / (steps - 1) for step in range(steps)]
        self.at = 0

    def step(self) -> None:
        if self.at < len(self.values):
            self.dropblock.drop_prob = self.values[self.at]
        self.at += 1


class Block(nn.Module):
    """Two convolutions and a short cut, with DropBlock after each."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.short_cut = nn.Conv2d(width_in, width, 1, stride, bias=False)
        self.drop1, self.drop2 = DropBlock2D(0.0, 3), DropBlock2D(0.0, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop1(F.relu(self.norm1(self.conv1(x))))
        y = self.norm2(self.conv2(y))
        return self.drop2(F.relu(y + self.short_cut(x)))


class Net(nn.Module):
    """Three residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1)
        self.blocks = nn.Sequential(Block(16, 32, 1), Block(32, 64, 2), Block(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.head(x.mean(dim=(2, 3)))


def load() -> TensorDataset:
    """Digits as images of 16 by 16."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)
    return TensorDataset(F.interpolate(images, size=16, mode="bilinear"), torch.from_numpy(labels))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(load(), batch_size=16, shuffle=True, drop_last=True))
    model = Net().to(device)
    net = compile(model)
    drops = [module for module in model.modules() if isinstance(module, DropBlock2D)]
    schedulers = [LinearScheduler(drop, start=0.0, stop=0.2, steps=200) for drop in drops]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    running_loss = 0.0

    def step() -> float:
        nonlocal running_loss
        images, labels = next(batches)
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        running_loss = 0.9 * running_loss + 0.1 * loss.item()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
