"""REINFORCE on the cart pole: reinforcement learning with an environment written in NumPy.

Each step of an episode reads the action with `.item()`, and the environment decides when the episode ends, so
the program's control flow depends on the parameters that have been learned so far.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from _main import Step, main
from torch import nn

STEPS = 20
COMPARABLE = 10

LEAST_STEPS = 80
"""Minimum number of environment steps per update. The last episode is always finished."""


class CartPole:
    """The cart pole: a pole on a cart that is pushed to the left or to the right."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def reset(self) -> np.ndarray:
        self.state = self.rng.uniform(-0.05, 0.05, size=4)
        self.steps = 0
        return self.state

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """Apply an action. Return the new state, the reward, and whether the episode has ended."""
        _, speed, angle, spin = self.state
        force = 10.0 if action == 1 else -10.0
        push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        pull = push - 0.05 * turn * math.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.array([speed, pull, spin, turn])
        self.steps += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)
        return self.state, 1.0, fallen or self.steps >= 200


def returns(rewards: list[float], discount: float = 0.99) -> list[float]:
    """Return, for each step of an episode, the discounted sum of the rewards of this step and of all later
    steps.
    """
    total, totals = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        totals.append(total)
    return totals[::-1]


def make(device: str, compile: Callable = lambda model: model) -> Step:
    """An update of the policy on `device`, with the episodes that it needs."""
    env = CartPole(np.random.default_rng(0))
    model = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    policy = compile(model)

    def episode() -> tuple[list[torch.Tensor], list[float]]:
        log_probabilities, rewards = [], []
        state, ended = env.reset(), False
        while not ended:
            logits = policy(torch.from_numpy(state).float().to(device))
            log_probability = torch.log_softmax(logits, dim=0)
            action = torch.multinomial(log_probability.exp(), 1).item()
            state, reward, ended = env.step(action)
            log_probabilities.append(log_probability[action])
            rewards.append(reward)
        return log_probabilities, returns(rewards)

    def step() -> torch.Tensor:
        log_probabilities, values = [], []
        while len(values) < LEAST_STEPS:
            for whole, part in zip((log_probabilities, values), episode(), strict=True):
                whole += part
        value = torch.tensor(values, device=device)
        advantage = (value - value.mean()) / value.std()
        loss = -(torch.stack(log_probabilities) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(make, STEPS)
