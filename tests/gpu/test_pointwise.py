"""Point-wise operators on the device: layouts of derivatives, special functions, integers."""

import os

import pytest
import torch

if os.environ.get("TANDEM_DEVICE") != "gpu":
    pytest.skip("for the device's own kernels", allow_module_level=True)

from .alike import alike, moved

aten = torch.ops.aten


def layouts(*sizes):
    """Returns tensors of these sizes in several layouts."""
    x = torch.randn(sizes)
    return (
        x,
        x.transpose(-1, -2).contiguous().transpose(-1, -2),
        x.contiguous(memory_format=torch.channels_last),
    )


BACKWARD = {
    "threshold_backward": (0.1,),
    "leaky_relu_backward": (0.1, False),
    "hardtanh_backward": (-1.0, 1.0),
    "hardsigmoid_backward": (),
    "hardswish_backward": (),
    "silu_backward": (),
    "gelu_backward": (),
    "mish_backward": (),
    "sigmoid_backward": (),
    "tanh_backward": (),
    "logit_backward": (0.1,),
    "softplus_backward": (1.0, 20.0),
    "softshrink_backward": (0.5,),
    "hardshrink_backward": (0.5,),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_layouts_of_derivatives(name):
    for g in layouts(2, 3, 4, 5):
        for x in layouts(2, 3, 4, 5):
            alike(lambda g, x: getattr(aten, name)(g, x, *BACKWARD[name]), g, x)


def test_halves_slopes_and_noise():
    for x in layouts(2, 4, 6, 5):
        for dim in (1, -2):
            alike(lambda x: aten.glu(x, dim), x)
            half = aten.glu(x, dim)
            for g in (half, half.contiguous()):
                alike(lambda g, x: aten.glu_backward(g, x, dim), g, x)
        w = torch.rand(1, 4, 1, 1)
        alike(lambda x, w: aten._prelu_kernel(x, w), x, w)
        alike(lambda x: aten.log_sigmoid_forward(x), x)
        alike(lambda x: aten.rrelu_with_noise(x, torch.zeros_like(x), 0.1, 0.3, False), x)
        for g in layouts(2, 4, 6, 5):
            alike(lambda g, x, w: aten._prelu_kernel_backward(g, x, w), g, x, w)
            alike(lambda g, x, b: aten.log_sigmoid_backward(g, x, b), g, x, aten.log_sigmoid_forward(x)[1])
            for training in (False, True):
                alike(
                    lambda g, x, n: aten.rrelu_with_noise_backward(g, x, n, 0.1, 0.3, training, False),
                    g,
                    x,
                    x,
                )


def test_special_functions():
    x = torch.cat(
        [torch.linspace(-12, 12, 4001), torch.tensor([0.0, 85.0, -85.0, float("inf"), float("nan")])]
    )
    for name in ("i0", "special_i0e", "special_i1", "special_i1e", "special_log_ndtr", "angle"):
        alike(getattr(aten, name), x, bound=1e-5)
    alike(aten.special_erfcx, x[x > -9], bound=1e-5)
    alike(lambda x: aten.polygamma(1, x), torch.linspace(0.05, 30, 500), bound=1e-5)
    alike(lambda x: aten.polygamma(1, x), torch.linspace(-3.9, -0.1, 39) + 0.02, bound=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_shifts_and_divisors(dtype):
    low = 0 if dtype == torch.uint8 else -100
    x = torch.randint(low, 100, (300,)).to(dtype)
    y = torch.randint(low // 10, 70, (300,)).to(dtype)
    for name in ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"):
        # C++ does not define shifts of a narrow type by all of its bits.
        alike(getattr(aten, name), x, y if dtype.itemsize > 2 else y.clamp(0, 7))
    alike(aten.gcd, x, y)
    alike(aten.lcm, x, y.clamp(max=9))
    alike(lambda x: x.gcd_(x.new_tensor([12])), x.clone())


def test_next_floats():
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0, float("inf"), 1.0, float("nan"), 1e-45, 1.0, 3.0])
    y = torch.tensor([2.0, 2.0, 1.0, -1.0, -5.0, 0.0, 1.0, 1.0, 0.0, float("inf"), 3.0])
    keep = slice(None)
    alike(aten.nextafter, x[keep], y[keep])


def test_digits():
    x = torch.randn(100) * 100
    for decimals in (0, 2, -1):
        alike(lambda x: torch.round(x, decimals=decimals), x)
        alike(lambda x: x.round_(decimals=decimals), x)


def test_powers_of_2():
    alike(torch.ldexp, torch.randn(50), torch.randint(-20, 20, (50,)))
    alike(torch.ldexp, torch.randn(3, 1), torch.tensor([1, 5, -3], dtype=torch.int32))


def test_division_by_0_of_bytes():
    for dtype in (torch.int8, torch.uint8, torch.int16):
        x = moved(torch.tensor([4, 5, 6, 7], dtype=dtype))
        with pytest.raises((RuntimeError, ZeroDivisionError, IndexError)):
            torch.floor_divide(x, moved(torch.tensor([1, 2, 0, 1], dtype=dtype))).cpu()


@pytest.mark.parametrize(
    "call",
    (
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x.view(3, 3).copy_(x.view(3, 3).t()),
        lambda x: x - True,
        lambda x: x.int().add(1, alpha=0.5),
        lambda x: torch.floor(x > 0),
        lambda x: torch.round(x > 0),
    ),
)
def test_what_eager_refuses_is_refused(call):
    def refusal(where):
        with pytest.raises(RuntimeError) as error:
            call(torch.arange(9.0).to(where))
        return str(error.value).split("'")[0].splitlines()[0]

    assert refusal("tandem") == refusal("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "rsub", "mul", "div", "fmod", "remainder", "eq", "lt", "ge"])
def test_operands_are_rounded_to_half_precision(name, dtype):
    """Tensors without dimensions and numbers do not promote, so they are rounded to the dtype of the other
    operand.
    """
    call = getattr(torch, name)
    x = (torch.randn(3000) * 3).to(dtype)
    others = [
        torch.tensor(1.2345678),
        torch.tensor(2051),
        torch.tensor(0.1, dtype=torch.float64),
        1.2345678,
        3,
    ]
    for other in others:
        there = other.to("tandem") if isinstance(other, torch.Tensor) else other
        expected = call(x, other)
        got = [call(x.to("tandem"), there)]
        if isinstance(other, torch.Tensor) and name != "rsub":
            expected = torch.stack([expected, call(other, x)])
            got.append(call(there, x.to("tandem")))
        torch.testing.assert_close(
            torch.stack(got).cpu().squeeze(0), expected, rtol=0, atol=0, equal_nan=True, msg=f"{name} {other}"
        )
    if name in ("add", "mul", "div", "sub"):
        listed = getattr(torch, f"_foreach_{name}")
        for other in (1.2345678, [1.2345678, 0.1]):
            for got, expected in zip(
                listed([x.to("tandem"), x.to("tandem")[:7]], other), listed([x, x[:7]], other), strict=True
            ):
                torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)
