"""The machine's peak bandwidth and arithmetic rate, which the report compares kernels with (roofline)."""

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
    """Measure the rates of a copy, in bytes read and written, and of a matrix product, in operations.

    Both are per second, and each is the best of a few tries on PyTorch's threads.
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
