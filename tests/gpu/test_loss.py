"""Losses on the device: reductions in two steps, labels, layouts and dtypes that OpInfo's samples lack."""

import os

import pytest
import torch
import torch_tandem

if os.environ.get("TANDEM_DEVICE") != "gpu":
    pytest.skip("for the device's own kernels", allow_module_level=True)

from .alike import alike, moved

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PLAIN = {"mse_loss": (), "smooth_l1_loss": (0.7,), "huber_loss": (0.7,), "soft_margin_loss": ()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_losses(name, dtype):
    forward, backward, more = getattr(aten, name), getattr(aten, name + "_backward"), PLAIN[name]
    x, t = torch.randn(2, 3, 4, 5).to(dtype), torch.randn(2, 3, 4, 5).to(dtype)
    last = t.contiguous(memory_format=torch.channels_last)
    for a, b in [
        (x, t),
        (x, last),
        (last, x),
        (x.transpose(0, 1), t.transpose(0, 1)),
        (x[:, :1].expand_as(x), t),
    ]:
        for reduction in (0, 1, 2):
            alike(lambda a, b: forward(a, b, reduction, *more), a, b)
            grad = torch.randn(() if reduction else a.shape)
            alike(lambda g, a, b: backward(g, a, b, reduction, *more), grad.to(dtype), a, b)


def test_sums_in_two_steps():
    x, t = torch.randn(3, 33333), torch.randn(3, 33333)
    alike(lambda x, t: aten.mse_loss(x, t, 1), x, t, bound=1e-4)
    alike(lambda x, t: aten.mse_loss(x, t, 2), x, t, bound=1e-4)
    alike(lambda x, t: aten.mse_loss(x, t, 2), x.t(), t.t(), bound=1e-4)
    alike(lambda x, t: aten.binary_cross_entropy(x, t), x.sigmoid(), t.sigmoid(), bound=1e-4)


def test_broadcast():
    alike(lambda x, t: aten.mse_loss(x, t, 0), torch.randn(3, 1), torch.randn(4))
    alike(lambda x, t: aten.mse_loss(x, t, 1), torch.randn(3, 1), torch.randn(4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropies_of_two(dtype):
    x, t = torch.rand(3, 4, 5).to(dtype), torch.rand(3, 4, 5).to(dtype)
    x[0, 0, :2] = torch.tensor([0.0, 1.0]).to(dtype)
    w = torch.rand(5).to(dtype)
    for reduction in (0, 1, 2):
        alike(lambda x, t, w: aten.binary_cross_entropy(x, t, w, reduction), x, t, w)
        alike(
            lambda x, t: aten.binary_cross_entropy(x, t, None, reduction),
            x.transpose(0, 2),
            t.transpose(0, 2),
        )
        alike(lambda x, t, w: aten.binary_cross_entropy_with_logits(x, t, w, w, reduction), x * 9 - 4, t, w)
        grad = torch.randn(() if reduction else x.shape).to(dtype)
        middle = x * 0.5 + 0.25
        alike(
            lambda g, x, t, w: aten.binary_cross_entropy_backward(g, x, t, w, reduction), grad, middle, t, w
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_probabilities_beyond_1(dtype):
    x = moved(torch.tensor([0.5, 1.5], dtype=dtype))
    for reduction in (0, 1):
        with pytest.raises((RuntimeError, IndexError)):
            aten.binary_cross_entropy(x, x, None, reduction).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels(dtype):
    w = torch.rand(4).to(dtype)
    cases = [
        (torch.randn(6, 4), torch.tensor([0, 1, -100, 3, 3, 2])),
        (torch.randn(4, 6).t(), torch.tensor([0, 1, 2, 3, 3, -100])),
        (torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 2], dtype=torch.uint8)),
        (torch.randn(4), torch.tensor(2)),
        (torch.randn(4), torch.tensor([2])),
        (torch.randn(4), torch.tensor(-100)),
        (torch.randn(2, 4), torch.tensor([-100, -100])),
    ]
    for x, t in cases:
        x = x.to(dtype)
        for reduction in (0, 1, 2):
            for weight in (None, w):
                alike(lambda x, t, w: aten.nll_loss_forward(x, t, w, reduction, -100), x, t, weight)
                if t.shape != x.shape[: x.dim() - 1]:
                    continue
                out, total = aten.nll_loss_forward(x, t, weight, reduction, -100)
                grad = torch.ones_like(out)
                alike(
                    lambda g, x, t, w, s: aten.nll_loss_backward(g, x, t, w, reduction, -100, s),
                    grad, x, t, weight, total,
                )  # fmt: skip


def test_labels_of_pixels():
    x, t = torch.randn(2, 5, 60, 70), torch.randint(0, 5, (2, 60, 70))
    t[0, :9] = 1
    for scores in (x, x.contiguous(memory_format=torch.channels_last)):
        for reduction in (0, 1, 2):
            alike(lambda x, t: aten.nll_loss2d_forward(x, t, None, reduction, 1), scores, t, bound=1e-4)
    total = torch.tensor(7.0)
    alike(lambda x, t, s: aten.nll_loss2d_backward(s, x, t, None, 1, 1, s), x, t, total)


def test_labels_out_of_range():
    x = moved(torch.randn(3, 4))
    for label in (4, -1):
        for reduction in (0, 1):
            with pytest.raises(IndexError):
                aten.nll_loss_forward(x, moved(torch.tensor([0, label, 2])), None, reduction, -100)[0].cpu()


@pytest.mark.parametrize(
    "name", ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "soft_margin_loss", "kl_div")
)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_new_sizes_in_co_execution(name, reduction):
    """Some results have larger storages than their sizes need. The rules for new sizes tell the program the
    storages' sizes.
    """
    call = getattr(torch.nn.functional, name)
    torch_tandem.reset()
    for rows in (5, 5, 5, 5, 6, 7, 8, 5, 9):
        x, y = torch.rand(rows, 4, requires_grad=True), torch.rand(rows, 4).round() * 2 - 1
        expected = call(x, y, reduction=reduction)
        moved = x.detach().to("tandem").requires_grad_()
        got = call(moved, y.to("tandem"), reduction=reduction)
        for value in (expected, got):
            value.sum().backward()
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(moved.grad.cpu(), x.grad, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch_tandem.mark_step()
