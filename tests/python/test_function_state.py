"""State that functions read in unusual ways: a change is seen, or the function is never replayed.

Each case consists of a function of a tensor, and a second function that changes state which the first one
reads.
"""

import collections
import contextlib
import contextvars
import dataclasses
import enum
import fractions
import functools
import importlib
import operator
import os
import sys
import time
import types
import typing

import numpy as np
import pytest
import torch
import torch_tandem
from functions import data, replayed
from torch import nn

# If an audit finds a difference, a call was replayed wrongly.
pytestmark = pytest.mark.filterwarnings("error:.*an audit found")

SCALE = 1.0


@pytest.fixture(autouse=True)
def nothing_before():
    global SCALE
    SCALE = 1.0
    torch_tandem.reset()


def set_scale(value):
    global SCALE
    SCALE = value


@dataclasses.dataclass(slots=True)
class Slots:
    value: float = 1.0


class Point:
    __match_args__ = ("value",)

    def __init__(self, value=1.0):
        self.value = value

    @property
    def prop(self):
        return SCALE

    @staticmethod
    def static():
        return SCALE

    @classmethod
    def klass(cls):
        return SCALE

    def __getitem__(self, key):
        return SCALE

    def method(self):
        return 1.0


class Hidden:
    """An object that computes its attributes."""

    def __init__(self):
        self.values = {"a": 1.0}

    def __getattr__(self, name):
        return self.__dict__["values"][name]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, grad):
        return grad


class Kind(enum.Enum):
    A = 1


@contextlib.contextmanager
def scaled():
    yield SCALE


def read_scale(x):
    return x * SCALE


def matched(x, point):
    match point:
        case Point(value=value):
            return x * value


def framed(x):
    return x * sys._getframe().f_globals["SCALE"]


def managed(x):
    with scaled() as scale:
        return x * scale


def given(value, read):
    return lambda x: x * read(value)


POINT = Point()


def attribute(make=lambda value: value, read=float):
    """A case whose state is a value of some type, in an attribute of an object."""
    holder = types.SimpleNamespace(value=make(1.0))
    return lambda x: x * read(holder.value), lambda: setattr(holder, "value", make(2.0))


def contents(container, change, read):
    return lambda x: x * read(container), lambda: change(container)


def on_global(function):
    return function, lambda: set_scale(2.0)


def on_point(read):
    point = Point()
    return lambda x: read(x, point), lambda: setattr(point, "value", 2.0)


def replaced_method(on_class):
    kind = type("Local", (Point,), {"method": lambda self: 1.0})
    point = kind()
    return lambda x: x * point.method(), lambda: setattr(
        kind if on_class else point, "method", (lambda self: 2.0) if on_class else (lambda: 2.0)
    )


def second_closure():
    def make(options):
        return lambda x: x * options["s"]

    one, two = {"s": 1.0}, {"s": 1.0}
    functions = [make(one), make(two)]
    return lambda x: functions[1](functions[0](x)), lambda: two.update(s=2.0)


def replaced_code():
    def one(x):
        return x * 1.0

    def two(x):
        return x * 2.0

    return lambda x: one(x), lambda: setattr(one, "__code__", two.__code__)


def defaults():
    def scale(x, by=1.0):
        return x * by

    return lambda x: scale(x), lambda: setattr(scale, "__defaults__", (2.0,))


def function_attribute():
    def scale(x):
        return x * scale.by

    scale.by = 1.0
    return scale, lambda: setattr(scale, "by", 2.0)


def module_hook():
    model = nn.Identity()
    return lambda x: model(x), lambda: model.register_forward_hook(lambda m, args, out: out * 2)


def replaced_forward():
    model = nn.Identity()
    return lambda x: model(x * 1), lambda: setattr(model, "forward", lambda x: x * 2)


def evaluated():
    model = nn.Dropout(0.5).eval()
    model.training = False
    norm = nn.BatchNorm1d(3, affine=False).to("tandem").eval()
    return torch.no_grad()(lambda x: norm(x.view(1, 3))), lambda: norm.running_mean.fill_(-1.0)


def context_variable():
    variable = contextvars.ContextVar("scale", default=1.0)
    return lambda x: x * variable.get(), lambda: variable.set(2.0)


def members_of_a_module():
    module = types.ModuleType("settings")
    module.scale = 1.0
    sys.modules["settings_of_a_test"] = module

    def local(x):
        from settings_of_a_test import scale

        return x * scale

    return local, lambda: setattr(module, "scale", 2.0)


