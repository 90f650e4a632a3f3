"""A DCGAN learns to draw scikit-learn's digits.

Two models and two optimizers alternate within a step. The discriminator's update detaches the generator's
output; the generator's update does not. The script logs five numbers per step.
"""

from collections.abc import Callable

import torch
from _main import Step, endless, main
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
COMPARABLE = 8

LATENT, WIDTH = 64, 32


class Generator(nn.Sequential):
    """Converts noise to images of 32 by 32 pixels."""

    def __init__(self) -> None:
        super().__init__(
            nn.ConvTranspose2d(LATENT, WIDTH * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(WIDTH * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH * 4, WIDTH * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH * 2, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Returns the probability that images of 32 by 32 pixels are real."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, WIDTH * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH * 2, WIDTH * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH * 4, 1, 4, 1, 0, bias=False),
            nn.Flatten(0),
            nn.Sigmoid(),
        )


def weights_init(module: nn.Module) -> None:
    """The initialization of the DCGAN paper."""
    name = module.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def load() -> TensorDataset:
    """The digits, scaled to values between -1 and 1."""
    images = torch.from_numpy(load_digits().images / 8 - 1).float().unsqueeze(1)
    return TensorDataset(nn.functional.interpolate(images, size=32, mode="bilinear"))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step of both models on `device`."""
    batches = endless(DataLoader(load(), batch_size=16, shuffle=True, drop_last=True))
    generator = Generator().to(device).apply(weights_init)
    discriminator = Discriminator().to(device).apply(weights_init)
    net_g, net_d = compile(generator), compile(discriminator)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    log: dict[str, float] = {}

    def step() -> float:
        # The discriminator: log(D(x)) + log(1 - D(G(z))).
        discriminator.zero_grad()
        (real,) = next(batches)
        real = real.to(device)
        label = torch.full((len(real),), 1.0, device=device)
        output = net_d(real)
        loss_real = criterion(output, label)
        loss_real.backward()
        d_x = output.mean().item()

        noise = torch.randn(len(real), LATENT, 1, 1, device=device)
        fake = net_g(noise)
        label.fill_(0.0)
        output = net_d(fake.detach())
        loss_fake = criterion(output, label)
        loss_fake.backward()
        d_g_z1 = output.mean().item()
        loss_d = loss_real + loss_fake
        optimizer_d.step()

        # The generator: log(D(G(z))).
        generator.zero_grad()
        label.fill_(1.0)
        output = net_d(fake)
        loss_g = criterion(output, label)
        loss_g.backward()
        d_g_z2 = output.mean().item()
        optimizer_g.step()

        log.update(loss_d=loss_d.item(), loss_g=loss_g.item(), d_x=d_x, d_g_z1=d_g_z1, d_g_z2=d_g_z2)
        return log["loss_d"] + log["loss_g"]

    return step


if __name__ == "__main__":
    main(make, STEPS)
