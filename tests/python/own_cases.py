"""Operators at the limits of the sizes and layouts of the cpu executor's own kernels, by family."""

import math
from collections.abc import Callable, Iterator

import torch
from helpers import data
from torch.nn import functional as F
from torchvision.ops import roi_align

SIZES = (1, 2, 7, 16, 17, 129, 600)

Case = tuple[str, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]

# Lengths of rows that are computed several at a time.
SHORT = (1, 2, 7, 15, 16)


def products() -> Iterator[Case]:
    for m, k, n in [
        (1, 1, 1),
        (5, 1, 7),
        (1, 9, 33),
        (65, 3, 1),
        (31, 64, 17),
        (200, 300, 90),
        (500, 200, 300),
        (40, 600, 1000),
    ]:
        a, b, at, bt = data(m, k), data(k, n, seed=1), data(k, m, seed=2).t(), data(n, k, seed=3).t()
        yield f"mm {m} {k} {n}", torch.mm, (a, b)
        yield f"mm transposed {m} {k} {n}", torch.mm, (at, bt)
        yield f"mm columns {m} {k} {n}", torch.mm, (data(m, 2 * k)[:, ::2], b)
        yield f"mm part {m} {k} {n}", torch.mm, (data(m, k + 3)[:, :k], bt)
        for bias in (data(n, seed=4), data(1, seed=4), data(m, n, seed=4), data(m, 1, seed=4)):
            yield f"addmm {m} {k} {n} {list(bias.shape)}", torch.addmm, (bias, a, bt)
        yield "addmm scaled", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (data(n), a, b)
        yield "addmm alone", lambda c, a, b: torch.addmm(c, a, b, beta=0), (data(n) / 0, a, b)
        yield f"mv {m} {k}", torch.mv, (a, data(k, seed=5))
        yield f"mv transposed {m} {k}", torch.mv, (at, data(k, 2, seed=5)[:, 1])
        for bias in (data(m, seed=4), data(1, seed=4), data(m, 2, seed=4)[:, 0]):
            yield f"addmv {m} {k} {list(bias.stride())}", torch.addmv, (bias, a, data(k, seed=5))
        yield (
            f"addmv scaled {m} {k}",
            lambda c, a, b: torch.addmv(c, a, b, beta=2, alpha=0.5),
            (data(m), a, b[:, 0]),
        )
        yield f"bmm {m} {k} {n}", torch.bmm, (data(3, m, k), data(3, k, n))
        for shape in [(3, m, n), (1, m, n), (m, 1), (n,), (3, 1, 1)]:
            batches = (data(*shape, seed=4), data(3, m, k), data(3, n, k, seed=1).mT)
            yield f"baddbmm {m} {k} {n} {shape}", torch.baddbmm, batches
        yield "baddbmm scaled", lambda *x: torch.baddbmm(*x, beta=0.5, alpha=2), batches
        yield "baddbmm alone", lambda c, a, b: torch.baddbmm(c / 0, a, b, beta=0), batches
        yield "bmm expanded", torch.bmm, (data(m, k).expand(4, m, k), data(4, n, k).mT)
    for n in (*SIZES, 20_000):
        yield f"dot {n}", torch.dot, (data(n), data(n, seed=1))


def sums() -> Iterator[Case]:
    for shape, dims in [
        ((1,), 0),
        ((300_000,), 0),
        ((70, 5000), 1),
        ((5000, 70), 0),
        ((3, 4, 5), 1),
        ((3, 4, 5), (0, 1)),
        ((3, 4, 5), (1, 2)),
        ((3, 4, 5), (0, 2)),
        ((3, 1, 5), (0, 1, 2)),
        ((300, 260), 0),
        ((9, 10_000), -1),
        *(((37, n), 1) for n in SHORT),
    ]:
        for op in (torch.sum, torch.mean):
            yield f"{op.__name__} {shape} {dims}", lambda x, op=op, d=dims: op(x, d), (data(*shape),)
            yield f"{op.__name__} {shape}", op, (data(*shape),)
            kept = data(*shape).abs()
            yield (
                f"{op.__name__} {shape} {dims} kept",
                lambda x, op=op, d=dims: op(x, d, keepdim=True),
                (kept,),
            )


