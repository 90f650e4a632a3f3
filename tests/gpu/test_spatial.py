"""Pooling, padding and interpolation on the device: layouts, dtypes and edges that OpInfo's samples lack."""

import os

import pytest
import torch
from torch.nn import functional

if os.environ.get("TANDEM_DEVICE") != "gpu":
    pytest.skip("for the device's own kernels", allow_module_level=True)

from .alike import alike, device, moved

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def layouts(*sizes, dtype=torch.float32):
    """Yields tensors of these sizes in several layouts."""
    x = torch.randn(sizes).to(dtype)
    yield x
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield torch.randn(2, *sizes).to(dtype)[1]
    yield x[:, :1].expand(sizes)
    if len(sizes) in (4, 5):
        yield x.contiguous(memory_format=torch.channels_last if len(sizes) == 4 else torch.channels_last_3d)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_of_images(dtype):
    for x in layouts(2, 3, 7, 8, dtype=dtype):
        alike(lambda x: aten.max_pool2d_with_indices(x, [3, 2], [2, 1], [1, 1], [1, 2], True), x)
        alike(lambda x: aten.avg_pool2d(x, 3, 2, 1, True, False), x)
        alike(lambda x: aten.avg_pool2d(x, [2, 3], [1, 2], [1, 1], True, True, 5), x)
        alike(lambda x: aten._adaptive_avg_pool2d(x, [3, 5]), x)
        alike(lambda x: aten.adaptive_max_pool2d(x, [3, 5]), x)
        out, indices = aten.max_pool2d_with_indices(x, 3, 2, 1)
        alike(
            lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, 3, 2, 1, 1, False, i), out, x, indices
        )
        g = torch.randn_like(aten.avg_pool2d(x, 3, 2, 1, True, False))
        alike(lambda g, x: aten.avg_pool2d_backward(g, x, 3, 2, 1, True, False, None), g, x)
        g, indices = aten.adaptive_max_pool2d(x, [3, 5])
        alike(lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i), g, x, indices)
        alike(lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), g, x)


def test_a_pool_of_rows_is_a_view():
    x = torch.randn(2, 8)
    pooled = functional.max_pool1d(x.to(device), 2)
    assert pooled._is_view() and torch.equal(pooled.cpu(), functional.max_pool1d(x, 2))


def test_pools_of_volumes():
    for x in layouts(2, 3, 5, 6, 7):
        alike(lambda x: aten.max_pool3d_with_indices(x, 3, 2, 1, 1, True), x)
        alike(lambda x: aten.avg_pool3d(x, 3, 2, 1, True, False), x)
        alike(lambda x: aten._adaptive_avg_pool3d(x, [2, 3, 4]), x)
        alike(lambda x: aten.adaptive_max_pool3d(x, [2, 3, 4]), x)
        out, indices = aten.max_pool3d_with_indices(x, 3, 2, 1)
        alike(
            lambda g, x, i: aten.max_pool3d_with_indices_backward(g, x, 3, 2, 1, 1, False, i), out, x, indices
        )
        g = torch.randn_like(aten.avg_pool3d(x, 2))
        alike(lambda g, x: aten.avg_pool3d_backward(g, x, 2, 2, 0, False, True, None), g, x)


def test_the_largest_of_not_a_number():
    x = torch.randn(1, 2, 6, 6)
    x[0, 0, 1, 1], x[0, 0, 2, 2], x[0, 1] = float("nan"), float("nan"), -float("inf")
    alike(lambda x: aten.max_pool2d_with_indices(x, 4, 2, 1), x)
    alike(lambda x: aten.adaptive_max_pool2d(x, [2, 2]), x)


def test_pools_into_given_tensors():
    def pool(x, out, indices):
        return aten.max_pool2d_with_indices.out(x, [2, 2], out=out, indices=indices)

    alike(pool, torch.randn(1, 2, 4, 6), torch.empty(1, 2, 2, 3), torch.empty(1, 2, 2, 3, dtype=torch.int64))


def test_unpooling_and_what_it_refuses():
    out, indices = functional.max_pool2d(torch.randn(2, 3, 8, 8), 2, return_indices=True)
    alike(lambda x, i: aten.max_unpool2d(x, i, [8, 8]), out, indices)
    with pytest.raises((RuntimeError, IndexError)):
        aten.max_unpool2d(moved(out), moved(indices + 100), [8, 8]).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["reflection", "replication"])
def test_pads(mode, dtype):
    for n, sizes, pads in [
        (1, (2, 3, 5), [2, -1]),
        (2, (2, 3, 5, 6), [2, 1, -1, 3]),
        (3, (1, 2, 3, 4, 5), [1, 2] * 3),
    ]:
        forward, backward = getattr(aten, f"{mode}_pad{n}d"), getattr(aten, f"{mode}_pad{n}d_backward")
        for x in layouts(*sizes, dtype=dtype):
            alike(lambda x: forward(x, pads), x)
            alike(lambda g, x: backward(g, x, pads), torch.randn_like(forward(x, pads)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8, torch.bool])
