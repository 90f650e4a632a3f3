"""Trains with differential privacy: gradients of each example, clipped and noised; the budget's account."""

# /// script
# dependencies = ["opacus==1.6.0"]
# ///

import warnings

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)

convolutional = nn.Sequential(
    nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
    nn.Flatten(), nn.Linear(64, 2),
)  # fmt: skip
print("errors", len(ModuleValidator.validate(convolutional, strict=False)))
convolutional = ModuleValidator.fix(convolutional)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.lstm = DPLSTM(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(self.norm(hidden).mean(1))


labels = torch.randint(0, 2, (200,))
pictures = torch.randn(200, 1, 8, 8) + labels.view(-1, 1, 1, 1) * 0.5
tokens = torch.randint(0, 6, (200, 10)) + labels.view(-1, 1) * 6 * (torch.rand(200, 10) < 0.5)

for name, model, inputs, clipping, mode in (
    ("convolutional", convolutional, pictures, "flat", "hooks"),
    (
        "per layer",
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)),
        pictures,
        "per_layer",
        "hooks",
    ),
    (
        "functorch",
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 2)),
        pictures,
        "flat",
        "functorch",
    ),
    ("recurrent", Recurrent(), tokens, "flat", "hooks"),
    (
        "ghost",
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2)),
        pictures,
        "flat",
        "ghost",
    ),
):
    engine = PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=40)
    bound = [1.0] * sum(1 for _ in model.parameters()) if clipping == "per_layer" else 1.0
    private = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=bound,
        clipping=clipping, grad_sample_mode=mode, criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    if mode == "ghost":
        model, optimizer, criterion, loader = private
    else:
        (model, optimizer, loader), criterion = private, nn.CrossEntropyLoss()
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(name, epoch, loss.item(), "epsilon", engine.get_epsilon(delta=1e-5))
    with torch.no_grad():
        print(name, "accuracy", (model(inputs).argmax(1) == labels).float().mean().item())

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
    data_loader=DataLoader(TensorDataset(pictures, labels), batch_size=50),
    target_epsilon=8.0,
    target_delta=1e-5,
    epochs=3,
    max_grad_norm=1.0,
)
for epoch in range(3):
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=20, optimizer=optimizer
    ) as small_batches:
        for x, y in small_batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    print("epsilon", epoch, loss.item(), engine.get_epsilon(1e-5))
