"""A UNet from diffusers learns to denoise scikit-learn's digits, with diffusers' noise schedule."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

STEPS = 20
COMPARABLE = None

SIZE = 16


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1
    images = F.interpolate(images, SIZE, mode="bilinear")
    batches = endless(DataLoader(images, batch_size=8, shuffle=True, drop_last=True))
    model = UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=16,
    ).to(device)
    net = compile(model)
    average = EMAModel(model.parameters(), decay=0.99)
    noise_schedule = DDPMScheduler(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=10_000)

    def step() -> float:
        clean = next(batches).to(device)
        noise = torch.randn(clean.shape, device=device)
        times = torch.randint(noise_schedule.config.num_train_timesteps, (len(clean),), device=device)
        predicted = net(noise_schedule.add_noise(clean, noise, times), times, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        return loss.detach().item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
