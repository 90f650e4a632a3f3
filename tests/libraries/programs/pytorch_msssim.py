"""Fits an autoencoder to structured images by structural similarity, in one scale and in several."""

# /// script
# dependencies = ["pytorch-msssim==1.0.0"]
# ///

import torch
from pytorch_msssim import MS_SSIM, SSIM, ms_ssim, ssim
from torch import nn

torch.manual_seed(0)


def blobs(count, size=64):
    """Images of soft colored blobs."""
    grid = torch.linspace(-1, 1, size)
    centre = torch.rand(count, 3, 2) * 1.4 - 0.7
    width = torch.rand(count, 3) * 0.3 + 0.1
    dx = grid.view(1, 1, 1, -1) - centre[..., 0, None, None]
    dy = grid.view(1, 1, -1, 1) - centre[..., 1, None, None]
    return torch.exp(-(dx**2 + dy**2) / width[..., None, None] ** 2)


autoencoder = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1), nn.GELU(), nn.Conv2d(16, 8, 4, 2, 1), nn.GELU(),
    nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid(),
)  # fmt: skip
optimizer = torch.optim.Adam(autoencoder.parameters(), lr=3e-3)
similarity = SSIM(data_range=1, size_average=True, channel=3, win_size=7)
multiscale = MS_SSIM(data_range=1, size_average=True, channel=3, win_size=3, weights=[0.3, 0.4, 0.3])

for step in range(60):
    images = blobs(4)
    reconstruction = autoencoder(images)
    loss = 1 - (similarity if step % 2 else multiscale)(reconstruction, images)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 < 2:
        print("step", step, loss.item())

with torch.no_grad():
    images = blobs(3, 176)
    noisy = (images + 0.1 * torch.randn_like(images)).clamp(0, 1)
    print("ssim", ssim(noisy, images, data_range=1, size_average=False).tolist())
    print("ms_ssim", ms_ssim(noisy, images, data_range=1, size_average=False).tolist())
    print("relu", ssim(noisy, 1 - images, data_range=1, nonnegative_ssim=True).item())
