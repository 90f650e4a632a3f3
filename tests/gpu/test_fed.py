"""The program's tensors in host memory: ops read them, and some ops write them."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from tests.op_db import op_db

device = "tandem"
CHUNKS = 8
RANDOM = {"normal"}
ENTRIES = [
    op
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu") and op.name not in RANDOM and "jiterator" not in op.name
]


def tensors(x):
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def moved(x):
    return x.detach().clone().to(device) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_first_tensor_of_an_operator_may_be_on_the_host(chunk):
    wrong, compared = [], 0
    for op in ENTRIES[chunk::CHUNKS]:
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32), 8))
        except RuntimeError:
            continue
        fit = [s for s in samples if isinstance(s.input, torch.Tensor) and tensors((s.args, s.kwargs))]
        for number, sample in enumerate(fit[:3]):
            args, kwargs = (tree_map(moved, given) for given in (sample.args, sample.kwargs))
            try:
                expected = tensors(op(sample.input.detach().clone(), *sample.args, **sample.kwargs))
                got = tensors(op(sample.input.detach().clone(), *args, **kwargs))
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
                continue  # not defined for tensors on two devices
            compared += 1
            for e, g in zip(expected, got, strict=True):
                g = g.cpu()
                if e.layout != torch.strided:
                    assert g.layout == e.layout
                    e, g = e.to_dense(), g.to_dense()
                if e.shape != g.shape or not torch.allclose(g.resolve_conj(), e, 1e-3, 1e-4, True):
                    wrong.append(f"{op.name} {op.variant_test_name}, sample {number}")
    assert not wrong, "\n".join(wrong)
    assert compared > 20


@pytest.mark.parametrize("call", (torch.mm, torch.add, torch.maximum, torch.sub))
def test_results_are_written_to_host_tensors(call):
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    out = torch.zeros(4, 4)
    try:
        call(x, y.to(device), out=out)
    except RuntimeError:
        pytest.skip("refused, as PyTorch's devices refuse it")
    torch.testing.assert_close(out, call(x, y), rtol=1e-4, atol=1e-5)


def test_images_may_be_fed_to_convolutions():
    weight = torch.randn(8, 4, 3, 3)
    moved_weight = weight.to(device)
    for _ in range(6):
        x = torch.randn(2, 4, 12, 10)
        torch.testing.assert_close(F.conv2d(x, moved_weight).cpu(), F.conv2d(x, weight), rtol=1e-4, atol=1e-4)
