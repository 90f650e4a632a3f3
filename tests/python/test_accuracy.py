"""Errors of the cpu executor's own reductions relative to float64, compared with PyTorch's errors.

Operators, their gradients, lengths, layouts and distributions of values are combined; each combination is
drawn a few times. Ops run at once, with the bits that they have in all phases (`test_own_kernels.py`). The
largest error of any value may be twice PyTorch's largest error, or twice the rounding of a float.

`python tests/python/test_accuracy.py --large` tests more and longer combinations, and prints those with the
largest errors.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import OWN
from torch.nn import functional as F
from torch_tandem import _core

Tensors = tuple[torch.Tensor, ...]
Operator = Callable[..., torch.Tensor]
Spread = Callable[[torch.Tensor], torch.Tensor]

LENGTHS = (1, 3, 64, 65, 1000, 70_001, 1 << 20)
LARGE = (
    *LENGTHS,
    2,
    5,
    15,
    16,
    17,
    31,
    63,
    100,
    257,
    511,
    4095,
    4096,
    4097,
    10_007,
    1 << 16,
    300_001,
    9_400_003,
)
DRAWS = ((1 << 8, 100), (1 << 12, 24), (1 << 20, 2))
"""Numbers of draws for operands with fewer elements than the given number. The error of few values varies
much between draws.
"""
MOST = 1 << 20
"""Number of elements of an operator's operands above which only `--large` tests the operator."""
ROUNDING = 2.0**-24
"""Relative rounding error of a float: half a unit in the last place."""


def normal(x: torch.Tensor) -> torch.Tensor:
    return x


