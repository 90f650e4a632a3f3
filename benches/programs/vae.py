"""A variational autoencoder learns scikit-learn's digits, with convolutions and torch.distributions."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils.data import DataLoader

STEPS = 20
COMPARABLE = None

SIZE, LATENT, BATCH = 16, 16, 64


class VAE(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        c = channels
        self.encoder = nn.Sequential(
            nn.Conv2d(1, c, 4, stride=2, padding=1),
            nn.BatchNorm2d(c),
            nn.LeakyReLU(0.2),
            nn.Conv2d(c, 2 * c, 4, stride=2, padding=1),
            nn.BatchNorm2d(2 * c),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * c * (SIZE // 4) ** 2, 2 * LATENT),
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 2 * c * (SIZE // 4) ** 2),
            nn.Unflatten(1, (2 * c, SIZE // 4, SIZE // 4)),
            nn.ConvTranspose2d(2 * c, c, 4, stride=2, padding=1),
            nn.BatchNorm2d(c),
            nn.ELU(),
            nn.ConvTranspose2d(c, 1, 4, stride=2, padding=1),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of reconstructed images, and the divergence of each posterior from the prior."""
        mean, log_std = self.encoder(x).chunk(2, dim=1)
        posterior = Independent(Normal(mean, log_std.exp(), validate_args=False), 1)
        prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False), 1)
        return self.decoder(posterior.rsample()), kl_divergence(posterior, prior)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    images = F.interpolate(images, SIZE, mode="bilinear")
    batches = endless(DataLoader(images, batch_size=BATCH, shuffle=True, drop_last=True))
    model = VAE().to(device)
    net = compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    updates = 0

    def step() -> float:
        nonlocal updates
        updates += 1
        x = next(batches).to(device)
        logits, divergence = net(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2, 3))
        beta = min(1.0, updates / 200)
        loss = (reconstruction + beta * divergence).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item() / images[0].numel()

    return step


if __name__ == "__main__":
    main(make, STEPS)
