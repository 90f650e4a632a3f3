"""Gathers, scatters, joins and views on the GPU against the CPU: duplicates, layouts, ranges, large sizes."""

import os

import pytest
import torch
import torch_tandem

device = "tandem"
HALF = (torch.float16, torch.bfloat16)
DTYPES = [*HALF, torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool]


def make(*size, dtype=torch.float32):
    """Returns numbers that every dtype can represent."""
    return torch.randint(0, 2 if dtype == torch.bool else 50, size).to(dtype)


def moved(value):
    """Returns the same nested structure on the device, with its tensors' strides and offsets."""
    if isinstance(value, torch.Tensor):
        if value.storage_offset() == 0 and value.is_contiguous():
            return value.to(device)
        whole = value.untyped_storage().nbytes() // value.itemsize
        base = torch.as_strided(value, (whole,), (1,), 0)
        return torch.as_strided(base.to(device), value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v) for v in value)
    return value


def same(got, expected, tolerance=0.0):
    """Compares values, dtypes, sizes and strides."""
    if isinstance(expected, (list, tuple)):
        for g, e in zip(got, expected, strict=True):
            same(g, e, tolerance)
        return
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if expected.numel():
        sized = [d for d, n in enumerate(expected.shape) if n > 1]
        assert [got.stride(d) for d in sized] == [expected.stride(d) for d in sized]
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(call, *args, native=True, tolerance=0.0):
    """Checks that a call on the device returns what it returns on the CPU, without the host path."""
    on_device = moved(list(args))
    expected = call(*args)
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    got = call(*on_device)
    torch_tandem.synchronize()
    assert not native or not torch_tandem.report()["host_ops"]
    same(got, expected, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_of_several_stays(dtype):
    x, src = make(37, 50, dtype=dtype), make(90, 50, dtype=dtype)
    index = torch.randint(0, 37, (90, 50))
    check(lambda x, i, s: x.scatter(0, i, s), x, index, src)
    check(lambda x, i, s: x.scatter_(0, i, s), x.clone(), index, src)
    check(lambda x, i, s: x.index_copy(0, i, s), x, index[:, 0], src)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_of_several_stays_where_threads_race_on_the_cpu(dtype):
    x, rows, columns = make(37, 50, dtype=dtype), torch.randint(-37, 37, (400,)), torch.randint(0, 50, (400,))
    points, lines, many = make(400, dtype=dtype), make(400, 50, dtype=dtype), make(4, 1000, dtype=dtype)
    places = torch.randint(-1850, 1850, (4, 1000))

    def put(x, rows, columns, points, lines, places, many):
        return x.index_put((rows, columns), points), x.index_put((rows,), lines), x.put(places, many)

    def scattered(index, values):
        return x.flatten().scatter(0, index.flatten() % 1850, values.flatten()).view(37, 50)

    whole = x.scatter(0, (rows % 37)[:, None].expand(-1, 50), lines)
    expected = scattered(rows * 50 + columns, points), whole, scattered(places, many)
    same(put(*moved([x, rows, columns, points, lines, places, many])), expected)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (torch.bool, torch.float64)])
def test_sums_of_several(dtype):
    x, src = make(7, 50, dtype=dtype), make(90, 50, dtype=dtype)
    index = torch.randint(0, 7, (90, 50))
    tolerance = 1e-1 if dtype in HALF else 1e-5 if dtype.is_floating_point else 0
    if dtype in HALF:
        x, src = x / 50, src / 500
    check(lambda x, i, s: x.scatter_add(0, i, s), x, index, src, tolerance=tolerance)
    columns = x.t().contiguous().t()
    check(lambda x, i, s: x.scatter_add_(0, i, s), columns, index, src, tolerance=tolerance)
    check(lambda x, i, s: x.index_add(0, i, s, alpha=2), x, index[:, 0], src, tolerance=tolerance)
    for values in (src, src[0]):
        args = x.clone(), index[:, 0], values
        check(lambda x, i, s: x.index_put_((i,), s, accumulate=True), *args, tolerance=tolerance)