def sums_of_groups() -> Iterator[Case]:
    """Point-wise operators before a sum, which consumes their results block by block."""

    def kept(x, y):
        e = (x * 0.5).exp()
        return e.sum() + (e * y).mean() + e.sum(-1).mean()

    def many(x, y):
        t = x * y
        total = t.sum()
        return (t * total).mean() + (t + 1).sum(-1).sum() + t.mean()

    for shape in [
        (1,),
        (5,),
        (4096,),
        (4097,),
        (70, 5000),
        (3, 4, 5),
        (300_000,),
        (600, 6),
        (2000, 3),
        (33, 15),
    ]:
        x, y = data(*shape), data(*shape, seed=1)
        yield f"of products {shape}", lambda x, y: (x * y).sum(), (x, y)
        yield f"of a chain {shape}", lambda x, y: ((x * y).tanh() + x).mean(), (x, y)
        yield f"of rows {shape}", lambda x, y: (x * y + 1).mean(-1), (x, y)
        yield f"of rows that stay {shape}", lambda x, y: (x - y).square().sum(-1, keepdim=True) * y, (x, y)
        yield f"of all but rows {shape}", lambda x, y: (x * y).sum(0), (x, y)
        yield f"kept {shape}", kept, (x, y)
        yield f"many {shape}", many, (x, y)
        yield f"in place {shape}", lambda x, y: x.clone().mul_(y).add_(1).sum(), (x, y)
        yield f"reshaped {shape}", lambda x, y: (x * y).view(-1, x.size(-1)).sum(1), (x, y)
        yield f"of some {shape}", lambda x, y: (x * y)[..., 1:].sum() + (x * y)[:1].sum(), (x, y)
        yield f"of bools {shape}", lambda x, y: (x > 0).float().sum() * (x * y).sum(), (x, y)
        flat = (x.flatten(), y.flatten())
        yield f"dot of a result {shape}", lambda x, y: (x + y * 2).dot(y) * y.dot(x - y), flat
        yield f"dot with itself {shape}", lambda x, y: (lambda d: d.dot(d))((x - y).tanh()), flat
        yield f"dot in place {shape}", lambda x, y: (lambda q: q.dot(q.add_(y)))(x.clone()), flat
        yield f"dot of both {shape}", lambda x, y: (lambda a, b: a.dot(b))(x + y, x - y), flat
    x, y = data(90, 70), data(70, 90, seed=1)
    yield "of transposed ones", lambda x, y: (x.T * y).sum() + (x.T * y).sum(1).sum(), (x, y)
    yield "transposed", lambda x, y: (x.T * y.T.contiguous().T).sum(-1), (x, y)
    yield "spread", lambda x, y: (x[:, :1] * y.T).sum(1) + (x[:1] * y.T).sum() + (x[:, :1] * 2).sum(), (x, y)
    by_columns = x.T.contiguous().T
    yield "after a transposed one", lambda x, y: (lambda t, u: t * u.sum())(x * 2, y * 3), (by_columns, x)
    yield "spread more", lambda x, y: (x[:, None] * y.T[None]).mean(-1), (x, y)


