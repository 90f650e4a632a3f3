"""Code that reads or writes what it does not name: an object as a whole, by an operator, by its text or by a
method in C, and the special methods of its class.

A change of it is seen by the next call.
"""

import argparse
import collections
import dataclasses
import functools
import operator
import types
from types import SimpleNamespace

import pytest
import torch
import torch_tandem

CHANGE, CALLS = 20, 28


@dataclasses.dataclass
class Record:
    v: float


class Subclass(SimpleNamespace):
    pass


class Pair(collections.namedtuple("Pair", "v other", defaults=(0,))):
    __slots__ = ()


def attribute(one, value):
    one.v = value


# How an object is made from a number, and how the program changes the number in place.
OBJECTS = {
    "SimpleNamespace": (lambda v: SimpleNamespace(v=v), attribute),
    "subclass of SimpleNamespace": (lambda v: Subclass(v=v), attribute),
    "namespace in a namespace": (
        lambda v: SimpleNamespace(a=SimpleNamespace(v=v)),
        lambda o, v: attribute(o.a, v),
    ),
    "argparse.Namespace": (lambda v: argparse.Namespace(v=v), attribute),
    "dataclass": (Record, attribute),
    "namedtuple of a list": (lambda v: Pair([v]), lambda o, v: o.v.__setitem__(0, v)),
    "exception": (ValueError, lambda o, v: setattr(o, "args", (v,))),
    "partial": (lambda v: functools.partial(max, [v]), lambda o, v: o.args[0].__setitem__(0, v)),
    "dict of namespaces": (lambda v: {"a": SimpleNamespace(v=v)}, lambda o, v: attribute(o["a"], v)),
    "OrderedDict": (lambda v: collections.OrderedDict(a=v), lambda o, v: o.update(a=v)),
    "deque": (lambda v: collections.deque([v]), lambda o, v: o.__setitem__(0, v)),
}
# How code reads the object `o`; `p` is equal to it until the change.
READS = {
    "==": lambda o, p: o == p,
    "!=": lambda o, p: o != p,
    "__eq__": lambda o, p: o.__eq__(p) is True,
    "operator.eq": lambda o, p: operator.eq(o, p),
    "in": lambda o, p: o in [p],
    "index": lambda o, p: [p, o].index(o),
    "tuples": lambda o, p: (1, o) == (1, p),
    "<": lambda o, p: [o, 1] < [p, 2],
    "repr": lambda o, p: sum(repr(o).encode()) % 97,
    "str": lambda o, p: sum(str(o).encode()) % 97,
    "f-string": lambda o, p: sum(f"{o}".encode()) % 97,
    "%": lambda o, p: sum(("%s" % (o,)).encode()) % 97,  # noqa: UP031
}


def results(wrap, f, change):
    function = wrap(f)
    found = []
    for i in range(CALLS):
        if i == CHANGE:
            change()
        try:
            found.append(function(torch.full((2,), 1.0 + i, device="tandem")).tolist())
        except TypeError as error:
            found.append(str(error))
    return found, function


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("read", READS)
def test_a_change_is_seen(name, read):
    make, change = OBJECTS[name]

    def run(wrap):
        one, other = make(2.0), make(2.0)
        return results(wrap, lambda x: x * (2.0 + READS[read](one, other)), lambda: change(one, 1.25))

    plain, _ = run(lambda f: f)
    found, function = run(lambda f: torch_tandem.function(f, audit=10**6))
    assert found == plain
    if all(isinstance(result, list) for result in plain):
        assert function.cache_info().hits > 0, function.explain()


