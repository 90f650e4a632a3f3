"""Train a small convolutional network on scikit-learn's digits: an ordinary PyTorch script."""

import argparse
import json

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class Net(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(64)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = self.dropout(F.relu(self.hidden(x.flatten(1))))
        return self.out(x)


def load(seed: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.from_numpy(array) for array in split)
    train = DataLoader(TensorDataset(train_x, train_y), batch_size=batch_size, shuffle=True, drop_last=True)
    return train, DataLoader(TensorDataset(test_x, test_y), batch_size=256)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    model.eval()
    predicted = torch.cat([model(x.to(device)).argmax(1) for x, _ in loader]).cpu()
    expected = torch.cat([y for _, y in loader])
    accuracy = (predicted == expected).float().mean().item()
    return accuracy, f1_score(expected.numpy(), predicted.numpy(), average="macro")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", metavar="FILE", help="write losses and accuracy as JSON")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    train, test = load(args.seed, args.batch_size)
    model = Net(args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    losses = []
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        progress = tqdm(train, desc=f"epoch {epoch}", leave=False, disable=None)
        for x, y in progress:
            value = train_step(model, optimizer, x.to(device), y.to(device)).item()
            total += value
            progress.set_postfix(loss=f"{value:.3f}")
        schedule.step()
        losses.append(total / len(train))
        accuracy, f1 = evaluate(model, test, device)
        print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracy:.2%}, macro F1 {f1:.4f}")

    if args.losses:
        with open(args.losses, "w") as file:
            json.dump({"losses": losses, "accuracy": accuracy}, file)


if __name__ == "__main__":
    main()
