"""A vision transformer from timm learns scikit-learn's digits, with timm's mixup, optimizer and schedule."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from sklearn.datasets import load_digits
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
COMPARABLE = None

SIZE, PATCH = 32, 4


def load() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8 - 1
    return TensorDataset(F.interpolate(images, SIZE, mode="bilinear"), torch.from_numpy(labels))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    batches = endless(DataLoader(load(), batch_size=16, shuffle=True, drop_last=True))
    model = create_model(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=PATCH,
        in_chans=1,
        num_classes=10,
        embed_dim=96,
        depth=6,
        num_heads=3,
        drop_path_rate=0.1,
    ).to(device)
    model.train()
    net = compile(model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(
        optimizer, t_initial=1000, warmup_t=20, warmup_lr_init=1e-5, t_in_epochs=False
    )
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    criterion = SoftTargetCrossEntropy()
    updates = 0

    def step() -> float:
        nonlocal updates
        images, labels = (tensor.to(device) for tensor in next(batches))
        images, targets = mixup(images, labels)
        loss = criterion(net(images), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        updates += 1
        schedule.step_update(updates)
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
