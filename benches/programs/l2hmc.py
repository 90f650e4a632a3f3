"""L2HMC: a Markov chain sampler whose leapfrog steps are trained, on a mixture of two Gaussians.

Each of ten leapfrog steps calls small networks and takes the energy's gradient by `autograd.grad` with
`create_graph=True`, forward and backward in time: many small operators in nested Python loops.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = None

CHAINS = 64
LEAPFROG_STEPS = 10
HIDDEN = 10
SCALE = 0.1


def energy(x: torch.Tensor) -> torch.Tensor:
    """Energy of a mixture of two Gaussians, at -2 and 2 on the first axis."""
    centers = x.new_tensor([[-2.0, 0.0], [2.0, 0.0]])
    distances = (x.unsqueeze(1) - centers).square().sum(2)
    return -torch.logsumexp(-distances / (2 * SCALE), dim=1)


def energy_gradient(x: torch.Tensor) -> torch.Tensor:
    if not x.requires_grad:
        x = x.requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


class Network(nn.Module):
    """Scale, transformation and translation of an update."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, HIDDEN)
        self.second = nn.Linear(2, HIDDEN)
        self.time = nn.Linear(2, HIDDEN)
        self.hidden = nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Linear(HIDDEN, 2)
        self.transform = nn.Linear(HIDDEN, 2)
        self.translate = nn.Linear(HIDDEN, 2)
        self.scale_size = nn.Parameter(torch.zeros(2))
        self.transform_size = nn.Parameter(torch.zeros(2))

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, time: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden = torch.relu(self.first(first) + self.second(second) + self.time(time))
        hidden = torch.relu(self.hidden(hidden))
        scale = torch.tanh(self.scale(hidden)) * self.scale_size.exp()
        transform = torch.tanh(self.transform(hidden)) * self.transform_size.exp()
        return scale, transform, self.translate(hidden)


class Dynamics(nn.Module):
    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.position, self.momentum = Network(), Network()
        self.log_eps = nn.Parameter(torch.tensor(math.log(0.1)))
        phases = 2 * math.pi * torch.arange(LEAPFROG_STEPS) / LEAPFROG_STEPS
        self.register_buffer("times", torch.stack((phases.cos(), phases.sin()), dim=1))
        masks = [rng.permutation([0.0, 1.0]) for _ in range(LEAPFROG_STEPS)]
        self.register_buffer("masks", torch.tensor(np.array(masks), dtype=torch.float32))

    def kick(self, x: torch.Tensor, v: torch.Tensor, t: int, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the momentum after half an update and the log-determinant of its Jacobian.

        With sign -1, the update is inverted.
        """
        eps = self.log_eps.exp()
        gradient = energy_gradient(x)
        scale, transform, translate = self.momentum(x, gradient, self.times[t])
        scale = 0.5 * sign * eps * scale
        force = 0.5 * eps * (torch.exp(eps * transform) * gradient + translate)
        v = v * scale.exp() - force if sign > 0 else (v + force) * scale.exp()
        return v, scale.sum(1)

    def drift(
        self, x: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, t: int, sign: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the position after an update of the coordinates at which `mask` is 0, and the update's
        log-determinant.

        With sign -1, the update is inverted.
        """
        eps = self.log_eps.exp()
        scale, transform, translate = self.position(v, mask * x, self.times[t])
        scale = sign * eps * scale
        way = eps * (torch.exp(eps * transform) * v + translate)
        moved = x * scale.exp() + way if sign > 0 else (x - way) * scale.exp()
        return mask * x + (1 - mask) * moved, ((1 - mask) * scale).sum(1)

    def forward(
        self, x: torch.Tensor, v: torch.Tensor, sign: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return position and momentum after a trajectory, and the log-determinant of its Jacobian."""
        log_volume = x.new_zeros(len(x))
        steps = range(LEAPFROG_STEPS)
        for t in steps if sign > 0 else reversed(steps):
            masks = (self.masks[t], 1 - self.masks[t])
            v, volume = self.kick(x, v, t, sign)
            log_volume = log_volume + volume
            for mask in masks if sign > 0 else reversed(masks):
                x, volume = self.drift(x, v, mask, t, sign)
                log_volume = log_volume + volume
            v, volume = self.kick(x, v, t, sign)
            log_volume = log_volume + volume
        return x, v, log_volume


def propose(dynamics: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return proposed positions, each forward or backward in time, and their acceptance probabilities."""
    v = torch.randn_like(x)
    forward = torch.rand_like(x[:, 0]) < 0.5
    ends = zip(dynamics(x, v, 1), dynamics(x, v, -1), strict=True)
    new_x, new_v, log_volume = (torch.where(forward.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in ends)
    start = energy(x) + 0.5 * v.square().sum(1)
    end = energy(new_x) + 0.5 * new_v.square().sum(1)
    return new_x, torch.exp((start - end + log_volume).clamp(max=0))


def make(
    device: str,
    compile: Callable = lambda model: model,
    function: Callable = lambda step: step,
    fused: bool | None = None,
) -> Step:
    """A training step on `device`.

    `function` wraps the part that computes on tensors, which needs a fused optimizer.
    """
    model = Dynamics(np.random.default_rng(0)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    dynamics = compile(model)
    chains = torch.randn(CHAINS, 2).to(device)

    @function
    def train(chains: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The batch has the chains and as many new random points, so that the sampler also learns to burn in.
        x = torch.cat((chains, torch.randn_like(chains)))
        new_x, probability = propose(dynamics, x)
        jump = (new_x - x).square().sum(1) * probability + 1e-4
        loss = (SCALE / jump - jump / SCALE).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            accepted = torch.rand_like(probability) < probability
            chains = torch.where(accepted.unsqueeze(1), new_x, x)[:CHAINS]
        return loss.detach(), chains

    def step() -> torch.Tensor:
        nonlocal chains
        loss, chains = train(chains)
        return loss

    return step


if __name__ == "__main__":
    main(make, STEPS)
