"""A small diffusion model of scikit-learn's digits: a UNet with attention learns to predict the noise."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, main
from sklearn.datasets import load_digits
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 16
TIMES = 200


class Block(nn.Module):
    """A residual block with a time embedding."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(out))))


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3 * self.heads, -1)).transpose(2, 3)
        out = F.scaled_dot_product_attention(*qkv.chunk(3, dim=1))
        return x + self.out(out.transpose(2, 3).reshape(x.shape))


class UNet(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        c, time = channels, 4 * channels
        self.channels = c
        self.time = nn.Sequential(nn.Linear(c, time), nn.SiLU(), nn.Linear(time, time), nn.SiLU())
        self.first = nn.Conv2d(1, c, 3, padding=1)
        self.down1, self.down2 = Block(c, c, time), Block(c, 2 * c, time)
        self.shrink = nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.middle1, self.attention = Block(2 * c, 2 * c, time), Attention(2 * c, heads=4)
        self.middle2 = Block(2 * c, 2 * c, time)
        self.up2, self.up1 = Block(4 * c, 2 * c, time), Block(3 * c, c, time)
        self.norm, self.out = nn.GroupNorm(8, c), nn.Conv2d(c, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        time = self.time(self.embedding(time))
        high = self.down1(self.first(x), time)
        low = self.down2(self.shrink(high), time)
        out = self.middle2(self.attention(self.middle1(low, time)), time)
        out = self.up2(torch.cat((out, low), dim=1), time)
        out = F.interpolate(out, scale_factor=2, mode="nearest")
        out = self.up1(torch.cat((out, high), dim=1), time)
        return self.out(F.silu(self.norm(out)))

    def embedding(self, time: torch.Tensor) -> torch.Tensor:
        half = self.channels // 2
        rates = torch.exp(-math.log(10_000) / half * torch.arange(half, device=time.device))
        angles = time[:, None] * rates
        return torch.cat((angles.sin(), angles.cos()), dim=1)


def kept_signal(device: str) -> torch.Tensor:
    """Return the share of the image's variance that is left at each diffusion time."""
    return torch.cumprod(1 - torch.linspace(1e-4, 0.05, TIMES), dim=0).to(device)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1
    shuffle = torch.Generator().manual_seed(0)
    model = UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = compile(model)
    kept = kept_signal(device)

    def step() -> torch.Tensor:
        chosen = torch.randint(len(images), (BATCH,), generator=shuffle)
        x = images[chosen].to(device)
        time = torch.randint(TIMES, (BATCH,), device=device)
        noise = torch.randn_like(x)
        signal = kept[time].view(-1, 1, 1, 1)
        predicted = forward(signal.sqrt() * x + (1 - signal).sqrt() * noise, time)
        loss = F.mse_loss(predicted, noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(make, STEPS)