def slots_of(kind, count, slots):
    """Indices into slots, distributed in the way `kind`."""
    return {
        "random": lambda: torch.randint(0, slots, (count,)),
        "equal": lambda: torch.full((count,), slots // 2),
        "apart": lambda: torch.randperm(count) % slots,
        "few": lambda: (torch.rand(count) ** 8 * slots).long(),
        "descending": lambda: torch.arange(count).mul(slots).div(max(count, 1)).long().flip(0),
    }[kind]()


SIZES = [1, 2, 63, 64, 65, 96, 1023, 1024, 1025, 2048, 5000, 32 * 1024, 32 * 1024 + 1, 70_001]
"""Numbers of elements around the limits of the kernels for few elements, blocks, tiles and parts."""


@pytest.mark.parametrize("kind", ["random", "equal", "apart", "few", "descending"])
@pytest.mark.parametrize("count", SIZES)
def test_sums_of_any_number_of_elements(count, kind):
    """Sums of small integers are exact in any order. Other sums have the same bits in every run."""
    slots = 300
    index = slots_of(kind, count, slots)
    x, src = make(slots, 3) - 25, make(count, 3) - 25
    check(lambda x, i, s: x.index_add(0, i, s), x, index, src)
    check(lambda x, i, s: x.t().contiguous().index_add_(1, i, s.t()), x, index, src)
    check(lambda x, i, s: x[:, 0].scatter_add(0, i, s[:, 0]), x, index, src)
    check(lambda x, i, s: x.put(i - slots, s[:, 1], accumulate=True), x, index, src)
    check(lambda x, i, s: x.index_put((i - slots,), s[:, :1], accumulate=True), x, index, src)
    options = dict(reduce="mean", include_self=False)
    check(lambda x, i, s: x[:, 0].scatter_reduce(0, i, s[:, 0], **options), x, index, src, tolerance=1e-6)
    x, index, src = moved([torch.randn(slots, 3), index, torch.randn(count, 3)])
    first, second = (x.index_add(0, index, src).cpu() for _ in range(2))
    assert torch.equal(first, second)


def test_sums_along_any_dimensions():
    x, i, j = make(9, 40, 7, 5), torch.randint(0, 40, (30, 8)), torch.randint(-7, 7, (8,))
    flat = i.flatten()
    check(lambda x, i: x.index_add(1, i, x[:, i % 7].contiguous()), x, flat)
    check(lambda x, i, s: x.index_add_(2, i, s), x.clone(), flat % 7, make(9, 40, 240, 5))
    check(lambda x, i, s: x.index_put((i,), s, accumulate=True), x, i % 9, make(30, 8, 40, 7, 5))
    check(lambda x, i, j: x.index_put((i % 9, i, j), x[0, 0, 0], accumulate=True), x, i, j)
    check(lambda x, i, j, s: assign_sums(x, (i, j), s), x, i, j, make(9, 30, 8, 5))
    for dim in range(4):
        index = torch.randint(0, x.shape[dim], (9, 40, 7, 5))
        check(lambda x, i, s, d=dim: x.scatter_add(d, i[:, :33], s), x, index, x * 2)


@pytest.mark.parametrize("count", [30, 3000])
def test_sums_within_one_storage(count):
    def call(x, i):
        x[: count * 4].view(count, 4).index_add_(0, i, x[count * 4 :].view(count, 4))
        return x

    check(call, make(count * 8), torch.randint(0, count, (count,)))


def assign_sums(x, indices, values):
    """Returns `x` with values added at indices in all dimensions but the first."""
    every = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
    return x.index_put((every, *indices), values, accumulate=True)


@pytest.mark.parametrize("count", [40, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_what_is_not_finite(count, dtype):
    index = torch.randint(0, 50, (count,))
    src = torch.randn(count).to(dtype)
    src[index == 3], src[index == 4], src[index == 5] = -0.0, float("inf"), 0.0
    src[index == 6] = src[index == 6].sign() * float("inf")
    src[7] = float("nan")
    x = torch.randn(50).to(dtype)
    x[3] = -0.0
    tolerance = 5e-6 if dtype == torch.float32 else 1.5e-1
    check(lambda x, i, s: x.index_add(0, i, s), x, index, src, tolerance=tolerance)
    check(lambda x, i, s: x.scatter_add_(0, i, s), x.clone(), index, src, tolerance=tolerance)
    check(lambda x, i, s: x.scatter_reduce(0, i, s.sign(), "prod"), x, index, src, tolerance=tolerance)


# 64-bit floats are passed to the kernel as 64-bit integers, which not every adapter has.
@pytest.mark.skipif(
    not {"f64", "int64"}.isdisjoint(os.environ.get("TANDEM_GPU_WITHOUT", "").split(",")),
    reason="needs 64-bit floats",
)
@pytest.mark.parametrize("count", [40, 3000])
def test_sums_of_64_bits(count):
    x, src, index = (
        torch.randn(50, dtype=torch.double),
        torch.randn(count, dtype=torch.double),
        torch.randint(0, 50, (count,)),
    )
    check(lambda x, i, s: x.index_add(0, i, s, alpha=0.3), x, index, src, tolerance=1e-12)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, "mean"), x, index, src, tolerance=1e-12)


@pytest.mark.parametrize("count", [7, 100, 2000])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_embeddings(dtype, scaled, count):
    gradient, index = (make(count, 2, 33) / 64).to(dtype), torch.randint(0, 90, (count, 2))
    index[index == 11] = 12
    for i in (index, index.int(), torch.full_like(index, 5)):
        args = moved([gradient, i])
        call = torch.ops.aten.embedding_dense_backward
        for padding in (-1, 5):
            got = [call(*args, 90, padding, scaled).cpu() for _ in range(2)]
            assert torch.equal(*got)
            expected = call(gradient.double(), i, 90, padding, scaled).to(dtype)
            same(got[0], expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_sums_carry_into_the_upper_word():
    x = torch.tensor([2**40 - 1, -(2**33), 0])
    index = torch.tensor([0, 1, 0, 1, 2] * 30)
    src = torch.tensor([2**32 - 1, -1, 2**31, -(2**50), -7] * 30)
    check(lambda x, i, s: x.scatter_add(0, i, s), x, index, src)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8])