def functions_of_numpy():
    array = np.array([1.0, 2.0])
    return lambda x: x * float(np.concatenate([array, array]).sum()), lambda: array.__setitem__(1, 5.0)


def memory_of_numpy():
    array = np.ones(3, dtype=np.float32)
    tensor = torch.from_numpy(array)
    return lambda x: x * tensor.to(x.device), lambda: array.fill(2.0)


def replaced_class():
    class Other(Point):
        def method(self):
            return 2.0

    point = Point()
    return lambda x: x * point.method(), lambda: setattr(point, "__class__", Other)


class Aliased:
    names: typing.ClassVar = {"scale": "value"}

    def __init__(self):
        self.value = 1.0

    def __getattribute__(self, name):
        names = super().__getattribute__("names")
        return super().__getattribute__(names.get(name, name))


class Own:
    def __init__(self):
        self.value = 1.0

    def read(self):
        return max(self.__dict__[name] for name in ("value",) if self.__dict__.get(name))


def cached(size):
    values = [1.0]
    read = functools.lru_cache(size)(lambda key: values[0])
    return lambda x: x * read("a"), lambda: (values.__setitem__(0, 2.0), read.cache_clear())


def two_values():
    return types.SimpleNamespace(value_1=1.0, other=1.0)


def change(values):
    values.value_1 = 2.0


