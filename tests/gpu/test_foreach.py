"""Operators on lists of tensors on the GPU, against the CPU: PyTorch's samples, in place and out of place."""

import copy
import itertools

import pytest
import torch
import torch_tandem

from tests.conformance.check import difference, to_device
from tests.op_db import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)

device = "tandem"
OPS = (
    foreach_unary_op_db
    + foreach_binary_op_db
    + foreach_pointwise_op_db
    + foreach_reduce_op_db
    + foreach_other_op_db
)
# Operators that take the host path: matrix products, and operators whose factors are in a host tensor.
ON_HOST = {"_foreach_addcmul", "_foreach_addcdiv", "_foreach_mm"}


def outcome(call, given):
    try:
        return call(given[0], *given[1], **given[2])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return error


def check(op, dtype, limit, hosted):
    samples = op.sample_inputs("cpu", dtype, num_input_tensors=[5], noncontiguous=False)
    for number, sample in enumerate(itertools.islice(samples, limit)):
        for in_place, call in ((False, op.method_variant), (True, op.inplace_variant)):
            if call is None:
                continue
            given = (sample.input, sample.args, sample.kwargs)
            expected_given = copy.deepcopy(given)
            moved = to_device(given, device)
            if op.name in ("_foreach_addcmul", "_foreach_addcdiv") and isinstance(given[1][-1], torch.Tensor):
                moved = (moved[0], (*moved[1][:-1], given[1][-1]), moved[2])
            expected = outcome(call, expected_given)
            if op.name == "_foreach_zero" and not in_place:
                continue
            torch_tandem.synchronize()
            torch_tandem.reset_report()
            got = outcome(call, moved)
            what = f"{op.name} {dtype} sample {number} in place {in_place}"
            if isinstance(expected, Exception):
                assert isinstance(got, Exception), what
                continue
            assert not isinstance(got, Exception), f"{what}: {got}"
            torch_tandem.synchronize()
            # Powers of float64 values have no native kernel.
            if sample.kwargs.get("dtype") != torch.float64:
                hosted.update(torch_tandem.report()["host_ops"])
            failure = difference(expected, got, what) or difference(expected_given[0], moved[0], what)
            assert failure is None, failure


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_samples(op):
    hosted = set()
    check(op, torch.float32, 12, hosted)
    assert op.name in ON_HOST or not hosted, hosted
    for dtype in (torch.bfloat16, torch.int64, torch.float64, torch.bool):
        if dtype in op.supported_dtypes("cpu"):
            check(op, dtype, 2, set())


def lists(*sizes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in sizes]


def same(calls, *given):
    """Compares the same calls on both devices, including the inputs that they wrote."""
    ours, theirs = to_device(list(given), device), copy.deepcopy(list(given))
    got, expected = calls(*ours), calls(*theirs)
    assert difference([expected, theirs], [got, ours], "lists") is None


def test_sizes_layouts_and_dtypes():
    many = lists(3, (4, 5), 1, (), 0, 70_000, (2, 3, 4), (100_001,), 7, 9, 11, 13)
    others = lists(3, (4, 5), 1, (), 0, 70_000, (2, 3, 4), (100_001,), 7, 9, 11, 13, seed=1)
    others[1] = others[1].t().contiguous().t()
    others[6] = torch.randn(1, 3, 1)
    for dtype in (torch.float32, torch.float16, torch.int32):
        a, b = [x.to(dtype) for x in many], [x.to(dtype) for x in others]
        same(lambda x, y: torch._foreach_add(x, y, alpha=2), a, b)
        same(lambda x, y: torch._foreach_mul_(x, y), a, b)
        same(lambda x, y: torch._foreach_add_(x, list(range(12))), a, b)
    same(lambda x, y: torch._foreach_addcmul_(x, y, y, [0.5 * i for i in range(12)]), many, others)
    same(lambda x, y: torch._foreach_lerp_(x, y, 0.25), many[:6], others[:6])
    same(lambda x: torch._foreach_norm(x), many)
    same(lambda x: torch._foreach_mul(x, torch.tensor(3.0)), many)
    mixed = [
        x.to(d)
        for x, d in zip(many, [torch.float32, torch.float64, torch.float16, torch.int64] * 3, strict=True)
    ]
    same(lambda x: torch._foreach_mul_(x, 2), mixed)
    same(lambda x, y: torch._foreach_copy_(x, y), many, mixed)


