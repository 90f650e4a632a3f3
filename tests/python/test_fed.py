"""Operators whose first tensor stays on the host, as batches from NumPy or from files do in adopted scripts.

The first iterations are traced. The next ones are co-executed, and the tensor is fed. Results are compared
with eager CPU, and the bits of the two phases with each other.
"""

import itertools

import pytest
import torch
import torch_tandem
from helpers import OWN, same_bits
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from tests.op_db import op_db

SAMPLES = 3
ITERATIONS = 5
CHUNKS = 8


def floats(x):
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor) and t.is_floating_point()]


ENTRIES = [
    op for op in op_db if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("jiterator")
]


def samples_of(op):
    """Returns samples whose first argument is a tensor of several elements, and which have another such
    tensor.
    """
    try:
        made = list(itertools.islice(op.sample_inputs("cpu", torch.float32), 4 * SAMPLES))
    except RuntimeError:
        return []
    fitting = [
        s
        for s in made
        if isinstance(s.input, torch.Tensor)
        and s.input.is_floating_point()
        and s.input.dim() > 0
        and any(t.dim() > 0 for t in floats((s.args, s.kwargs)))
    ]
    return fitting[:SAMPLES]


def moved(x):
    return x.detach().clone().to("tandem") if isinstance(x, torch.Tensor) else x


def outcome(op, given, args, kwargs):
    torch.manual_seed(0)
    return [t.detach().cpu() for t in tree_leaves(op(given, *args, **kwargs)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_first_tensor_of_an_operator_may_be_fed(chunk):
    wrong, compared = [], 0
    for op in ENTRIES[chunk::CHUNKS]:
        for number, sample in enumerate(samples_of(op)):
            args, kwargs = (tree_map(moved, given) for given in (sample.args, sample.kwargs))
            known = {}
            for iteration in range(ITERATIONS):
                # Each iteration has a new tensor, because a fed tensor is read while Python goes on.
                factor = 1 + iteration % 2 / 8
                given = sample.input.detach() * factor
                try:
                    expected = outcome(op, given.clone(), sample.args, sample.kwargs)
                    got = outcome(op, given, args, kwargs)
                except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
                    torch_tandem.mark_step()
                    break  # not defined for these values, or for tensors on two devices
                torch_tandem.mark_step()
                compared += 1
                first = known.setdefault(factor, got)
                for e, g, before in zip(expected, got, first, strict=True):
                    near = same_bits(e, g) or (e.shape == g.shape and torch.allclose(g, e, 1e-4, 1e-5, True))
                    if not (near and same_bits(before, g)):
                        wrong.append(
                            f"{op.name} {op.variant_test_name}, sample {number}, iteration {iteration}"
                        )
    assert not wrong, "\n".join(wrong)
    assert compared > 100


@pytest.mark.parametrize("format", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("groups", (1, 4))
def test_images_may_be_fed_to_convolutions(groups, format):
    """Tandem's kernels for convolutions compute on contents whose order in memory differs from
    the strides.
    """
    torch.manual_seed(0)
    weight = torch.randn(8, 4 // groups, 3, 3)
    after = torch.randn(8, 8, 1, 1)
    moved_weight, moved_after = weight.to("tandem"), after.to("tandem")
    for _ in range(8):
        x = torch.randn(2, 4, 12, 10).to(memory_format=format)
        results = []
        for w, a in ((weight, after), (moved_weight, moved_after)):
            y = F.conv2d(x, w, groups=groups).relu()
            results.append((F.max_pool2d(F.conv2d(y, a), 2) + y.mean()).cpu())
        torch_tandem.mark_step()
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert OWN or torch.equal(*results)
