"""Convolutions in layouts and shapes that PyTorch's samples lack, against the CPU."""

import itertools

import pytest
import torch
import torch_tandem

device = "tandem"
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check(x, w, b, mask=(True, True, True), native=True, **options):
    """Compares the forward pass and all gradients, with their strides."""
    rank = x.dim() - 2
    o = {
        "stride": 1,
        "padding": 0,
        "dilation": 1,
        "transposed": False,
        "output_padding": 0,
        "groups": 1,
        **options,
    }
    lists = [[o[n]] * rank if isinstance(o[n], int) else o[n] for n in ("stride", "padding", "dilation")]
    arguments = (*lists, o["transposed"], [o["output_padding"]] * rank, o["groups"])
    expected = torch.ops.aten.convolution(x, w, b, *arguments)
    grad = torch.randn(expected.shape).to(x.dtype)
    if o.get("grad_last"):
        grad = grad.to(memory_format=LAST[x.dim()])
    sizes = None if b is None else list(b.shape)
    expected = (expected, *torch.ops.aten.convolution_backward(grad, x, w, sizes, *arguments, list(mask)))
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    to = [
        None
        if t is None
        else torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device).copy_(t)
        for t in (x, w, b, grad)
    ]
    got = torch.ops.aten.convolution(to[0], to[1], to[2], *arguments)
    got = (got, *torch.ops.aten.convolution_backward(to[3], to[0], to[1], sizes, *arguments, list(mask)))
    # oneDNN may return a gradient that was not requested.
    for e, g, wanted in zip(expected, got, (True, *mask), strict=True):
        assert (g is not None) == wanted
        if not wanted:
            continue
        tolerance = TOLERANCE[x.dtype] * max(1.0, e.abs().max().item())
        torch.testing.assert_close(g.cpu(), e, rtol=0, atol=tolerance)
        strides = [(a, c) for a, c, n in zip(e.stride(), g.stride(), e.shape, strict=True) if n > 1]
        assert all(a == c for a, c in strides), (e.stride(), g.stride())
    if native:
        hosted = {n for n in torch_tandem.report()["host_ops"] if "conv" in n}
        assert not hosted


@pytest.mark.parametrize("x_last, w_last, grad_last", list(itertools.product((False, True), repeat=3)))
def test_channels_last(x_last, w_last, grad_last):
    x, w, b = torch.randn(2, 8, 7, 9), torch.randn(12, 4, 3, 2), torch.randn(12)
    x = x.to(memory_format=torch.channels_last) if x_last else x
    w = w.to(memory_format=torch.channels_last) if w_last else w
    check(x, w, b, groups=2, padding=1, stride=2, grad_last=grad_last)


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_dtypes(dtype, last):
    x, w, b = torch.randn(2, 5, 8, 6).to(dtype), torch.randn(7, 5, 3, 3).to(dtype), torch.randn(7).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    check(x, w, b, padding=1)
    check(x, torch.randn(7, 5, 1, 1).to(dtype), None, mask=(True, True, False))


def test_float64():
    check(
        torch.randn(2, 4, 6, 5).double(),
        torch.randn(6, 2, 3, 3).double(),
        None,
        groups=2,
        padding=1,
        native=False,
    )


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("multiple", (1, 2))
@pytest.mark.parametrize("transposed", (False, True))
def test_depthwise(last, multiple, transposed):
    x, w = torch.randn(2, 6, 9, 8), torch.randn(6 * multiple, 1, 3, 3)
    if transposed:
        x = torch.randn(2, 6 * multiple, 5, 4)
    b = torch.randn(6 if transposed else 6 * multiple)
    x = x.to(memory_format=torch.channels_last) if last else x
    check(x, w, b, groups=6, padding=1, stride=2, transposed=transposed)
    check(x, w, b, groups=6, padding=2, dilation=2, transposed=transposed)


@pytest.mark.parametrize(
    "stride, dilation, padding, extra", ((1, 1, 0, 0), (2, 1, 1, 1), (3, 2, 2, 1), (1, 2, 1, 0))
)
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_transposed(rank, stride, dilation, padding, extra):
    x, w = torch.randn(2, 6, *[4, 5, 3][:rank]), torch.randn(6, 5, *[3, 2, 3][:rank])
    options = {"stride": stride, "dilation": dilation, "padding": padding, "output_padding": extra}
    check(x, w, torch.randn(5), transposed=True, **options)


def test_layouts_without_order():
    x = torch.randn(9, 7, 4, 3).permute(3, 2, 1, 0)
    w = torch.randn(3, 3, 4, 10)[..., ::2].permute(3, 2, 0, 1)
    check(x, w, torch.randn(10)[::2], padding=1)
    x = torch.randn(1, 4, 1, 1)
    w = torch.randn(5, 4, 3, 3)
    got = torch.nn.functional.conv2d(x.to(device).expand(2, 4, 6, 6), w.to(device), stride=(2, 1))
    torch.testing.assert_close(
        got.cpu(), torch.nn.functional.conv2d(x.expand(2, 4, 6, 6), w, stride=(2, 1)), rtol=1e-4, atol=1e-4
    )


def test_many_pixels_and_split_depth():
    check(torch.randn(3, 8, 40, 40), torch.randn(20, 8, 3, 3), torch.randn(20), padding=1)
    check(torch.randn(2, 40, 8, 8), torch.randn(24, 40, 1, 1), torch.randn(24))
    check(torch.randn(2, 300, 4, 4), torch.randn(8, 300, 3, 3), torch.randn(8), padding=1)


@pytest.mark.parametrize("mask", list(itertools.product((False, True), repeat=3)))
def test_masks(mask):
    check(torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), mask=mask)


def test_invalid_calls_raise_as_on_the_cpu():
    x, w = torch.randn(1, 3, 4, 4, device=device), torch.randn(2, 4, 3, 3, device=device)
    with pytest.raises(RuntimeError, match="channels"):
        torch.nn.functional.conv2d(x, w)
        torch_tandem.synchronize()
    assert torch.nn.functional.conv2d(x[:0], torch.randn(2, 3, 3, 3, device=device)).shape == (0, 2, 2, 2)
