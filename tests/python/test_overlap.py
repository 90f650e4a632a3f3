"""Windows that share memory.

The cases are written windows that overlap themselves or operands, copies with gaps, tensors that occur
several times in a list, and an `out=` that is sometimes an operand. A case is a line that runs repeatedly,
each time with other windows of one storage. All values of the storage, and the errors, must be eager's.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_tandem
from helpers import OWN

ELEMENTS = 24
ITERATIONS = 12


def window(base: torch.Tensor, rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a window of a shape. It may have gaps, any order of dimensions, and elements that occur several
    times.
    """
    strides, last = [], 1
    for size in reversed(shape):
        strides.insert(0, rng.choice([last, last, last + 1, 1, 1, 0, 2]))
        last = max(last, strides[0] * size)
    rng.random() < 0.2 and rng.shuffle(strides)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if extent > ELEMENTS:
        return window(base, rng, shape)
    return base.as_strided(shape, strides, rng.randrange(ELEMENTS - extent + 1))


def in_place(base, rng, step):
    x, y = (window(base, rng, (2, 3)) for _ in range(2))
    x.add_(1)
    x.mul_(y if rng.random() < 0.5 else 2)


def functional(base, rng, step):
    x, y = (window(base, rng, (2, 3)) for _ in range(2))
    base[:6] = (x + y).flatten()


def copies(base, rng, step):
    shape = rng.choice([(4,), (2, 3), (2, 2, 2)])
    # A host tensor of the same layout. The copy that is fed has the same gaps.
    host = torch.arange(float(ELEMENTS)) + step
    seed = rng.random()
    to, source = (window(b, random.Random(seed), shape) for b in (base, host))
    to.copy_(source)
    host.zero_()
    window(base, rng, shape).copy_(window(base, rng, shape))


def copies_of_all_but_gaps(base, rng, step):
    shape, strides = rng.choice([((4,), (2,)), ((2, 2, 2), (1, 1, 5)), ((2, 3), (4, 1)), ((2, 3), (1, 2))])
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    # A tensor that covers its whole storage.
    x = base.new_ones(extent) * step
    x.as_strided(shape, strides).copy_(torch.arange(float(extent)).as_strided(shape, strides))
    base[:extent].add_(x)


def copies_to_the_host(base, rng, step):
    host = torch.zeros(ELEMENTS)
    shape = rng.choice([(4,), (2, 3)])
    window(host, rng, shape).copy_(window(base, rng, shape))
    base.add_(host.to(base.device), alpha=0.5)


def lists(base, rng, step):
    n = rng.choice([2, 4, 9])
    xs, ys = ([window(base, rng, (3,)) for _ in range(n)] for _ in range(2))
    if rng.random() < 0.5:
        # Disjoint windows, one of which occurs twice.
        xs = [base[2 * i : 2 * i + 2] for i in range(n)]
        xs[rng.randrange(n)] = xs[0]
        ys = [x + 1 for x in xs]
    torch._foreach_add_(xs, ys)
    torch._foreach_mul_(xs, 0.5)


def long_lists(base, rng, step):
    x, y = base.new_ones(50_000), base.new_ones(50_000)
    xs = rng.choice([[x, x, y], [x, y, y, x, x], [x[:30_000], x[20_000:]], [x, y, x[1:]]])
    for _ in range(4):
        torch._foreach_add_(xs, 1.0)
        torch._foreach_mul_(xs, [float(i + 2) for i in range(len(xs))])
        if all(t.shape == x.shape for t in xs):
            torch._foreach_sub_(xs, xs[::-1])
        x.remainder_(11)
        y.remainder_(11)
    base[:2], base[2:4] = torch.stack([x.sum(), x[25_000]]), torch.stack([y.sum(), y[7]])


def out(base, rng, step):
    x, y, z = (window(base, rng, (2, 3)) for _ in range(3))
    place = rng.choice([x, y, z, z])
    given = torch.add(x, y, out=place)
    assert given is place
    torch.sin(x, out=rng.choice([x, z]))


def out_of_several(base, rng, step):
    x = base[:9].view(3, 3)
    a, b = base[9:18].view(3, 3), base.new_zeros(3, 3)
    place = rng.choice([x, a, b])
    assert torch.addmm(x, x, a, out=place) is place
    base[18:21] = place.sum(0)


def out_through_another_object(base, rng, step):
    x = rng.choice([base[:12].view(3, 4)[:, :3], base[:9].view(3, 3)])
    index = torch.tensor([rng.randrange(3) for _ in range(3)], device=base.device)
    # PyTorch's kernels distinguish the operand object from another object with the same window.
    place = rng.choice([x, x.view_as(x), x[:], base[12:21].view(3, 3)])
    torch.index_select(x, 0, index, out=place)
    small = base[21:24]
    place = rng.choice([small, small[:]])
    torch.add(x, small, out=place)
    base[:9] = place.flatten()


def lists_that_fail(base, rng, step):
    n = rng.randrange(2, 6)
    xs = [base.new_ones(3) * (i + 1) for i in range(n)]
    if rng.random() < 0.5:
        with torch.inference_mode():
            xs[rng.randrange(n)] = base.new_ones(3)
    ys = [base.new_ones(3 if rng.random() < 0.8 else 2) for _ in range(n)]
    try:
        torch._foreach_add_(xs, ys) if rng.random() < 0.8 else torch._foreach_mul_(xs, [2.0] * n)
    finally:
        base[:n] = torch.stack([x.sum() for x in xs])
        base[6 : 6 + n] = torch.tensor([-1 if x.is_inference() else x._version for x in xs])


CASES: list[Callable] = [
    in_place,
    functional,
    copies,
    copies_of_all_but_gaps,
    copies_to_the_host,
    lists,
    long_lists,
    out,
    out_of_several,
    out_through_another_object,
    lists_that_fail,
]


def states(case: Callable, device: str, seed: int) -> Iterator[tuple[torch.Tensor, str | None]]:
    """Yields, after each iteration, a copy of the storage and the error."""
    rng = random.Random(seed)
    base = torch.arange(float(ELEMENTS)).to(device)
    for step in range(ITERATIONS):
        error = None
        try:
            case(base, rng, step)
        except RuntimeError as raised:
            error = str(raised).split("\n")[0].split(" (raised by")[0]
        base.copy_(base.nan_to_num(1).remainder(7))
        torch_tandem.mark_step()
        yield base.cpu(), error


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_eager(case):
    for seed in range(4 if case is long_lists else 25):
        torch_tandem.reset()
        pairs = zip(states(case, "cpu", seed), states(case, "tandem", seed), strict=True)
        for step, ((expected, refused), (actual, error)) in enumerate(pairs):
            where = f"seed {seed}, iteration {step}"
            assert error == refused, where
            torch.testing.assert_close(actual, expected, rtol=1e-5 if OWN else 0, atol=0, msg=where)
