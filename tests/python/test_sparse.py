"""Sparse tensors have the same values, layouts and gradients as on the host."""

import itertools
import warnings
from pathlib import Path

import forked
import pytest
import torch
import torch_tandem
from torch.utils import _pytree

from tests.op_db import op_db

HERE = Path(__file__).parent
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


@pytest.fixture(scope="module")
def eager():
    return printed()


def printed(*command, arguments=()):
    done = forked.run([*command, HERE / "sparse.py", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("way", ["cuda", "adopted"])
def test_calls_print_what_they_print_on_the_host(eager, way):
    run = ["-m", "torch_tandem", "run", "--quiet"]
    if way == "cuda":
        found = printed(*run, "--adopt=never", arguments=["cuda"])
    else:
        found = printed(*run, "--adopt=always")
    assert [line for line in eager if line.endswith("Error")] == ["numpy TypeError"]
    assert found == eager


def shown(values):
    return [
        (x.layout, x.dtype, x.shape, contents(x.detach())) if torch.is_tensor(x) else x
        for x in _pytree.tree_leaves(values)
    ]


def contents(x):
    x = x.cpu().to_dense()
    return (torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x).numpy().tobytes()


def run(function, leaves, spec, in_place):
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in leaves]
    first, args, kwargs = _pytree.tree_unflatten(leaves, spec)
    torch.manual_seed(0)
    try:
        result = function(first.clone() if in_place else first, *args, **kwargs)
        found = shown(result)
        if torch.is_tensor(result) and result.requires_grad:
            (result.to_dense() if result.layout != torch.strided else result).sum().backward()
            found += shown([x.grad for x in leaves if torch.is_tensor(x)])
    except Exception as error:
        return type(error)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_samples_of_pytorch(layout):
    calls, wrong = 0, {}
    for op, dtype in itertools.product(op_db, (torch.float32, torch.int64)):
        if dtype not in op.dtypes:
            continue
        differentiable = dtype == torch.float32 and op.supports_autograd
        try:
            with warnings.catch_warnings(action="ignore"):
                made = op.sample_inputs_sparse(layout, "cpu", dtype, requires_grad=differentiable)
                made = list(itertools.islice(made, 12))
        except Exception:
            continue  # PyTorch has no sample of this layout
        for sample in made:
            leaves, spec = _pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            moved = [
                x.detach().to("tandem").requires_grad_(x.requires_grad) if torch.is_tensor(x) else x
                for x in leaves
            ]
            for function, in_place in ((op.op, False), (op.inplace_variant, True)):
                if function is None or (in_place and dtype == torch.int64):
                    continue
                expected = run(function, leaves, spec, in_place)
                calls += 1
                if (found := run(function, moved, spec, in_place)) != expected:
                    wrong[f"{op.name} {sample.args} {in_place}"] = found
            torch_tandem.mark_step()
    assert not wrong
    print(f"{calls} calls with {layout}")
    assert calls >= 20


def test_functions_that_use_sparse_tensors_run_in_python():
    edges = (torch.eye(4) + 1).to_sparse().to("tandem")
    table = torch.nn.Embedding(4, 2, sparse=True, device="tandem")

    def reads(x):
        return torch.sparse.mm(edges, x)

    def trains(x):
        table.zero_grad()
        loss = table(x.int().flatten()).square().sum()
        loss.backward()
        return loss.detach()

    def makes(x):
        return x.to_sparse()

    for function in (reads, trains, makes):
        replayed = torch_tandem.function(function)
        for i in range(8):
            x = torch.full((4, 1), float(i % 3), device="tandem")
            assert torch.equal(replayed(x).to_dense().cpu(), function(x).to_dense().cpu())
        assert replayed.cache_info().hits == 0 and replayed.reason()
