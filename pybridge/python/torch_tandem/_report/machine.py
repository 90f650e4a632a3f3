"""Peak bandwidth and arithmetic rate of this machine: the roofline that kernels are compared with."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_tandem._report.types import Machine

_COPIED = 64 << 20  # bytes; more than fits in caches
_ROWS = 1024  # rows and columns of the matrices
_TRIES = 5


@functools.cache
def peaks() -> Machine:
    """Measure bytes per second of a copy (read and written) and operations per second of a matrix product.

    Each is the best of a few tries on PyTorch's threads.
    """
    source = torch.ones(_COPIED // 4, device="cpu")
    target = torch.empty_like(source)
    a = torch.ones(_ROWS, _ROWS, device="cpu")
    with torch.no_grad():
        copy = _best(lambda: target.copy_(source))
        product = _best(lambda: a @ a)
    return {"copy": 2 * _COPIED / copy, "matmul": 2 * _ROWS**3 / product}


def _best(work: Callable[[], Any]) -> float:
    """Return the shortest time of a few calls, in seconds."""
    times = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
