"""Model-agnostic meta-learning (MAML) on sinusoids, with 1 meta-parameter besides the initial weights.

The meta-parameter is the inner learning rate, which all tensors of the network share; maml_10.py learns one
rate for each tensor. Gradients are taken through gradients: `autograd.grad` with `create_graph=True` in
Python loops over tasks and inner steps.
"""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

TASKS = 5
SHOTS = 10
INNER_STEPS = 3
SIZES = (1, 40, 40, 40, 40, 1)


def network(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A multilayer perceptron of the given weights and biases."""
    *hidden, (weight, bias) = zip(weights[::2], weights[1::2], strict=True)
    for w, b in hidden:
        x = torch.tanh(F.linear(x, w, b))
    return F.linear(x, weight, bias)


def task(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of one sinusoid: the first half for adaptation, the second half for evaluation."""
    amplitude, phase = torch.rand(2, generator=generator) * torch.tensor([4.9, math.pi])
    x = torch.rand(2 * SHOTS, 1, generator=generator) * 10 - 5
    return x, (amplitude + 0.1) * torch.sin(x + phase)


def make(
    device: str,
    compile: Callable = lambda model: model,
    function: Callable = lambda step: step,
    fused: bool | None = None,
    meta_parameters: int = 1,
) -> Step:
    """A meta-training step on `device`.

    `function` wraps the part that computes on tensors, which needs a fused optimizer.
    """
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(SIZES)]
    weights = [parameter for layer in layers for parameter in layer.to(device).parameters()]
    rates = [nn.Parameter(torch.tensor(0.01, device=device)) for _ in range(meta_parameters)]
    rate_of = rates * (len(weights) // meta_parameters)
    optimizer = torch.optim.Adam([*weights, *rates], lr=1e-3, fused=fused)
    forward = compile(network)

    def adapted_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        adapted = weights
        for _ in range(INNER_STEPS):
            loss = F.mse_loss(forward(adapted, x[:SHOTS]), y[:SHOTS])
            gradients = torch.autograd.grad(loss, adapted, create_graph=True)
            adapted = [w - rate * g for w, rate, g in zip(adapted, rate_of, gradients, strict=True)]
        return F.mse_loss(forward(adapted, x[SHOTS:]), y[SHOTS:])

    @function
    def train(tasks: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        loss = torch.stack([adapted_loss(x, y) for x, y in tasks]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step() -> torch.Tensor:
        tasks = [task(generator) for _ in range(TASKS)]
        return train([(x.to(device), y.to(device)) for x, y in tasks])

    return step


if __name__ == "__main__":
    main(make, STEPS)
