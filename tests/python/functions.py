"""Helpers for tests of functions: data, models, and the comparison with the reference."""

import os

import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(n, *shapes):
    return [[data(*shape, seed=10 * i + j) for j, shape in enumerate(shapes)] for i in range(n)]


def mlp(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def trainer(device, model, optimizer, wrap):
    model.to(device)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return wrap(step)


# GPU kernels round differently from eager PyTorch, so there the reference is Tandem without functions.
REFERENCE = "cpu" if os.environ.get("TANDEM_DEVICE", "cpu") == "cpu" else "tandem"


def both(program, reference=REFERENCE):
    """Run `program(device, wrap)` on the reference and as a function on Tandem."""
    torch.manual_seed(3)
    eager = program(reference, lambda f: f)
    made = []

    def wrap(f):
        made.append(torch_tandem.function(f, audit=None))
        return made[-1]

    torch.manual_seed(3)
    ours = program("tandem", wrap)
    return eager, ours, made


def same(eager, ours):
    assert len(eager) == len(ours)
    for i, (one, two) in enumerate(zip(eager, ours, strict=True)):
        assert one.dtype == two.dtype and torch.equal(one.detach().cpu(), two.detach().cpu()), f"value {i}"


def replayed(function, least):
    info = function.cache_info()
    assert info.hits >= least, (info, function.reason())


def reason(function, *shapes, n=40):
    step = torch_tandem.function(function)
    for inputs in batches(n, *shapes):
        step(*(x.to("tandem") for x in inputs))
    assert step.cache_info().hits == 0
    return step.reason()
