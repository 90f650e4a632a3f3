"""Rows of many lengths. A team keeps short rows in registers, and reads longer rows several times."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.alike import alike

LENGTHS = [4, 20, 30, 128, 300, 512, 516, 1000, 1024, 2048, 2052, 4100, 8192, 8200]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def rows(length, dtype, begin=0):
    """Rows of normally distributed numbers. With `begin`, they are views that begin in the middle of a
    vector.
    """
    generator = torch.Generator().manual_seed(length)
    storage = torch.randn(begin + 5 * length, generator=generator).to(dtype)
    return storage[begin:].view(5, length)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_softmax(length, dtype):
    x, grad = rows(length, dtype), rows(length, dtype)
    x[1, 0], x[2, :3], x[3] = torch.inf, -torch.inf, -torch.inf
    x[4, -1] = torch.nan
    alike(lambda x: [x.softmax(1), x.log_softmax(1)], x)
    alike(lambda x: x[1:].softmax(1), rows(length, dtype, 1))
    # The rows have large exponents, and exponents far below the largest.
    alike(lambda x: [(x * 50).softmax(1), (x * 50).log_softmax(1)], rows(length, torch.float32))
    y = rows(length, dtype).softmax(1)
    alike(lambda grad, y: torch.ops.aten._softmax_backward_data(grad, y, 1, y.dtype), grad, y)
    alike(lambda grad, y: torch.ops.aten._log_softmax_backward_data(grad, y, 1, y.dtype), grad, y.log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_layer_norm(length, dtype):
    x, grad = rows(length, dtype) * 2 + 3, rows(length, dtype)
    weight, bias = rows(length, dtype)[0], rows(length, dtype)[1]

    def step(x, weight, bias, grad):
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        y = F.layer_norm(x, (x.shape[1],), weight, bias)
        return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad)]

    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    alike(step, x, weight, bias, grad, bound=bound)
    alike(lambda x: F.layer_norm(x, (x.shape[1],)), rows(length, dtype, 3), bound=bound)


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_and_extremes(length):
    for begin in (0, 2):
        x = rows(length, torch.float32, begin)
        alike(lambda x: [x.sum(1), x.amax(1), x.argmin(1), x.var(1), x.norm(dim=1)], x, bound=1e-4)
