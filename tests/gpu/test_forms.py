"""Forms of calls that PyTorch refuses or treats specially, which a lowering must leave to PyTorch."""

import pytest
import torch


def outcome(of, device):
    """The values and offset that a call returns, or the type of the exception that it raises."""
    try:
        y = of(device)
    except Exception as error:
        return type(error)
    return y.storage_offset(), y.stride(), y.tolist()


def window(device, offset):
    return torch.arange(64.0, device=device).as_strided((4, 4), (4, 1), offset)


CALLS = {
    "ceil into float64": lambda d: torch.ceil(
        torch.ones(3, device=d), out=torch.ones(3, dtype=torch.float64, device=d)
    ),
    "signbit into int32": lambda d: torch.signbit(
        torch.ones(3, device=d), out=torch.ones(3, dtype=torch.int32, device=d)
    ),
    "negative size": lambda d: torch.ones(2, device=d).new_ones(-1, 0),
    "negative stride": lambda d: torch.empty_strided((5, 5), (-1, 1), device=d).zero_(),
    "norm of one element": lambda d: torch.linalg.vector_norm(torch.full((2, 1), 8.5, device=d), 1e30, dim=1),
    "scatter at an offset": lambda d: torch.select_scatter(window(d, 3), torch.zeros(4, device=d), 0, 1),
    "diagonal at an offset": lambda d: torch.diagonal_scatter(window(d, 1), torch.zeros(4, device=d)),
}


@pytest.mark.parametrize("name", CALLS)
def test_forms_are_as_on_the_cpu(name):
    for _ in range(3):
        assert outcome(CALLS[name], "tandem") == outcome(CALLS[name], "cpu")
