"""`torch.histc` of integers. PyTorch supports it on CUDA only."""

import pytest
import torch
import torch_tandem

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def histogram(x: torch.Tensor, bins: int, least: int, most: int) -> list[int]:
    """The number of elements in each bin, computed in whole numbers like PyTorch's CUDA kernel."""
    items = [int(item) for item in x.flatten()]
    if least == most and items:
        least, most = min(items), max(items)
    if least == most:
        least, most = least - 1, most + 1
    counts = [0] * bins
    for item in items:
        if least <= item <= most:
            counts[min((item - least) * bins // (most - least), bins - 1)] += 1
    return counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounds", [(0, 0), (0, 9), (2, 5), (3, 3)], ids=str)
def test_integers(dtype, bounds):
    numbers = torch.Generator().manual_seed(0)
    for size in ((40,), (5, 6), (), (0,)):
        x = torch.randint(0, 12, size, dtype=dtype, generator=numbers)
        for bins in (1, 4, 12):
            for _ in range(3):
                y = torch.histc(x.to("tandem"), bins, *bounds)
                torch_tandem.mark_step()
            assert y.dtype == dtype
            assert y.tolist() == histogram(x, bins, *bounds)


def test_all_elements_are_equal():
    x = torch.full((7,), 4, dtype=torch.int32, device="tandem")
    assert torch.histc(x, 3).tolist() == [0, 7, 0]


def test_an_existing_tensor_is_written():
    out = torch.empty(2, dtype=torch.int64, device="tandem")
    x = torch.tensor([0, 1, 1, 3], device="tandem")
    assert torch.histc(x, 4, 0, 3, out=out) is out
    assert out.tolist() == [1, 2, 0, 1]


def test_floats_are_pytorchs():
    x = torch.rand(50)
    assert torch.equal(torch.histc(x.to("tandem"), 5).cpu(), torch.histc(x, 5))


def test_wrong_arguments_raise():
    x = torch.tensor([1, 2], device="tandem")
    with pytest.raises(RuntimeError, match="bins must be > 0"):
        torch.histc(x, 0)
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(x, 2, 3, 1)