def test_scatter_reduce(dtype, reduce, include_self):
    x, src = (make(5, 30) % 3 - 1).to(dtype), (make(12, 30) % 4 - 2).to(dtype)
    index = torch.randint(0, 4, (12, 30))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5 if dtype == torch.float32 else 0
    options = dict(reduce=reduce, include_self=include_self)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, **options), x, index, src, tolerance=tolerance)
    if reduce != "sum":
        source = (index[:, 0], src)
        check(lambda x, i, s: x.index_reduce(0, i, s, **options), x, *source, tolerance=tolerance)


def test_not_a_number_wins_a_maximum():
    x, src = torch.zeros(3), torch.tensor([1.0, float("nan"), 2.0, -1.0])
    index = torch.tensor([0, 0, 0, 1])
    check(lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), x, index, src)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, "amin", include_self=False), x, index, src)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float16])
def test_windows_that_do_not_begin_with_a_word(dtype):
    base = make(1003, dtype=dtype)
    index = torch.randint(0, 90, (200,))

    def write(base, index):
        window = base[3:93]
        window.index_copy_(0, index, base[500:700].clone())
        window[::3].index_fill_(0, index % 30, 1)
        base[101:201].scatter_(0, index[:7] + 1, 3)
        return base, torch.cat([base[1:6], base[7:14], base[9:10]]), base[5:300].flip(0)

    check(write, base, index)


def assign(x, index, value):
    """Returns a copy of `x` after `x[:, index] = value`."""
    x = x.clone()
    x[:, index] = value
    return x


def test_positions_of_any_kind():
    x = make(6, 7, 8, 9)
    i, j = torch.tensor([[0, -1, 5], [2, 2, -6]]), torch.tensor([3, 1, -7])
    check(lambda x, i: x[i], x, i)
    check(lambda x, i: x[i.int()], x, i)
    check(lambda x, i: x[:, i], x, i)
    check(lambda x, i, j: x[i, j], x, i, j)
    check(lambda x, i, j: x[i, :, j], x, i, j)
    check(lambda x, i, j: x[:, i, None, j], x, i, j)
    check(lambda x, i, j: x[..., i, j], x, i, j)
    check(lambda x, i: x[:, i[:, :0]], x, i)
    check(lambda x, i: x.take(i * 500), x, i % 6)
    check(assign, x, i, make(6, 1, 3, 8, 1))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 0, 2, 1), (1, 0, 3, 2)])