def test_order_where_tensors_overlap():
    def chain(x):
        a, b, c = x, x[1:], x[2:]
        torch._foreach_add_([a[:10], b[11:20]], [b[10:20], c[:9]])
        torch._foreach_add_([b[11:20], a[:10]], [c[:9], b[10:20]])
        torch._foreach_mul_([a[:5], a[5:10], c[8:]], 3.0)
        torch._foreach_add_([a, a], [a, a])
        return x

    same(chain, torch.randn(40))

    def through(x, y, z):
        torch._foreach_add_([y, x], [z, y])
        torch._foreach_add_([x, y], [y, z])
        torch._foreach_add_([x, y, x], [x, x, y])

    same(through, *lists(6, 6, 6))


def test_changing_scalars():
    a, b = lists(5, 6, 7), lists(5, 6, 7)
    b = to_device(b, device)
    for step in range(1, 6):
        torch._foreach_add_(a, [1.0 / step, step, -step])
        torch._foreach_add_(b, [1.0 / step, step, -step])
        torch._foreach_mul_(a, 1.0 + 1.0 / step)
        torch._foreach_mul_(b, 1.0 + 1.0 / step)
    assert difference(a, b, "lists") is None


def test_clip_grad_norm():
    def clip(*tensors):
        ps = [t.clone().requires_grad_() for t in tensors]
        for p in ps:
            p.grad = p.detach() * 3
        return [torch.nn.utils.clip_grad_norm_(ps, 1.0), *(p.grad for p in ps)]

    same(clip, *lists(5, (40, 50), (), 33_000, 1))


SIZES = [1, 3, 255, 256, 1023, 16383, 16384, 16385, 50001, *range(2, 90)]


@pytest.mark.parametrize("order", (1, 2, 1.0, 2.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_norms_of_many_tensors_share_kernels(order, dtype):
    tensors = [torch.randn(n).to(dtype) for n in SIZES]
    tensors += [
        torch.randn(7, 33).to(dtype).t(),
        torch.randn(9, 8)[:, ::2].to(dtype)[:, 1:],
        torch.zeros(0, dtype=dtype),
    ]
    expected = torch._foreach_norm(tensors, order)
    moved = [t.to(device) for t in tensors]
    outputs = []
    for _ in range(2):
        torch_tandem.synchronize()
        torch_tandem.reset_report()
        outputs.append([t.cpu() for t in torch._foreach_norm(moved, order)])
        report = torch_tandem.report()
        assert not report["host_ops"]
        assert report["devices"][0]["dispatches"] <= 2 * len(tensors) // 6  # at least 8 buffers a kernel
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for e, g, again in zip(expected, *outputs, strict=True):
        torch.testing.assert_close(g, e, rtol=bound, atol=bound)
        assert torch.equal(g, again)


def test_norms_pass_on_what_is_not_finite():
    tensors = [torch.tensor([1.0, float("inf")]), torch.tensor([float("nan")]), torch.ones(20_000)]
    got = torch._foreach_norm([t.to(device) for t in tensors])
    torch.testing.assert_close([t.cpu() for t in got], list(torch._foreach_norm(tensors)), equal_nan=True)


@pytest.mark.parametrize("bad", (None, float("inf"), float("-inf"), float("nan")))
def test_many_gradients_are_unscaled_together(bad):
    grads = [torch.randn(n) for n in SIZES] + [torch.randn(7, 33).t(), torch.randn(40).half()]
    if bad is not None:
        grads[6][16_000] = bad
    results = []
    for where in ("cpu", device):
        given = [g.to(where).clone() for g in grads]
        found, scale = torch.zeros(1, device=where), torch.full((1,), 0.25, device=where)
        torch_tandem.synchronize()
        torch_tandem.reset_report()
        torch._amp_foreach_non_finite_check_and_unscale_(given, found, scale)
        results.append([*given, found])
        torch_tandem.synchronize()
    report = torch_tandem.report()
    assert not report["host_ops"] and report["devices"][0]["dispatches"] <= len(grads) // 5
    for e, g in zip(*results, strict=True):
        torch.testing.assert_close(g.cpu(), e, equal_nan=True)


def test_a_gradient_that_is_listed_twice_is_unscaled_twice():
    grad = torch.ones(5, device=device)
    found, scale = torch.zeros(1, device=device), torch.full((1,), 0.5, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([grad, grad], found, scale)
    assert grad.tolist() == [0.25] * 5
