"""A Lightning `Trainer` with a small convolutional network on scikit-learn's digits.

The library has the training loop, and also chooses the device: accelerator="auto".
"""

import logging
import warnings
from collections.abc import Callable

import lightning
import torch
import torch.nn.functional as F
from _main import Step, main
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
COMPARABLE = None

BATCHES = 4
"""Number of batches per step. Each step is a call of `Trainer.fit` for one more epoch."""
BATCH = 64


class Classifier(lightning.LightningModule):
    def __init__(self, compile: Callable) -> None:
        super().__init__()
        self.net = compile(
            nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1, stride=2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Dropout(0.2),
                nn.Linear(32 * 4 * 4, 10),
            )
        )
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A step of `BATCHES` batches on `device`, which Lightning chooses unless it is the CPU."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images / 16).float().view(-1, 1, 8, 8)
    shuffle = torch.Generator().manual_seed(0)
    data = TensorDataset(images, torch.from_numpy(labels))
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=shuffle)
    model = Classifier(compile)
    trainer = lightning.Trainer(
        accelerator="cpu" if device == "cpu" else "auto",
        devices=1,
        max_epochs=0,
        limit_train_batches=BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def step() -> float:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model, loader)
        return trainer.callback_metrics["loss_epoch"].item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
