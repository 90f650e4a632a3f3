"""Sampling from the UNet of diffusion.py: a Python loop over times, without gradients and optimizer."""

from collections.abc import Callable

import torch
from _main import Step, main
from diffusion import TIMES, UNet, kept_signal

STEPS = 20
COMPARABLE = None

IMAGES = 4
STRIDE = 10


def make(
    device: str, compile: Callable = lambda model: model, function: Callable = lambda step: step
) -> Step:
    """A step on `device`, wrapped by `function`, that samples a few images and returns their mean."""
    model = UNet().to(device).eval()
    denoise = compile(model)
    kept = kept_signal(device)

    @torch.no_grad()
    def step() -> torch.Tensor:
        x = torch.randn(IMAGES, 1, 8, 8, device=device)
        for time in range(TIMES - 1, 0, -STRIDE):
            noise = denoise(x, torch.full((IMAGES,), time, device=device))
            image = ((x - (1 - kept[time]).sqrt() * noise) / kept[time].sqrt()).clamp(-1, 1)
            before = time - STRIDE
            if before > 0:
                fresh = 0.5 * (1 - kept[before]).sqrt()
                rest = (1 - kept[before] - fresh**2).sqrt()
                x = kept[before].sqrt() * image + rest * noise + fresh * torch.randn_like(x)
            else:
                x = image
        return x.mean()

    return function(step)


if __name__ == "__main__":
    main(make, STEPS)
