"""Seeding in program order.

The device draws from PyTorch's default CPU generator, on GraphRunner. So whoever reads or sets that
generator's state on the host first waits for the draws that the program asked for before.
"""

import functools
from collections.abc import Callable

import torch

from torch_tandem import _core

_NAMES = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")


def install() -> None:
    """Make torch's seeding functions wait for pending draws."""
    for name in _NAMES:
        function = _after_draws(getattr(torch.random, name))
        setattr(torch.random, name, function)
        setattr(torch, name, function)


def _after_draws(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        _core.wait_random()
        return function(*args, **kwargs)

    return wrapper