def rows() -> Iterator[Case]:
    for n in (*SIZES, *SHORT):
        for shape, dim in [((3, n), 1), ((n,), 0), ((2, n, 1), 1), ((n, 4), 0), ((5, 7, n), 2)]:
            x = data(*shape) * 4
            for op in (F.softmax, F.log_softmax, torch.logsumexp):
                yield f"{op.__name__} {shape} {dim}", lambda x, op=op, d=dim: op(x, d), (x,)
        x = data(2, n) * 100
        x[0, n // 2] = torch.inf
        x[1] = -torch.inf
        yield f"logsumexp infinite {n}", lambda x: x.logsumexp(1, keepdim=True), (x,)
        yield f"softmax infinite {n}", lambda x: F.softmax(x, 1), (x,)
        yield f"safe softmax {n}", lambda x: torch._safe_softmax(x, 1), (x[1:],)
        many = data(19, n)
        many[3] = -torch.inf
        yield f"safe softmax of rows {n}", lambda x: torch._safe_softmax(x, 1), (many,)
        weight, bias = data(n, seed=1), data(n, seed=2)
        x = data(5, 3, n) + 3
        yield f"layer_norm {n}", lambda x, w, b, n=n: F.layer_norm(x, (n,), w, b), (x, weight, bias)
        yield f"layer_norm plain {n}", lambda x, n=n: F.layer_norm(x, (n,)), (x,)
        yield f"layer_norm weight {n}", lambda x, w, n=n: F.layer_norm(x, (n,), w, None, 1e-3), (x, weight)
    for groups, channels, shape in [
        (1, 3, (4,)),
        (2, 6, (5, 7)),
        (4, 4, (2,)),
        (3, 6, (1,)),
        (8, 64, (30, 40)),
    ]:
        x, weight, bias = data(2, channels, *shape) - 2, data(channels, seed=1), data(channels, seed=2)
        name = f"group_norm {groups} {channels} {shape}"
        yield name, lambda x, w, b, g=groups: F.group_norm(x, g, w, b), (x, weight, bias)
        yield name + " plain", lambda x, g=groups: F.group_norm(x, g), (x,)


def batch_norms() -> Iterator[Case]:
    def step(x, *affine, training=True, running=True):
        channels = x.shape[1]
        # The statistics are results too, because the operator updates them in place.
        mean, var = (
            torch.full((channels,), 0.3, device=x.device),
            torch.full((channels,), 1.7, device=x.device),
        )
        mean, var = (mean.to(x.dtype), var.to(x.dtype)) if running else (None, None)
        weight, bias = affine or (None, None)
        y = F.batch_norm(x, mean, var, weight, bias, training, 0.1, 1e-5)
        return torch.cat([y.flatten(), mean, var]) if running else y

    for shape in [(1, 2, 4), (3, 5, 2, 2), (8, 33, 4, 4), (2, 3, 17, 19), (2, 4, 64, 64), (5, 2, 3, 3, 3)]:
        x = data(*shape) * 3 + 50
        weight, bias = data(shape[1], seed=1), data(shape[1], seed=2)
        name = f"batch_norm {shape}"
        yield name, step, (x, weight, bias)
        yield name + " plain", step, (x,)
        yield name + " of this batch", lambda *given: step(*given, running=False), (x, weight, bias)
        yield name + " with its statistics", lambda *given: step(*given, training=False), (x, weight, bias)

    def sharing(x):
        channels = x.shape[1]
        memory = x.detach().clone()
        shared, own = (
            memory.flatten()[-channels:],
            torch.full((channels,), 0.5, device=x.device, dtype=x.dtype),
        )
        first = F.batch_norm(memory, shared, own, None, None, True)
        second = F.batch_norm(x, own, own, own, shared, True)
        return torch.cat([first.flatten(), second.flatten(), memory.flatten(), own])

    yield "batch_norm of windows of one storage", sharing, (data(3, 5, 2, 3),)


def poolings() -> Iterator[Case]:
    def largest(x, *options):
        y, places = F.max_pool2d(x, *options, return_indices=True)
        return torch.cat([y.flatten(), places.flatten().to(y.dtype)])

    for shape in [(1, 1, 1, 1), (2, 3, 4, 4), (3, 7, 9), (5, 2, 17, 12), (1, 2, 3, 130), (2, 1, 112, 112)]:
        x = data(*shape)
        for options in [
            (1,),
            (2,),
            (3, 2, 1),
            (3, 1, 1),
            (2, 3),
            ((3, 2), (2, 1), (1, 0)),
            (5, 5, 2),
            (4, 3, 2),
        ]:
            for ceil in (False, True):
                size, stride, padding = (*options, *(None, 0)[len(options) - 1 :])
                if min(shape[-2:]) < (max(size) if isinstance(size, tuple) else size):
                    continue
                name = f"{shape} {options} {ceil}"
                given = (size, stride, padding, 1, ceil)
                yield f"max_pool2d {name}", lambda x, o=given: largest(x, *o), (x,)
                for counted, divisor in [(True, None), (False, None), (True, 3)]:
                    given = (size, stride, padding, ceil, counted, divisor)
                    yield f"avg_pool2d {name} {counted}", lambda x, o=given: F.avg_pool2d(x, *o), (x,)
        for size in (1, 2, (3, 5), (7, 1), 12):
            yield f"adaptive {shape} {size}", lambda x, n=size: torch._adaptive_avg_pool2d(x, n), (x,)
    special = data(2, 2, 8, 8)
    special[0, 0, :4], special[0, 1, ::3, 1::2], special[1, 0] = -torch.inf, torch.nan, 1.0
    special[1, 1, 3] = torch.inf
    for options in [(2,), (3, 2, 1), (4, 1, 2)]:
        yield f"max_pool2d special {options}", lambda x, o=options: largest(x, *o), (special,)
    yield "max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (data(2, 3, 50),)
    columns = data(2, 6, 5, 3).permute(0, 3, 1, 2)
    yield "max_pool2d channels last", lambda x: largest(x, 2), (columns,)
    yield "avg_pool2d channels last", lambda x: F.avg_pool2d(x, 2), (columns,)


def convolutions() -> Iterator[Case]:
    for size, filters, stride, padding, dilation in [
        ((1, 1), (1, 1), 1, 0, 1),
        ((2, 2), (1, 1), 1, 0, 1),
        ((2, 2), (1, 1), 2, 0, 1),
        ((2, 2), (3, 3), 1, 1, 1),
        ((2, 2), (3, 3), 2, 1, 1),
        ((1, 4), (1, 3), 1, (0, 1), 1),
        ((5, 3), (4, 1), 1, 0, 1),
        ((5, 5), (3, 3), 1, 0, 2),
        ((9, 9), (3, 3), (4, 3), (0, 1), 1),
        ((8, 8), (3, 3), 1, 1, 1),
        ((8, 8), (1, 1), 1, 0, 1),
        ((9, 7), (1, 1), (2, 3), 0, 1),
        ((3, 4), (1, 1), 1, 1, 1),
    ]:
        x, weight, bias = data(3, 5, *size), data(7, 5, *filters, seed=1), data(7, seed=2)
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        name = f"conv2d {size} {filters} {stride} {padding} {dilation}"
        yield name, lambda x, w, b, o=options: F.conv2d(x, w, b, **o), (x, weight, bias)
        yield name + " without bias", lambda x, w, o=options: F.conv2d(x, w, **o), (x, weight)
    yield "conv2d of a sum", lambda x, w: F.conv2d(x + 1, w), (data(4, 6, 1, 2), data(300, 6, 1, 1))
    for stride in (1, 2):
        x, w = data(9, 40, 12, 12), data(70, 40, 1, 1)
        yield f"conv2d of many channels {stride}", lambda x, w, s=stride: F.conv2d(x, w, stride=s), (x, w)
    # Tiles cover several images, or several rows of one image. Filters and channels are divided between
    # threads.
    for shape, out, size, stride, padding in [
        ((9, 70, 4, 4), 130, 3, 1, 1),
        ((3, 4, 40, 37), 20, 3, 1, 1),
        ((5, 40, 6, 6), 70, 3, 2, 1),
        ((2, 3, 35, 41), 40, 5, (3, 2), (4, 0)),
        ((2, 600, 3, 4), 140, 1, 1, 0),
        ((2, 6, 20, 20), 4, 2, 3, 0),
    ]:
        x, w, b = data(*shape), data(out, shape[1], size, size, seed=1) / 8, data(out, seed=2)
        options = {"stride": stride, "padding": padding}
        yield f"conv2d {shape} {out} {options}", lambda x, w, b, o=options: F.conv2d(x, w, b, **o), (x, w, b)
    # Odd sizes, few and many channels, and large planes, forward and transposed.
    for shape, out, padding in [
        ((3, 9, 17, 13), 10, 1),
        ((2, 8, 12, 15), 8, 0),
        ((5, 12, 6, 7), 33, 2),
        ((2, 40, 9, 22), 16, (0, 2)),
        ((40, 70, 3, 3), 20, 1),
        ((2, 300, 8, 8), 150, 1),
        ((1, 8, 90, 100), 70, 1),
    ]:
        x, w, b = data(*shape), data(out, shape[1], 3, 3, seed=1) / 8, data(out, seed=2)
        name = f"conv2d {shape} {out} {padding}"
        yield name, lambda x, w, b, p=padding: F.conv2d(x, w, b, padding=p), (x, w, b)
        w = data(shape[1], out, 3, 3, seed=1) / 8
        name = f"conv_transpose2d {shape} {out} {padding}"
        yield name, lambda x, w, b, p=padding: F.conv_transpose2d(x, w, b, padding=p), (x, w, b)
    for shape, out, options in [
        ((3, 6, 1, 1), 5, {}),
        ((3, 6, 2, 2), 5, {"stride": 2, "padding": 1}),
        ((3, 6, 5, 7), 5, {"stride": 2, "padding": 1, "output_padding": 1}),
        ((2, 30, 9, 9), 50, {"stride": 2, "padding": 1}),
        ((2, 6, 9, 9), 5, {"padding": 2, "dilation": 2}),
    ]:
        x, w, b = data(*shape), data(shape[1], out, 3, 3, seed=1), data(out, seed=2)
        name = f"conv_transpose2d {shape} {out} {options}"
        yield name, lambda x, w, b, o=options: F.conv_transpose2d(x, w, b, **o), (x, w, b)
    x, w = data(2, 3, 9, 8), data(4, 3, 2, 2, seed=1)
    yield (
        "one number for two dimensions",
        lambda x, w: torch.convolution(x, w, None, [2], [1], [1], False, [0], 1),
        (x, w),
    )
    x, w, b = data(3, 4, 50), data(6, 4, 5, seed=1), data(6, seed=2)
    yield "conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=2), (x, w, b)
    yield "conv1d of pixels", lambda x, w, b: F.conv1d(x, w[:, :, :1].contiguous(), b), (x, w, b)
    yield "conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=3), (data(3, 6, 20), w)
    yield "grouped", lambda x, w: F.conv2d(x, w, groups=2), (data(2, 4, 2, 2), data(6, 2, 1, 1))
    for size, filters, padding, dilation in [
        ((1, 1), (1, 1), 0, 1),
        ((7, 7), (7, 7), 3, 1),
        ((9, 20), (3, 3), 1, 1),
        ((20, 9), (3, 5), (0, 2), 1),
        ((12, 11), (3, 2), (2, 1), (2, 3)),
        ((4, 3), (3, 3), 5, 1),
        ((33, 34), (1, 4), (0, 3), 1),
    ]:
        x, weight, bias = data(3, 5, *size), data(5, 1, *filters, seed=1), data(5, seed=2)
        for stride in (1, 2, (3, 1), (2, 4)):
            options = {"padding": padding, "dilation": dilation, "stride": stride, "groups": 5}
            name = f"depthwise conv2d {size} {filters} {padding} {dilation} {stride}"
            yield name, lambda x, w, b, o=options: F.conv2d(x, w, b, **o), (x, weight, bias)
            yield name + " without bias", lambda x, w, o=options: F.conv2d(x, w, **o), (x, weight)
    x, w, b = data(4, 6, 21), data(6, 1, 4, seed=1), data(6, seed=2)
    yield "depthwise conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6), (x, w, b)
    yield "strided depthwise conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=2, groups=6), (x, w, b)
    yield "depthwise conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, groups=6), (x, w, b)
    x, w = data(2, 6, 9, 12), data(6, 1, 3, 4, seed=1)
    for options in [
        {"padding": 1},
        {"dilation": 2, "output_padding": 1},
        {"stride": 2},
        {"stride": 3, "padding": 2, "output_padding": 2},
        {"stride": (5, 1), "padding": 1, "output_padding": (4, 0)},
    ]:
        name = f"depthwise conv_transpose2d {options}"
        yield name, lambda x, w, o=options: F.conv_transpose2d(x, w, groups=6, **o), (x, w)
    pairs = data(12, 1, 3, 3, seed=1)
    many = data(70, 6, 5, 4)
    yield "a batch of small planes", lambda x, w: F.conv2d(x, w, padding=2, groups=6), (many, w)
    for options in ({}, {"stride": 2, "padding": 1}):
        name = f"grouped conv_transpose2d {options}"
        yield name, lambda x, w, o=options: F.conv_transpose2d(x, w, groups=3, **o), (x, data(6, 2, 3, 3))
    yield "two filters per channel", lambda x, w: F.conv2d(x, w, groups=6), (data(2, 6, 9, 12), pairs)


def pieces() -> Iterator[Case]:
    a, b, c = data(2, 3, 4), data(2, 5, 4), data(2, 3, 4, seed=1)
    yield "cat", lambda *x: torch.cat(x, 1), (a, b, c)
    yield "cat last", lambda a, c: torch.cat([a, c, a], -1), (a, c)
    yield "cat strided", lambda a, b: torch.cat([a[:, :2], b], 1), (a, b)
    yield "cat with nothing", lambda a: torch.cat([a, a[:, :0], torch.empty(0, device=a.device)], 1), (a,)
    for dim in (0, 1, 3, -1):
        yield f"stack {dim}", lambda a, c, d=dim: torch.stack([a, c], d), (a, c)
    numbers = torch.tensor([[3, 0], [2, 2]])
    weight = data(5, 3)
    yield "embedding", lambda w, i: F.embedding(i, w), (weight, numbers)
    yield "embedding padded", lambda w, i: F.embedding(i, w, padding_idx=2), (weight, numbers)
    yield "index", lambda w, i: w[i - 2], (weight, numbers)
    yield "index of many dimensions", lambda w, i: w[i], (data(4, 2, 3), numbers)
    yield "index by a mask", lambda w: w[w > 0], (weight,)
    yield "index_select", lambda w, i: w.index_select(0, i.flatten()), (weight, numbers)
    yield "index_select columns", lambda w, i: w.index_select(1, i.flatten() % 3), (weight, numbers)
    yield "take", lambda w, i: w.take(i - 2) + w.take(i.T), (weight, numbers)
    yield "take of a view", lambda w, i: w[2:].take(i) + w.T.take(i), (weight, numbers)
    for n in (3, 16, 80):
        x = data(9, 20, n)
        yield f"transposed {n}", lambda x: x.transpose(0, 1).contiguous() * x.permute(1, 0, 2), (x,)
        yield f"transposed last {n}", lambda x: x.mT.contiguous(), (x,)
    yield "select", lambda a: a.select(1, -1) * a[0, 0, 2], (a,)
    yield "slices", lambda a: a[:, 1:3] * a[:, ::2] + a[:, -2:], (a,)


def many_pieces() -> Iterator[Case]:
    """Operators on sizes that are divided between threads, and on arbitrary windows."""
    a, b = data(40, 90, 120), data(40, 120, 70, seed=1)
    for dim in (0, 1, 2):
        yield (
            f"cat large {dim}",
            lambda a, d=dim: torch.cat([a, a.narrow(d, 7, 5), a], d),
            (a,),
        )
    yield "cat transposed", lambda a, b: torch.cat([a, b.mT, a[:, ::2]], 1), (a, b)
    yield "cat columns", lambda a: torch.cat([a[:, :, ::3], a.flip(2)[:, :, 5:]], 2), (a,)
    yield (
        "cat of numbers",
        lambda a, i: torch.cat([i.T, i.T], 0) * a[0, 0, 0],
        (a, torch.arange(60).view(4, 15)),
    )
    yield "cat of bools", lambda a: torch.cat([a > 0, a.mT.contiguous().mT > 1], 1) * a[0, 0, 0], (a,)
    yield "stack transposed", lambda a, b: torch.stack([a[:, :70, :70], b[:, :70].mT], 2), (a, b)
    yield "slices of columns", lambda a: a[:, :, 3:90:2].mT.cos(), (a,)
    yield "slice of nothing", lambda a: torch.cat([a[:, 5:5], a[:, 80:]], 1), (a,)
    yield "select of columns", lambda a: a.select(2, 3).T.sin(), (a,)
    for pad in [(1, 2), (0, 3, 2, 0), (1, 1, 1, 1, 1, 1), (-1, 2)]:
        yield f"padded {pad}", lambda a, p=pad: F.pad(a, p), (a,)
        yield f"padded with a number {pad}", lambda a, p=pad: F.pad(a.mT, p, value=0.5), (a,)
    yield "padded numbers", lambda a, i: F.pad(i, (2, 1), value=3) * a[0, 0, 0], (a, torch.arange(7))
    numbers, weight = torch.arange(600).view(20, 30) * 7 % 900, data(900, 400)
    yield "embedding large", lambda w, i: F.embedding(i, w), (weight, numbers)
    yield "embedding of columns", lambda w, i: F.embedding(i.T[::2], w, padding_idx=7), (weight, numbers)
    yield "embedding expanded", lambda w, i: F.embedding(i[:1].expand(9, 30), w), (weight, numbers)
    yield "index_select strided", lambda w, i: w.index_select(0, i[:, 3]), (weight, numbers)
    yield "take large", lambda w, i: w.take(i * 399), (weight, numbers)


def losses() -> Iterator[Case]:
    for examples, classes in [(1, 1), (7, 3), (300, 700)]:
        x, target = data(examples, classes) * 3, torch.arange(examples) * 5 % classes
        for reduction in ("mean", "sum", "none"):
            name = f"cross_entropy {examples} {classes} {reduction}"
            options = {"reduction": reduction, "ignore_index": 2}
            yield name, lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r), (x, target)
            yield f"{name} ignoring", lambda x, t, o=options: F.cross_entropy(x, t, **o), (x, target)
        weighted = lambda x, t: F.cross_entropy(x, t, torch.ones_like(x[0].detach()).cumsum(0))  # noqa: E731
        yield f"cross_entropy weighted {examples}", weighted, (x, target)
    yield "cross_entropy of pictures", F.cross_entropy, (data(2, 3, 4, 5), torch.arange(40).view(2, 4, 5) % 3)
    for shape in [(1,), (), (3, 5), (511, 3), (20_000,)]:
        x, t = (data(*shape or (1,), seed=seed).reshape(shape) * 2 for seed in (0, 1))
        for reduction in ("mean", "sum", "none"):
            name = f"{shape} {reduction}"
            yield f"mse {name}", lambda x, t, r=reduction: F.mse_loss(x, t, reduction=r), (x, t)
            for beta in (0.0, 0.3, 1.0):
                smooth = lambda x, t, r=reduction, b=beta: F.smooth_l1_loss(x, t, reduction=r, beta=b)  # noqa: E731
                yield f"smooth_l1 {name} {beta}", smooth, (x, t)
                huber = lambda x, t, r=reduction, d=beta: F.huber_loss(x, t, reduction=r, delta=d + 0.1)  # noqa: E731
                yield f"huber {name} {beta}", huber, (x, t)
            entropy = lambda x, t, r=reduction: F.binary_cross_entropy(x, t, reduction=r)  # noqa: E731
            yield f"binary_cross_entropy {name}", entropy, (x.sigmoid(), t.sigmoid())
            logits = lambda x, t, r=reduction: F.binary_cross_entropy_with_logits(x, t, reduction=r)  # noqa: E731
            yield f"binary_cross_entropy_with_logits {name}", logits, (x * 20, t.sigmoid())
    shapes = [(3,), (1,), (40, 50), (400, 300), (2, 3, 4)]
    for order in (2.0, 1, 3.5):
        yield (
            f"norms {order}",
            lambda *x, p=order: torch.stack(torch._foreach_norm(x, p)),
            tuple(data(*shape, seed=i) + 0.1 for i, shape in enumerate(shapes)),
        )


