"""The residual network of sdpoint, without downsampling, on images that workers crop, flip and distort."""

from collections.abc import Callable

import numpy as np
import torch
from _main import Step, endless
from sdpoint import SDPointNet
from sdpoint import load as load_images
from torch import nn
from torch.utils.data import DataLoader, Dataset

COMPARABLE = 2


class Augmented(Dataset):
    """Digits of 32 by 32, padded and cropped, with a random contrast and noise."""

    def __init__(self) -> None:
        self.images = load_images()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.images[index]
        draw = np.random.default_rng(int(torch.randint(2**31, ()).item()))
        pixels = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
        top, left = draw.integers(0, 9, 2)
        pixels = pixels[:, top : top + 32, left : left + 32]
        if draw.random() < 0.5:
            pixels = pixels[:, :, ::-1]
        spectrum = np.fft.rfft2(pixels) * (1 - 0.2 * draw.random((1, 32, 17)))
        pixels = np.fft.irfft2(spectrum, s=(32, 32)) + draw.normal(0, 0.05, (1, 32, 32))
        return torch.from_numpy(pixels.astype("float32")), label


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step on `device`."""
    loader = DataLoader(Augmented(), 16, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True)
    batches = endless(loader)
    model = SDPointNet(10).to(device)
    net = compile(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def step() -> float:
        images, labels = next(batches)
        loss = criterion(net(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
