"""The cpu executor's kernels for point-wise operators and rows, compared with eager's kernels and with the
copy bandwidth.

Each expression is computed on tensors of several sizes, alternately in eager and co-executed. All results of
a block are kept until the block ends, so that no op is dead. Bandwidth counts the bytes of each operand and
of the result once, as if intermediate results needed no memory. Eager PyTorch makes the copies.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_tandem
from tables import table, write_section

SIZES = (1, 64, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
BLOCKS = 9
PAUSE = 0.01
"""Seconds before a measurement, in which OpenMP's threads stop spinning after eager's last kernel."""

Expression = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gelu_by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """GELU as in GPT-2, with eight operators."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def rows(x: torch.Tensor) -> torch.Tensor:
    """View of the elements as a matrix with rows of at most 1,024 elements."""
    return x.view(-1, min(x.numel(), 1024))


EXPRESSIONS: dict[str, tuple[Expression, int]] = {
    "x + y": (lambda x, y: x + y, 3),
    "gelu(x)": (lambda x, y: F.gelu(x), 2),
    "gelu in eight operators": (gelu_by_hand, 2),
    "silu(x) * y": (lambda x, y: F.silu(x) * y, 3),
    "x.sum()": (lambda x, y: x.sum(), 1),
    "rows(x).sum(1)": (lambda x, y: rows(x).sum(1), 1),
    "rows(x).sum(0)": (lambda x, y: rows(x).sum(0), 1),
    "rows(x).softmax(1)": (lambda x, y: rows(x).softmax(1), 2),
    "(x * y).sum()": (lambda x, y: (x * y).sum(), 2),
}
"""The expressions by name, each with the number of full-size tensors that it reads and writes."""


def block(run: Expression, x: torch.Tensor, y: torch.Tensor, times: int, wait: Callable[[], None]) -> float:
    """Return the seconds per evaluation of an expression."""
    wait()
    start = time.perf_counter()
    held = [run(x, y) for _ in range(times)]
    wait()
    spent = time.perf_counter() - start
    held.clear()
    torch_tandem.mark_step()
    return spent / times


def held_results(size: int) -> int:
    """Return the number of results that a block keeps, which is small for large tensors, as in programs."""
    return max(4, min(200, (1 << 20) // size))


def measure(run: Expression, size: int) -> tuple[list[float], list[float]]:
    """Return the seconds per evaluation in each block, for eager and for co-execution."""
    x, y = torch.randn(size), torch.rand(size)
    there = x.to("tandem"), y.to("tandem")
    times = held_results(size)
    ways = ((x, y, lambda: None), (*there, torch_tandem.synchronize))
    for _ in range(6):
        for a, b, wait in ways:
            block(run, a, b, times, wait)

    def second(a: torch.Tensor, b: torch.Tensor, wait: Callable[[], None]) -> float:
        """Run two blocks and return the time of the second. The first block wakes threads and
        fills caches.
        """
        time.sleep(PAUSE)
        block(run, a, b, times, wait)
        return block(run, a, b, times, wait)

    seconds = [[second(*way) for way in ways] for _ in range(BLOCKS)]
    eager, tandem = zip(*seconds, strict=True)
    return list(eager), list(tandem)


def bandwidth(size: int) -> float:
    """Return the bytes per second of copies to as many tensors as a block keeps results."""
    x, copies = torch.randn(size), [torch.zeros(size) for _ in range(held_results(size))]
    seconds = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for y in copies:
            y.copy_(x)
        seconds.append((time.perf_counter() - start) / len(copies))
    return 8 * size / statistics.median(seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(2)
    copies = {size: bandwidth(size) for size in SIZES if size >= 1 << 22}
    rows = []
    for name, (run, tensors) in EXPRESSIONS.items():
        for size in SIZES:
            eager, tandem = measure(run, size)
            ratios = statistics.quantiles([a / b for a, b in zip(eager, tandem, strict=True)], n=4)
            us = [f"{statistics.median(side) * 1e6:.4g}" for side in (eager, tandem)]
            share = 4 * tensors * size / statistics.median(tandem) / copies[size] if size in copies else None
            ratio = f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f})"
            rows.append([name, f"{size:,}", *us, ratio, "" if share is None else f"{share:.0%}"])
            print(rows[-1], flush=True)
    head = ["expression", "elements", "eager, us", "Tandem, us", "eager / Tandem", "of copy bandwidth"]
    write_section("pointwise.py", table(head, rows))


if __name__ == "__main__":
    main()