def functions() -> Iterator[Case]:
    """Elementary functions, including arguments that are too large for the usual reduction."""
    corners = torch.tensor([0.0, -0.0, 1e-20, -1e-40, 1e10, -3e38, torch.inf, -torch.inf, torch.nan])
    x, y = torch.cat([data(3000) * 3, corners]), torch.cat([data(3000, seed=1) * 2, corners.roll(4)])
    for op in (torch.sin, torch.cos, torch.tan, torch.atan, torch.asinh):
        yield op.__name__, op, (x,)
    for op in (torch.sinh, torch.cosh):
        yield op.__name__, op, (x.clamp(-80, 80),)
    for op in (torch.asin, torch.acos, torch.atanh):
        yield op.__name__, op, (x.tanh() * 0.99,)
    yield "sinc", torch.sinc, (x.clamp(-1e10, 1e10),)
    yield "acosh", torch.acosh, (x.abs() + 1.01,)
    yield "atan2", torch.atan2, (x, y)
    yield "copysign", torch.copysign, (x, y)
    few = data(3000) * 100
    for op in (torch.fmod, torch.remainder):
        yield op.__name__, op, (few, y[:3000] + y[:3000].sign())
        yield f"{op.__name__} by a number", lambda x, op=op: op(x, 0.7), (few,)
        yield f"{op.__name__} of large ones", lambda x, op=op: op(x, 1e-3), (few * 1e30,)
    yield "fused", lambda x, y: (x.sin() * y.cos()).atan2(y.abs() + 1).sinh() * x.tan(), (x, y)


