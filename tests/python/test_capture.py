"""The kernels that PyTorch's dispatcher calls for tandem tensors.

Operators with a kernel of PyTorch for any device ("default backend kernel") do not reach Tandem as operators.
reviewed_default_kernels.txt lists the operators for which this is right: they create views, compose captured
operators, answer from metadata, call a functional operator and copy, or are for layouts that Tandem does not
support. If a new version of PyTorch adds such a kernel, these tests fail until it has been reviewed.
"""

import pathlib
import re

import pytest
import torch
import torch_tandem
from helpers import assert_same, to_host

REVIEWED = pathlib.Path(__file__).with_name("reviewed_default_kernels.txt")


def kernel(overload, key):
    """Returns the dispatcher's kind of kernel: `kernel`, `math kernel`, `default backend kernel`, ..."""
    row = re.search(rf"^{key}: .*\[(.+)\]$", torch._C._dispatch_dump_table(overload), re.MULTILINE)
    return row and row[1]


@pytest.fixture(scope="module")
def kernels():
    overloads = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {name: kernel(name, "PrivateUse1") for name in overloads}


def test_only_reviewed_operators_reach_default_kernels(kernels):
    reviewed = {line for line in REVIEWED.read_text().split("\n") if line and not line.startswith("#")}
    default = {name for name, kind in kernels.items() if kind == "default backend kernel"}
    assert sorted(default - reviewed) == []


def test_the_reviewed_list_has_no_operator_that_is_captured(kernels):
    reviewed = {line for line in REVIEWED.read_text().split("\n") if line and not line.startswith("#")}
    assert sorted(name for name in reviewed if kernels.get(name) == "kernel") == []


def test_operators_that_the_cpu_does_not_decompose_are_captured(kernels):
    decomposed = [
        name
        for name, kind in kernels.items()
        if kind == "math kernel" and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    ]
    assert decomposed == []


def test_every_cpu_kernel_has_a_captured_counterpart(kernels):
    reviewed = REVIEWED.read_text().split("\n")
    missing = [
        name
        for name, kind in kernels.items()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        and kind != "kernel"
        and name not in reviewed
    ]
    assert missing == []


def test_the_common_operators_are_captured(kernels):
    names = "add.Tensor add_.Tensor addmm convolution native_layer_norm _softmax sum.dim_IntList embedding"
    names += " _foreach_add_.Scalar _fused_adamw_ native_dropout index_put_ _copy_from"
    assert [n for n in names.split() if kernels[f"aten::{n}"] != "kernel"] == []


A = torch.ops.aten


def seeded(device):
    return torch.Generator(device=device).manual_seed(3)


# Calls of reviewed operators that programs may use, and of generated variants, with a device, two matrices
# and indices. These operators have no kernels for this device, because they are composed of captured
# operators.
REVIEWED_CALLS = [
    lambda d, x, y, i: [torch.bartlett_window(6, device=d), torch.blackman_window(6, device=d)],
    lambda d, x, y, i: [torch.hamming_window(6, device=d), torch.hann_window(7, periodic=False, device=d)],
    lambda d, x, y, i: [torch.fft.fftfreq(5, device=d), torch.fft.rfftfreq(5, device=d)],
    lambda d, x, y, i: [torch.linspace(0, x[0, 0], 5, device=d), torch.logspace(x[0, 0], 2, 5, device=d)],
    lambda d, x, y, i: [torch.range(0, 5, 2, device=d), torch.full((2,), 3, device=d)],
    lambda d, x, y, i: [torch.randperm(7, device=d), torch.randperm(7, generator=seeded(d), device=d)],
    lambda d, x, y, i: [torch.randint_like(i, 2, 5), A.randint_like(i, i.max() + 1)],
    lambda d, x, y, i: [torch.rand_like(x), torch.randn_like(x), A.rand_like(x, generator=seeded(d))],
    lambda d, x, y, i: torch.randint(5, (3,), generator=seeded(d), device=d),
    lambda d, x, y, i: [A.normal_functional(x, 1.0, 2.0), A._efficientzerotensor([2], device=d)],
    lambda d, x, y, i: [A.resize(x, [3, 4]), A.resize_as(x, y[:2]), A.set(x, y), A.set(x)],
    lambda d, x, y, i: [A.index_copy(x, 0, i[0, :2], y[:2]), A._foreach_copy([x], [y])],
    lambda d, x, y, i: [A._reshape_copy(x, [6, 4]), A._reshape_alias_copy(x, [6, 4], [4, 1])],
    lambda d, x, y, i: [torch.alias_copy(x), torch.detach_copy(x), torch.select_copy(x, 0, 1), A.lift(x)],
    lambda d, x, y, i: [torch.slice_copy(x, 1, 1, 4), torch.split_copy(x, 2), torch.squeeze_copy(x[:1])],
    lambda d, x, y, i: [torch.view_copy(x, dtype=torch.int32), torch.unfold_copy(x, 1, 2, 2)],
    lambda d, x, y, i: [torch.view_as_complex_copy(x.view(4, 3, 2)), torch.narrow_copy(x, 0, 1, 2)],
    lambda d, x, y, i: [torch.unsafe_split_with_sizes(x, [2, 2]), A.slice_inverse(x[1:3], x, 0, 1, 3)],
    lambda d, x, y, i: [A._neg_view(x) + 0, torch._neg_view_copy(x)],
    lambda d, x, y, i: torch._pack_padded_sequence(x.view(4, 2, 3), torch.tensor([4, 2]), False),
    lambda d, x, y, i: [torch.repeat_interleave(i[0]), torch.repeat_interleave(x, 2)],
    lambda d, x, y, i: [x.is_pinned(), A._has_same_storage_numel(x, y), x.is_same_size(y), x.dense_dim()],
    lambda d, x, y, i: A.arange.out(5, out=torch.empty(5, device=d)),
    lambda d, x, y, i: A.tril_indices.out(3, 3, out=torch.empty(2, 6, dtype=torch.long, device=d)),
    lambda d, x, y, i: A.add.Scalar_out(x, 2, out=torch.empty_like(x)),
    lambda d, x, y, i: A.relu.out(x, out=torch.empty_like(x)),
    lambda d, x, y, i: A.native_dropout.out(x, 0.5, True, out0=torch.empty_like(x), out1=x > 9),
    lambda d, x, y, i: A.flip.out(x, [1], out=torch.empty_like(x)),
    lambda d, x, y, i: A.convolution.out(
        x.view(1, 2, 3, 4), y[:1, :2].view(1, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
        out=torch.empty(1, 1, 3, 4, device=d),
    ),
    lambda d, x, y, i: A._fused_sgd.out(
        [x], [y], [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, out=[torch.empty_like(x)],
    ),
]  # fmt: skip


def call(number, device):
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 4, 6, generator=numbers).to(device)
    return REVIEWED_CALLS[number](device, x, y, torch.tensor([[2, 0, 3], [1, 1, 2]], device=device))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(REVIEWED_CALLS)))
def test_reviewed_operators_compute_as_eager(number):
    expected = to_host(call(number, "cpu"))
    for _ in range(3):
        assert_same(expected, to_host(call(number, "tandem")), "reviewed")
        torch_tandem.mark_step()


def test_kaiser_window():
    assert torch.equal(torch.kaiser_window(7, device="tandem").cpu(), torch.kaiser_window(7))
