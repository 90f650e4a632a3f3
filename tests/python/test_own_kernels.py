"""Operators that the cpu executor computes with its own kernels, at the limits of their sizes and layouts.

Each result is compared with float64 on the host, where the order of additions does not matter: an error may
be at most a few roundings, or a multiple of PyTorch's own error. Tracing, co-execution op by op, and
co-execution by a plan must have the same bits.
"""

from collections.abc import Callable, Iterable

import own_cases
import pytest
import torch
import torch_tandem
from helpers import OWN, assert_same, data, results
from torch.nn import functional as F

ITERATIONS = 6


def with_gradients(op: Callable, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns an operator's output and gradients."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = op(*leaves)
    # The output gradients are not all equal.
    back = torch.arange(out.numel(), device=out.device, dtype=out.dtype).reshape(out.shape).cos()
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], back)]


def moved(t: torch.Tensor) -> torch.Tensor:
    """Returns the same window on Tandem, with the same strides."""
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return memory.to("tandem").as_strided(t.size(), t.stride(), t.storage_offset())


@pytest.mark.parametrize(
    "cases",
    own_cases.FAMILIES,
    ids=lambda f: f.__name__,
)
def test_own_kernels_against_double_precision(cases):
    for name, op, tensors in cases():

        def program(device, op=op, tensors=tensors):
            leaves = [moved(t) if device == "tandem" else t for t in tensors]
            for _ in range(ITERATIONS):
                given = with_gradients(op, leaves)
                yield given, [t.stride() for t in given]

        exact = with_gradients(op, (t.double() if t.is_floating_point() else t for t in tensors))
        eager, _ = results(program, "cpu")
        got, _ = results(program, "tandem")
        for iteration in got[1:]:
            assert_same(got[0], iteration, name)
        (values, strides), (plain, expected_strides) = got[0], eager[0]
        assert strides == expected_strides, name
        for number, (a, x, e) in enumerate(zip(values, exact, plain, strict=True)):
            assert (a.dtype, a.shape) == (e.dtype, e.shape), (name, number)
            finite = x[x.isfinite()].abs()
            largest = max(finite.max().item() if finite.numel() else 0.0, 0.1)
            # If values cancel, PyTorch's results have errors too.
            away = (e.double() - x)[x.isfinite()].abs()
            bound = max(4e-6 * largest, 3 * away.max().item() if away.numel() else 0.0)
            place = f"{name}, value {number}"
            torch.testing.assert_close(
                a.double(),
                x,
                rtol=2e-6,
                atol=bound,
                equal_nan=True,
                msg=lambda m, p=place: f"{p}: {m}",
            )


def test_numbers_out_of_range_are_refused():
    weight = torch.ones(3, 2, device="tandem")
    good, bad = torch.tensor([0, 2], device="tandem"), torch.tensor([1, 3], device="tandem")

    for take in (
        lambda i: F.embedding(i, weight),
        lambda i: weight[i],
        lambda i: weight.index_select(0, i),
        lambda i: weight.gather(0, i[:, None].expand(2, 2)),
        lambda i: weight.clone().scatter_add_(0, i[:, None].expand(2, 2), weight[:2]),
        lambda i: weight.scatter(0, i[:, None].expand(2, 2), 1.5),
        lambda i: weight.clone().index_add_(0, i, weight[:2]),
        lambda i: weight.clone().index_put_((i,), weight[:2]),
    ):
        for _ in range(4):
            take(good)
            torch_tandem.mark_step()
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            take(bad).tolist()
        torch_tandem.mark_step()


def test_what_is_not_a_probability_is_refused():
    good, bad = torch.rand(600, device="tandem"), torch.linspace(0, 1.01, 600, device="tandem")
    for _ in range(4):
        F.binary_cross_entropy(good, good).item()
        torch_tandem.mark_step()
    for predicted, target, name in [
        (bad, good, "input"),
        (good, bad, "target"),
        (good, bad * torch.nan, "target"),
    ]:
        with pytest.raises(RuntimeError, match=f"all elements of {name} should be between 0 and 1"):
            F.binary_cross_entropy(predicted, target).item()
        torch_tandem.mark_step()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64, torch.uint8])
def test_all_and_any(dtype):
    def program(device):
        for step in range(ITERATIONS):
            for n in (1, 3, 255, 256, 257, 70_000):
                for ones in (0, 1, n - 1, n):
                    x = (torch.arange(n) < ones).roll(step).to(dtype).to(device)
                    y = x.expand(3, n).contiguous()
                    yield x.all(), x.any(), y.all(1), y.any(-1, keepdim=True), y.all(), y.any(0)
            yield torch.ones((), dtype=dtype, device=device).all(), torch.ones(0, 3, device=device).all(1)
            yield torch.tensor([float("nan")], device=device).any(), torch._is_all_true(x.bool())

    expected, _ = results(program, "cpu")
    got, _ = results(program, "tandem")
    assert_same(got, expected, str(dtype))


@pytest.mark.parametrize("n", [1, 3, 400])
def test_variances_without_degrees_of_freedom_are_warned_of(n):
    x = torch.ones(5, n, device="tandem")
    for call in (torch.std, torch.var):
        with pytest.warns(UserWarning, match="degrees of freedom"):
            call(x, 1, correction=n).cpu()


def test_classes_out_of_range_are_refused():
    x, good, bad = data(4, 3).to("tandem"), torch.tensor([0, 2, -100, 1]), torch.tensor([0, 3, 1, 1])
    for _ in range(4):
        F.cross_entropy(x, good.to("tandem")).item()
        torch_tandem.mark_step()
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)target 3 is out of bounds"):
        F.cross_entropy(x, bad.to("tandem")).item()
    torch_tandem.mark_step()


@pytest.mark.skipif(not OWN, reason="PyTorch's depend on it")
def test_products_have_the_same_bits_with_any_number_of_threads():
    a, b = data(300, 500).to("tandem"), data(500, 400).to("tandem")
    batch = data(6, 200, 200).to("tandem")
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append([(a @ b).cpu(), torch.bmm(batch, batch).cpu()])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*made, strict=True):
        assert_same(one, two, "threads")


def test_convolutions_that_pytorch_refuses():
    x, w = data(2, 3, 5, 5), data(4, 3, 3, 3, seed=1)
    for options in ({"dilation": 0}, {"stride": 0}, {"dilation": 3}, {"groups": 2}):
        with pytest.raises(RuntimeError) as expected:
            F.conv2d(x, w, **options)
        with pytest.raises(RuntimeError) as got:
            F.conv2d(x.to("tandem"), w.to("tandem"), **options)
        assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0], options


@pytest.mark.parametrize("permuted", [False, True])
def test_powers_of_a_number_are_contiguous(permuted):
    for _ in range(3):
        made = {}
        for device in ("cpu", "tandem"):
            x = torch.arange(6.0, device=device).view(2, 3)
            made[device] = torch.pow(1.5, x.t() if permuted else x)
        torch_tandem.mark_step()
        assert made["tandem"].stride() == made["cpu"].stride()
        torch.testing.assert_close(made["tandem"].cpu(), made["cpu"])
