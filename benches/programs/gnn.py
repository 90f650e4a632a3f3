"""A graph attention network learns the share of each graph's largest component, with scatters over edges.

The graphs have different sizes, so a batch is one graph of many components and no two batches have the same
shapes.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from _main import Step, main
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import nn

STEPS = 20
COMPARABLE = None

GRAPHS, FEATURES = 16, 32


def segment_softmax(scores: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Return the softmax of scores [edges, heads], over all scores of the same segment."""
    index = segment.unsqueeze(1).expand_as(scores)
    largest = scores.new_full((count, scores.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, index, scores.detach(), reduce="amax")
    weights = (scores - largest[segment]).exp()
    total = scores.new_zeros(count, scores.shape[1]).scatter_add(0, index, weights)
    return weights / total[segment].clamp(min=1e-12)


class Attention(nn.Module):
    """A layer of graph attention (Velickovic et al., 2018)."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, features // heads
        self.linear = nn.Linear(features, features, bias=False)
        self.source = nn.Parameter(torch.empty(heads, self.size))
        self.target = nn.Parameter(torch.empty(heads, self.size))
        self.norm = nn.LayerNorm(features)
        nn.init.xavier_uniform_(self.source)
        nn.init.xavier_uniform_(self.target)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        h = self.linear(x).view(-1, self.heads, self.size)
        scores = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        weights = segment_softmax(F.leaky_relu(scores, 0.2), target, len(x))
        messages = h[source] * weights.unsqueeze(-1)
        gathered = torch.zeros_like(h).index_add_(0, target, messages)
        return self.norm(x + F.elu(gathered.flatten(1)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, FEATURES)
        self.layers = nn.ModuleList(Attention(FEATURES, heads=4) for _ in range(3))
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        """Return a prediction for each graph: the mean over its nodes."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edges)
        nodes = torch.bincount(graph, minlength=GRAPHS).clamp(min=1)
        pooled = x.new_zeros(GRAPHS, FEATURES).index_add_(0, graph, x) / nodes.unsqueeze(1)
        return self.out(pooled).squeeze(1)


def batch(rng: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Return random graphs: features of nodes, edges [2, count], each node's graph, and the shares."""
    features, edges, graphs, shares, first = [], [], [], [], 0
    for number in range(GRAPHS):
        n = int(rng.integers(20, 60))
        pairs = rng.integers(n, size=(2, int(n * rng.uniform(0.3, 1.0))))
        pairs = np.concatenate((pairs, pairs[::-1], np.tile(np.arange(n), (2, 1))), axis=1)
        links = coo_matrix((np.ones(pairs.shape[1]), pairs), shape=(n, n))
        _, component = connected_components(links)
        shares.append(np.bincount(component).max() / n)
        degrees = np.bincount(pairs[0], minlength=n)
        features.append(np.stack((degrees, rng.standard_normal(n)), axis=1))
        edges.append(pairs + first)
        graphs.append(np.full(n, number))
        first += n
    return (
        torch.from_numpy(np.concatenate(features)).float(),
        torch.from_numpy(np.concatenate(edges, axis=1)),
        torch.from_numpy(np.concatenate(graphs)),
        torch.tensor(shares, dtype=torch.float32),
    )


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    rng = np.random.default_rng(0)
    model = Network().to(device)
    net = compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step() -> float:
        x, edges, graph, shares = (tensor.to(device) for tensor in batch(rng))
        loss = F.binary_cross_entropy_with_logits(net(x, edges, graph), shares)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main(make, STEPS)