CASES = {
    "a cache": lambda: cached(None),
    "a bounded cache": lambda: cached(3),
    "aliases": lambda: contents(Aliased(), lambda o: setattr(o, "value", 2.0), lambda o: o.scale),
    "an object's own __dict__": lambda: contents(Own(), lambda o: setattr(o, "value", 2.0), Own.read),
    "a name from parts": lambda: contents(two_values(), change, lambda o, k=1: getattr(o, f"value_{k}")),
    "a name of two": lambda: contents(
        two_values(), change, lambda o: getattr(o, "value_1" if o.other else "other")
    ),
    "a name from a method": lambda: contents(two_values(), change, lambda o: getattr(o, "VALUE_1".lower())),
    "a global in a helper": lambda: on_global(lambda x: read_scale(x) * SCALE / SCALE),
    "a property": lambda: on_global(lambda x: x * POINT.prop),
    "a static method": lambda: on_global(lambda x: x * Point.static()),
    "a class method": lambda: on_global(lambda x: x * Point.klass()),
    "__getitem__": lambda: on_global(lambda x: x * POINT[0]),
    "an autograd.Function": lambda: on_global(lambda x: Scaled.apply(x)),
    "torch.no_grad() around": lambda: on_global(torch.no_grad()(read_scale)),
    "partial": lambda: on_global(functools.partial(read_scale)),
    "a context manager": lambda: on_global(lambda x: managed(x)),
    "map": lambda: on_global(lambda x: next(map(read_scale, [x]))),
    "globals()": lambda: on_global(lambda x: x * globals()["SCALE"]),
    "a module's __dict__": lambda: on_global(lambda x: x * sys.modules[__name__].__dict__["SCALE"]),
    "frames": lambda: on_global(framed),
    "slots": lambda: contents(Slots(), lambda s: setattr(s, "value", 2.0), lambda s: s.value),
    "a namespace": attribute,
    "a float of NumPy": lambda: attribute(np.float64),
    "a fraction": lambda: attribute(fractions.Fraction),
    "a subclass of float": lambda: attribute(type("Celsius", (float,), {})),
    "a mapping proxy": lambda: attribute(lambda v: types.MappingProxyType({"a": v}), lambda p: p["a"]),
    "a frozen set": lambda: attribute(lambda v: frozenset([v]), max),
    "an object, replaced": lambda: attribute(Point, lambda p: p.value),
    "a set": lambda: contents({1.0}, lambda s: (s.clear(), s.add(2.0)), max),
    "a deque": lambda: contents(collections.deque([1.0]), lambda d: d.append(1.0), sum),
    "an empty list": lambda: contents([], lambda v: v.append(1), lambda v: 1.0 + len(v)),
    "an empty dict": lambda: contents({}, lambda v: v.update(a=1), lambda v: 1.0 + len(v)),
    "an array of NumPy": lambda: contents(np.ones(1), lambda a: a.fill(2.0), lambda a: float(a[0])),
    "a bytearray": lambda: contents(bytearray([1]), lambda b: b.__setitem__(0, 2), lambda b: float(b[0])),
    "keys that are tuples": lambda: contents(
        {(1, 2): 1.0}, lambda d: d.update({(1, 2): 2.0}), lambda d: d[1, 2]
    ),
    "keys that are enums": lambda: contents(
        {Kind.A: 1.0}, lambda d: d.update({Kind.A: 2.0}), lambda d: d[Kind.A]
    ),
    "a long list": lambda: contents([1.0] * 9000, lambda v: v.__setitem__(8000, 2.0), lambda v: v[8000]),
    "signed zeros": lambda: contents(
        [0.0], lambda v: v.__setitem__(0, -0.0), lambda v: np.copysign(1.5, v[0])
    ),
    "order of a dict": lambda: contents(
        {"a": 1.0, "b": 2.0}, lambda d: d.update(a=d.pop("a")), lambda d: next(iter(d.values()))
    ),
    "__getattr__": lambda: contents(Hidden(), lambda h: h.values.update(a=2.0), lambda h: h.a),
    "vars": lambda: contents(Point(), lambda p: setattr(p, "value", 2.0), lambda p: vars(p)["val" + "ue"]),
    "a computed name": lambda: contents(
        Point(), lambda p: setattr(p, "value", 2.0), lambda p: getattr(p, "".join(["val", "ue"]))
    ),
    "attrgetter": lambda: contents(Point(), lambda p: setattr(p, "value", 2.0), operator.attrgetter("value")),
    "format": lambda: on_point(lambda x, p: x * float("{0.value}".format(p))),  # noqa: UP030, UP032
    "match": lambda: on_point(matched),
    "a method replaced on the class": lambda: replaced_method(True),
    "a method replaced on the object": lambda: replaced_method(False),
    "a class replaced": replaced_class,
    "a second closure of one code": second_closure,
    "__code__": replaced_code,
    "default arguments": defaults,
    "an attribute of a function": function_attribute,
    "a hook of a module": module_hook,
    "a replaced forward": replaced_forward,
    "a buffer": evaluated,
    "a context variable": context_variable,
    "an import inside": members_of_a_module,
    "memory that NumPy writes": memory_of_numpy,
    "an array that functions of NumPy read": functions_of_numpy,
    "an environment variable": lambda: (
        lambda x: x * float(os.environ.get("TANDEM_TEST_SCALE", "1")),
        lambda: os.environ.__setitem__("TANDEM_TEST_SCALE", "2"),
    ),
}
# State that code can read or change without a trace.
UNKNOWN = {
    "a clock": lambda: given(time, lambda module: float(module.time() > 0)),
    "a clock that a C function calls": lambda: given(1.0, lambda one: min(one, next(iter(time.time, 0)))),
    "an iterator": lambda: given(iter([1.0] * 99), next),
    "a generator of NumPy": lambda: given(np.random.default_rng(0), lambda rng: rng.random()),
    "an open file": lambda: given(open(__file__), lambda file: float(file.fileno() > 0)),  # noqa: SIM115
    "frames": lambda: framed,
    "a module by its name": lambda: given(
        "time", lambda name: float(importlib.import_module(name).time() > 0)
    ),
    "modules": lambda: given("math", lambda name: sys.modules[name].pi),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name, monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_SCALE", "1")
    function, change = CASES[name]()
    x = torch.ones(3, device="tandem")
    step = torch_tandem.function(function)
    for _ in range(20):
        step(x)
    assert torch.equal(step(x).cpu(), function(x).cpu())
    change()
    assert torch.equal(step(x).cpu(), function(x).cpu()), step.explain()


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_never_replayed(name):
    step = torch_tandem.function(UNKNOWN[name]())
    for _ in range(20):
        step(torch.ones(3, device="tandem"))
    assert step.cache_info().hits == 0 and step.reason()


def test_most_of_these_functions_are_replayed(monkeypatch):
    monkeypatch.setenv("TANDEM_TEST_SCALE", "1")
    x = torch.ones(3, device="tandem")
    refused = {}
    for name, make in CASES.items():
        set_scale(1.0)
        step = torch_tandem.function(make()[0])
        for _ in range(20):
            step(x)
        if not step.cache_info().hits:
            refused[name] = step.reason()
    assert len(refused) <= 5, refused


@pytest.mark.parametrize("write", [lambda to, x: np.copyto(to, x), lambda to, x: np.add(x, 0, out=to)])
def test_an_array_that_numpy_writes(write):
    array = np.zeros(2)

    def count(x):
        write(array, array + 1)
        return x * float(array[0])

    step = torch_tandem.function(count)
    for i in range(20):
        assert step(torch.ones(3, device="tandem"))[0].item() == i + 1


MADE = {
    "a float": (float, float),
    "an integer": (lambda v: 1000 + int(v), lambda found: found - 1000),
    "text": (lambda v: f"scale {v}", lambda found: float(found.split()[1])),
    "a tuple": (lambda v: (1.0, float(v)), lambda found: found[1]),
    "a tuple in a tuple": (lambda v: (1.0, (float(v), 2.0)), lambda found: found[1][0]),
    "a list": (lambda v: [float(v)], lambda found: found[0]),
    "a list of tuples": (lambda v: [(float(v), 1.0)], lambda found: found[0][0]),
    "a dict": (lambda v: {"scale": float(v)}, lambda found: found["scale"]),
    "an object": (lambda v: Point(float(v)), lambda found: found.value),
    "an object with slots": (lambda v: Slots(float(v)), lambda found: found.value),
    "a function's default": (lambda v: lambda scale=float(v): scale, lambda found: found()),
    "a closure": (lambda v: given(float(v), float), lambda found: found(1.0)),
    "a tensor": (lambda v: torch.full((), float(v), device="tandem"), lambda found: found),
    "a partial": (lambda v: functools.partial(float, float(v)), lambda found: found()),
    "a method": (lambda v: Point(float(v)).method, lambda found: found.__self__.value),
}


@pytest.mark.parametrize("kind", MADE)
def test_values_at_the_addresses_of_freed_ones(kind):
    """A new value may have the address of one that was freed, which was compared before."""
    make, read = MADE[kind]
    holder = types.SimpleNamespace(value=make(1))
    step = torch_tandem.function(lambda x: x * read(holder.value))
    x = torch.ones(3, device="tandem")
    random = np.random.default_rng(0)
    for i in range(40):
        for _ in range(random.integers(1, 4)):
            holder.value = make(int(random.integers(1, 9)))
        for _ in range(random.integers(1, 9) if i else 12):
            assert torch.equal(step(x), x * read(holder.value)), step.explain()


def set_defaults(x):
    given_default.__defaults__ = ([1.0],)
    return x * 2


def given_default(value=()):
    return value


REPLACING = {
    "a list": lambda holder: lambda x: (setattr(holder, "value", [1.0]), x * 2)[1],
    "a list in a tuple": lambda holder: lambda x: (setattr(holder, "value", (1, [2])), x * 2)[1],
    "a dict": lambda holder: lambda x: (setattr(holder, "value", {"a": 1.0}), x * 2)[1],
    "an object": lambda holder: lambda x: (setattr(holder, "value", Point()), x * 2)[1],
    "defaults": lambda holder: set_defaults,
}


@pytest.mark.parametrize("what", REPLACING)
def test_objects_that_a_call_replaces_by_equal_ones(what):
    """The program may hold the former object, and change it."""
    holder = types.SimpleNamespace(value=None)
    step = torch_tandem.function(REPLACING[what](holder))
    kept = []
    for _ in range(20):
        step(torch.ones(3, device="tandem"))
        kept.append(given_default.__defaults__ if what == "defaults" else holder.value)
    assert len({id(value) for value in kept}) == 20
    assert "changes" in step.reason()


def test_objects_of_another_call_are_compared_too():
    """A call with two objects is of another kind than one with the first object alone."""

    class Scale:
        def __init__(self, value):
            self.value = value

    scales = [Scale(1)]
    step = torch_tandem.function(lambda x, scales: x * (2 if scales[-1].value > 1 else 3))
    for i in range(40):
        if i == 10:
            scales.append(Scale(1))
        if i == 30:
            scales[-1].value = 2
        x = data(3, seed=i)
        assert torch.equal(step(x.to("tandem"), scales).cpu(), x * (2 if scales[-1].value > 1 else 3))
    replayed(step, 5)


class Frozen:
    __slots__ = ("value",)


WRITES_BY_NAME = {
    "constant": lambda target, name: object.__setattr__(target, "value", 3),
    "variable": lambda target, name: object.__setattr__(target, name, 3),
    "of the object": lambda target, name: target.__setattr__(name, 3),
    "computed": lambda target, name: object.__setattr__(target, "val" + name[3:], 3),
    "method": lambda target, name: [object.__setattr__][0](target, name, 3),
}


@pytest.mark.parametrize("way", WRITES_BY_NAME)
@pytest.mark.parametrize("kind", [Frozen, type("Plain", (), {})])
def test_attributes_that_methods_in_c_write_by_name(way, kind):
    """The profiling hook does not show calls of `object.__setattr__`."""
    target = kind()
    target.value = 3
    step = torch_tandem.function(lambda x: (x * 2, WRITES_BY_NAME[way](target, "value"))[0])
    for i in range(40):
        if i % 10 == 9:
            target.value = 1
        step(data(3, seed=i).to("tandem"))
        assert target.value == 3
