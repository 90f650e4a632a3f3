"""A check that has compared a state before finds a difference where one that has not finds one.

The former reads words in memory where nothing was replaced, the latter visits all values.
"""

import contextlib
import copy
import types

import pytest
import torch
import torch_tandem
from hypothesis import example, given, settings
from hypothesis import strategies as st


class World:
    """The objects that a function reads, and the places at which a program can replace them."""

    def __init__(self):
        class Meta(type):
            limit = 4

        class Base(metaclass=Meta):
            shared = 1.5

            def bump(self, y):
                return y + self.value

        class Plain(Base):
            pass

        class Other(Base):
            pass

        class Slotted:
            __slots__ = ("inner", "name")

        class Items(list):
            pass

        class Named(dict):
            pass

        plain, slotted, captured = Plain(), Slotted(), 1.25
        plain.inner, plain.items, plain.value = Plain(), [1.0, Plain(), (2, "two")], 3
        plain.inner.value, plain.items[1].value = 4, 5
        slotted.name, slotted.inner = "slot", Plain()
        slotted.inner.value = 6
        config = {"scale": 2.0, "nested": {"depth": [1, 2, (3, "four")]}}
        items, named = Items([7, 8]), Named(one=9)
        items.tag = named.tag = 10
        module = types.ModuleType("settings")
        module.rate, module.one = 0.5, 0

        def helper(y, factor=2, *, shift=1):
            return y * factor + shift + captured

        helper.tag = 11

        def step(x):
            y = helper(x) * config["scale"] + config["nested"]["depth"][0] + config["nested"]["depth"][2][0]
            y = plain.bump(plain.inner.bump(plain.items[1].bump(y))) + plain.items[0] + plain.items[2][0]
            y = slotted.inner.bump(y) + len(slotted.name) + Plain.shared + Meta.limit + helper.tag
            return y + items[1] + items.tag + named["one"] + named.tag + module.rate + len(items)

        self.function = step
        self.kinds = {"Plain": Plain, "Other": Other, "object": object}
        held = {"plain": plain, "slotted": slotted, "config": config, "helper": helper, "Plain": Plain}
        held |= {"Base": Base, "Meta": Meta, "items": items, "named": named, "module": module}
        self.held = types.SimpleNamespace(**held)
        self.cell = helper.__closure__[0]
        self.first = {place: self.get(place) for place in PLACES}

    def holder(self, place):
        *way, last = place
        at = self.held
        for name in way:
            at = at[name] if isinstance(at, dict | list) and name in KEYS else getattr(at, name)
        return at, last

    def get(self, place):
        if place == CELL:
            return self.cell.cell_contents
        at, last = self.holder(place)
        return at[last] if last in KEYS else getattr(at, last)

    def set(self, place, value):
        if place == CELL:
            self.cell.cell_contents = value
            return
        at, last = self.holder(place)
        if last in KEYS:
            at[last] = value
        else:
            setattr(at, last, value)

    def delete(self, place):
        if place == CELL:
            del self.cell.cell_contents
            return
        at, last = self.holder(place)
        if last in KEYS:
            del at[last]
        else:
            delattr(at, last)


KEYS = ("scale", "nested", "depth", "one", 0, 1, 2)
CELL = ("cell",)
PLACES = [
    CELL,
    ("config", "scale"),
    ("config", "nested"),
    ("config", "nested", "depth"),
    ("config", "nested", "depth", 0),
    ("config", "nested", "depth", 2),
    ("plain", "inner"),
    ("plain", "inner", "value"),
    ("plain", "inner", "__dict__"),
    ("plain", "inner", "__class__"),
    ("plain", "items"),
    ("plain", "items", 0),
    ("plain", "items", 1),
    ("plain", "items", 1, "value"),
    ("plain", "items", 2),
    ("plain", "value"),
    ("plain", "__dict__"),
    ("plain", "__class__"),
    ("slotted", "name"),
    ("slotted", "inner"),
    ("slotted", "inner", "value"),
    ("helper", "__code__"),
    ("helper", "__defaults__"),
    ("helper", "__kwdefaults__"),
    ("helper", "__name__"),
    ("helper", "__qualname__"),
    ("helper", "__dict__"),
    ("helper", "tag"),
    ("Plain", "shared"),
    ("Base", "shared"),
    ("Base", "bump"),
    ("Base", "__name__"),
    ("Plain", "__bases__"),
    ("Meta", "limit"),
    ("Base", "limit"),
    ("items", 1),
    ("items", "tag"),
    ("items", "__dict__"),
    ("named", "one"),
    ("named", "tag"),
    ("module", "rate"),
    ("module", "__dict__", "one"),
]


