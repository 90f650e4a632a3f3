"""Small models and their training, the same on each device."""

from itertools import pairwise

import torch
from helpers import data
from torch import nn

STEPS = 12


def copies(*modules):
    return [t.detach().clone() for m in modules for t in m.state_dict().values()]


def grads(*modules):
    return [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]


def layers(device, *sizes, act=nn.Tanh):
    """Linear layers with activations between them, with the same weights on each device."""
    torch.manual_seed(1)
    pairs = [(nn.Linear(a, b), act()) for a, b in pairwise(sizes)]
    return nn.Sequential(*[m for pair in pairs for m in pair][:-1]).to(device)


def sgd(*modules, lr=0.05, **options):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr, foreach=False, **options)


def adam(*modules, lr=0.01, **options):
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr, foreach=False, **options)


def train(device, model, loss_of, optimizer=None, steps=STEPS):
    """Plain training with `loss_of(x, step)`, where `x` is a different batch in each step."""
    optimizer = optimizer or sgd(model, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(data(3, 4, seed=step).to(device), step)
        loss.backward()
        optimizer.step()
        yield loss.detach(), copies(model), grads(model)
