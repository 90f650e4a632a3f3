"""Arguments that are objects with tensors, as batches, and containers that the state may have as well."""

import argparse
import collections
import dataclasses
import types

import pytest
import torch
import torch.nn as nn
import torch_tandem


def full(value):
    return torch.full((2,), float(value), device="tandem")


class Batch:
    scale = 1.0

    def __init__(self, value):
        self.x, self.y = full(value), [full(value + 1), full(value + 2)]
        self.n, self.names = 3, ["a"]

    def total(self):
        return self.x * self.n * self.scale + self.y[0] * 10 + self.y[1] * 100


@dataclasses.dataclass
class Data:
    x: object
    y: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    x: object
    n: int = 2


class Encoding(collections.UserDict):
    pass


def cyclic(value):
    data = Data(full(value))
    data.y = Data(full(1), data)
    return data


RECORDS = {
    "class": (Batch, lambda b: b.total()),
    "dataclass": (lambda v: Data(full(v), {"a": full(v + 1)}), lambda d: d.x + d.y["a"]),
    "slots": (lambda v: Slots(full(v)), lambda d: d.x * d.n),
    "namespace": (lambda v: types.SimpleNamespace(x=full(v)), lambda d: d.x * len(vars(d))),
    "argparse": (lambda v: argparse.Namespace(x=full(v)), lambda d: d.x + 1),
    "UserDict": (lambda v: Encoding(x=full(v), y=full(2)), lambda d: d["x"] + d["y"]),
    "keywords": (lambda v: Encoding(input=full(v), other=full(2)), lambda d: torch.add(**d)),
    "nested": (lambda v: Data(Data(full(v)), full(1)), lambda d: d.x.x + d.y),
    "list": (lambda v: [Data(full(v)), Data(full(1))], lambda d: d[0].x + d[1].x),
    "cyclic": (cyclic, lambda d: d.y.y.x * d.y.x),
    "in place": (lambda v: Data(full(v)), lambda d: d.x.add_(1) * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_replayed(name):
    make, f = RECORDS[name]
    function = torch_tandem.function(f, audit=10**6)
    for i in range(14):
        assert torch.equal(function(make(i)), f(make(i)))
    assert function.cache_info().hits == 8


def replayed(f, make):
    function = torch_tandem.function(f, audit=10**6)
    for i in range(12):
        function(make(i))
    assert function.cache_info().hits
    return function


def test_what_else_a_record_has_is_compared():
    function = replayed(Batch.total, Batch)
    batch = Batch(5)
    batch.n = 7
    assert torch.equal(function(batch), Batch.total(batch))
    try:
        Batch.scale = 3.0
        assert torch.equal(function(Batch(6)), Batch.total(Batch(6)))
    finally:
        Batch.scale = 1.0


def test_the_identity_of_a_record_is_compared():
    kept = Data(full(1))

    def f(data):
        return data.x * (2 if data is kept else 3)

    function = replayed(f, lambda i: Data(full(i)))
    assert function(kept).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("kept", [[1, 2], {"a": 1}, collections.deque([1])])
def test_the_identity_of_a_container_is_compared(kept):
    def f(container, x):
        return x * (2 if container is kept else 3)

    function, x = torch_tandem.function(f, audit=10**6), full(1)
    for _ in range(12):
        assert function(kept.copy(), x).tolist() == [3.0, 3.0]
    assert function.cache_info().hits
    assert function(kept, x).tolist() == [2.0, 2.0]
    assert function(kept.copy(), x).tolist() == [3.0, 3.0]


def test_gradients_of_a_loss_of_a_record():
    w = nn.Parameter(full(2))
    function = torch_tandem.function(lambda data: (w * data.x).sum(), audit=10**6)
    for i in range(14):
        w.grad = None
        function(Data(full(i))).backward()
        assert w.grad.tolist() == [float(i)] * 2
    assert function.cache_info().hits == 8


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda data: data, "it returns a Data"),
        (lambda data: setattr(data, "y", data.x * 2) or data.y, "changes a container among its arguments"),
    ],
)
def test_what_is_refused(f, reason):
    function = torch_tandem.function(f, audit=10**6)
    for i in range(14):
        function(Data(full(i)))
    assert reason in function.reason()
    assert not function.cache_info().hits


def test_an_object_that_stays_keeps_its_tensors():
    data = Data(full(7))

    def f(data, x):
        data.x.add_(x)
        return data.x * 2

    function = torch_tandem.function(f, audit=10**6)
    for i in range(12):
        assert function(data, full(1)).tolist() == [2 * (8.0 + i)] * 2
    assert function.cache_info().hits


@pytest.mark.parametrize("is_list", [False, True])
def test_arguments_that_are_nested_deeply(is_list):
    def make(value):
        nested = Data(full(value))
        for _ in range(2000):
            nested = [nested] if is_list else Data(full(value), nested)
        return nested

    function = torch_tandem.function(lambda nested, x: x * 2, audit=10**6)
    for i in range(12):
        assert function(make(i), full(i)).tolist() == [2.0 * i] * 2