def attentions() -> Iterator[Case]:
    attend = F.scaled_dot_product_attention
    for batch, heads, queries, keys, width in [
        (1, 1, 1, 1, 1),
        (2, 3, 5, 7, 4),
        (1, 2, 64, 64, 16),
        (2, 2, 65, 130, 8),
        (3, 1, 200, 64, 33),
        (1, 4, 1, 300, 16),
    ]:
        q, k, v = (data(batch, heads, n, width, seed=i) * 2 for i, n in enumerate((queries, keys, keys)))
        name = f"attention {batch} {heads} {queries} {keys} {width}"
        yield name, attend, (q, k, v)
        yield f"{name} causal", lambda q, k, v: attend(q, k, v, is_causal=True), (q, k, v)
        yield f"{name} scaled", lambda q, k, v: attend(q, k, v, scale=0.3), (q, k, v)
        kept = (torch.arange(queries * keys).view(queries, keys) % 3 > 0).index_fill(
            0, torch.tensor(0), False
        )
        yield f"{name} masked", lambda q, k, v, m: attend(q, k, v, m), (q, k, v, kept)
        added = lambda q, k, v, m: attend(q, k, v, m.detach())  # noqa: E731
        bias = data(batch, 1, 1, keys, seed=4)
        yield f"{name} biased", lambda q, k, v, m, f=added: f(q, k, v, m) + m.mean() * 0, (q, k, v, bias)
        # The heads are side by side in memory, as layers make them.
        apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        yield f"{name} of heads side by side", lambda q, k, v: attend(q, k, v, is_causal=True), apart
        yield (
            f"{name} of columns",
            attend,
            [data(batch, heads, n, 2 * width)[..., ::2] for n in (queries, keys, keys)],
        )
    q, k, v = (data(2, n, 9, 8, seed=n) for n in (4, 2, 2))
    yield "attention of grouped heads", lambda q, k, v: attend(q, k, v, enable_gqa=True), (q, k, v)
    x = data(2, 3, 20, 8)
    yield "attention to itself", lambda x: attend(x, x, x, is_causal=True), (x,)


