"""Every operator in PyTorch's own database, forward and gradient, bit for bit with eager CPU.

Each sample runs twice. The first iteration is traced, and the second is co-executed.

docs/differs.md lists the operators that differ, with reasons. The test fails if an operator differs without
being listed, and also if a listed operator agrees.
"""

import itertools
import pathlib
import re

import pytest
import torch
import torch_tandem
from helpers import OWN, same_bits
from torch.utils._pytree import tree_leaves, tree_map

from tests.op_db import op_db

SAMPLES = 4
CHUNKS = 24
NEEDS_A_GPU = "jiterator"
# Maximum number of entries of a chunk (about 28 entries) whose second iteration may be traced too.
MAY_BE_TRACED = 2
DIFFERS = pathlib.Path(__file__).parents[2] / "docs" / "differs.md"
ENTRIES = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]

# Positions of arguments that PyTorch reads on the host, whatever the device.
STAYS_ON_HOST = {"tensor_split": 0}


def name(op):
    return f"{op.name} ({op.variant_test_name})" if op.variant_test_name else op.name


def listed():
    """Returns the operators in the first table of docs/differs.md."""
    section = DIFFERS.read_text().split("\n## ")[1]
    rows = re.findall(r"^\| `([^`]+)` +\|", section, re.MULTILINE)
    assert len(rows) == len(set(rows)), "an operator is listed twice"
    return set(rows)


def leaves(x):
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def move(x, device):
    if isinstance(x, torch.Tensor):
        # The tensor is copied even for the CPU, so that operators that write in place do not change the
        # sample.
        return x.detach().clone().to(device).requires_grad_(x.requires_grad)
    return x


def run(op, sample, device):
    """Returns an operator's outputs, and its gradients for output gradients of one."""
    args = (sample.input, *sample.args)
    kept = STAYS_ON_HOST.get(op.name)
    args = [
        move(a, "cpu") if i - 1 == kept else tree_map(lambda t: move(t, device), a)
        for i, a in enumerate(args)
    ]
    kwargs = tree_map(lambda t: move(t, device), sample.kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device(device)
    torch.manual_seed(0)
    out = sample.output_process_fn_grad(op(*args, **kwargs))
    outs = leaves(out)
    inputs = [t for t in leaves((args, kwargs)) if t.requires_grad and t.is_leaf]
    roots = [t for t in outs if t.requires_grad]
    grads = []
    if inputs and roots:
        ones = [torch.ones_like(t) for t in roots]
        grads = torch.autograd.grad(roots, inputs, ones, allow_unused=True)
    return [t.detach().cpu() for t in outs], [None if g is None else g.detach().cpu() for g in grads]


def samples_of(op):
    """Returns some of an entry's samples, or none if this build of PyTorch cannot create them."""
    try:
        made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        return list(itertools.islice(made, SAMPLES))
    except RuntimeError:
        return []


def on_tandem(op, sample):
    """Returns outputs and gradients, and whether the whole iteration was co-executed."""
    before = torch_tandem.report()["steps_traced"]
    try:
        outs, grads = run(op, sample, "tandem")
    finally:
        torch_tandem.mark_step()
    return outs, grads, torch_tandem.report()["steps_traced"] == before


def near(x, y):
    """Whether values are as near as the results of Tandem's own kernels have to be."""
    try:
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError:
        return False
    return True


def within_twice(op, sample, what, number, eager, tandem):
    """Whether Tandem's value is at most twice as far from the double precision result as eager's value.

    The limit is the same as in test_accuracy.py.
    """

    def double(x):
        floats = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().double().requires_grad_(x.requires_grad) if floats else x

    exact = run(op, sample.transform(double), "cpu")[what == "gradient"][number]
    far = [(x.double() - exact).abs().max() for x in (eager, tandem)]
    return bool(far[1] <= 2 * far[0])


def difference(op):
    """Returns how Tandem differs from eager or `None`, the number of samples that ran, and whether all second
    iterations were co-executed.

    A sample that eager PyTorch itself refuses in this build does not run.
    """
    ran, coexecuted = 0, True
    for sample in samples_of(op):
        try:
            outs, grads = run(op, sample, "cpu")
        except Exception:
            continue
        ran += 1
        agrees = near if OWN else same_bits
        for phase in ("tracing", "co-executing"):
            try:
                tandem_outs, tandem_grads, untraced = on_tandem(op, sample)
            except Exception as e:
                return f"{phase}, {type(e).__name__}: {str(e).splitlines()[0]}", ran, False
            for what, eager, tandem in (("output", outs, tandem_outs), ("gradient", grads, tandem_grads)):
                if len(eager) != len(tandem):
                    return f"{phase}, {len(tandem)} {what}s instead of {len(eager)}", ran, False
                for number, (x, y) in enumerate(zip(eager, tandem, strict=True)):
                    if (x is None and y is None) or (x is not None and y is not None and agrees(x, y)):
                        continue
                    if (
                        x is None
                        or y is None
                        or agrees is not near
                        or not within_twice(op, sample, what, number, x, y)
                    ):
                        return f"{phase}, {what}: {x} and {y}", ran, False
            # Co-execution must have tracing's bits, whichever kernels are used.
            outs, grads, agrees = tandem_outs, tandem_grads, same_bits
        coexecuted &= untraced
    return None, ran, coexecuted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators(chunk):
    known = listed()
    problems, skipped, traced = [], [], []
    entries = ENTRIES[chunk::CHUNKS]
    for op in entries:
        differs, ran, coexecuted = difference(op)
        if differs and name(op) not in known:
            problems.append(f"{name(op)} is not listed and differs, {differs}")
        elif not differs and not OWN and name(op) in known:
            problems.append(f"{name(op)} is listed and agrees")
        if not ran:
            skipped.append(name(op))
        elif not differs and not coexecuted:
            traced.append(name(op))
    print(f"{len(entries)} entries; not run: {skipped}; traced twice: {traced}")
    assert not problems, "\n".join(problems)
    assert all(entry.startswith(NEEDS_A_GPU) for entry in skipped), skipped
    assert len(traced) <= MAY_BE_TRACED, traced


def test_the_list_is_short_and_names_operators():
    names = {name(op) for op in ENTRIES}
    assert listed() <= names
    assert len(listed()) <= 0.03 * len(names)
