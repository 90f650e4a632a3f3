"""Trains a small diffusion model of images and one of signals, and samples with DDPM and DDIM steps."""

# /// script
# dependencies = ["denoising-diffusion-pytorch==2.3.4"]
# ///

import random

import torch
from denoising_diffusion_pytorch import (
    ElucidatedDiffusion,
    GaussianDiffusion,
    GaussianDiffusion1D,
    Unet,
    Unet1D,
)

random.seed(0)  # self-conditioning draws from it
torch.manual_seed(0)


def discs(count, size=16):
    grid = torch.linspace(-1, 1, size)
    centre = torch.rand(count, 2, 1, 1) - 0.5
    inside = (grid.view(1, 1, -1) - centre[:, 0]) ** 2 + (grid.view(1, -1, 1) - centre[:, 1]) ** 2 < 0.2
    return inside.float().unsqueeze(1).repeat(1, 3, 1, 1)


def waves(count):
    return (torch.linspace(0, 12, 32) + torch.rand(count, 1) * 6).sin().unsqueeze(1) / 2 + 0.5


def unet(**options):
    return Unet(dim=8, dim_mults=(1, 2), flash_attn=False, attn_heads=2, attn_dim_head=8, **options)


models = {
    "velocity": (GaussianDiffusion(unet(), image_size=16, timesteps=20, objective="pred_v"), discs),
    "ddim": (
        GaussianDiffusion(
            unet(self_condition=True, dropout=0.1),
            image_size=16,
            timesteps=50,
            sampling_timesteps=5,
            objective="pred_noise",
            beta_schedule="cosine",
            min_snr_loss_weight=True,
            offset_noise_strength=0.1,
        ),
        discs,
    ),
    "elucidated": (
        ElucidatedDiffusion(unet(learned_sinusoidal_cond=True), image_size=16, num_sample_steps=5),
        discs,
    ),
    "signal": (
        GaussianDiffusion1D(
            Unet1D(dim=8, dim_mults=(1, 2), channels=1), seq_length=32, timesteps=20, objective="pred_x0"
        ),
        waves,
    ),
}

for name, (diffusion, data) in models.items():
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=2e-3)
    for step in range(15):
        loss = diffusion(data(4))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 4:
            print(name, step, loss.item())
    samples = diffusion.sample(batch_size=2)
    print(name, "samples", tuple(samples.shape), samples.mean().item(), samples.std().item())

images = discs(2)
print("interpolated", models["velocity"][0].interpolate(images[:1], images[1:], t=5).mean().item())