# Statements of a call that write the number 2 to `o` as a whole.
WRITES = {
    "__init__": (lambda v: SimpleNamespace(v=v), lambda o: o.__init__(v=2.0), lambda o: o.v, attribute),
    "__init__ of the class": (
        lambda v: SimpleNamespace(v=v),
        lambda o: SimpleNamespace.__init__(o, v=2.0),
        lambda o: o.v,
        attribute,
    ),
    "__init__ of a list": (
        lambda v: [v],
        lambda o: o.__init__([2.0]),
        lambda o: o[0],
        lambda o, v: o.__setitem__(0, v),
    ),
    "__init__ of a dict": (
        lambda v: {"a": v},
        lambda o: o.__init__(a=2.0),
        lambda o: o["a"],
        lambda o, v: o.update(a=v),
    ),
    "__init__ of an exception": (
        ValueError,
        lambda o: o.__init__(2.0),
        lambda o: o.args,
        lambda o, v: setattr(o, "args", (v,)),
    ),
    "__setstate__ of a partial": (
        lambda v: functools.partial(max, [v]),
        lambda o: o.__setstate__((max, ([2.0],), {}, None)),
        lambda o: o.args,
        lambda o, v: o.args[0].__setitem__(0, v),
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_happens_in_each_call(name):
    make, write, read, change = WRITES[name]

    def run(wrap):
        one = make(2.0)

        def f(x):
            write(one)
            return x * 2

        found, _ = results(wrap, f, lambda: change(one, 1.25))
        return found, read(one)

    assert run(lambda f: torch_tandem.function(f, audit=10**6)) == run(lambda f: f)


# By the name of a member: code that uses the member of `o`, or does without it; and the new member.
SPECIAL = {
    "__str__": (lambda o: len(str(o)), lambda self: "x"),
    "__format__": (lambda o: len(f"{o}"), lambda self, spec: "x"),
    "__bool__": (lambda o: 2 if o else 3, lambda self: False),
    "__round__": (lambda o: round(o), lambda self: 5),
    "__matmul__": (lambda o: o @ 1, lambda self, other: 5),
    "__iadd__": (lambda o: operator.iadd(o, 1), lambda self, other: 5),
    "__contains__": (lambda o: 2 if 1 in o else 3, lambda self, item: False),
    "__reversed__": (lambda o: next(iter(reversed(o))), lambda self: iter([5])),
    "__length_hint__": (lambda o: operator.length_hint(o, 2), lambda self: 5),
    "__missing__": (lambda o: o["a"], lambda self, key: 5),
    "__hash__": (lambda o: 2 * len({o}), lambda self: 5),
    "__get__": (lambda o: 2 if o.member is o else 3, lambda self, one, owner: 5),
    "__set__": (lambda o: o.attribute, lambda self, one, value: None),
    "__instancecheck__": (lambda o: 2 if isinstance(1, type(o)) else 3, lambda self, one: True),
    "__subclasscheck__": (lambda o: 2 if issubclass(int, type(o)) else 3, lambda self, one: True),
    "factor": (lambda o: getattr(o, "factor", 2), 5),
}


@pytest.mark.parametrize("takes_a_place", [False, True])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_new_member_of_a_class_is_seen(name, takes_a_place):
    read, method = SPECIAL[name]

    def run(wrap):
        meta = type("Meta", (type,), {"spare": 1})
        members = {"spare": 1, "__repr__": lambda self: "abc"}
        if name == "__hash__":
            members["__eq__"] = lambda self, other: self is other
        elif name in ("__contains__", "__reversed__"):
            members |= {"__getitem__": lambda self, i: [2, 1][i], "__len__": lambda self: 2}
        elif name == "__set__":
            members["__get__"] = lambda self, one, owner: 3
        kind = meta("Kind", (dict,) if name == "__missing__" else (), members)
        one = kind()
        if name in ("__get__", "__set__"):
            kind.member = kind.attribute = one
        if name == "__set__":
            vars(one)["attribute"] = 2

        def f(x):
            try:
                return x * read(one)
            except (TypeError, KeyError):
                return x

        def change():
            changed = meta if name.endswith("check__") else kind
            if takes_a_place:
                del changed.spare
            setattr(changed, name, method)

        return results(wrap, f, change)[0]

    plain = run(lambda f: f)
    assert run(lambda f: torch_tandem.function(f, audit=10**6)) == plain
    assert plain[CHANGE][0] / (CHANGE + 1) != plain[0][0], "the change has no effect"


@pytest.mark.parametrize(
    "text",
    [
        repr,
        str,
        lambda g: repr([g]),
        lambda g: repr(functools.partial(g)),
        lambda g: repr(types.MethodType(g, 1)),
    ],
)
def test_a_new_name_of_a_function_is_seen_in_its_text(text):
    def run(wrap):
        def other():
            pass

        def change():
            other.__qualname__ = "a.longer.name" * 4

        return results(wrap, lambda x: x * len(text(other)), change)[0]

    plain = run(lambda f: f)
    found = run(lambda f: torch_tandem.function(f, audit=10**6))
    assert [round(r[0] / (i + 1)) for i, r in enumerate(found)] == [
        round(r[0] / (i + 1)) for i, r in enumerate(plain)
    ]
