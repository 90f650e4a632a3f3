"""The training step of examples/digits.py on images that workers rotate and blur."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless
from scipy import ndimage
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

from benches.programs.digits import Net

COMPARABLE = 10


class Augmented(Dataset):
    """Digits, each rotated by a random angle and blurred."""

    def __init__(self) -> None:
        images, self.labels = load_digits(return_X_y=True)
        self.images = (images / 16).reshape(-1, 8, 8).astype("float32")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        angle = torch.empty(()).uniform_(-20, 20).item()
        image = ndimage.rotate(self.images[index], angle, reshape=False, order=1)
        image = ndimage.gaussian_filter(image, 0.5)
        return torch.from_numpy(image)[None], int(self.labels[index])


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step on `device`."""
    loader = DataLoader(Augmented(), 64, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True)
    batches = endless(loader)
    model = Net().to(device)
    net = compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step() -> float:
        x, y = next(batches)
        loss = F.cross_entropy(net(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
