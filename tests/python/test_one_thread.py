"""PyTorch's CPU kernels of the table's column "always parallel" have the same bits on one thread."""

import random
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

TABLE = Path(__file__).parents[2] / "docs" / "operator-table.md"


def optimized(kind, size):
    """Three steps of a fused optimizer with random options, over tensors of several sizes."""
    options = {"weight_decay": 0.1}
    options |= {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    parameters = [torch.randn(size() * size() + 1).requires_grad_() for _ in range(3)]
    optimizer = kind(parameters, lr=0.1, fused=True, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    return parameters


CALLS = {
    "native_layer_norm": lambda size: [F.layer_norm(torch.randn(size(), n := size()), (n,))],
    "max_pool2d_with_indices": lambda size: list(
        F.max_pool2d(torch.randn(2, size(), 9 + size(), 9), 3, 2, return_indices=True)
    ),
    "avg_pool2d": lambda size: [F.avg_pool2d(torch.randn(2, size(), 9 + size(), 9), 3, 2)],
    "_fused_adam_": lambda size: optimized(torch.optim.Adam, size),
    "_fused_adamw_": lambda size: optimized(torch.optim.AdamW, size),
    "_fused_sgd_": lambda size: optimized(torch.optim.SGD, size),
    "_fused_adagrad_": lambda size: optimized(torch.optim.Adagrad, size),
}


def test_all_operators_of_the_column_are_here():
    rows = [line for line in TABLE.read_text().splitlines() if "always parallel" in line]
    names = {match[1] for line in rows if (match := re.match(r"\| `(\w+)`", line))}
    assert names == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_bits_do_not_depend_on_the_number_of_threads(name):
    before = torch.get_num_threads()
    try:
        for seed in range(20):
            found = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                torch.manual_seed(seed)
                draws = random.Random(seed)
                found.append(CALLS[name](lambda draws=draws: draws.randint(1, 70)))
            for other in found[1:]:
                assert all(map(torch.equal, found[0], other)), seed
    finally:
        torch.set_num_threads(before)
