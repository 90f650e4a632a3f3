"""Point-wise operators on operands in different orders of memory."""

import itertools

import pytest
import torch
import torch_tandem

from tests.gpu.alike import alike

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def numbers(dtype, *sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randint(-100, 100, sizes, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:], ids=str)
def test_permuted_copies(order, dtype):
    for sizes in [(3, 40, 33), (17, 5, 64), (32, 32, 32), (1, 70, 16)]:
        x = numbers(dtype, *sizes)
        alike(lambda x: x.permute(order).contiguous(), x)
        alike(lambda x: x.permute(order).clone(memory_format=torch.contiguous_format), x[..., 1:])
    alike(lambda x: x.permute(0, 2, 3, 1).contiguous(), numbers(dtype, 2, 19, 6, 7))
    alike(lambda x: x.contiguous(memory_format=torch.channels_last), numbers(dtype, 2, 19, 6, 7))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_operands_in_several_orders(dtype):
    x, y = numbers(dtype, 50, 36), numbers(dtype, 36, 50)
    row, column, one = numbers(dtype, 36), numbers(dtype, 50, 1), numbers(dtype, 1)
    alike(lambda x, y: x + y.t(), x, y)
    alike(lambda x, y: torch.add(y.t(), x), x, y)
    alike(lambda x, row, column, one: [x * row, x - column, x + one, x + row + column], x, row, column, one)
    alike(lambda x, row: x[:, 1:33] * row[1:33], x, row)
    alike(lambda x, row: torch.where(x > row, x, row), x, row)
    alike(
        lambda x, y, column: torch.addcmul(x, y.t(), column) if x.is_floating_point() else x * y.t(),
        x,
        y,
        column,
    )
    whole = numbers(dtype, 4, 3, 20, 24)
    alike(lambda x, m: x + m, whole, numbers(dtype, 4, 1, 1, 24))
    alike(lambda x, m: x + m, whole, numbers(dtype, 20, 24))
    alike(lambda x, m: x.transpose(1, 2) + m, whole, numbers(dtype, 24))
    alike(
        lambda x, m: x.transpose(1, 3) + m.transpose(1, 3), whole, whole + 1 if dtype != torch.bool else whole
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_operands_in_several_orders(dtype):
    given = [torch.randn(40, 36).to(dtype), torch.randn(36, 40).to(dtype), torch.randn(36).to(dtype)]
    there = [x.to("tandem") for x in given]

    def step(x, y, row):
        return (x + y.t()) * row, (x * row).sigmoid(), (y.t() * 2 + x).contiguous()

    torch_tandem.reset()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for _ in range(12):
        results = step(*there)
        torch_tandem.mark_step()
        for result, expected in zip(results, step(*given), strict=True):
            torch.testing.assert_close(result.cpu(), expected, rtol=bound, atol=bound)
    torch_tandem.synchronize()
    assert torch_tandem.report()["ops_coexecuted"] > 0
