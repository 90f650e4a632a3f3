"""Conversion of floats to integers: rounding towards zero, and eager's values on this CPU for floats outside
of the integer's range.
"""

import pytest
import torch
import torch_tandem

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
LIMITS = [s * x for x in (127, 128, 255, 256, 2**15, 2**31, 2**32, 2**53, 2**63, 2**64) for s in (1, -1)]


def floats(n: int, seed: int) -> torch.Tensor:
    """Returns numbers of all magnitudes, some of them at the limits of integers, infinite or NaN."""
    g = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (n,), generator=g) * 2 - 1
    x = signs * 2 ** (torch.rand(n, dtype=torch.float64, generator=g) * 80 - 6)
    corners = torch.tensor([*LIMITS, torch.inf, -torch.inf, torch.nan, -0.5], dtype=torch.float64)
    # Values next to the limits on both sides.
    corners = torch.cat([corners, corners - 0.5, corners + 1, corners * (1 + 2**-24)])
    here = torch.rand(n, generator=g) < 0.3
    return torch.where(here, corners[torch.randint(len(corners), (n,), generator=g)], x)


WAYS = {
    "to": lambda x, dtype: x.to(dtype),
    "copy_": lambda x, dtype: torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x),
    "with gaps": lambda x, dtype: torch.zeros(2, len(x), dtype=dtype, device=x.device).t()[:, 1].copy_(x),
    "one by one": lambda x, dtype: torch.stack(
        [torch.zeros((), dtype=dtype, device=x.device).copy_(e) for e in x[:9]]
    ),
    "of numbers": lambda x, dtype: torch.zeros(9, dtype=dtype, device=x.device).copy_(x.cpu()[0]),
    "computed": lambda x, dtype: (x * 1 + 0).to(dtype),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_as_integers(source, way):
    for seed, n in enumerate((9, 64, 1001)):
        x = floats(n, seed).to(source)
        for dtype in INTEGERS:
            expected = WAYS[way](x, dtype)
            for _ in range(3):
                actual = WAYS[way](x.to("tandem"), dtype).cpu()
                torch_tandem.mark_step()
                different = (actual != expected).nonzero().flatten()[:3]
                where = f"{dtype} of {x[different].tolist()}: {actual[different]} and {expected[different]}"
                assert torch.equal(actual, expected), where
