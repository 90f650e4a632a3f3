"""Trains attention with sparse weights (sparsemax, entmax) and the losses that belong to these mappings."""

# /// script
# dependencies = ["entmax==1.3"]
# ///

import torch
from entmax import (
    Entmax15Loss,
    EntmaxBisectLoss,
    SparsemaxLoss,
    budget_bisect,
    entmax15,
    entmax_bisect,
    normmax_bisect,
    sparsemax,
)
from torch import nn

torch.manual_seed(0)


class SparseAttention(nn.Module):
    """Attention whose heads learn how sparse they are."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.alpha = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        alpha = 1 + self.alpha.sigmoid().view(1, -1, 1, 1)
        self.weights = entmax_bisect(scores, alpha.expand(batch, -1, length, 1), dim=-1)
        return (self.weights @ v).transpose(1, 2).reshape(batch, length, width)


embedding = nn.Embedding(20, 32)
attention = SparseAttention(32, 4)
head = nn.Linear(32, 20)
parameters = [*embedding.parameters(), *attention.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=3e-3)
losses = [SparsemaxLoss(), Entmax15Loss(k=10), EntmaxBisectLoss(alpha=1.3, n_iter=20)]

for step in range(90):
    tokens = torch.randint(0, 20, (16, 12))
    logits = head(attention(embedding(tokens)))
    targets = tokens.flip(1).flatten()
    loss = losses[step % 3](logits.flatten(0, 1), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 < 3:
        print(loss.item(), (attention.weights == 0).float().mean().item())

scores = torch.randn(4, 9)
for mapping in (sparsemax, entmax15):
    p = mapping(scores, dim=-1)
    print(mapping.__name__, p.sum().item(), (p > 0).sum(-1).tolist())
print("normmax", normmax_bisect(scores, alpha=2, dim=-1).max().item())
print("budget", budget_bisect(scores, budget=2, dim=-1).sum(-1).tolist())
print("alpha", attention.alpha.tolist())
