"""An LSTM learns sentences of scikit-learn's descriptions, as packed sequences of different lengths."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, endless, main
from gpt2 import corpus
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

STEPS = 20
COMPARABLE = None

BATCH, LONGEST = 16, 60


def sentences() -> list[torch.Tensor]:
    """The lines of the texts, as bytes."""
    lines = bytes(corpus().tolist()).split(b"\n")
    return [torch.tensor(list(line[:LONGEST] + b"\n")) for line in lines if len(line) > 4]


class Model(nn.Module):
    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, hidden, num_layers=2, dropout=0.2)
        self.out = nn.Linear(hidden, 256)

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        """Return the logits of the next characters, in the order of the packed characters."""
        embedded = packed._replace(data=self.embed(packed.data))
        hidden, _ = self.lstm(embedded)
        return self.out(hidden.data)


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    loader = DataLoader(sentences(), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=list)
    batches = endless(loader)
    model = Model().to(device)
    net = compile(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.9)

    def step() -> float:
        lines = next(batches)
        given = pack_sequence([line[:-1] for line in lines], enforce_sorted=False).to(device)
        expected = pack_sequence([line[1:] for line in lines], enforce_sorted=False).to(device)
        loss = F.cross_entropy(net(given), expected.data)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
