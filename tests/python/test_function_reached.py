"""State that code reaches otherwise than by the names in its bytecode: through C code that calls back,
classes and descriptors, objects of libraries, the interpreter, and PyTorch's C++ code.
`torch_tandem.function` compares it, or does not replay calls that reach it.

Each case is a function with a change of what it reads. Calls after the change give what Python gives.
"""

import abc
import array
import collections
import contextvars
import datetime
import functools
import gc
import operator
import re
import sys
import threading
import types
import typing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_tandem
from functions import data
from torch import nn

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*an audit found")]
CHANGE, CALLS = 30, 45

# Cases whose calls are replayed before the change, and cases that are never replayed.
compared, refused = [], []


def is_compared(case):
    compared.append(case)
    return case


def is_refused(case):
    refused.append(case)
    return case


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


# --- Captured tensors and containers --------------------------------------------------------------------


@is_compared
def attribute_of_a_captured_tensor():
    tensor = torch.ones(3, device="tandem")
    return lambda x: x * getattr(tensor, "scale", 2.0) * tensor, lambda: setattr(tensor, "scale", 3.0)


@is_compared
def lists_that_become_one():
    config = SimpleNamespace(a=[1.0], b=[1.0])
    return lambda x: x * (2.0 if config.a is config.b else 3.0), lambda: setattr(config, "b", config.a)


@is_compared
def sets_in_a_dict_that_become_one():
    config = {"a": {1}, "b": {1}}
    return lambda x: x * (2.0 if config["a"] is config["b"] else 3.0), lambda: config.update(b=config["a"])


# --- C code that reads attributes or calls methods ------------------------------------------------------


@is_compared
def reduce_of_getattr():
    config = SimpleNamespace(a=SimpleNamespace(b=2.0))
    return lambda x: x * functools.reduce(getattr, ["a", "b"], config), lambda: vars(config.a).update(b=3.0)


@is_compared
def map_of_getattr():
    config = SimpleNamespace(b=2.0)
    return lambda x: x * next(map(getattr, [config], ["b"])), lambda: vars(config).update(b=3.0)


@is_compared
def getattribute_by_another_name():
    config, read = SimpleNamespace(b=2.0), object.__getattribute__
    return lambda x: x * read(config, "b"), lambda: vars(config).update(b=3.0)


@is_compared
def attrgetter_by_another_name():
    config, getter = SimpleNamespace(b=2.0), operator.attrgetter
    return lambda x: x * getter("b")(config), lambda: vars(config).update(b=3.0)


@is_compared
def descriptor_of_a_slot():
    class Slots:
        __slots__ = ("by",)

    one, read = Slots(), Slots.by.__get__
    one.by = 2.0
    return lambda x: x * read(one), lambda: setattr(one, "by", 3.0)


@is_compared
def bound_method_in_c():
    values = [1.0, 2.0]
    size = values.__len__
    return lambda x: x * size(), lambda: values.append(1.0)


@is_refused
def bound_method_of_an_iterator():
    following = iter([2.0] * 60 + [3.0] * 60).__next__
    return lambda x: x * following(), lambda: None


@is_refused
def methodcaller_of_a_host_tensor():
    host, read = torch.tensor([2.0]), operator.methodcaller("tolist")
    return lambda x: x * read(host)[0], lambda: host.fill_(3.0)


@is_refused
def unbound_method_of_a_host_tensor():
    host = torch.tensor([2.0])
    read = functools.partial(torch.Tensor.tolist, host)
    return lambda x: x * read()[0], lambda: host.fill_(3.0)


@is_refused
def map_of_an_unbound_method():
    host = torch.tensor([2.0])
    return lambda x: x * float(next(map(torch.Tensor.numpy, [host]))[0]), lambda: host.fill_(3.0)


@is_refused
def setattr_by_another_name():
    config, store = SimpleNamespace(b=2.0), object.__setattr__

    def step(x):
        store(config, "b", config.b + 1)
        return x * 2

    return step, lambda: None


@is_refused
def sorted_by_id():
    return lambda x: sorted([x, x * 2], key=id)[0].numel() * x, lambda: None