def far_from_zero(x: torch.Tensor) -> torch.Tensor:
    return x + 1e4


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs()


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Returns magnitudes from 1e-4 to 1e4."""
    exponent = torch.rand(x.shape, generator=torch.Generator().manual_seed(x.numel())) * 8 - 4
    return x * 10**exponent


def alternating(x: torch.Tensor) -> torch.Tensor:
    """Returns values that nearly cancel."""
    return x.abs() * torch.tensor([1.0, -1.0]).repeat(x.numel())[: x.numel()].view_as(x) + 0.01


DISTRIBUTIONS = (far_from_zero, positive, mixed)
MORE = (normal, alternating)


def reductions(n: int) -> Iterator[tuple[str, Operator, list[tuple[int, ...]]]]:
    """Yields operators over `n` values, with the shapes of their operands."""
    yield "sum", torch.sum, [(n,)]
    yield "mean", torch.mean, [(n,)]
    yield "dot", torch.dot, [(n,), (n,)]
    yield "norm", lambda x: torch.stack(torch._foreach_norm([x])), [(n,)]
    yield "sum of a product", lambda x, y: (x * y).sum(), [(n,), (n,)]
    yield "mean of a chain", lambda x, y: ((x - y) * 0.5 + 1).mean(), [(n,), (n,)]
    yield "sums of rows", lambda x: x.sum(1), [(3, n)]
    yield "means of rows of a product", lambda x, y: (x * y).mean(-1), [(2, n), (2, n)]
    yield "sums of columns", lambda x: x.sum(0), [(n, 3)]
    yield "means of planes", lambda x: x.mean((0, 1)), [(2, n, 5)]
    yield "sums of inner rows", lambda x: x.sum(1, keepdim=True), [(2, n, 3)]
    yield "sums of strided rows", lambda x: x[:, ::2].sum(1), [(2, 2 * n)]
    yield "sums of transposed rows", lambda x: x.T.sum(1), [(n, 3)]
    yield "softmax", lambda x: F.softmax(x, -1), [(2, n)]
    yield "logsumexp", lambda x: x.logsumexp(-1), [(2, n)]
    yield "logcumsumexp", lambda x: x.logcumsumexp(0), [(n, 3)]
    yield "logcumsumexp of rows", lambda x: x.logcumsumexp(1), [(3, n)]
    yield "log_softmax", lambda x: F.log_softmax(x, -1), [(2, n)]
    yield "layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), [(3, n), (n,), (n,)]
    yield "layer_norm plain", lambda x: F.layer_norm(x, x.shape[-1:]), [(1, n)]
    yield "layer_norm of many", lambda x, w, b: F.layer_norm(x, (7,), w, b), [(n, 7), (7,), (7,)]
    yield "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, n), (4,), (4,)]
    yield "group_norm of many", lambda x, w, b: F.group_norm(x, 3, w, b), [(n, 6, 3), (6,), (6,)]
    yield "batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(2, 3, n), (3,), (3,)]
    yield (
        "batch_norm of many",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [(n, 3, 5), (3,), (3,)],
    )
    if n > 1:
        yield "cross_entropy", lambda x: F.cross_entropy(x, classes(x)), [(n, 3)]
        yield "cross_entropy of many", lambda x: F.cross_entropy(x, classes(x), reduction="sum"), [(2, n)]
    yield (
        "embedding",
        lambda w, x: (F.embedding(classes(x[:, None]) % 2, w) * x[:, None]).sum(0),
        [(2, 3), (n,)],
    )
    if n <= 1 << 16:
        yield "conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), [(2, 3, n), (2, 3, 3), (2,)]
        yield "conv2d of pixels", lambda x, w, b: F.conv2d(x, w, b), [(n, 3, 2, 2), (2, 3, 1, 1), (2,)]


def classes(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]


def draw(shape: tuple[int, ...], spread: Spread, seed: int) -> torch.Tensor:
    return spread(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def with_gradients(op: Operator, tensors: Tensors) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = op(*leaves)
    back = torch.arange(out.numel(), dtype=out.dtype).add(1).cos().reshape(out.shape).to(out.device)
    grads = torch.autograd.grad(out, leaves, back)
    return [out.detach(), *grads]


def errors(op: Operator, shapes: list[tuple[int, ...]], spread: Spread) -> list[tuple[float, float]]:
    """Returns Tandem's and PyTorch's error for each result of an operator, in roundings of the largest
    element.

    This unit makes the errors of draws of large and of small values comparable. PyTorch's error is that of
    its less exact kernel: oneDNN's kernels depend on the CPU, and those with AVX2 add in another order than
    those with AVX-512.
    """
    found: list[list[tuple[float, float]]] = []
    for seed in range(next((times for most, times in DRAWS if elements(shapes) < most), 1)):
        # All operands but the first are weights and the like, so they are always drawn from a normal
        # distribution.
        tensors = tuple(draw(s, spread if i == 0 else normal, 10 * seed + i) for i, s in enumerate(shapes))
        exact = with_gradients(op, tuple(t.double() for t in tensors))
        plain = with_gradients(op, tensors)
        with torch.backends.mkldnn.flags(enabled=False):
            other = with_gradients(op, tensors)
        own = [t.cpu() for t in with_gradients(op, tuple(t.to("tandem") for t in tensors))]

        def away(x: torch.Tensor, e: torch.Tensor) -> float:
            error, rounding = (x.double() - e).abs().max().item(), e.abs().max().item() * ROUNDING
            return error / rounding if rounding > 0 else math.inf if error else 0.0

        results = zip(own, plain, other, exact, strict=True)
        found.append([(away(a, e), max(away(p, e), away(o, e))) for a, p, o, e in results])
    return [
        (max(own), max(plain))
        for own, plain in (zip(*draws, strict=True) for draws in zip(*found, strict=True))
    ]


def elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def ratios(lengths: tuple[int, ...], spreads: tuple[Spread, ...], most: int) -> Iterator[tuple[float, str]]:
    """Yields an error relative to PyTorch's or to the rounding, whichever is larger, with its description.

    Operands have at most `most` elements, except for operators over a single row.
    """
    before = _core.mode()
    _core.set_mode("trace")
    try:
        for n, spread in itertools.product(lengths, spreads):
            for name, op, shapes in reductions(n):
                if elements(shapes) > most and shapes[0] not in ((n,), (1, n)):
                    continue
                for number, (own, plain) in enumerate(errors(op, shapes, spread)):
                    ratio = 1.0 if own == plain else own / max(plain, 1.0)
                    what = f"{name} of {n} {spread.__name__}, value {number}: {own:.3g}, PyTorch {plain:.3g}"
                    yield (math.inf if math.isnan(ratio) else ratio), what
    finally:
        _core.set_mode(before)


@pytest.mark.skipif(not OWN, reason="of Tandem's own kernels")
def test_errors_are_at_most_twice_those_of_pytorch():
    bad = [(ratio, what) for ratio, what in ratios(LENGTHS, DISTRIBUTIONS, MOST) if ratio > 2]
    assert not bad, "\n".join(f"{ratio:.2f}: {what}" for ratio, what in sorted(bad, reverse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="more and longer rows")
    large = parser.parse_args().large
    many = (LENGTHS + LARGE, DISTRIBUTIONS + MORE, 1 << 25)
    found = sorted(ratios(*(many if large else (LENGTHS, DISTRIBUTIONS, MOST))), reverse=True)
    bad = sum(ratio > 2 for ratio, _ in found)
    print(f"{len(found)} values, {bad} beyond twice PyTorch's error; the worst:")
    for ratio, what in found[:40]:
        print(f"{ratio:8.2f}  {what}")


if __name__ == "__main__":
    main()