def cells() -> Iterator[Case]:
    for rows, n in [(1, 1), (3, 5), (2, 32), (70, 130)]:
        x, h, c = data(rows, 4), data(rows, n, seed=1), data(rows, n, seed=2)
        for op, gates, state in ((torch.lstm_cell, 4, (h, c)), (torch.gru_cell, 3, (h,))):
            weights = (data(gates * n, 4, seed=3), data(gates * n, n, seed=4) / 4)
            biases = (data(gates * n, seed=5), data(gates * n, seed=6))

            def cell(x, *given, op=op, state=state):
                before, rest = given[: len(state)], given[len(state) :]
                out = op(x, before if len(before) == 2 else before[0], *rest)
                return torch.cat(out) if len(before) == 2 else out

            name = f"{op.__name__} {rows} {n}"
            yield name, cell, (x, *state, *weights, *biases)
            yield f"{name} without biases", cell, (x, *state, *weights)
            yield (
                f"{name} hidden state only",
                lambda *t, f=cell: f(*t)[: len(t[0])],
                (x, *state, *weights, *biases),
            )


def moves() -> Iterator[Case]:
    for shape in [(1,), (7,), (5, 6), (3, 1, 4), (2, 3, 4, 5), (60, 70, 40)]:
        x, last = data(*shape), len(shape) - 1
        for dims in [(0,), (last,), tuple(range(len(shape)))]:
            yield f"flip {shape} {dims}", lambda x, d=dims: x.flip(d), (x,)
            yield f"roll {shape} {dims}", lambda x, d=dims: x.roll([5, -1, 2, 9][: len(d)], d), (x,)
        yield f"roll all {shape}", lambda x: x.roll(3), (x,)
        yield f"repeat {shape}", lambda x: x.repeat(*[2, 1, 3, 2, 1][: x.dim() + 1]), (x,)
        yield f"repeat transposed {shape}", lambda x: x.transpose(0, -1).repeat(*[2] * x.dim()), (x,)
        yield f"flip transposed {shape}", lambda x: x.transpose(0, -1).flip(0), (x,)
        if last:
            for diagonal in (-9, -1, 0, 2):
                yield f"tril {shape} {diagonal}", lambda x, d=diagonal: x.tril(d), (x,)
                yield f"triu {shape} {diagonal}", lambda x, d=diagonal: x.triu(d), (x,)
    yield "roll twice", lambda x: x.roll((1, 2), (0, 0)), (data(5, 2),)
    yield "roll empty", lambda x: x.roll(1, 0), (data(0, 2),)
    numbers = torch.arange(12).view(3, 4)
    yield (
        "moved numbers",
        lambda x, i: x * (i.flip(1) + i.roll(1, 0) + i.tril() - i.repeat(2, 1)[3:]),
        (data(3, 4), numbers),
    )


