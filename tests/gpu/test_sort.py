"""Sorting and searching on the GPU against the CPU."""

import math
from functools import partial

import pytest
import torch
import torch_tandem

device = "tandem"
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]


def native(call, *args):
    """Returns a call's result on the device, after checking that the call did not take the host path."""
    args = [a.to(device) for a in args]
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    result = call(*args)
    torch_tandem.synchronize()
    assert not torch_tandem.report()["host_ops"]
    return result


def same(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        torch.testing.assert_close(g.cpu(), e, rtol=0, atol=0, equal_nan=True)


def make(*size, dtype):
    """Returns numbers with ties; floats include infinities, zeros of both signs, and NaN."""
    x = torch.randint(-60, 60, size)
    if not dtype.is_floating_point:
        return (x % 2 if dtype == torch.bool else x % 50 if dtype == torch.uint8 else x).to(dtype)
    x = x.to(dtype)
    for at, value in enumerate((math.inf, -math.inf, math.nan, -0.0, 0.0, -math.nan)):
        x[torch.rand(size) < 0.02 * (at + 1) / 6] = value
    return x


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sort_is_stable(dtype, descending):
    for size, dim in [((1,), 0), ((3, 2, 5), 1), ((40, 33), 0), ((2, 1024), 1), ((3, 1025), 1), ((9000,), 0)]:
        x = make(*size, dtype=dtype)
        call = partial(torch.sort, dim=dim, descending=descending, stable=True)
        same(native(call, x), call(x))


@pytest.mark.parametrize("order", ["random", "equal", "ascending", "descending"])
@pytest.mark.parametrize("size", [1023, 1024, 1025, 2047, 2048, 2049, 32 * 2048, 32 * 2048 + 1])
def test_sizes_around_those_of_blocks_and_tiles(size, order):
    x = torch.arange(size)
    if order == "random":
        x = torch.randint(-(2**31), 2**31, (size,))
    elif order == "equal":
        x = torch.full((size,), -7)
    elif order == "descending":
        x = x.flip(0)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        y = x.to(dtype)
        same(native(lambda y: y.sort(stable=True), y), y.sort(stable=True))
    same(native(lambda x: x.sort(stable=True, descending=True), x), x.sort(stable=True, descending=True))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16, torch.int8])
def test_many_rows_longer_than_a_block(dtype, descending):
    call = partial(torch.sort, dim=0, descending=descending, stable=True)
    for size in [(1500, 70), (2500, 3, 2), (70_000, 2)]:
        x = make(*size, dtype=dtype)
        same(native(call, x), call(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_halves(dtype):
    x = torch.arange(2**16)[torch.randperm(2**16)].to(torch.int16).view(dtype)
    for descending in (False, True):
        call = partial(torch.sort, descending=descending, stable=True)
        got, expected = native(call, x), call(x)
        same(got, expected)
        assert torch.equal(
            got[0].cpu().signbit() & (got[0].cpu() == 0), expected[0].signbit() & (expected[0] == 0)
        )


def test_all_exponents_of_floats():
    x = torch.randint(-(2**31), 2**31, (5000,)).to(torch.int32).view(torch.float32)
    same(native(lambda x: x.sort(stable=True), x), x.sort(stable=True))
    wide = torch.randint(-(2**63), 2**63 - 1, (5000,)).view(torch.float64)
    same(native(lambda x: x.sort(stable=True), wide), wide.sort(stable=True))


def test_integers_of_64_bits():
    x = torch.randint(-(2**62), 2**62, (3000,))
    x[:500] %= 2**33
    same(native(lambda x: x.sort(), x), x.sort())
    x = torch.randint(-2, 2, (100_000,)) * 2**40 + torch.randint(-2, 2, (100_000,))
    same(native(lambda x: x.sort(stable=True), x), x.sort(stable=True))


def test_long_rows():
    x = torch.randn(3, 70_001)
    same(native(lambda x: x.sort(1), x), x.sort(dim=1, stable=True))
    x[:, 7] = math.nan
    same(native(lambda x: x.t().sort(0, descending=True), x), x.t().sort(dim=0, descending=True, stable=True))


@pytest.mark.parametrize("size", [7, 600, 1024, 3000, 50_257])
@pytest.mark.parametrize("count", [5, 50, 512, 700])
@pytest.mark.parametrize("largest", [True, False])
def test_topk(size, count, largest):
    count = min(count, size)
    x = torch.randperm(3 * size).view(3, size).float()
    x[0, 0] = math.nan
    call = partial(torch.topk, k=count, largest=largest)
    same(native(call, x), call(x))


def test_the_kth_and_the_middle():
    x = torch.randperm(4 * 2500).view(4, 2500).float()
    x[1, [3, 50]] = math.nan
    x[2] = math.nan
    for k in (1, 600, 1250, 2500):
        same(native(partial(torch.kthvalue, k=k), x[::3]), x[::3].kthvalue(k))
    same(native(lambda x: x.median(1), x), x.median(1))
    same(native(lambda x: x[:2].nanmedian(1, keepdim=True), x), x[:2].nanmedian(1, keepdim=True))
    same([native(lambda x: x.nanmedian(), x)], [x.nanmedian()])
    same([native(lambda x: x.median(), x)], [x.median()])
    same([native(lambda x: x[0].int().median(), x)], [x[0].int().median()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_searches(dtype):
    row = make(3, 40, dtype=dtype).nan_to_num(7).sort(1).values
    x = make(3, 17, dtype=dtype).nan_to_num(3)
    for right in (False, True):
        call = partial(torch.searchsorted, right=right)
        same([native(call, row, x)], [call(row, x)])
        call = partial(torch.bucketize, right=right, out_int32=True)
        same([native(call, x, row[1])], [call(x, row[1])])
    if dtype != torch.bfloat16:
        same([native(lambda r: torch.searchsorted(r, 5), row[0])], [torch.searchsorted(row[0], 5)])
    shuffled = make(40, dtype=dtype).nan_to_num(7)

    def by_order(row, x):
        return torch.searchsorted(row, x, sorter=row.sort(stable=True).indices)

    same([native(by_order, shuffled, x)], [by_order(shuffled, x)])
