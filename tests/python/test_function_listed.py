"""State of kinds that the list of a call's state has missed: each change of it is seen by the next call."""

import collections
import enum
import functools
import itertools
import sys
import time
import types
import typing
from datetime import timedelta

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_tandem

NAMES = ["".join(["r", "s"])]


class Object:
    pass


class Slotted:
    __slots__ = ("x",)

    def factor(self):
        return 2.0


class OtherSlotted:
    __slots__ = ("x",)

    def factor(self):
        return 3.0


class Weak:
    __slots__ = ("__weakref__",)

    def factor(self):
        return 2.0


class OtherWeak:
    __slots__ = ("__weakref__",)

    def factor(self):
        return 3.0


class Empty:
    __slots__ = ()

    def factor(self):
        return 2.0


class OtherEmpty:
    __slots__ = ()

    def factor(self):
        return 3.0


class One(enum.Enum):
    A = 1

    def factor(self):
        return 2.0


class Two(enum.Enum):
    A = 1

    def factor(self):
        return 3.0


class SlottedDict(dict):
    __slots__ = ("s",)


class Dict(dict):
    pass


T = typing.TypeVar("T")


class Generic(typing.Generic[T]):
    scale = 2.0

    def get(self):
        return self.scale


class Subscripted:
    scale = 2.0
    __class_getitem__ = classmethod(types.GenericAlias)


class Leaf:
    def __init__(self):
        setattr(self, NAMES[0], 2.0)


class Node:
    def __init__(self, child):
        self.child = child

    def look(self):
        self = self.child
        return self.__dict__[NAMES[0]]


def mutated_value_of_a_bounded_cache():
    @functools.lru_cache
    def settings():
        return {"scale": 2.0}

    return lambda x: x * settings()["scale"], lambda: settings().update(scale=3.0)


def bounded_cache_that_is_filled_again():
    state = {"v": 2.0}

    @functools.lru_cache(maxsize=8)
    def value():
        return state["v"]

    return lambda x: x * value(), lambda: (state.update(v=5.0), value.cache_clear(), value())


def module_in_a_bounded_cache():
    @functools.lru_cache(maxsize=1)
    def dropout():
        return nn.Dropout(1.0)

    return lambda x: dropout()(x), lambda: dropout().eval()


def several_values_of_a_bounded_cache():
    @functools.lru_cache(maxsize=8)
    def value(name):
        return [float(len(name))]

    return lambda x: x * value("a")[0] * value("bc")[0] * value("def")[0], lambda: value("def").append(
        value("def").pop() + 1
    )


def module_that_is_passed_on():
    config = types.ModuleType("config")
    config.S, config.K = 2.0, 3.0
    names = {"config": config}
    exec(
        "def a(x): return x * config.S\n"
        "def helper(c, x): return x * c.K\n"
        "def z(x): return helper(config, x)\n"
        "def f(x): return a(x) + z(x)",
        names,
    )
    return names["f"], lambda: setattr(config, "K", 5.0)


def module_that_is_imported_in_two_ways():
    config = sys.modules["config_of_a_test"] = types.ModuleType("config_of_a_test")
    config.S, config.K = 2.0, 3.0

    def a(x):
        from config_of_a_test import S

        return x * S

    def b(x):
        import config_of_a_test as q

        return x * q.K

    return lambda x: a(x) + b(x), lambda: setattr(config, "K", 7.0)


def getattr_that_is_passed_on():
    o = Object()
    o.a, o.rs = 2.0, 3.0

    def a(x):
        return x * getattr(o, "a")  # noqa: B009

    def b(x):
        return x * next(map(getattr, [o], NAMES))

    return lambda x: a(x) + b(x), lambda: setattr(o, "rs", 7.0)


def clock_that_is_passed_on():
    debug, limit = False, time.monotonic() + 1.5

    def a():
        return time.monotonic() if debug else 0

    def b():
        return collections.defaultdict(time.monotonic)["a"]

    return lambda x: x * (2.0 if a() + b() < limit else 3.0), lambda: time.sleep(1.6)


def factory_of_a_defaultdict():
    d = collections.defaultdict(lambda: 2.0, {"a": 1.0})

    def read(x):
        y = x * d["z"]
        del d["z"]
        return y

    return read, lambda: setattr(d, "default_factory", lambda: 5.0)


def slot_of_a_dict():
    d = SlottedDict(a=1.0)
    d.s = 2.0
    return lambda x: x * d.s * d["a"], lambda: setattr(d, "s", 5.0)


def attributes_of_a_dict():
    d = Dict(a=1.0)
    d.s = 2.0
    return lambda x: x * d.s * d["a"], lambda: setattr(d, "__dict__", {"s": 5.0})


def attributes_of_an_ordered_dict():
    d = collections.OrderedDict(a=1.0)
    d.s = 2.0
    return lambda x: x * d.s * d["a"], lambda: setattr(d, "s", 5.0)


def modules_by_name():
    config = sys.modules["config_of_modules"] = types.ModuleType("config_of_modules")
    config.K = 2.0
    names = {}
    exec("import sys\ndef f(x): return x * sys.modules['config_of_modules'].K", names)
    return names["f"], lambda: setattr(config, "K", 3.0)