def scans() -> Iterator[Case]:
    for shape, dim in [
        ((1,), 0),
        ((600,), 0),
        ((5, 40), 0),
        ((5, 40), 1),
        ((3, 7, 33), 1),
        ((90, 300, 5), 1),
    ]:
        x = data(*shape) / 4
        yield f"cumsum {shape} {dim}", lambda x, d=dim: x.cumsum(d), (x,)
        yield f"cumprod {shape} {dim}", lambda x, d=dim: (x + 1).cumprod(d), (x,)
    for shape, dim in [
        ((1,), 0),
        ((600,), 0),
        ((40, 5), 0),
        ((70, 90), 1),
        ((3, 300, 7), 1),
        ((2, 50, 150), 1),
    ]:
        x = data(*shape) * 9
        yield f"logcumsumexp {shape} {dim}", lambda x, d=dim: x.logcumsumexp(d), (x,)
    x = torch.tensor([-torch.inf, -torch.inf, 3.0, -torch.inf, torch.inf, 2.0, torch.inf, torch.nan, 1.0])
    for dim in (0, 1):
        infinite = (torch.stack([x, x.flip(0), -x], 1 - dim),)
        yield f"logcumsumexp infinite {dim}", lambda x, d=dim: x.logcumsumexp(d), infinite
    yield "cumsum of numbers", lambda x, i: x * i.cumsum(0), (data(9), torch.arange(9))
    yield "cumsum of transposed", lambda x: x.t().cumsum(0), (data(4, 5),)


