"""Reductions, softmax, normalizations, scans on the device: sizes, layouts and values that OpInfo's samples
lack.
"""

import os

import pytest
import torch
import torch_tandem  # noqa: F401

if os.environ.get("TANDEM_DEVICE") != "gpu":
    pytest.skip("for the device's own kernels", allow_module_level=True)

device = "tandem"
aten = torch.ops.aten
inf, nan = float("inf"), float("nan")


def same(function, *inputs, rtol=1e-4, atol=1e-4):
    """Compares a function's outputs on the device with its outputs on the CPU, and also the inputs that it
    writes.
    """
    ours = [x.to(device) for x in inputs]
    theirs = [x.clone() for x in inputs]
    expected, got = function(*theirs), function(*ours)
    if isinstance(expected, torch.Tensor):
        expected, got = [expected], [got]
    pairs = list(zip(expected, got, strict=True))
    pairs += zip(theirs, ours, strict=True)
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(b.cpu(), a, rtol=rtol, atol=atol, equal_nan=True)


def numbers(*sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(
            0 if dtype in (torch.uint8, torch.bool) else -9, 10, sizes, generator=generator
        ).to(dtype)
    return torch.randn(sizes, generator=generator).to(dtype)


def reductions(x, dims):
    """Returns all reductions over dimensions that the dtype supports."""
    found = [x.sum(dims), x.amax(dims), x.amin(dims), x.any(dims), x.all(dims), torch.count_nonzero(x, dims)]
    if x.dtype.is_floating_point:
        found += [x.mean(dims), x.nansum(dims), *torch.var_mean(x, dims), x.std(dims, correction=0)]
        found += [torch.linalg.vector_norm(x, p, dims) for p in (0, 1, 2, inf, -inf)]
    return found


SHAPES = [
    ((20_003,), (0,)),
    ((5, 5001), (1,)),
    ((5001, 5), (0,)),
    ((900, 70), (0,)),
    ((2, 90, 33), (1,)),
    ((4, 6, 20, 41), (0, 2, 3)),
    ((7, 1, 5), (1,)),
    ((0, 4), (0,)),
    ((4, 0), (0,)),
]


@pytest.mark.parametrize(("sizes", "dims"), SHAPES)
def test_sizes(sizes, dims):
    x = numbers(*sizes)
    if 0 in sizes:
        same(
            lambda x: [
                x.sum(dims),
                x.mean(dims),
                x.nansum(dims),
                x.any(dims),
                x.all(dims),
                x.logsumexp(dims),
            ],
            x,
        )
        return
    same(lambda x: reductions(x, dims), x)
    same(lambda x: [x.logsumexp(dims)], x)
    if len(dims) == 1:
        same(lambda x: [*x.max(dims[0]), *x.min(dims[0], True), x.argmax(dims[0]), x.argmin(dims[0])], x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_integers(dtype):
    for sizes, dims in [((9000,), (0,)), ((40, 600), (0,)), ((40, 600), (1,))]:
        x = numbers(*sizes, dtype=dtype)
        same(lambda x, dims=dims: reductions(x, dims), x)
        same(lambda x, dims=dims: [*x.max(dims[0]), x.to(torch.int64).prod(dims[0])], x)
        same(lambda x, dims=dims: [x.cumsum(dims[0]), *torch.cummax(x, dims[0])], x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype):
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {"rtol": 4e-2, "atol": 4e-2}
    x = numbers(37, 301, dtype=dtype)
    for dim in (0, 1):
        same(
            lambda x, dim=dim: [x.sum(dim, dtype=torch.float32), x.mean(dim), x.var(dim), x.amax(dim)],
            x,
            **tolerance,
        )
        same(lambda x, dim=dim: [x.softmax(dim), x.log_softmax(dim), *x.max(dim)], x, **tolerance)
    w = numbers(301, dtype=dtype)
    same(lambda x, w: aten.native_layer_norm(x, [301], w, w, 1e-5), x, w, **tolerance)
    same(lambda x, w: aten.native_layer_norm(x, [301], w.float(), w.float(), 1e-5), x, w, **tolerance)
    same(lambda x: x[:, :300].softmax(1), x, **tolerance)


def test_values_that_are_not_finite():
    x = numbers(6, 300)
    x[0, 7], x[1, 250], x[2, 3], x[3, 299] = nan, inf, -inf, nan
    x[3, 2] = nan
    x[4] = -inf
    for dim in (0, 1):
        same(lambda x, dim=dim: [*x.max(dim), *x.min(dim), x.argmax(dim), x.argmin(), x.logsumexp(dim)], x)
        same(lambda x, dim=dim: [x.softmax(dim), x.log_softmax(dim), *x.aminmax(dim=dim), x.var(dim)], x)
        same(lambda x, dim=dim: [*x.cummax(dim), *x.cummin(dim), x.logcumsumexp(dim)], x)
        same(lambda x, dim=dim: [aten.norm(x, p, [dim]) for p in (None, 1, inf)], x)
    same(lambda x: [x.sum(), x.nansum(), x.isnan().sum(), (x != x).any(), x.any(), x.nan_to_num().prod()], x)
    same(lambda x: [torch._is_any_true(x != x), torch._is_all_true(x == x), torch._is_all_true(x == 0)], x)


def test_ties():
    x = numbers(3000, dtype=torch.int64)
    same(lambda x: [x.argmax(), x.argmin(), *x.max(0), *x.cummax(0), *x.cummin(0)], x)
    same(lambda x: [x.argmax(), x.t().argmax()], x.reshape(60, 50))


def test_layouts():
    x = numbers(6, 5, 20, 15)
    views = [
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x[:, ::2, 1:-1, ::3],
        lambda x: x[:, :1].expand(6, 5, 20, 15),
        lambda x: x.transpose(1, 3),
    ]

    def run(x):
        found = [x.sum((0, 2)), x.argmax(), *x.max(1), x.softmax(1), x.var((1, 3)), x.cumsum(2)]
        return [*found, x.softmax(-1), x.log_softmax(0)]

    for view in views:
        same(lambda x, view=view: run(view(x)), x)


def test_places_given():
    def run(x, out):
        torch.sum(x, 0, out=out)
        kept = out.clone()
        torch.amax(x, 0, out=out)
        y = x.clone()
        y.cumsum_(1)
        z = x.t().clone().t()
        z.cumprod_(0)
        y.renorm_(2, 0, 1.0)
        return [kept, out, y, z]

    same(run, numbers(40, 30) / 4, torch.zeros(30))
    same(lambda x: [x.cumsum_(0)], numbers(40, dtype=torch.int32))


def test_scans():
    for sizes, dim in [((9001,), 0), ((900, 40), 0), ((40, 300), 1), ((), 0)]:
        x = numbers(*sizes)
        same(lambda x, dim=dim: [x.cumsum(dim), x.logcumsumexp(dim), *x.cummax(dim)], x, atol=2e-3)
        same(lambda x, dim=dim: [(1 + x * 1e-3).cumprod(dim)], x, rtol=1e-3)


def test_softmax_of_few_long_rows():
    for sizes, dim in [((2, 33_000), 1), ((33_000,), 0)]:
        x, g = numbers(*sizes), numbers(*sizes, seed=1)
        same(lambda x, dim=dim: [x.softmax(dim), x.log_softmax(dim)], x)
        same(lambda g, y, dim=dim: [aten._softmax_backward_data(g, y, dim, torch.float32)], g, x.softmax(dim))
        same(
            lambda g, y, dim=dim: [aten._log_softmax_backward_data(g, y, dim, torch.float32)],
            g,
            x.log_softmax(dim),
        )


@pytest.mark.parametrize(("rows", "columns"), [(2, 33_000), (300, 64), (3, 1), (1000, 3)])
def test_layer_norm(rows, columns):
    x, g, w = numbers(rows, columns), numbers(rows, columns, seed=1), numbers(columns, seed=2)
    mean, rstd = x.mean(1, True), 1 / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    same(lambda x, w: aten.native_layer_norm(x, [columns], w, w, 1e-5), x, w)
    same(lambda x: aten.native_layer_norm(x, [columns], None, None, 1e-5), x)

    def backward(g, x, mean, rstd, w):
        return [
            t
            for mask in ([True, True, True], [False, False, True], [True, True, False])
            for t in aten.native_layer_norm_backward(g, x, [columns], mean, rstd, w, w, mask)
            if t is not None
        ]

    if columns > 1:
        same(backward, g, x, mean, rstd, w, rtol=1e-3, atol=1e-3)


def test_group_norm_backward():
    x, g, w = numbers(3, 12, 50, 40), numbers(3, 12, 50, 40, seed=1), numbers(12, seed=2)
    same(lambda x, w: aten.native_group_norm(x, w, w, 3, 12, 2000, 4, 1e-5), x, w)
    _, mean, rstd = aten.native_group_norm(x, w, w, 3, 12, 2000, 4, 1e-5)

    def backward(g, x, mean, rstd, w):
        return aten.native_group_norm_backward(g, x, mean, rstd, w, 3, 12, 2000, 4, [True, True, True])

    same(backward, g, x, mean, rstd, w, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_updates_running_statistics(channels_last):
    x = numbers(8, 20, 30, 11)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    w = numbers(20, seed=1)

    def run(x, w, mean, var):
        y = torch.nn.functional.batch_norm(x, mean, var, w, w, training=True, momentum=0.3)
        z = torch.nn.functional.batch_norm(x, mean, var, w, None, training=False)
        return [y, z, mean * 2, var * 2]

    same(run, x, w, torch.zeros(20), torch.ones(20))
    # Both statistics are in one storage.
    same(
        lambda x, both: [torch.nn.functional.batch_norm(x, both[0], both[1], training=True)],
        x,
        torch.ones(2, 20),
    )


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_backward(training):
    x, g, w = numbers(9, 20, 33), numbers(9, 20, 33, seed=1), numbers(20, seed=2)
    mean, var = x.mean((0, 2)), x.var((0, 2), correction=0)

    def backward(g, x, w, mean, var):
        rstd = 1 / (var + 1e-5).sqrt()
        return [
            t
            for mask in ([True, True, True], [True, False, False], [False, True, False])
            for t in aten.native_batch_norm_backward(g, x, w, mean, var, mean, rstd, training, 1e-5, mask)
            if t is not None
        ]

    same(backward, g, x, w, mean, var, rtol=1e-3, atol=1e-3)
    same(lambda g, x: backward(g, x, None, x.mean((0, 2)), x.var((0, 2))), g, x, rtol=1e-3, atol=1e-3)


def test_more_rows_than_workgroups():
    x = numbers(70_000, 2)
    same(
        lambda x: [x[:, :, None].expand(70_000, 2, 270).amax((1, 2)), x[:, :1].expand(70_000, 18).softmax(1)],
        x,
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16])
def test_elements_of_another_tensor(dtype):
    def found(x, tests):
        few = tests.flatten()[:3]
        calls = [(x, tests), (x.mT, tests.flatten()[::2]), (x[:, :0], tests), (x, tests[:0]), (x[0, 0], few)]
        found = [torch.isin(*call, invert=invert) for call in calls for invert in (False, True)]
        return [*found, torch.isin(x, few, assume_unique=True), torch.isin(x.long(), tests.float())]

    x, tests = numbers(30, 70, dtype=dtype), numbers(6, 5, dtype=dtype, seed=1)
    tests[2, 3] = x[4, 5]
    if dtype.is_floating_point:
        x[0, 0] = tests[0, 0] = nan
        x[1, 1], tests[1, 1] = 0.0, -0.0
    same(found, x, tests)
    same(lambda x, tests: [torch.isin(x, tests)], numbers(3, dtype=dtype), numbers(9000, dtype=dtype))
