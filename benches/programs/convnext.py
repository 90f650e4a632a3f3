"""A ConvNeXt from timm learns scikit-learn's digits, with an average of its weights and random erasing."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from sklearn.datasets import load_digits
from timm import create_model
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, ModelEmaV2, accuracy
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
COMPARABLE = None

SIZE = 32


def load() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, SIZE, mode="bicubic").expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.from_numpy(labels))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(load(), batch_size=16, shuffle=True, drop_last=True))
    model = create_model("convnext_atto", num_classes=10, drop_path_rate=0.1).to(device)
    average = ModelEmaV2(model, decay=0.99)
    net = compile(model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    erase = RandomErasing(probability=0.25, mode="pixel", device=device)
    criterion = LabelSmoothingCrossEntropy(0.1)
    losses, top1 = AverageMeter(), AverageMeter()

    def step() -> float:
        images, labels = (tensor.to(device) for tensor in next(batches))
        output = net(erase(images))
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, labels)[0].item(), images.size(0))
        return losses.val

    return step


if __name__ == "__main__":
    main(make, STEPS)
