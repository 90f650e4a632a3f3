"""Training that logs with Matplotlib and pandas.

Tensors are passed to libraries that do not use PyTorch. Every step adds a row to a table, and every fifth
step also draws the weights and summarizes the table.
"""

import io
from collections.abc import Callable

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from _main import Step, main
from sklearn.datasets import load_digits
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 128
EVERY = 5


class Log:
    """A table of training metrics, and plots of the weights."""

    def __init__(self) -> None:
        matplotlib.use("Agg")
        self.rows: list[dict[str, float]] = []

    def add(self, model: nn.Module, loss: torch.Tensor, accuracy: torch.Tensor) -> None:
        row = {"loss": loss.item(), "accuracy": accuracy.item()}
        for name, parameter in model.named_parameters():
            row[f"norm of {name}"] = parameter.detach().norm().item()
            row[f"gradient of {name}"] = parameter.grad.norm().item()
        self.rows.append(row)

    def summary(self) -> pd.DataFrame:
        table = pd.DataFrame(self.rows)
        return table.rolling(EVERY).mean().describe()

    def picture(self, weight: torch.Tensor) -> bytes:
        figure, (left, right) = plt.subplots(1, 2, figsize=(5, 2.5))
        left.imshow(weight.detach().cpu().numpy(), cmap="gray")
        right.hist(weight.detach().flatten().cpu().numpy(), bins=20)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=50)
        plt.close(figure)
        return file.getvalue()


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`, with its logging."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images / 16).float(), torch.from_numpy(labels)
    shuffle = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    forward = compile(model)
    log = Log()

    def step() -> float:
        chosen = torch.randint(len(images), (BATCH,), generator=shuffle)
        x, y = images[chosen].to(device), labels[chosen].to(device)
        out = forward(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.add(model, loss, (out.argmax(1) == y).float().mean())
        if len(log.rows) % EVERY == 0:
            log.summary()
            log.picture(model[0].weight)
        return log.rows[-1]["loss"]

    return step


if __name__ == "__main__":
    main(make, STEPS)
