"""Ops of new shapes are co-executed if the shapes of their outputs follow from their arguments."""

import copy
import os

import pytest
import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention with a mask, dropout and layer norm over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.to_all = nn.Linear(16, 48)
        self.end = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        q, k, v = self.to_all(self.norm(h)).chunk(3, -1)
        weights = q @ k.transpose(1, 2) / 4
        weights = weights + torch.ones_like(weights).tril() * 0.5
        weights = weights.masked_fill(weights < -3, -1e4)
        h = h + F.dropout(weights.softmax(-1), 0.25) @ v
        last = F.pad(h[:, -1:].mean(2), (1, 0)).sum(1, keepdim=True) + h.std((1, 2))[:, None]
        h = torch.cat([h, torch.tanh(h * last[:, :, None])], 1)
        return self.end(h)


class Decoder(nn.Module):
    """Attention by PyTorch's function, recurrent cells, and operators that select and order."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.to_all = nn.Linear(16, 48)
        self.lstm, self.gru = nn.LSTMCell(16, 8), nn.GRUCell(16, 8)
        self.end = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        batch, length, _ = h.shape
        q, k, v = (t.view(batch, length, 2, 8).transpose(1, 2) for t in self.to_all(h).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        order = y.mean(-1).argsort(dim=1, stable=True)
        y = y.gather(1, order[:, :, None].expand(-1, -1, 16)) + y.flip(1).cumsum(1).roll(1, 1) / length
        best = y.max(2).values.topk(min(3, length), 1).values.sum(1)
        y = y + y.amax(1, keepdim=True) + y.var(1, correction=0, keepdim=True) + best[:, None, None]
        flat = y.flatten(0, 1)
        cells = torch.cat([self.lstm(flat)[0], self.gru(flat)], 1)
        pooled = (
            torch.zeros_like(cells).index_add(0, x.flatten() % length, cells) + cells[x.flatten() % length]
        )
        return self.end(pooled.view(batch, length, 16).repeat(1, 2, 1).tril())


def train(
    device: str, lengths: list[int], block: nn.Module
) -> tuple[list[float], list[int], list[torch.Tensor]]:
    """Returns losses, the number of runs that each step sent, and the weights."""
    block = copy.deepcopy(block).to(device)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    losses, sent = [], []
    torch.manual_seed(0)
    for length in lengths:
        x = torch.randint(20, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
        y = torch.cat([x, x], 1).flatten()
        before = torch_tandem.report()["blocks_sent"]
        optimizer.zero_grad()
        loss = F.cross_entropy(block(x).flatten(0, 1), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(torch_tandem.report()["blocks_sent"] - before)
    return losses, sent, [p.detach().cpu() for p in block.parameters()]


@pytest.mark.parametrize("model", [Block, Decoder])
def test_every_step_has_another_length(model):
    torch.manual_seed(0)
    block = model()
    lengths = [5, 5, 5, 5, 5, 5, 5, *range(6, 20), 1, 2, 3]
    losses, sent, weights = train("tandem", lengths, block)
    expected, _, theirs = train("cpu", lengths, block)
    # On devices other than the CPU, PyTorch fuses recurrent cells, which round differently.
    exact = os.environ["TANDEM_KERNELS"] == "aten" and model is Block
    tolerance = 0 if exact else 1e-5
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights, theirs, rtol=tolerance, atol=tolerance)
    # The length is new in each of these steps, and dozens of ops have new shapes. Each op that runs at once
    # would end a run. If no op runs at once, a step has a few runs, or more of them if GraphRunner runs
    # beside Python.
    assert max(sent[7:21]) < (10 if model is Block else 20), sent


def test_outputs_keep_the_offsets_of_their_inputs():
    def program(device):
        large, zeros, seen = torch.arange(64.0, device=device), torch.zeros(4, device=device), []
        for step in range(12):
            offset = step * 7 % 5
            x = large.as_strided((4, 4), (4, 1) if step % 2 else (1, 4), offset)
            for y in (
                torch.diagonal_scatter(x, zeros),
                torch.select_scatter(x, zeros, 0, 1),
                torch.slice_scatter(x, zeros.expand(2, 4), 0, 1, 3),
                torch.as_strided_scatter(x, zeros.view(2, 2), (2, 2), (1, 1), offset),
            ):
                seen.append((y.storage_offset(), y.stride(), y.tolist()))
            if device == "tandem":
                torch_tandem.mark_step()
        return seen

    assert program("tandem") == program("cpu")
