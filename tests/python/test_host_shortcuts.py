"""Operators that PyTorch computes in a shorter way on its CPU device."""

import pytest
import torch
import torch_tandem
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_tandem import _core

QS = torch.tensor([0.0, 0.25, 0.6, 1.0])
CALLS = {
    "aten::max_pool1d": lambda x: F.max_pool1d(x, 3, 2, padding=1),
    "aten::quantile": lambda x: torch.quantile(x, QS.to(x.device), dim=1),
    "aten::quantile.scalar": lambda x: torch.quantile(x, 0.3, dim=-1, keepdim=True),
    "aten::nanquantile": lambda x: torch.nanquantile(x, QS.to(x.device)),
    "aten::nanquantile.scalar": lambda x: torch.nanquantile(x, 0.7, interpolation="lower"),
}


def captured(call, *arguments):
    """The result of a call that is co-executed, and the names of the operators."""
    torch_tandem.reset()
    for _ in range(6):
        result = call(*arguments)
        torch_tandem.mark_step()
    return result, {node["op"] for node in _core.graph()["nodes"]}


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_gradients_are_captured_whole(name):
    x = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))
    x[1, 2, 7] = torch.nan
    result, names = captured(CALLS[name], x.to("tandem"))
    assert name in names
    torch.testing.assert_close(result.cpu(), CALLS[name](x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_eager(name):
    x = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(1))
    ours, theirs = (t.detach().clone().requires_grad_() for t in (x.to("tandem"), x))
    result, names = captured(CALLS[name], ours)
    assert name not in names
    result.sum().backward()
    CALLS[name](theirs).sum().backward()
    assert torch.equal(ours.grad.cpu(), theirs.grad)


def test_a_pooling_is_no_view():
    assert not F.max_pool1d(torch.randn(2, 8).to("tandem"), 2)._is_view()


def test_a_changed_quantile_out_of_range_is_refused_at_its_call():
    x = torch.randn(9).to("tandem")
    for q in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        torch.quantile(x, q)
    with pytest.raises(RuntimeError, match=r"range \[0, 1\] but got 1.5"):
        torch.quantile(x, 1.5)


def test_values_out_of_range_are_refused():
    x = torch.randn(9).to("tandem")
    with pytest.raises(RuntimeError, match=r"range \[0, 1\]"):
        torch.quantile(x, torch.tensor([1.5]).to("tandem")).cpu()


class Seen(TorchDispatchMode):
    """A mode that notes the operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_dispatch_modes_see_the_composed_operators(name):
    with Seen() as seen:
        CALLS[name](torch.randn(4, 3, 50, device="tandem"))
    assert seen.names and not any(name.removeprefix("aten::") in found for found in seen.names)


def test_transforms_see_the_composed_operators():
    x = torch.randn(4, 3, 50)
    ours = torch.func.vmap(lambda x: F.max_pool1d(x, 2))(x.to("tandem"))
    assert torch.equal(ours.cpu(), F.max_pool1d(x, 2))
    value, tangent = torch.func.jvp(
        lambda x: F.max_pool1d(x, 2), (x.to("tandem"),), (torch.ones_like(x).to("tandem"),)
    )
    assert torch.equal(value.cpu(), F.max_pool1d(x, 2)) and tangent.cpu().eq(1).all()
