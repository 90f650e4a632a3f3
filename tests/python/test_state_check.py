"""The comparison of values that are stored at known places in their objects: each change of one is seen."""

import abc
import dataclasses

import pytest
from torch_tandem import _core


class Slotted:
    __slots__ = ("name", "unset")

    def __init__(self):
        self.name = "one"


class One:
    pass


class Other:
    pass


class Fielded:
    __slots__ = ("items",)

    def __init__(self):
        self.items = ("a", "b", 3)


def made():
    return 1


def check(*listed):
    found = _core.StateCheck([(*value, 0) if len(value) == 5 else value for value in listed])
    assert found([]) == -1
    assert found([]) == -1
    return found


def members(value, *names):
    """The object, and its attributes in C as they are now."""
    listed = [("r", 0, value, "s", value)]
    for name in names:
        if not hasattr(value, name):
            listed.append(("a", 0, name, "0", None))
        else:
            of = getattr(value, name)
            kind = "=" if type(of) in (type(None), str, int) else "s"
            listed.append(("a", 0, name, kind, of))
    return listed


def rename(value):
    value.__name__ = "Other"


def rename_within(value):
    value.__qualname__ = "Other.Named"


def unset(value):
    value.unset = 1


def replace_descriptor(value):
    type(value).name = property(lambda self: "two")


CHANGES = {
    "slot": (Slotted, ("name", "unset"), lambda v: setattr(v, "name", "two")),
    "equal slot": (Slotted, ("name", "unset"), lambda v: setattr(v, "name", "".join(["o", "ne"]))),
    "deleted slot": (Slotted, ("name",), lambda v: delattr(v, "name")),
    "new slot": (Slotted, ("name", "unset"), unset),
    "name": (lambda: type("Named", (), {}), ("__name__", "__qualname__", "__class__"), rename),
    "qualified name": (lambda: type("Named", (), {}), ("__name__", "__qualname__"), rename_within),
    "bases": (lambda: type("Named", (One,), {}), ("__mro__",), lambda v: setattr(v, "__bases__", (Other,))),
    "name of an abstract class": (lambda: abc.ABCMeta("Named", (), {}), ("__name__", "__class__"), rename),
    "class method": (lambda: classmethod(made), ("__func__",), lambda v: v.__init__(rename)),
    "property": (
        lambda: property(made),
        ("fget", "fset", "fdel", "__doc__"),
        lambda v: v.__init__(made, rename),
    ),
    "field": (lambda: dataclasses.field(default=4), ("default",), lambda v: setattr(v, "default", 5)),
    "descriptor": (lambda: make_slotted()(), ("name",), replace_descriptor),
}


def make_slotted():
    return type(
        "Slotted", (), {"__slots__": ("name",), "__init__": lambda self: setattr(self, "name", "one")}
    )


@pytest.mark.parametrize("make, names, change", CHANGES.values(), ids=CHANGES)
def test_changes_of_members(make, names, change):
    value = make()
    found = check(*members(value, *names))
    change(value)
    is_equal = change is CHANGES["equal slot"][2]
    assert (found([]) == -1) == is_equal
    assert (found([]) == -1) == is_equal


def test_a_descriptor_that_is_replaced_and_restored():
    kind = make_slotted()
    value, descriptor = kind(), kind.name
    found = check(*members(value, "name"))
    kind.name = "two"
    assert found([]) == 1
    kind.name = descriptor
    assert found([]) == -1


def of_items(value, of):
    """A slot with a tuple, and its items."""
    yield ("r", 0, value, "s", value, 0)
    yield ("a", 0, "items", "l", tuple, len(of))
    for i, item in enumerate(of):
        yield ("i", 1, i, "=", item, 0)


@pytest.mark.parametrize("items", [("a", "b", 4), ("a", "b"), ("a", "b", 3, 4), ["a", "b", 3], None])
def test_another_tuple(items):
    value = Fielded()
    found = check(*of_items(value, value.items))
    for _ in range(3):
        value.items = items
        assert found([]) > 0
    for _ in range(3):
        # A new tuple, which may have the address of one that was freed.
        value.items = tuple(["a", "b", 3])
        assert found([]) == -1
        value.items = tuple(["a", "c", 3])
        assert found([]) > 0
