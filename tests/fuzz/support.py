"""What random programs are written with."""

import copy
import functools
import gc
import itertools
import random
import re
import weakref
from types import SimpleNamespace

import numpy as np
import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = [
    "F", "Ghost", "Net", "Scale", "State", "Twice", "checkpoint", "copy", "data", "functools", "gc", "halve",
    "itertools", "late", "mark_step", "nn", "np", "safe", "text", "torch", "weakref",
]  # fmt: skip

SIDE = 4

mark_step = torch_tandem.mark_step


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers on the host, a few of which are equal."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (numbers * 8).round().div(8).to(dtype)


def safe(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of small finite numbers."""
    return x.nan_to_num(0.5, 2.0, -2.0).clamp(-2, 2)


def text(x: torch.Tensor) -> str:
    """How a tensor prints, without its device."""
    return "".join(re.sub(r",\s*device='[^']*'", "", str(x)).split())


def late(x: torch.Tensor) -> float:
    """Read what may have failed: an index out of range is only found where the operator runs."""
    return x.sum().item()


def halve(p: torch.Tensor) -> None:
    """A hook that changes a gradient."""
    p.grad.mul_(0.5)


class Scale(torch.autograd.Function):
    """A product with a number, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.factor + x.sign() * 0.125, None


class Twice(torch.autograd.Function):
    """Writes its input and returns it."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Net(nn.Module):
    """A module whose path depends on its attributes and its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.norm = nn.LayerNorm(SIDE)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(SIDE, SIDE)
        self.rounds = 1
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        h = self.first(x)
        for _ in range(self.rounds):
            h = self.norm(h).relu() + x
        self.count += 1
        return self.last(self.drop(h))


class Ghost:
    """Issues an operator when it dies."""

    def __init__(self, x, n):
        self.x, self.n = x, n

    def __del__(self):
        with torch.no_grad():
            self.x.mul_(0.5).add_(self.n)


class State(SimpleNamespace):
    """A program's state on a device, and what it lets be seen."""

    def __init__(self, device: str):
        super().__init__(
            device=device, seen=[], rng=random.Random(0), kept=[], hooks=[], ref=None, it=iter(())
        )
        torch.manual_seed(0)
        self.g = torch.Generator(device)
        self.g.manual_seed(1)
        for i in range(3):
            setattr(self, f"m{i}", data(i, SIDE, SIDE).to(device))
            setattr(self, f"v{i}", data(3 + i, SIDE).to(device))
        self.d0 = data(6, SIDE, SIDE, dtype=torch.float64).to(device)
        self.h0 = data(7, SIDE, SIDE, dtype=torch.bfloat16).to(device)
        self.b0 = data(8, SIDE, SIDE).gt(0).to(device)
        self.i0 = torch.tensor([2, 0, 3, 2]).to(device)
        self.r0 = data(9, 3, SIDE).to(device)
        self.u0 = data(10, 5).to(device)
        self.host = data(11, SIDE, SIDE)
        self.w = data(12, SIDE, SIDE).to(device).requires_grad_()
        self.c = data(13, SIDE).to(device).requires_grad_()

    def net(self, x):
        return self.module(x)

    def train(self, optimizer: str, foreach: bool):
        """Have a module and an optimizer."""
        self.module = Net().to(self.device)
        rule = {
            "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
            "adam": functools.partial(torch.optim.Adam, lr=0.01),
            "adamw": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        }[optimizer]
        self.opt = rule([self.w, self.c, *self.module.parameters()], foreach=foreach)

    def see(self, x):
        """Let a value be compared: a tensor's at the end, by a copy."""
        if isinstance(x, torch.Tensor):
            self.seen.append((tuple(x.shape), x.dtype, x.stride(), x.requires_grad))
            x = x.detach().clone()
        self.seen.append(x)

    def watch(self, x):
        """Let a tensor itself be compared as it is at the end."""
        self.seen.append(x.detach())

    def tidy(self, in_place: bool):
        """Keep the numbers small and the graphs short."""
        with torch.no_grad():
            for name, x in sorted(vars(self).items()):
                if not isinstance(x, torch.Tensor) or name in ("host", "b0"):
                    continue
                if name in ("w", "c"):
                    x.requires_grad_().copy_(safe(x))
                elif name == "i0":
                    self.i0 = x % SIDE
                elif in_place and not x.is_inference() and 0 not in x.stride():
                    x = x.detach()
                    x.nan_to_num_(0.5, 2.0, -2.0).clamp_(-2, 2)
                    setattr(self, name, x)
                else:
                    setattr(self, name, safe(x.detach()))
            self.host.nan_to_num_(0.5, 2.0, -2.0).clamp_(-2, 2)