def of_another_type(value):
    return None if isinstance(value, str) else "text"


def other(world, value):
    """An object of the same type with other contents."""
    if isinstance(value, type):
        return world.kinds["Other" if value.__name__ == "Plain" else "Plain"]
    if isinstance(value, types.CodeType):
        return (lambda y, factor=2, *, shift=1: y - world).__code__
    if isinstance(value, list | tuple):
        return type(value)([*value[:-1], 77])
    if isinstance(value, dict):
        return {**value, "more": 1}
    if isinstance(value, int | float | str):
        return value * 2
    made = copy.copy(value)
    made.more = 1
    return made


CHANGES = {
    "same": lambda world, place: world.set(place, world.first[place]),
    "copy": lambda world, place: world.set(place, copy.copy(world.get(place))),
    "equal": lambda world, place: world.set(place, copy.deepcopy(world.first[place])),
    "other": lambda world, place: world.set(place, other(world, world.get(place))),
    "type": lambda world, place: world.set(place, of_another_type(world.get(place))),
    "delete": lambda world, place: world.delete(place),
    "grow": lambda world, place: world.get(place).append(1),
    "shrink": lambda world, place: world.get(place).pop(),
    "add": lambda world, place: world.get(place).update(more=1),
    "remove": lambda world, place: world.get(place).pop("more"),
}


def changes():
    return st.lists(
        st.tuples(st.sampled_from(PLACES), st.sampled_from(list(CHANGES))), min_size=1, max_size=12
    )


def holds(check):
    return check([]) < 0


def recorded():
    """A world, and the state that a call of its function could read."""
    world = World()
    function = torch_tandem.function(world.function)
    x = torch.ones(3, device="tandem")
    for _ in range(3):
        function(x)
    return world, function._recorder._latest


@settings(max_examples=300, deadline=None, derandomize=True)
@given(changes())
@example([(("plain", "items"), "equal"), (("plain", "items", 1, "value"), "other")])
@example([(("plain", "items", 1), "equal"), (("plain", "inner", "__dict__"), "copy"), (CELL, "delete")])
def test_changes_in_turn(listed):
    world, state = recorded()
    warm = state.check(set())
    assert holds(warm) and holds(warm)
    for place, change in listed:
        with contextlib.suppress(Exception):
            CHANGES[change](world, place)
        expected = holds(state.check(set()))
        assert [holds(warm), holds(warm)] == [expected] * 2, (place, change)


@pytest.mark.parametrize("change", ["equal", "other", "type", "delete"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_each_change_and_back(place, change):
    world, state = recorded()
    warm = state.check(set())
    assert holds(warm) and holds(warm)
    for step in (change, "same", change, "same"):
        with contextlib.suppress(Exception):
            CHANGES[step](world, place)
        expected = holds(state.check(set()))
        assert [holds(warm), holds(warm)] == [expected] * 2


def test_places_are_read():
    """Most changes are seen, so the checks above compare something."""
    seen = 0
    for place in PLACES:
        world, state = recorded()
        with contextlib.suppress(Exception):
            CHANGES["type"](world, place)
        seen += not holds(state.check(set()))
    assert seen > len(PLACES) // 2