def test_constant_pads(dtype):
    for x in layouts(2, 3, 4, 5):
        x = x.mul(3).to(dtype)
        for pad in ([1, 2], [-1, -1, 0, -2], [1, -2, 3, 0, 0, 1], [0, 0], [1, 1, 1, 1, 1, 1, 1, 1]):
            alike(lambda x: functional.pad(x, pad, value=1), x)
    alike(lambda x: functional.pad(x, [1, 2], value=5.5), torch.ones(()).expand(3))


def test_patches():
    for x in layouts(2, 3, 6, 7):
        alike(lambda x: aten.im2col(x, [2, 3], [2, 1], [1, 2], [2, 1]), x)
    for x in (torch.randn(2, 12, 30), torch.randn(2, 30, 12).transpose(1, 2)):
        alike(lambda x: aten.col2im(x, [7, 5], [2, 2], [1, 2], [0, 1], [1, 1]), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_shuffles(dtype):
    for x in layouts(2, 8, 4, 6):
        x = x.mul(3).to(dtype)
        for function in (functional.pixel_shuffle, functional.pixel_unshuffle, functional.channel_shuffle):
            alike(lambda x: function(x, 2), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_interpolation(dtype):
    for base, sizes, size, scale in [
        ("upsample_nearest2d", (2, 3, 5, 6), (9, 4), ()),
        ("_upsample_nearest_exact2d", (2, 3, 5, 6), (9, 4), ()),
        ("upsample_nearest2d", (2, 3, 5, 6), (12, 15), (2.5, 2.5)),
        ("upsample_nearest3d", (1, 2, 3, 4, 5), (6, 5, 2), ()),
        ("upsample_bilinear2d", (2, 3, 5, 6), (9, 4), (False,)),
        ("upsample_bilinear2d", (2, 3, 5, 6), (9, 4), (True,)),
        ("upsample_bilinear2d", (2, 3, 5, 6), (12, 15), (False, 2.5, 2.5)),
        ("upsample_bicubic2d", (2, 3, 5, 6), (9, 4), (False,)),
        ("upsample_bicubic2d", (2, 3, 5, 6), (11, 17), (True,)),
        ("upsample_linear1d", (2, 3, 5), (8,), (False,)),
        ("upsample_trilinear3d", (1, 2, 3, 4, 5), (6, 5, 2), (False,)),
        ("upsample_bilinear2d", (1, 1, 40, 33), (3, 1), (True,)),
    ]:
        forward, backward = getattr(aten, base), getattr(aten, base + "_backward")
        for x in layouts(*sizes, dtype=dtype):
            if base == "_upsample_nearest_exact2d" and not x.is_contiguous():
                continue
            alike(lambda x: forward(x, size, *scale), x)
            grad = torch.randn_like(forward(x, size, *scale))
            alike(lambda g: backward(g, size, sizes, *scale), grad)


def test_interpolation_of_infinite_gradients():
    grad = torch.randn(1, 1, 8, 8)
    grad[0, 0, 3, 3] = float("inf")
    got = aten.upsample_nearest2d_backward(moved(grad), [8, 8], [1, 1, 4, 4]).cpu()
    torch.testing.assert_close(got, aten.upsample_nearest2d_backward(grad, [8, 8], [1, 1, 4, 4]))


def test_grids():
    for x in layouts(2, 3, 5, 6):
        grid = torch.randn(2, 4, 7, 2)
        grid[0, 0, 0] = torch.tensor([float("nan"), 100.0])
        for mode in (0, 1):
            for edge in (0, 1, 2):
                finite = grid if edge == 0 else grid.nan_to_num()
                for align in (False, True):
                    alike(lambda x, g: aten.grid_sampler_2d(x, g, mode, edge, align), x, finite)
                    alike(
                        lambda d, x, g: aten.grid_sampler_2d_backward(
                            d, x, g, mode, edge, align, [True, True]
                        ),
                        torch.randn(2, 3, 4, 7),
                        x,
                        finite.nan_to_num(),
                        bound=1e-4,
                    )


def test_many_workgroups():
    x = torch.randn(1, 17, 1024, 1024)
    y = x.to(device)
    assert torch.equal(functional.pad(y, [1, 0])[0, 16, 1023].cpu(), functional.pad(x, [1, 0])[0, 16, 1023])
    got = aten.max_pool2d_with_indices(y, [1, 1])[1][0, 16, 1023].cpu()
    assert torch.equal(got, torch.arange(1024) + 1023 * 1024)
