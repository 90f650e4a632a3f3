"""Gradients of windows (`x[:, t]`, slices, and copies to them) are written into the whole gradient.

The bits are eager's.
"""

import json
import random
import subprocess
import sys

import pytest
import torch
from helpers import OWN, coexecuting, data, same_bits
from models import STEPS

VALUES = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.5, -2.25, float("inf"), 1e-3])
"""Elements of incoming gradients. Sums of some of them are -0.0, or depend on the order."""


def _windows(draw: random.Random, sizes: list[int]) -> list[tuple]:
    """Indices of one tensor: windows that are equal, apart or overlap, in one dimension or in several."""
    favourite, made = draw.randrange(len(sizes)), []
    for _ in range(draw.randint(2, 7)):
        dim = favourite if draw.random() < 0.8 else draw.randrange(len(sizes))
        size = sizes[dim]
        index = (
            draw.randrange(-size, size)
            if draw.random() < 0.5
            else slice(
                draw.choice([None, *range(-size, size + 1)]),
                draw.choice([None, *range(-size, size + 3)]),
                draw.choice([None, 1, 2, 3]),
            )
        )
        made.append((slice(None),) * dim + (index,))
    return made + draw.choices(made, k=draw.randint(0, 2))


def _gradient(device: str, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The gradient of a tensor of which windows are used, beside uses of the whole tensor."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    generator = torch.Generator().manual_seed(seed)

    def values(like: torch.Tensor) -> torch.Tensor:
        return VALUES[torch.randint(len(VALUES), like.shape, generator=generator)].to(device, dtype)

    leaf = torch.ones(sizes, dtype=dtype, device=device, requires_grad=True)
    x = leaf if draw.random() < 0.5 else leaf.view(sizes)
    uses = [x[index] for index in _windows(draw, sizes)]
    uses += [x * 1.0 for _ in range(draw.choice([0, 0, 1, 2]))]
    if draw.random() < 0.3:
        uses += [x[index].flatten()[:1] for index in _windows(draw, sizes)]
    draw.shuffle(uses)
    if draw.random() < 0.3:
        x.register_hook(lambda grad: grad * 1.0)
    torch.autograd.backward(uses, [values(use) for use in uses])
    return [leaf.grad]


@pytest.mark.parametrize("seed", range(12))
def test_any_windows_have_the_bits_of_whole_gradients(seed):
    for case in range(seed * 40, seed * 40 + 40):
        dtype = random.Random(case).choice([torch.float32, torch.float64, torch.bfloat16])
        expected, actual = (_gradient(device, case, dtype) for device in ("cpu", "tandem"))
        for a, b in zip(expected, actual, strict=True):
            assert same_bits(a, b.cpu()), (case, a, b)


@pytest.mark.parametrize(
    "program",
    [
        lambda y, zeros: (zeros[1:3].copy_(y) * torch.tensor(-0.0, device=y.device)).sum() + y[:1].sum(),
        lambda y, zeros: zeros[1:3].copy_(y)[1] * 3 + y[:1].sum(),
        lambda y, zeros: y[1 :: 2**63 - 1].sum() + y[:1].sum() * 3,
        lambda y, zeros: y[0] * -0.0 + y[1] * -0.0,
    ],
)
def test_values_and_versions_of_gradients(program):
    """A copy's source has negative zeros of its own, steps may be large, and added zeros are no write."""
    seen = []
    for device in ("cpu", "tandem"):
        x = torch.ones(2, device=device, requires_grad=True)
        program(x * 1, torch.zeros(4, device=device)).backward()
        y = torch.ones(2, device=device, requires_grad=True)
        (y[0] * 2 + y[1]).backward()
        seen.append((x.grad.cpu(), y.grad._version))
    assert same_bits(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]


def _copied(device: str, seed: int) -> list[torch.Tensor]:
    """The gradients of what is written to windows of a tensor, some of which are read again."""
    draw = random.Random(seed)
    rows, columns = draw.randint(2, 6), draw.randint(1, 4)
    generator = torch.Generator().manual_seed(seed)
    values = VALUES[torch.randint(len(VALUES), (rows, columns), generator=generator)].to(device)
    first = torch.ones(rows, columns, device=device, requires_grad=True)
    leaves = [data(columns, seed=t).to(device).requires_grad_() for t in range(rows)]
    given = [leaf * 1.0 for leaf in leaves]
    parts = [t[index] for t in given for index in draw.choices([slice(0, 1), slice(-1, None), -1], k=2)]
    out = first * 1.0
    for t in draw.sample(range(rows), rows):
        match draw.randrange(4):
            case 0:
                out[t] = given[t]
            case 1:
                out[t : t + 2] = given[t] * out[t].clone()
            case 2:
                out[t].mul_(given[t])
            case _:
                out[:, 0][t].copy_(given[t][0] * out[t - 1, -1].clone())
    uses = [out, out[0]] if draw.random() < 0.5 else [out]
    zeros = [torch.full_like(part, -0.0) for part in parts]
    torch.autograd.backward([*uses, *parts], [*[values, values[0]][: len(uses)], *zeros])
    return [first.grad, *(t.grad for t in leaves)]


@pytest.mark.parametrize("seed", range(8))
def test_copies_to_windows_have_the_bits_of_copied_gradients(seed):
    for case in range(seed * 25, seed * 25 + 25):
        for a, b in zip(_copied("cpu", case), _copied("tandem", case), strict=True):
            assert (a is None and b is None) or same_bits(a, b.cpu()), (case, a, b)


@coexecuting
def test_a_scan(device):
    """Each step reads windows of the input and of the output, and writes the next window."""
    x = data(6, 9, 4).to(device).requires_grad_()
    decay = torch.full((4,), 0.9, device=device, requires_grad=True)
    for _ in range(STEPS):
        out = torch.zeros(6, 9, 4, device=device)
        out[:, 0] = x[:, 0]
        for t in range(1, 9):
            out[:, t] = (out[:, t - 1].clone() * decay + x[:, t] * x[:, t, :1]).tanh()
        loss = out.square().mean() + x[:, 2:5].exp().mean()
        loss.backward()
        yield loss, x.grad, decay.grad
        x.grad = None


LOOPS = """
import json, torch, torch_tandem

def select(x, steps):
    h = torch.zeros(64, device="tandem")
    for t in range(steps):
        h = h * 0.5 + x[t]
    return h

def slice(x, steps):
    return torch.stack([x[t : t + 1, 3:].sum() for t in range(steps)])

def write(x, steps):
    out = torch.zeros_like(x)
    out[0] = x[0]
    for t in range(1, steps):
        out[t] = out[t - 1].clone() * 0.5 + x[t]
    return out

def so_far():
    torch_tandem.synchronize()
    return sum(kernel["bytes"] for kernel in torch_tandem.report()["kernels"])

def measured(loop, steps):
    x = torch.ones(steps, 64, device="tandem", requires_grad=True)
    for iteration in range(12):
        if iteration == 8:
            before = so_far()
        loop(x, steps).sum().backward()
        x.grad = None
        torch_tandem.mark_step()
    return so_far() - before

torch_tandem.record()
loops = (select, slice, write)
print(json.dumps({loop.__name__: [measured(loop, steps) for steps in (64, 256)] for loop in loops}))
"""


def test_loops_over_windows_take_bytes_in_proportion_to_their_steps():
    run = subprocess.run([sys.executable, "-c", LOOPS], capture_output=True, text=True, check=True)
    for name, (few, many) in json.loads(run.stdout.splitlines()[-1]).items():
        assert 0 < many < 5 * few, (name, few, many)


def test_denormal_numbers_are_flushed_where_zeros_are_added():
    """An addition of zeros flushes them, too, so the whole gradient is added."""
    if OWN or not torch.set_flush_denormal(True):
        pytest.skip("the CPU cannot")
    try:
        seen = []
        for device in ("cpu", "tandem"):
            x = torch.ones(3, 2, device=device, requires_grad=True)
            tiny = torch.tensor([1, 2], dtype=torch.int32).view(torch.float32).to(device)
            torch.autograd.backward([x[0], x[1]], [tiny, torch.ones(2, device=device)])
            seen.append(x.grad.cpu().view(torch.int32))
        assert torch.equal(*seen)
    finally:
        torch.set_flush_denormal(False)
