"""`a + a` on 8 by 8 numbers: what one op costs."""

from collections.abc import Callable

import torch

ROUND = 100
"""Ops an iteration, so that its end costs little."""


def make(device: str) -> Callable[[], None]:
    """One addition on `device`."""
    a = torch.randn(8, 8).to(device)
    done = 0

    def end_iteration() -> None:
        if device == "tandem":
            import torch_tandem

            torch_tandem.mark_step()

    def step() -> None:
        nonlocal done
        a + a
        done += 1
        if done % ROUND == 0:
            end_iteration()

    return step
