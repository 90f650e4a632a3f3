"""Which kernels PyTorch's dispatcher calls for tandem tensors.

Operators whose kernel is PyTorch's own for any device ("default backend kernel") do not reach Tandem as
themselves. reviewed_default_kernels.txt lists those that may: they move views, make tensors out of captured
operators, answer from metadata, call a functional operator and copy, or are for layouts that Tandem refuses.
A new version of PyTorch that adds one fails here until somebody has looked at it.
"""

import pathlib
import re

import pytest
import torch
import torch_tandem  # noqa: F401

REVIEWED = pathlib.Path(__file__).with_name("reviewed_default_kernels.txt")


def kernel(overload, key):
    """What kind of kernel the dispatcher has: `kernel`, `math kernel`, `default backend kernel`, ..."""
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
