"""Joins of lists of tensors, with new lengths. They do not diverge."""

import pytest
import torch
import torch_tandem


def collect(device: str, length: int, join: str, dim: int) -> tuple[float, torch.Tensor]:
    """Returns a loss over tensors that a loop collects, and the gradient of the tensor that they are pieces
    of.
    """
    w = torch.linspace(-1, 1, 6).reshape(2, 3).to(device).requires_grad_()
    parts = []
    for i in range(length):
        part = torch.tanh(w * (0.1 * i))
        parts.append(part if join == "stack" or i % 2 == 0 else torch.cat([part, part], dim))
    whole = getattr(torch, join)(parts, dim)
    loss = (whole * whole.mean(0, keepdim=True)).sum()
    loss.backward()
    torch_tandem.mark_step()
    return loss.item(), w.grad.cpu()


@pytest.mark.parametrize(
    ("join", "dim"), [("stack", 0), ("stack", 1), ("stack", -1), ("cat", 0), ("cat", -1)]
)
def test_lengths_that_never_came(join: str, dim: int):
    # The warm-up has lists of all lengths.
    for length in [20, 20, 20, *range(17, 36), 40, 90]:
        collect("tandem", length, join, dim)
    torch_tandem.reset_report()
    for length in (57, 61, 75, 110, 43):
        loss, gradient = collect("tandem", length, join, dim)
        expected, theirs = collect("cpu", length, join, dim)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=1e-6)
    assert torch_tandem.report()["divergences"] == []


@pytest.mark.parametrize("dim", [5, -5])
def test_the_dimension_is_checked(dim: int):
    parts = [torch.ones(2, device="tandem") for _ in range(20)]
    for join in (torch.stack, torch.cat):
        with pytest.raises(IndexError, match="Dimension out of range"):
            join(parts, dim)


def test_what_does_not_fit_is_pytorchs_to_refuse():
    parts = [torch.ones(2, device="tandem") for _ in range(19)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([*parts, torch.ones(3, device="tandem")])
    assert torch.cat([*parts, torch.ones(3, device="tandem")]).shape == (41,)
    mixed = torch.stack([*parts, torch.ones(2, dtype=torch.float64, device="tandem")])
    assert mixed.dtype == torch.float64


def test_results_are_dense_and_of_their_own():
    parts = [torch.full((2, 3), float(i)) for i in range(40)]
    ours = [p.to("tandem") for p in parts]
    for dim in (0, 1, 2):
        stacked, expected = torch.stack(ours, dim), torch.stack(parts, dim)
        assert stacked.stride() == expected.stride()
        assert torch.equal(stacked.cpu(), expected)
        stacked.zero_()
        assert float(ours[39].sum()) == 39 * 6