def extremes() -> Iterator[Case]:
    for shape, dim in [
        ((1,), 0),
        ((40,), 0),
        ((5, 1), 1),
        ((5, 17), 1),
        ((17, 5), 0),
        ((3, 9, 4), 1),
        ((90, 400), 1),
        *(((37, n), 1) for n in SHORT),
        ((400, 3), 1),
    ]:
        # There are few different values, so that some are equal.
        x = (data(*shape) * 3).round()
        for op in (torch.max, torch.min):
            yield f"{op.__name__} {shape} {dim}", lambda x, op=op, d=dim: op(x, d).values, (x,)
            yield f"{op.__name__} {shape} {dim} at", lambda x, op=op, d=dim: x.mean() * op(x, d).indices, (x,)
            yield f"{op.__name__} {shape}", lambda x, op=op: op(x), (data(*shape),)
        for op in (torch.amax, torch.amin):
            yield f"{op.__name__} {shape} {dim}", lambda x, op=op, d=dim: op(x, d, keepdim=True), (x,)
        for op in (torch.argmax, torch.argmin):
            yield f"{op.__name__} {shape} {dim}", lambda x, op=op, d=dim: x.mean() * op(x, d), (x,)
            yield f"{op.__name__} {shape}", lambda x, op=op: x.mean() * op(x), (x,)
        y = x.clone()
        y.view(-1)[y.numel() // 2] = torch.nan
        undefined = lambda x, d=dim: x.max(d).values + x.amin(d) + x.argmin(d)  # noqa: E731
        yield f"extremes with NaN {shape} {dim}", undefined, (y,)
        for descending in (False, True):
            ordered = lambda x, d=dim, o=descending: x.sort(d, o).values  # noqa: E731
            yield f"sort {shape} {dim} {descending}", ordered, (x,)
            yield f"sort with NaN {shape} {dim} {descending}", ordered, (y,)
            for k in (1, min(3, shape[dim])):
                largest = lambda x, k=k, d=dim, o=descending: x.topk(k, d, o)  # noqa: E731
                yield f"topk {k} {shape} {dim} {descending}", lambda x, f=largest: f(x).values, (x,)
                yield (
                    f"topk {k} {shape} {dim} {descending} at",
                    lambda x, f=largest: x.mean() * f(x).indices,
                    (data(*shape),),
                )
            places = lambda x, d=dim, o=descending: x.mean() * x.argsort(dim=d, descending=o, stable=True)  # noqa: E731
            yield f"argsort {shape} {dim} {descending}", places, (x,)
    numbers = torch.arange(20).view(4, 5) * 7 % 11
    yield (
        "extremes of numbers",
        lambda x, i: x * (i.max(1).indices + i.argmin(1) + i.sort(1).values[:, 2]),
        (data(4), numbers),
    )


def moments() -> Iterator[Case]:
    for shape, dim in [
        ((2,), 0),
        ((40,), 0),
        ((5, 17), 1),
        ((3, 9, 4), (1, 2)),
        ((17, 5), 0),
        ((9, 3000), 1),
        *(((37, n), 1) for n in SHORT if n > 1),
    ]:
        x = data(*shape) + 3
        for op in (torch.var, torch.std):
            yield f"{op.__name__} {shape} {dim}", lambda x, op=op, d=dim: op(x, d), (x,)
            yield f"{op.__name__} {shape}", op, (x,)
            yield f"{op.__name__} {shape} biased", lambda x, op=op, d=dim: op(x, d, correction=0), (x,)
        yield f"norm {shape} {dim}", lambda x, d=dim: x.norm(dim=d), (x,)
        yield f"norm {shape}", lambda x: x.norm(), (x,)
        for order in (1, 3.5, torch.inf):
            yield f"norm {shape} {order}", lambda x, p=order, d=dim: torch.linalg.vector_norm(x, p, d), (x,)
    far = data(50) + 1e4
    far[0] = 5e4
    yield "variance of distant values", torch.var, (far,)


def scatters() -> Iterator[Case]:
    for shape, dim, n in [
        ((6,), 0, 9),
        ((5, 7), 0, 3),
        ((5, 7), 1, 11),
        ((3, 4, 70), 1, 6),
        ((40, 300), 0, 90),
    ]:
        sizes = [*shape]
        sizes[dim] = n
        x, source = data(*shape), data(*sizes, seed=1)
        index = torch.arange(source.numel()).view(sizes) * 13 % shape[dim]
        first = torch.arange(n).view([-1 if d == dim else 1 for d in range(len(shape))]) * 5 % shape[dim]
        for name, i in (("", index), (" expanded", first.expand(sizes))):
            label = f"{shape} {dim}{name}"
            yield f"gather {label}", lambda x, i, d=dim: x.gather(d, i), (x, i)
            yield f"scatter_add {label}", lambda x, s, i, d=dim: x.scatter_add(d, i, s), (x, source, i)
            yield (
                f"scatter_add_ {label}",
                lambda x, s, i, d=dim: x.clone().scatter_add_(d, i, s),
                (x, source, i),
            )
            for how in ("sum", "prod", "amax", "amin", "mean"):
                for includes in (True, False):
                    yield (
                        f"scatter_reduce {how} {includes} {label}",
                        lambda x, s, i, d=dim, h=how, c=includes: x.scatter_reduce(
                            d, i, s, h, include_self=c
                        ),
                        (x, source, i),
                    )
            yield (
                f"scatter_reduce_ {label}",
                lambda x, s, i, d=dim: x.clone().scatter_reduce_(d, i, s, "amax"),
                (x, source, i),
            )
            yield f"scatter of a number {label}", lambda x, i, d=dim: x.scatter(d, i, 0.5), (x, i)
        distinct = torch.arange(shape[dim]).flip(0)
        same = data(*shape, seed=2)
        spread = distinct.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        yield f"scatter {shape} {dim}", lambda x, s, i, d=dim: x.scatter(d, i, s), (x, same, spread)
        flat = first.flatten()
        yield f"index_select {shape} {dim}", lambda x, i, d=dim: x.index_select(d, i), (x, flat)
        yield (
            f"index_add {shape} {dim}",
            lambda x, s, i, d=dim: x.index_add(d, i, s, alpha=0.5),
            (x, source, flat),
        )
        yield (
            f"index_add_ {shape} {dim}",
            lambda x, s, i, d=dim: x.clone().index_add_(d, i, s),
            (x, source, flat),
        )
    x, i, values = data(7, 3), torch.tensor([[0, -1, 3], [3, 3, 0]]), data(2, 3, 3)
    yield "index", lambda x, i: x[i], (x, i)
    yield "index_put of sums", lambda x, v, i: x.index_put((i,), v, accumulate=True), (x, values, i)
    yield "index_put_ of sums", lambda x, v, i: x.clone().index_put_((i,), v, accumulate=True), (x, values, i)
    yield "index_put", lambda x, v, i: x.index_put((i[0],), v[0]), (x, values, i)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, 1.0, -0.0, 0.0])
    for how in ("sum", "prod", "amax", "amin"):
        for includes in (True, False):
            yield (
                f"scatter_reduce of special values {how} {includes}",
                lambda x, s, i, h=how, c=includes: x.scatter_reduce(0, i, s, h, include_self=c),
                (special.flip(0), special, torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 6])),
            )
    # The values are a part of the storage that is written.
    own = lambda x, i: (lambda y: y[:3].scatter_add_(0, i.expand(3, 3), y[3:6]))(x.clone())  # noqa: E731
    yield "scatter of its own storage", own, (x, torch.tensor([[0, 2, 1]]))
    number = lambda x, i: x * F.one_hot(i.flatten() % 7, 7).t()[:, :3]  # noqa: E731
    yield "scatter of integers", number, (x, i)


def regions() -> Iterator[Case]:
    # Boxes in quarters of pixels: inside, over the edges, outside, empty, and with swapped corners.
    edges = [[0, 4, 6, 19, 22], [1, -9, -3, 40, 50], [1, 60, 60, 90, 90], [0, 8, 8, 8, 8], [0, 20, 9, 10, 3]]
    edges += [[i % 2, i, 2 * i, 3 * i + 7, 3 * i + 5] for i in range(12)]
    for shape, size, samples, aligned in [
        ((2, 3, 7, 9), (2, 2), 2, True),
        ((2, 3, 7, 9), (2, 3), -1, False),
        ((2, 70, 12, 12), (7, 7), 2, False),
        ((2, 1, 1, 1), (1, 1), 0, True),
    ]:
        yield (
            f"roi_align {shape} {size} {samples} {aligned}",
            lambda x, r, o=(size, 0.5, samples, aligned): roi_align(
                x, torch.cat([r[:, :1], r[:, 1:] / 4], 1).to(x.dtype), *o
            ),
            (data(*shape), torch.tensor(edges)),
        )


FAMILIES = [
    products,
    sums,
    sums_of_groups,
    rows,
    batch_norms,
    poolings,
    convolutions,
    pieces,
    many_pieces,
    losses,
    functions,
    attentions,
    cells,
    moves,
    scans,
    extremes,
    moments,
    scatters,
    regions,
]
