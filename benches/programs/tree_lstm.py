"""A binary TreeLSTM that predicts the value of random arithmetic-like trees.

The model recurses over Python objects, and each step has trees of different shapes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

BATCH = 8
WORDS = 20
SIZE = 64


@dataclass
class Tree:
    """A node of a tree. A leaf has a word, any other node has two children."""

    word: int = 0
    children: "tuple[Tree, Tree] | None" = None

    def value(self) -> int:
        """Return the target: the sum over the leaves, with the sign inverted in every right child."""
        if self.children is None:
            return self.word - WORDS // 2
        left, right = self.children
        return left.value() - right.value()


def random_tree(rng: random.Random, leaves: int) -> Tree:
    if leaves == 1:
        return Tree(word=rng.randrange(WORDS))
    left = rng.randint(1, leaves - 1)
    return Tree(children=(random_tree(rng, left), random_tree(rng, leaves - left)))


class TreeLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.leaf = nn.Linear(SIZE, 3 * SIZE)
        self.node = nn.Linear(2 * SIZE, 5 * SIZE)
        self.out = nn.Linear(SIZE, 2)

    def encode(self, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state and the cell state of a tree."""
        if tree.children is None:
            word = torch.tensor([tree.word], device=self.words.weight.device)
            i, o, u = self.leaf(self.words(word)).chunk(3, dim=1)
            cell = i.sigmoid() * u.tanh()
        else:
            (h_left, c_left), (h_right, c_right) = map(self.encode, tree.children)
            gates = self.node(torch.cat((h_left, h_right), dim=1))
            i, o, u, f_left, f_right = gates.chunk(5, dim=1)
            cell = i.sigmoid() * u.tanh() + f_left.sigmoid() * c_left + f_right.sigmoid() * c_right
        return o.sigmoid() * cell.tanh(), cell

    def forward(self, trees: list[Tree]) -> torch.Tensor:
        return self.out(torch.cat([self.encode(tree)[0] for tree in trees]))


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """A training step on `device`."""
    rng = random.Random(0)
    model = TreeLSTM().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    forward = compile(model)

    def step() -> torch.Tensor:
        trees = [random_tree(rng, rng.randint(4, 9)) for _ in range(BATCH)]
        labels = torch.tensor([int(tree.value() > 0) for tree in trees], device=device)
        loss = F.cross_entropy(forward(trees), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(make, STEPS)