def test_strides_are_eagers(order):
    x = make(4, 5, 6, 3).permute(order)
    i = torch.randint(0, 3, (2, 3))
    check(lambda x, i: x[i], x, i)
    check(lambda x, i: x[:, i], x, i)
    check(lambda x, i: x[:, :, i.t()], x, i)
    check(lambda x, i: x[i, :, i], x, i)
    check(lambda x, i: x[i, i], x, i)
    check(lambda x, i: x[:, i.int().expand(2, 2, 3)], x, i)
    check(lambda x, i: x.index_select(1, i[0]), x, i)
    check(lambda x, i: x.index_fill(1, i[0], 4), x, i)
    check(lambda x, i: x.index_add(1, i[0], x[:, :3]), x, i)
    check(lambda x, i: x.index_put((i,), x[i] + 1), x, i)
    check(lambda x: (x.flip(1, 3), x.roll((1, -2), (1, 3)), x.roll(5), x.tril(-1), x.triu(1)), x)
    check(lambda x: (x.rot90(1, (1, 3)), x.rot90(2, (0, 1)), x.rot90(-1, (3, 2)), x.rot90(4, (0, 1))), x)
    check(lambda x: (torch.cat([x, x], 1), torch.cat([x, x.contiguous()], 2), torch.stack([x, x], 2)), x)
    check(lambda x: torch.cat([x.narrow(1, 0, 2), x, x.int()], 1), x)
    check(lambda x: (x.repeat(2, 1, 3, 1), torch.diag_embed(x, -2, 1, 3)), x)
    check(lambda x: (x.select_scatter(x[:, 1], 1, 0), x.slice_scatter(x[:, :, :1], 2, 1, 2, 2)), x)
    check(lambda x: x.diagonal_scatter(x.diagonal(1, 1, 2) + 1, 1, 1, 2), x)
    check(lambda x: (torch.gather(x, 1, (x % 3).long()), torch.take(x, (x % 3).long())), x)
    check(lambda x: (x.sort(dim=1, stable=True), x.topk(2, 1)[0]), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_movement_of_all_dtypes(dtype):
    x = make(5, 6, dtype=dtype)
    check(lambda x: torch.cat([x[:2], x, x.t()[:, :5].t(), x[3:]]), x)
    check(lambda x: torch.cat([x] * 20, 1), x)
    check(lambda x: torch.cat([torch.empty(0, dtype=x.dtype, device=x.device), x], 1), x)
    check(lambda x: torch.stack([x, x, x], -1), x)
    check(lambda x: torch.block_diag(x, x[0], x[0, 0], x), x)
    check(lambda x: (x.flip(0), x.roll(7), x.repeat(2, 1, 2), x.tril(1), x.triu(-2), x.diag(1)), x)
    if dtype not in (torch.bool, torch.float64):
        check(torch.trace, x)
    check(lambda x, m: x.index_put((m,), x[0, 0]), x, make(5, dtype=torch.bool))
    check(lambda x, m: assign(x, m, x[1, 1]), x, make(6, dtype=torch.bool))


def test_cat_promotes():
    tensors = [make(2, 3, dtype=d) for d in (torch.int8, torch.uint8, torch.float16, torch.bfloat16)]
    check(lambda *t: torch.cat(t), *tensors)
    check(lambda *t: torch.stack(t), *tensors)


def test_out_is_resized():
    x, i = make(5, 6), torch.tensor([4, 0])

    def call(x, i):
        empty = [torch.empty(0, device=x.device) for _ in range(4)]
        torch.cat([x, x], out=empty[0])
        torch.index_select(x, 0, i, out=empty[1])
        torch.arange(1, 2.05, 0.1, out=empty[2])
        torch.linspace(0, 1, 11, out=empty[3])
        return empty

    check(call, x, i, tolerance=1e-6)
    check(lambda x: (torch.eye(4, 6, device=x.device), torch.arange(7, device=x.device)), x)
    check(lambda x: torch.logspace(-2, 2, 9, device=x.device), x, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype):
    weight, index = (make(20, 33) / 100).to(dtype), torch.randint(0, 20, (4, 9))

    def gradient(weight, index, **options):
        weight = weight.detach().requires_grad_()
        y = torch.nn.functional.embedding(index, weight, **options)
        y.backward(torch.ones_like(y) / 4)
        return y.detach(), weight.grad

    check(gradient, weight, index, tolerance=1e-2)
    check(lambda w, i: gradient(w, i.int(), padding_idx=3), weight, index, tolerance=1e-2)
    check(lambda w, i: gradient(w, i, scale_grad_by_freq=True), weight, index, tolerance=1e-2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x.gather(0, i),
        lambda x, i: x[i[0], i[0]],
        lambda x, i: x.index_select(0, i[0]),
        lambda x, i: x.scatter(0, i, 1),
        lambda x, i: x.index_add(0, i[0], x[:2]),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: x.bfloat16().index_select(0, i[0]),
        lambda x, i: x.take(i * 10),
        lambda x, i: x.index_add(0, i.flatten().repeat(50), x.repeat(40, 1)),
        lambda x, i: x.scatter_add(1, i.repeat(2, 60)[:, :100] - 2, x.repeat(1, 40)),
        lambda x, i: x.index_put((i.flatten().repeat(400),), x[0], accumulate=True),
        lambda x, i: x.put(i * 10, i.float(), accumulate=True),
    ],
)
def test_out_of_range_is_told(call):
    x, index = make(5, 5).to(device), torch.tensor([[1, 5], [0, 2]]).to(device)
    with pytest.raises(Exception, match="out of range"):
        call(x, index).cpu()
    assert x.sum().item() == x.cpu().sum().item()


