"""Eager, tracing and co-execution have the same bits, and most steps are co-executed."""

import pytest
import torch
from helpers import check, share_coexecuted
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 50
OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]
FOREACH_ROUNDS_OTHERWISE = ("NAdam", "RAdam", "ASGD")


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def epochs(features, targets, batch_size):
    """Yields STEPS shuffled batches. The last batch of each epoch is smaller."""
    dataset = TensorDataset(features, targets)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    step = 0
    while True:
        for batch in loader:
            if step == STEPS:
                return
            yield batch
            step += 1


def train(device, model, loss_of, features, targets, optimizer, schedule=None, batch_size=8):
    model.to(device)
    for x, y in epochs(features, targets, batch_size):
        optimizer.zero_grad()
        loss = loss_of(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        yield loss.detach()
    yield [t.detach().clone() for t in model.state_dict().values()]


def mostly_coexecuted(seen, steps=STEPS):
    assert seen["steps_coexecuted"] >= 0.8 * steps
    assert share_coexecuted(seen) >= 0.8


def test_shuffle_dropout_adam_and_a_schedule():
    def program(device):
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.7)
        targets = torch.arange(44) % 3
        yield from train(device, model, F.cross_entropy, data(44, 6), targets, optimizer, schedule)

    mostly_coexecuted(check(program))


def test_convolutions_and_batch_norm():
    def program(device):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.25),
            nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 2),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)
        targets = torch.arange(36) % 2
        yield from train(device, model, F.cross_entropy, data(36, 1, 8, 8), targets, optimizer, schedule)

    mostly_coexecuted(check(program))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2) / 3.0).masked_fill(~mask, float("-inf"))
        x = x + (F.dropout(scores.softmax(-1), 0.1, self.training) @ v).transpose(1, 2).reshape(b, t, c)
        return self.out(x).flatten(0, 1)


def test_attention_over_tokens():
    def program(device):
        model = Attention()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        tokens = torch.randint(11, (40, 9))
        loss = lambda out, y: F.cross_entropy(out, y.flatten())  # noqa: E731
        yield from train(device, model, loss, tokens[:, :-1], tokens[:, 1:], optimizer)

    mostly_coexecuted(check(program))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def test_recurrence_written_out():
    def program(device):
        model = Recurrent()
        optimizer = torch.optim.RMSprop(model.parameters(), 0.01)
        yield from train(device, model, F.mse_loss, data(40, 5, 4), data(40, 1, seed=1), optimizer)

    mostly_coexecuted(check(program, like_eager=False))


@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"],
)
def test_optimizers(name, foreach):
    def program(device):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = getattr(torch.optim, name)(model.parameters(), 0.01, foreach=foreach)
        yield from train(device, model, F.mse_loss, data(44, 6), data(44, 1, seed=1), optimizer)

    mostly_coexecuted(
        check(program, like_eager=foreach is not None or name not in ("NAdam", "RAdam", "ASGD"))
    )


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers(name):
    def program(device):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = getattr(torch.optim, name)(model.parameters(), 0.01, fused=True)
        yield from train(device, model, F.mse_loss, data(44, 6), data(44, 1, seed=1), optimizer)

    mostly_coexecuted(check(program))


def test_evaluation_between_epochs():
    def program(device):
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)).to(
            device
        )
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        held_out = data(10, 6, seed=5).to(device)
        for step, (x, y) in enumerate(epochs(data(44, 6), data(44, 1, seed=1), 8)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scores = None
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    scores = [model(held_out), float(model(held_out).mean())]
                model.train()
            yield loss.detach(), scores

    mostly_coexecuted(check(program))


def test_losses_read_every_step():
    def program(device):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in epochs(data(44, 6), data(44, 1, seed=1), 8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield loss.item(), norm.item()

    mostly_coexecuted(check(program))


def test_gradient_accumulation():
    def program(device):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for step, (x, y) in enumerate(epochs(data(44, 6), data(44, 1, seed=1), 8)):
            loss = F.mse_loss(model(x.to(device)), y.to(device)) / 4
            loss.backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            yield loss.detach()
        yield [p.detach().clone() for p in model.parameters()]

    mostly_coexecuted(check(program))
