"""Random programs: views, writes, branches, deletions, fetches and draws in arbitrary order.

A program is a list of instructions on a pool of tensors. Every iteration runs it again. Sometimes one
instruction is replaced, left out or inserted, so that co-execution diverges at any place.
"""

import random

import pytest
import torch
from helpers import check

STEPS = 30
POOL = 6
SIDE = 4


def data(seed):
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


# An instruction gets (pool, i, j, k, number, device), where i, j and k are indices of tensors in the pool.


def new(p, i, j, k, n, d):
    p[i] = p[j] + p[k]


def product(p, i, j, k, n, d):
    p[i] = (p[j] @ p[k]).tanh()


def scaled(p, i, j, k, n, d):
    p[i] = p[j] * n


def write(p, i, j, k, n, d):
    p[i].add_(p[j], alpha=0.5)


def write_scalar(p, i, j, k, n, d):
    p[i].mul_(n)


def alias(p, i, j, k, n, d):
    p[i] = p[j]


def transposed(p, i, j, k, n, d):
    p[i] = p[j].t()


def row_written(p, i, j, k, n, d):
    p[i][j % SIDE] = p[k][i % SIDE].tanh()


def block_written(p, i, j, k, n, d):
    p[i][1:3, :2].copy_(p[j][:2, 2:].clone())


def overlapping(p, i, j, k, n, d):
    p[i][1:].add_(p[i][:-1].clone())


def diagonal(p, i, j, k, n, d):
    p[i].diagonal().sub_(p[j].sum(0))


def flipped(p, i, j, k, n, d):
    p[i] = p[j].flip(0).clamp(-3, 3)


def dropped(p, i, j, k, n, d):
    p[i] = torch.nn.functional.dropout(p[j], 0.5)


def drawn(p, i, j, k, n, d):
    p[i].normal_()


def host_drawn(p, i, j, k, n, d):
    p[i] = p[j] + torch.rand(SIDE, SIDE).to(d)


def fed(p, i, j, k, n, d):
    buffer = torch.full((SIDE,), n)
    p[i] = p[j] + buffer.to(d)
    buffer.fill_(-99)


def fetched(p, i, j, k, n, d):
    p[i] = p[j] / (1 + p[k].abs().max().item())


def branch(p, i, j, k, n, d):
    if p[i].sum() > 0:
        p[j] = p[k].sigmoid()
    else:
        p[j].abs_()


def selected(p, i, j, k, n, d):
    p[i][p[j] > n] = 0.25


def dead(p, i, j, k, n, d):
    (p[i] * 3).exp().sum()


def swapped(p, i, j, k, n, d):
    p[i], p[j] = p[j], p[i]


def replaced(p, i, j, k, n, d):
    p[i] = p[i].clone()


def differentiated(p, i, j, k, n, d):
    x = p[i].detach().clone().requires_grad_()
    (x.sin() * p[j].detach()).sum().backward()
    p[k] = x.grad


def set_data(p, i, j, k, n, d):
    p[i].data = p[j].clone()


def counted(p, i, j, k, n, d):
    for _ in range(1 + int(n * 10) % 4):
        p[i] = p[i] * 0.9 + 0.1


INSTRUCTIONS = [
    new, product, scaled, write, write_scalar, alias, transposed, row_written, block_written, overlapping,
    diagonal, flipped, dropped, drawn, host_drawn, fed, fetched, branch, selected, dead, swapped, replaced,
    differentiated, set_data, counted,
]  # fmt: skip


def instruction(rng):
    return rng.choice(INSTRUCTIONS), *(rng.randrange(POOL) for _ in range(3))


def random_program(seed):
    def program(device):
        rng = random.Random(seed)
        pool = [data(i).to(device) for i in range(POOL)]
        code = [instruction(rng) for _ in range(rng.randrange(4, 14))]
        for step in range(STEPS):
            now = list(code)
            if step > 4 and rng.random() < 0.3:
                at = rng.randrange(len(now))
                change = rng.choice(["replace", "leave out", "put in"])
                now[at : at + (change != "put in")] = [] if change == "leave out" else [instruction(rng)]
                if rng.random() < 0.3:
                    code = now
            for f, i, j, k in now:
                f(pool, i, j, k, rng.random(), device)
            for i in range(POOL):
                if step % 3 == 2:
                    pool[i] = pool[i].nan_to_num(0.5, 2.0, -2.0).clamp(-4, 4)
            yield [t.clone() for t in pool]

    return program


@pytest.mark.parametrize("seed", range(40))
def test_random_program(seed):
    check(random_program(seed), coexecuted=0.4)