@is_refused
def version_by_attrgetter():
    read = operator.attrgetter("_version")
    return lambda x: x * (1.0 + read(x)), lambda: None


# --- operators of PyTorch that read host tensors themselves ---------------------------------------------


@is_refused
def lengths_of_ctc_loss():
    scores = torch.randn(9, 1, 3).log_softmax(-1).to("tandem")
    targets, lengths = torch.ones(1, 3, dtype=torch.long, device="tandem"), torch.tensor([3])

    def step(x):
        return nn.functional.ctc_loss(scores + x[0], targets, torch.tensor([9]), lengths)

    return step, lambda: lengths.fill_(2)


@is_refused
def host_indices_of_tensor_split():
    at = torch.tensor([1])
    return lambda x: torch.tensor_split(x, at)[0].sum() * x, lambda: at.fill_(2)


@is_refused
def batch_sizes_of_a_packed_sequence():
    sizes = torch.tensor([2, 1])

    def step(x):
        packed = nn.utils.rnn.PackedSequence(x.reshape(3, 1), sizes)
        return nn.utils.rnn.pad_packed_sequence(packed)[0].sum() * x

    return step, lambda: sizes.copy_(torch.tensor([1, 2]).flip(0))


# --- classes, functions and modules ---------------------------------------------------------------------


@is_compared
def special_method_that_is_an_object():
    class Add:
        by = 2.0

        def __call__(self, other):
            return other * self.by

    class Value:
        __add__ = Add()

    value = Value()
    return lambda x: value + x, lambda: setattr(Value.__add__, "by", 3.0)


@is_compared
def special_method_in_c():
    class Value:
        __call__ = staticmethod(torch.sin)

    value = Value()
    return lambda x: value(x), lambda: setattr(Value, "__call__", staticmethod(torch.cos))


@is_compared
def class_of_a_class():
    one = type("One", (type,), {"__call__": lambda cls: 2.0})
    two = type("Two", (type,), {"__call__": lambda cls: 3.0})
    made = one("Made", (), {})
    return lambda x: x * made(), lambda: setattr(made, "__class__", two)


@is_compared
def class_of_a_module():
    config = types.ModuleType("config")
    config.scale = 2.0
    computed = type("Computed", (types.ModuleType,), {"scale": property(lambda self: 3.0)})
    return lambda x: x * config.scale, lambda: setattr(config, "__class__", computed)