def test_what_is_empty():
    x, none = make(0, 4), torch.zeros(0, dtype=torch.long)
    check(lambda x, i: (x[i], x.index_select(0, i), x.flip(0), x.roll(1), x.repeat(2, 3), x.tril()), x, none)
    check(lambda x, i: (x.index_add(0, i, x), x.index_copy(0, i, x), x.index_put((i,), x)), x, none)
    check(lambda x, i: (x[:, :1].t().index_add(1, i, x[:, :1].t()), x.index_put((i,), x, True)), x, none)
    check(lambda x, i: make(3, 4).to(x.device).index_add(0, i, x) * 0, x, none)
    call = torch.ops.aten.embedding_dense_backward
    check(lambda x, i: (call(x, i, 5, -1, False), call(x[:, :0], i, 5, -1, True)), x, none)
    check(lambda x: (torch.cat([x, x]), torch.stack([x, x]), x.sort(0), x.topk(2), x.msort()), x)


def test_more_elements_than_workgroups_along_one_axis():
    x = torch.arange(256 * 65536 + 1000, dtype=torch.int32)
    check(lambda x: x.flip(0)[::1000], x)


@pytest.mark.parametrize("dim", (0, 1, 2))
@pytest.mark.parametrize("expanded", ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), ()))
def test_rows_are_scattered_by_expanded_indices(dim, expanded):
    x, src = torch.randn(9, 11, 13), torch.randn(8, 10, 12)
    sizes = [1 if d in expanded and d != dim else n for d, n in enumerate(src.shape)]
    index = torch.randint(0, x.shape[dim], sizes).expand(src.shape)

    def compare(call):
        # PyTorch's CPU kernels return wrong sums for expanded indices if `x` is wider than the source.
        whole = lambda i: i.contiguous() if i.device.type == "cpu" else i  # noqa: E731
        check(lambda x, i, s: call(x, whole(i), s), x, index, src, tolerance=1e-4)

    compare(lambda x, i, s: x.scatter_add(dim, i, s))
    compare(lambda x, i, s: x.scatter(dim, i, s))
    for how in ("mean", "prod", "amax"):
        compare(lambda x, i, s, how=how: x.scatter_reduce(dim, i, s, how, include_self=False))
