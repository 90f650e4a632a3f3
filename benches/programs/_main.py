"""Runs a program of this folder as a script, and prints each step's loss on a line."""

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

Step = Callable[[], Any]
"""A training (or sampling) step. It returns its loss, as a number or as a tensor of one element."""


def endless(loader: Iterable) -> Iterator:
    """Yield the batches of a loader, over and over."""
    while True:
        yield from loader


def as_function(step: Callable) -> Callable:
    """Wrap the part of a step that computes on tensors as a `torch_tandem.function`, if Tandem runs the
    program.
    """
    tandem = sys.modules.get("torch_tandem")
    return tandem.function(step, max_graphs=64) if tandem else step


def seed() -> None:
    """Seed all generators, so that every run of a program starts from the same state."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def main(make: Callable[[str], Step], steps: int) -> None:
    """Print each step's loss with all digits. `make` builds the program's step on a device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    seed()
    step = make(args.device)
    for number in range(args.steps):
        print(number, float(step()).hex(), flush=True)