@is_compared
def class_of_a_captured_tensor():
    class Doubled(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
                return result * 2 if function is torch.add else result

    weight = nn.Parameter(torch.ones(3, device="tandem"), requires_grad=False)
    return lambda x: torch.add(x, weight), lambda: setattr(weight, "__class__", Doubled)


@is_compared
def slots_of_a_captured_tensor():
    class Scaled(torch.Tensor):
        __slots__ = ("scale",)

    weight = torch.ones(3, device="tandem").as_subclass(Scaled)
    weight.scale = 2.0
    return lambda x: x * weight.scale, lambda: setattr(weight, "scale", 3.0)


@is_compared
def method_of_tensors():
    def replace():
        torch.Tensor.relu = lambda self: self.clamp(min=0) + 1

    return lambda x: x.relu(), replace


@is_compared
def subclass_by_registration():
    Base = abc.ABCMeta("Base", (), {})

    class Other: ...

    other = Other()
    return lambda x: x * (2.0 if isinstance(other, Base) else 3.0), lambda: Base.register(Other)


@is_compared
def dispatch_by_registration():
    Base = abc.ABCMeta("Base", (), {})

    class Other: ...

    @functools.singledispatch
    def scale(value):
        return 2.0

    scale.register(Base, lambda value: 3.0)
    other = Other()
    return lambda x: x * scale(other), lambda: Base.register(Other)


@is_compared
def name_of_a_function():
    def helper(): ...

    return lambda x: x * len(helper.__name__), lambda: setattr(helper, "__name__", "other_helper")


@is_compared
def name_of_a_class():
    class Helper: ...

    return lambda x: x * len(repr(Helper)), lambda: setattr(Helper, "__qualname__", "Other")


@is_compared
def attribute_of_a_function_made_by_exec():
    space = {}
    exec("def scale(x): return x * getattr(scale, 'by', 2.0)", space)
    scale = space["scale"]
    return lambda x: scale(x), lambda: setattr(scale, "by", 3.0)


@is_compared
def cell_of_a_function_that_does_not_run():
    def make(value):
        def change(new):
            nonlocal value
            value = new

        return lambda: value, change

    reader, change = make(2.0)
    return lambda x: x * reader.__closure__[0].cell_contents, lambda: change(3.0)


@is_compared
def method_of_an_object_without_weak_references():
    class Scale:
        __slots__ = ("by",)

        def step(self, x):
            return x * self.by

    scale = Scale()
    scale.by = 2.0
    return scale.step, lambda: setattr(scale, "by", 3.0)


@is_refused
def protocol():
    @typing.runtime_checkable
    class Scaled(typing.Protocol):
        scale: float

    config = SimpleNamespace()
    return lambda x: x * (3.0 if isinstance(config, Scaled) else 2.0), lambda: vars(config).update(scale=1.0)


# --- objects of libraries -------------------------------------------------------------------------------


@is_compared
def ufunc():
    holder = SimpleNamespace(op=np.add)
    return lambda x: x * float(holder.op(2.0, 3.0)), lambda: vars(holder).update(op=np.multiply)


@is_compared
def function_of_numpy():
    holder = SimpleNamespace(op=np.sum)
    return lambda x: x * float(holder.op([1.0, 2.0])), lambda: vars(holder).update(op=np.mean)


@is_refused
def ufunc_of_an_object():
    config = SimpleNamespace(by=2.0)
    scale = np.frompyfunc(lambda value: value * config.by, 1, 1)
    return lambda x: x * float(scale(1.0)), lambda: vars(config).update(by=3.0)


@is_compared
def format_of_a_memoryview():
    content = bytearray(b"\0\0\x80\x3f")
    holder = SimpleNamespace(view=memoryview(content).cast("f"))
    change = lambda: vars(holder).update(view=memoryview(content).cast("i"))  # noqa: E731
    return lambda x: x * float(holder.view[0]), change


@is_compared
def typecode_of_an_array():
    holder = SimpleNamespace(values=array.array("f", [1.0]))
    change = lambda: vars(holder).update(values=array.array("i", holder.values.tobytes()))  # noqa: E731
    return lambda x: x * float(holder.values[0]), change


@is_compared
def order_of_an_array():
    holder = SimpleNamespace(values=np.array([[1.0, 2.0], [3.0, 4.0]]))
    change = lambda: vars(holder).update(values=np.asfortranarray(holder.values))  # noqa: E731
    return lambda x: x * float(holder.values.ravel("K")[1]), change


@is_compared
def fields_of_an_array():
    holder = SimpleNamespace(values=np.array([(1.0, 2.0)], dtype=[("a", float), ("b", float)]))
    change = lambda: setattr(holder.values, "dtype", np.dtype([("b", float), ("a", float)]))  # noqa: E731
    return lambda x: x * float(holder.values["a"][0]), change


@is_compared
def pattern():
    text = "|".join(f"word{i}" for i in range(60))
    holder = SimpleNamespace(pattern=re.compile(text + "|one"))
    change = lambda: vars(holder).update(pattern=re.compile(text + "|two"))  # noqa: E731
    return lambda x: x * (2.0 if holder.pattern.match("one") else 3.0), change


@is_compared
def attribute_of_an_exception():
    error = OSError(5, "text")
    return lambda x: x * float(error.errno), lambda: setattr(error, "errno", 7)


# --- the interpreter ------------------------------------------------------------------------------------


@is_compared
def context_variable_that_is_none():
    scale = contextvars.ContextVar("scale", default=1.0)
    return lambda x: x * (3.0 if scale.get() is None else 2.0), lambda: scale.set(None)


@is_refused
def copied_context():
    scale = contextvars.ContextVar("scale")
    scale.set(2.0)
    copy = contextvars.copy_context
    return lambda x: x * dict(copy().items())[scale], lambda: scale.set(3.0)


@is_compared
def lock():
    lock = threading.Lock()
    return lambda x: x * (2.0 if lock.locked() else 3.0), lock.acquire


@is_refused
def lock_that_stays_locked():
    lock = threading.Lock()

    def step(x):
        lock.acquire(blocking=False)
        return x * 2

    return step, lambda: None


@is_refused
def annotations():
    class Helper:
        by: int

    change = lambda: Helper.__annotations__.update(by=float)  # noqa: E731
    return lambda x: x * (2.0 if typing.get_type_hints(Helper)["by"] is int else 3.0), change


# --- PyTorch's C++ code ---------------------------------------------------------------------------------


@is_compared
def kernel_of_an_operator():
    library = torch.library.Library("aten", "IMPL")

    def change():
        library.impl("logaddexp2", lambda a, b: a + b, "AutogradPrivateUse1")

    return lambda x: torch.logaddexp2(x, x), change


@is_compared
def method_that_is_a_kernel():
    class Scale:
        by = 2.0

        def run(self, x):
            return x * self.by

    library, scale = torch.library.Library("reached", "FRAGMENT"), Scale()
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", scale.run, "CompositeImplicitAutograd")
    Scale.library = library
    return lambda x: torch.ops.reached.scale(x), lambda: setattr(scale, "by", 3.0)


@is_refused
def kernel_that_the_garbage_collector_does_not_show():
    library, config = torch.library.Library("reached", "FRAGMENT"), {"by": 2.0, "library": None}
    library.define("frozen(Tensor x) -> Tensor")
    library.impl("frozen", lambda x: x * config["by"], "CompositeImplicitAutograd")
    config["library"] = library
    gc.collect()
    gc.freeze()
    return lambda x: torch.ops.reached.frozen(x), lambda: config.update(by=3.0)


@is_refused
def attribute_of_a_scripted_module():
    class Net(nn.Module):
        scale: float

        def __init__(self):
            super().__init__()
            self.scale = 2.0

        def forward(self, x):
            return x * self.scale

    net = torch.jit.script(Net())
    return lambda x: net(x), lambda: setattr(net, "scale", 3.0)


@is_compared
def hook_of_the_node_of_a_parameter():
    weight = nn.Parameter(torch.ones(3, device="tandem"))
    node = weight.view_as(weight).grad_fn.next_functions[0][0]

    def step(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad.clone()

    return step, lambda: node.register_prehook(lambda grads: (grads[0] * 2,))


@is_compared
def cached_results():
    @functools.lru_cache
    def scale(n):
        return by[n]

    by = {1: 2.0, 2: 3.0}

    def change():
        scale.cache_clear()
        by.update({1: 3.0, 2: 2.0})
        scale(2), scale(1)

    scale(1), scale(2)
    return lambda x: x * scale(1), change


@is_compared
def getattr_of_a_module():
    config = types.ModuleType("config")
    config.__getattr__ = lambda name: 2.0
    return lambda x: x * config.scale, lambda: setattr(config, "__getattr__", lambda name: 3.0)


@is_compared
def special_method_that_is_new():
    class Value:
        unused = 1

    value = Value()

    def change():
        del Value.unused
        Value.__bool__ = lambda self: False

    return lambda x: x * (2.0 if value else 3.0), change


@is_compared
def object_without_weak_references():
    class Mode:
        __slots__ = ()

    one, config = Mode(), SimpleNamespace(mode=Mode())
    return lambda x: x * (2.0 if config.mode is one else 3.0), lambda: vars(config).update(mode=one)


@is_compared
def bound_format():
    config, text = SimpleNamespace(scale=2.0), "{0.scale}".format
    return lambda x: x * float(next(map(text, [config]))), lambda: vars(config).update(scale=3.0)


@is_refused
def clock_called_by_c():
    return lambda x: x * next(map(datetime.datetime.now, [None])).year, lambda: None


# --- the function itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*compared, *refused], ids=lambda case: case.__name__)
def test_calls_after_a_change_are_pythons(case):
    relu, frozen = torch.Tensor.relu, gc.get_freeze_count()
    plain, change = case()
    step = torch_tandem.function(plain)
    try:
        for i in range(CALLS):
            if i == CHANGE:
                hits = step.cache_info().hits
                change()
            x = data(3, seed=i).to("tandem").abs() + 1
            assert torch.equal(step(x).detach().cpu(), plain(x).detach().cpu()), f"call {i}: {step.explain()}"
    finally:
        torch.Tensor.relu = relu
        if gc.get_freeze_count() != frozen:
            gc.unfreeze()
    assert (hits > 5) == (case in compared), step.explain()


def test_attributes_of_the_function_itself():
    def plain(x):
        return x * step.scale

    step = torch_tandem.function(plain)
    step.scale = 2.0
    for i in range(CALLS):
        step.scale = 2.0 if i < CHANGE else 3.0
        x = data(3, seed=i).to("tandem")
        assert torch.equal(step(x), plain(x))
    assert step.cache_info().hits > 5

    @torch_tandem.function
    def counting(x):
        counting.calls += 1
        return x * 2

    counting.calls = 0
    for i in range(12):
        counting(data(3, seed=i).to("tandem"))
    assert counting.calls == 12 and "changes counting.calls" in counting.reason()


def test_an_exception_that_the_caller_handles():
    step = torch_tandem.function(lambda x: x * (2.0 if sys.exc_info()[0] is None else 3.0))
    for i in range(CALLS):
        x = data(3, seed=i).to("tandem")
        try:
            if i >= CHANGE:
                raise KeyError
            assert torch.equal(step(x), x * 2)
        except KeyError:
            assert torch.equal(step(x), x * 3)
    assert step.cache_info().hits > 5


def test_a_list_that_is_two_arguments():
    step = torch_tandem.function(lambda x, a, b: x * (2.0 if a is b else 3.0))
    for i in range(CALLS):
        x, a = data(3, seed=i).to("tandem"), [1]
        assert torch.equal(step(x, a, a), x * 2) and torch.equal(step(x, a, [1]), x * 3)
    assert step.cache_info().hits > 10


def returns_its_size(x):
    return x * 2, x.shape


@pytest.mark.parametrize(
    "name, plain, replays",
    [
        ("a size", returns_its_size, True),
        ("a list twice", lambda x: (lambda y: (y, y))([x * 2]), False),
        ("a subclass", lambda x: (x * 2).as_subclass(type("Mine", (torch.Tensor,), {})), False),
    ],
)
def test_results_have_pythons_types(name, plain, replays):
    step = torch_tandem.function(plain)
    for i in range(12):
        x = data(3, seed=i).to("tandem")
        got, want = step(x), plain(x)
        assert type(got).__name__ == type(want).__name__
        if isinstance(got, tuple):
            assert [*map(type, got)] == [*map(type, want)] and (got[0] is got[1]) == (want[0] is want[1])
    assert (step.cache_info().hits > 2) == replays, step.explain()


def test_results_that_existed_before():
    history = []
    returns_a_list = torch_tandem.function(lambda x: (x * (1 + len(history)), history))
    returns_an_argument = torch_tandem.function(lambda items: (items[0] * 2, items))
    for i in range(12):
        x = data(3, seed=i).to("tandem")
        items = [x]
        assert returns_a_list(x)[1] is history and returns_an_argument(items)[1] is items
    assert "it returns a list that existed before" in returns_a_list.reason()


def test_an_attribute_of_a_result():
    @torch_tandem.function
    def step(x):
        y = x * 2
        y.scale = 2.0
        return y

    for i in range(12):
        assert step(data(3, seed=i).to("tandem")).scale == 2.0


class Set(set):
    def __iter__(self):
        raise RuntimeError("its own iteration")


def test_a_set_with_its_own_iteration():
    found = Set([1.0])
    step = torch_tandem.function(lambda x: x * len(found))
    for i in range(CALLS):
        if i == CHANGE:
            found.add(2.0)
        x = data(3, seed=i).to("tandem")
        assert torch.equal(step(x), x * len(found))
    assert step.cache_info().hits > 5


# --- arguments and results ----------------------------------------------------------------------------------


Batch = collections.namedtuple("Batch", "x, y")


def with_attribute(x):
    found = collections.OrderedDict(x=x)
    found.scale = 3.0
    return found


ARGUMENTS = {
    "a parameter": (lambda x: x * (2.0 if isinstance(x, nn.Parameter) else 3.0), lambda x: x,
                    lambda x: nn.Parameter(x, requires_grad=False)),
    "keys that are tuples": (
        lambda d: sum(v * k[1] for k, v in d.items()), lambda x: {(0, 2.0): x}, lambda x: {(0, 3.0): x},
    ),
    "a key that is true": (
        lambda d: sum(v * (2.0 if k is True else 3.0) for k, v in d.items()),
        lambda x: {1: x},
        lambda x: {True: x},
    ),
    "the same tuple": (
        lambda p: p[0][0] * (2.0 if p[0] is p[1] else 3.0), lambda x: [(x,), (x,)], lambda x: [(x,)] * 2,
    ),
    "an attribute": (
        lambda d: d["x"] * getattr(d, "scale", 2.0), lambda x: collections.OrderedDict(x=x), with_attribute,
    ),
    "a range": (
        lambda p: p[0] * p[1].stop, lambda x: (x, range(0, 3, 2)), lambda x: (x, range(0, 4, 2)),
    ),
    "a slice": (
        lambda p: p[0] * (2 if type(p[1].start) is int else 3),
        lambda x: (x, slice(1, 2)),
        lambda x: (x, slice(1.0, 2)),
    ),
    "a longer deque": (
        lambda d: d[0] * len(d),
        lambda x: collections.deque([x]),
        lambda x: collections.deque([x, x.clone()]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_differ_are_told_apart(name):
    plain, one, two = ARGUMENTS[name]
    step = torch_tandem.function(plain)
    for i in range(CALLS):
        make = one if i < CHANGE else two
        x = data(3, seed=i).to("tandem")
        assert torch.equal(step(make(x)), plain(make(x)))


def test_named_tuples_are_replayed():
    step = torch_tandem.function(lambda batch: batch.x * batch.y)
    for i in range(12):
        x = data(3, seed=i).to("tandem")
        assert torch.equal(step(Batch(x, x)), x * x)
    assert step.cache_info().hits > 2, step.explain()


def test_tuples_that_iterate_in_their_own_way():
    """In a notebook, the file name of a class's code is that of code which `collections.namedtuple` makes."""
    space = {}
    source = """
class Pair(tuple):
    def __new__(cls, *items): return tuple.__new__(cls, items)
    def __iter__(self): raise RuntimeError
"""
    exec(compile(source, "<cell>", "exec"), space)
    step = torch_tandem.function(lambda pair: pair[0] * pair[1])
    for i in range(12):
        x = data(3, seed=i).to("tandem")
        assert torch.equal(step(space["Pair"](x, 2.0)), x * 2)


def test_attributes_and_identities_of_results():
    weight = nn.Parameter(torch.ones(3, device="tandem"))

    def gradient(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad

    returns_attribute, returns_gradient = map(
        torch_tandem.function, (lambda x: with_attribute(x * 2), gradient)
    )
    for i in range(12):
        x = data(3, seed=i).to("tandem")
        assert returns_attribute(x).scale == 3.0 and returns_gradient(x) is weight.grad


def test_views_of_buffers_that_autograd_saves():
    """The views are other tensors in each call, and live until the backward pass."""
    embedding = nn.Embedding(20, 4).to("tandem")
    positions = torch.arange(20, device="tandem").expand(1, -1)
    step = torch_tandem.function(lambda x: embedding(positions[:, :3]) * x)
    for i in range(16):
        x = data(4, seed=i).to("tandem")
        embedding.zero_grad()
        step(x).sum().backward()
        found, embedding.weight.grad = embedding.weight.grad, None
        (embedding(positions[:, :3]) * x).sum().backward()
        assert torch.equal(found, embedding.weight.grad)
    assert step.cache_info().hits > 4, step.explain()