def new_attribute_of_a_function_of_pytorch():
    act = F.celu
    return lambda x: x * (2.0 if getattr(act, "flag", False) else 3.0), lambda: setattr(act, "flag", True)


def class_of_an_alias():
    alias = Generic[int]
    return lambda x: x * alias.scale, lambda: setattr(Generic, "scale", Generic.scale + 1)


def method_of_an_alias():
    alias = Generic[int]
    return lambda x: x * alias().get(), lambda: setattr(Generic, "get", lambda self: 9.0)


def class_of_a_generic_alias():
    alias = Subscripted[int]
    return lambda x: x * alias.scale, lambda: setattr(Subscripted, "scale", 3.0)


def class_of_an_object_with_slots():
    o = Slotted()
    o.x = 1.0
    return lambda x: x * o.factor() * o.x, lambda: setattr(o, "__class__", OtherSlotted)


def class_of_an_object_in_an_object():
    o = Object()
    o.w = Weak()
    return lambda x: x * o.w.factor(), lambda: setattr(o.w, "__class__", OtherWeak)


def class_of_a_member_of_an_enum():
    member = One.A
    return lambda x: x * member.factor(), lambda: setattr(member, "__class__", Two)


def module_of_a_function():
    def named(x):
        return x

    return lambda x: x * (2.0 if named.__module__ == __name__ else 3.0), lambda: setattr(
        named, "__module__", "b"
    )


def annotations_of_a_function():
    def annotated(x):
        return x

    annotated.__annotations__ = {"p": 2.0}
    return (
        lambda x: x * annotated.__annotations__["p"],
        lambda: setattr(annotated, "__annotations__", {"p": 7.0}),
    )


def method_that_rebinds_its_object():
    node = Node(Leaf())
    return lambda x: x * node.look(), lambda: setattr(node.child, NAMES[0], 5.0)


CASES = [
    mutated_value_of_a_bounded_cache, bounded_cache_that_is_filled_again, module_in_a_bounded_cache,
    several_values_of_a_bounded_cache, module_that_is_passed_on, module_that_is_imported_in_two_ways,
    getattr_that_is_passed_on, clock_that_is_passed_on, factory_of_a_defaultdict, slot_of_a_dict,
    attributes_of_a_dict, attributes_of_an_ordered_dict, modules_by_name,
    new_attribute_of_a_function_of_pytorch, class_of_an_alias, method_of_an_alias, class_of_a_generic_alias,
    class_of_an_object_with_slots, class_of_an_object_in_an_object, class_of_a_member_of_an_enum,
    module_of_a_function, annotations_of_a_function, method_that_rebinds_its_object,
]  # fmt: skip


def differs(f, change, *args):
    """Whether a call after a change differs from plain Python's. No audit would hide a difference."""
    function = torch_tandem.function(f, audit=10**6)
    for _ in range(12):
        function(*args)
    before = f(*args).tolist()
    change()
    results = [function(*args).tolist() for _ in range(2)]
    assert before != f(*args).tolist(), "the change has no effect"
    return results != [f(*args).tolist()] * 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_is_seen(case):
    f, change = case()
    assert not differs(f, change, torch.ones(3, device="tandem"))


def test_a_module_whose_name_is_no_text():
    module = types.ModuleType("m")
    assert not differs(
        lambda x: x * (2.0 if module.__name__ == "m" else 3.0),
        lambda: setattr(module, "__name__", 0),
        torch.ones(3, device="tandem"),
    )


def test_an_argument_with_an_object_at_the_same_address():
    state = types.SimpleNamespace(mode=Empty())

    def swap():
        state.mode = None
        state.mode = OtherEmpty()

    assert not differs(lambda s, x: x * s.mode.factor(), swap, state, torch.ones(3, device="tandem"))


def test_objects_of_the_program_in_registries_of_pytorch():
    class Hook:
        def __init__(self):
            self.values = itertools.chain([2.0] * 6, [4.0] * 100)

        def __call__(self, module, args, output):
            return output * next(self.values)

    handle = nn.modules.module.register_module_forward_hook(Hook())
    try:
        module, x = nn.Identity(), torch.ones(3, device="tandem")
        function = torch_tandem.function(lambda x: module(x), audit=10**6)
        results = [function(x)[0].item() for _ in range(14)]
    finally:
        handle.remove()
    assert results == [2.0] * 6 + [4.0] * 8


def test_members_of_the_class_of_parameters():
    w = nn.Parameter(torch.ones(3, device="tandem"))
    try:
        change = lambda: setattr(nn.Parameter, "__mul__", lambda one, other: torch.add(one, other))  # noqa: E731
        assert not differs(lambda x: (w * x).detach(), change, torch.ones(3, device="tandem"))
    finally:
        del nn.Parameter.__mul__


def test_a_duration_of_a_number_that_varies():
    function = torch_tandem.function(
        lambda x, t: x * (5.0 if timedelta(seconds=t) > timedelta(seconds=100) else t), audit=10**6
    )
    x = torch.ones(1, device="tandem")
    for i in range(25):
        assert function(x, 4.0 + i).item() == 4.0 + i
    assert function(x, 400.5).item() == 5.0
