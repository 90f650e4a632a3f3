"""Learn the motion of a pendulum with a small network: operators are short, so Python sets the pace."""

import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

GRAVITY, LENGTH, FRICTION, TIME_STEP = 9.81, 1.0, 0.1, 0.05  # m/s^2, m, 1/s, s


def simulate(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return angles and velocities, and what they are a time step later."""
    rng = np.random.default_rng(seed)
    angle, velocity = rng.uniform(-np.pi, np.pi, n), rng.uniform(-6, 6, n)
    before = np.stack([np.sin(angle), np.cos(angle), velocity], axis=1)
    for _ in range(10):
        velocity = velocity - (GRAVITY / LENGTH * np.sin(angle) + FRICTION * velocity) * TIME_STEP / 10
        angle = angle + velocity * TIME_STEP / 10
    after = np.stack([np.sin(angle), np.cos(angle), velocity], axis=1)
    return torch.from_numpy(before.astype("float32")), torch.from_numpy(after.astype("float32"))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(x + model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--losses", metavar="FILE", help="write the losses and the time of training as JSON")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).to(
        args.device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    states, next_states = (data.to(args.device) for data in simulate(8192, seed=0))

    losses = []
    begin = time.perf_counter()
    for step in range(args.steps):
        at = step * args.batch_size % len(states)
        batch = slice(at, at + args.batch_size)
        loss = train_step(model, optimizer, states[batch], next_states[batch])
        schedule.step()
        if (step + 1) % 1000 == 0:
            losses.append(loss.item())
            print(f"step {step + 1:,}: loss {losses[-1]:.2e}")
    seconds = time.perf_counter() - begin

    if args.losses:
        with open(args.losses, "w") as file:
            json.dump({"losses": losses, "seconds": seconds}, file)


if __name__ == "__main__":
    main()
