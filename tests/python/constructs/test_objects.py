"""Classes and the data model, containers, iterators, copies, and objects that die."""

import abc
import bisect
import collections
import contextlib
import copy
import dataclasses
import enum
import gc
import heapq
import io
import itertools
import operator
import pickle
import typing
import weakref

import torch
from helpers import coexecuting, data
from torch import nn

STEPS = 18

# --- classes ------------------------------------------------------------------------------------


class Shape(abc.ABC):
    made: typing.ClassVar = {}

    def __init_subclass__(cls, factor=1, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.factor = factor
        Shape.made[cls.__name__] = cls

    def __init__(self, size):
        self.size = size

    @classmethod
    def named(cls, name, size):
        return cls.made[name](size)

    @staticmethod
    def unit(size):
        return size.abs() + 1

    @abc.abstractmethod
    def area(self): ...

    def scaled(self):
        return self.area() * self.factor


class Square(Shape, factor=2):
    def area(self):
        return self.unit(self.size) ** 2


class Circle(Shape, factor=3):
    def area(self):
        return self.unit(self.size).sin() * 3.0


class Ring(Circle, Square):
    def area(self):
        return super().area() - super(Circle, self).area() * 0.5


@coexecuting
def test_classes(device):
    x = data(4).to(device)
    for step in range(STEPS):
        shape = Shape.named(["Square", "Circle", "Ring"][step % 3], x)
        area = shape.scaled()
        if isinstance(shape, Circle) and not isinstance(shape, Square):
            area = area + 1
        if step % 4 == 3:
            shape.__class__ = Square
        yield area, shape.scaled()


class Clamped:
    """A descriptor."""

    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, thing, owner=None):
        return getattr(thing, self.name).clone() if thing else self

    def __set__(self, thing, value):
        setattr(thing, self.name, value.clamp(-1, 1))


class Account:
    __slots__ = ("_balance", "log")
    balance = Clamped()

    def __init__(self, x):
        self.balance, self.log = x, []

    @property
    def doubled(self):
        self.log.append(self.balance.sum())
        return self.balance * 2

    @doubled.setter
    def doubled(self, x):
        self.balance = x / 2

    @doubled.deleter
    def doubled(self):
        self.balance = torch.zeros_like(self.balance)


@coexecuting
def test_properties_and_descriptors(device):
    account = Account(data(4).to(device))
    for step in range(STEPS):
        account.doubled = account.doubled.sin() + step % 3
        if step % 4 == 3:
            del account.doubled
        account.balance += 0.1
        yield account.balance, account.log[-1], len(account.log)


class Lazy:
    """The object creates attributes and items when they are asked for."""

    def __init__(self, device):
        object.__setattr__(self, "device", device)

    def __getattr__(self, name):
        value = data(3, seed=len(name)).to(self.device)
        object.__setattr__(self, name, value)
        return value

    def __setattr__(self, name, value):
        super().__setattr__(name, value.sin())

    def __delattr__(self, name):
        super().__delattr__(name)
        self.deleted = getattr(self, name) + 1

    def __missing__(self, name):
        return getattr(self, name) * 2

    __getitem__ = __missing__


@coexecuting
def test_attribute_access(device):
    lazy = Lazy(device)
    for step in range(STEPS):
        x = lazy.weight if step % 2 else lazy["bias"]
        lazy.weight = x * 0.5 + lazy.bias
        if step % 3 == 2:
            del lazy.weight
            setattr(lazy, "deleted", lazy.deleted * hasattr(lazy, "weight"))  # noqa: B010
        yield lazy.weight, lazy["bias"], lazy.__dict__.get("deleted")


@dataclasses.dataclass(order=True)
class Entry:
    score: float
    value: torch.Tensor = dataclasses.field(compare=False)
    history: list = dataclasses.field(default_factory=list, compare=False)

    def __post_init__(self):
        self.history.append(self.value.sum())


class Pair(typing.NamedTuple):
    a: torch.Tensor
    b: torch.Tensor

    def swapped(self):
        return Pair(self.b, self.a)


class Act(enum.Enum):
    SIN = enum.member(torch.sin)
    COS = enum.member(torch.cos)
    EXP = enum.member(torch.exp)

    def __call__(self, x):
        return self.value(x)


@coexecuting
def test_dataclasses_named_tuples_and_enums(device):
    acts = list(Act)
    for step in range(STEPS):
        pair = Pair(*data(2, 3, seed=step % 3).to(device))
        if step % 2:
            pair = pair.swapped()
        entries = [Entry(float(x.sum()), x) for x in pair]
        best = dataclasses.replace(max(entries), value=acts[step % 3](pair.a))
        yield best.value - pair.b, best.history, pair._asdict(), Act.SIN(best.value)


class Dual:
    """A number with a derivative, with operators of every kind."""

    def __init__(self, value, slope):
        self.value, self.slope = value, slope

    def __add__(self, other):
        if not isinstance(other, Dual):
            return Dual(self.value + other, self.slope)
        return Dual(self.value + other.value, self.slope + other.slope)

    __radd__ = __add__

    def __mul__(self, other):
        if not isinstance(other, Dual):
            return NotImplemented
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __rmatmul__(self, matrix):
        return Dual(matrix @ self.value, matrix @ self.slope)

    def __imul__(self, by):
        self.value.mul_(by)
        self.slope.mul_(by)
        return self

    def __neg__(self):
        return Dual(-self.value, -self.slope)

    def __getitem__(self, at):
        return Dual(self.value[at], self.slope[at])

    def __len__(self):
        return len(self.value)

    def __bool__(self):
        return bool(self.value.sum() > 0)

    def __lt__(self, other):
        return bool(self.value.norm() < other.value.norm())

    def __contains__(self, x):
        return bool((self.value == x).any())

    def __call__(self, f):
        with torch.enable_grad():
            x = self.value.detach().requires_grad_()
            y = f(x)
            (g,) = torch.autograd.grad(y.sum(), x)
        return Dual(y.detach(), g * self.slope)


@coexecuting
def test_operator_overloading(device):
    matrix = data(4, 4, seed=9).to(device)
    for step in range(STEPS):
        x, y = (Dual(data(4, seed=k).to(device), torch.ones(4, device=device)) for k in (step % 6, 4))
        z = x * y + 1.0 if x < y else sum([x, y, -x])
        z = (matrix @ z)[1 : len(z)](torch.sin)
        z *= 0.5
        yield z.value, z.slope, bool(z), 2.0 in z


@coexecuting
def test_dispatch_on_types(device):
    def total(x):
        if isinstance(x, torch.Tensor):
            return x.sum() if x.is_floating_point() else x.float().mean()
        if isinstance(x, dict):
            return total(list(x.values()))
        if isinstance(x, (list, tuple)):
            return sum(map(total, x))
        return torch.tensor(float(x), device=device)

    x = data(4).to(device)
    things = [x, x > 0, [x, 2, x.int()], {"x": x, "y": (x, x)}, 3.5]
    for step in range(STEPS):
        yield total(things[step % 5]), total(things[: step % 3])


@coexecuting
def test_modules_changed_on_the_way(device):
    """Attributes, submodules, parameters and flags change between iterations."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    spare = nn.Linear(4, 4, bias=False).to(device)
    for step in range(STEPS):
        if step % 3 == 0:
            model[1], model[2] = (nn.ReLU(), spare) if step % 2 else (nn.Tanh(), model[0])
        if step % 4 == 3:
            model.append(nn.Dropout(0.1))
        elif len(model) > 3:
            del model[3]
        model.train(step % 2 == 0)
        model[0].bias.data = model[0].bias.data * 0.9
        yield model(data(2, 4, seed=step).to(device)).detach()


# --- containers ---------------------------------------------------------------------------------


@coexecuting
def test_lists_of_tensors(device):
    xs = list(data(4, 3).to(device))
    for step in range(STEPS):
        xs.append(xs.pop(0) * 0.9)
        xs[1:3] = [xs[2] + 0.1, xs[1].sin()]
        xs.insert(step % 4, xs[-1].clone())
        xs.reverse()
        xs[0] += 1
        del xs[-1]
        xs += [x * 2 for x in xs[: step % 2]]
        xs = xs[:4]
        yield torch.stack(xs), len(xs)


@coexecuting
def test_dicts_and_sets_of_tensors(device):
    x, y, z = data(3, 4).to(device)
    names, marks = {x: "x", y: "y"}, {id(x): 1.5, id(y): 2.5}
    seen = {x, y}
    groups = collections.defaultdict(list)
    for _ in range(STEPS):
        for t in (x, y, z):
            if t in seen:
                t.mul_(0.9)
            groups[names.get(t, "?")].append(t * marks.get(id(t), 0.5))
        seen ^= {y, z}
        totals = {name: sum(ts[-2:]) for name, ts in groups.items()}
        yield totals, totals | {"y": x.clone()}, z in seen


@coexecuting
def test_collections(device):
    recent, table = collections.deque(maxlen=3), collections.OrderedDict()
    counts, scope = collections.Counter(), collections.ChainMap({"scale": 1.0}, {"scale": 2.0})
    for step in range(STEPS):
        x = data(3, seed=step).to(device) * scope["scale"]
        recent.appendleft(x)
        recent.rotate(step % 2)
        counts.update(["even" if x.sum() > 0 else "odd"])
        scope = scope.new_child({"scale": 3.0}) if step % 2 else scope.parents
        table[step % 4] = sum(recent)
        table.move_to_end(min(table))
        yield list(table.values())[-1], torch.stack(list(recent)).mean(0), counts.most_common(1)[0][0]


@coexecuting
def test_sorting_by_values(device):
    for step in range(2 * STEPS):
        xs = list(data(3, 2, seed=step % 6).to(device))
        ranked = sorted(xs, key=lambda x: x.sum(), reverse=step % 2 == 0)
        best, worst = max(xs, key=torch.max), min(xs, key=lambda x: x[0].item())
        yield torch.stack(ranked) * 2, best - worst, ranked[0].sin()


@coexecuting
def test_heaps_and_bisection(device):
    for step in range(2 * STEPS):
        heap = []
        for k in range(3):
            x = data(2, seed=step % 4 + k).to(device)
            heapq.heappush(heap, (float(x.sum()), k, x))
        (_, _, x), (_, _, y) = heapq.heappop(heap), heapq.heappushpop(heap, (0.0, 9, x.sin()))
        place = bisect.bisect([-1.0, 0.0, 1.0], x[0])
        yield x * 2 + y, place, x.cos() * place


@coexecuting
def test_window_over_history(device):
    history = [torch.zeros(3, device=device)]
    for step in range(STEPS):
        window = history[-1 - step % 3 :]
        history.append(torch.stack(window).mean(0) + data(3, seed=step).to(device))
        yield history[-1]


# --- iterators ----------------------------------------------------------------------------------


@coexecuting
def test_itertools(device):
    for step in range(STEPS):
        xs = list(data(4, 3, seed=step % 3).to(device))
        pairs = [a - b for a, b in itertools.pairwise(xs)]
        grid = [a * b for a, b in itertools.product(xs[:2], xs[2:])]
        sums = list(itertools.accumulate(xs[: 2 + step % 3], operator.add))
        runs = [sum(run) for _, run in itertools.groupby(xs, key=lambda x: bool(x[0] > 0))]
        first, second = itertools.tee(itertools.chain(pairs, itertools.islice(grid, step % 2, None)))
        taken = list(itertools.takewhile(lambda x: x.sum() < 2, first))
        yield taken, sums, runs, torch.stack(list(second)).sum(0)


@coexecuting
def test_iterators_consumed_over_iterations(device):
    cycle = itertools.cycle([torch.sin, torch.cos, torch.exp])
    count, batches = itertools.count(), iter([])
    for _ in range(STEPS):
        try:
            x = next(batches)
        except StopIteration:
            batches = iter(data(4, 3, seed=next(count) % 2).to(device))
            x = next(batches).neg()
        yield next(cycle)(x) * 2


class Countdown:
    def __init__(self, x, start):
        self.x, self.left = x, start

    def __iter__(self):
        return self

    def __next__(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.x = self.x * 0.5 + self.left
        return self.x

    def __length_hint__(self):
        return self.left


@coexecuting
def test_iterator_protocol(device):
    for step in range(STEPS):
        x = data(3, seed=step).to(device)
        first, *rest = Countdown(x, 1 + step % 3)
        yield first, rest, sum(Countdown(x, step % 2)), max(Countdown(x, 2), key=torch.sum)


# --- copies -------------------------------------------------------------------------------------


@coexecuting
def test_copies(device):
    x = data(4).to(device)
    tree = {"x": x, "same": [x, x[:2]]}
    for step in range(STEPS):
        deep, shallow = copy.deepcopy(tree), copy.copy(tree)
        deep["x"].add_(step)
        deep["same"][1].mul_(2)
        shallow["same"][0].mul_(0.9)
        yield deep["same"], x.clone(), shallow["x"] is x, deep["x"] is deep["same"][0]


@coexecuting
def test_copied_models(device):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    for step in range(STEPS):
        other = copy.deepcopy(model)
        other[0].weight.data.mul_(1.1)
        x = data(2, 3, seed=step).to(device)
        y = other(x) - model(x)
        if step % 3 == 2:
            model = other
        yield y.detach()


@coexecuting(share=0.5)
def test_pickles(device):
    """Pickling reads values: most of its operators are fetches, and moves to and from the host."""
    x = data(4).to(device)
    for step in range(STEPS):
        thing = {"x": x, "view": x[1:], "step": step}
        thing = pickle.loads(pickle.dumps(thing))
        thing["view"].add_(step % 3)
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        loaded = torch.load(file)
        x = (loaded["x"] * 0.5).sin()
        yield x, thing["x"], loaded["step"], loaded["x"].device.type == device


# --- lives and deaths ---------------------------------------------------------------------------


class Farewell:
    def __init__(self, x, said):
        self.x, self.said = x, said

    def __del__(self):
        self.said.append(self.x.sin() * 2)
        self.x.zero_()


@coexecuting
def test_del_methods(device):
    for step in range(STEPS):
        x, said = data(4, seed=step).to(device), []
        thing = Farewell(x, said)
        y = x + 1
        if step % 2:
            del thing
        elif step % 3:
            thing = None
        y = y * x
        thing = None
        yield y, said, x.clone()


@coexecuting
def test_cycles_collected(device):
    gc.disable()
    try:
        for step in range(STEPS):
            x, said = data(4, seed=step).to(device), []
            thing = Farewell(x, said)
            thing.itself = thing
            y = x.cos()
            del thing
            if step % 3:
                gc.collect(0)
            z = y + x
            gc.collect(0)
            yield z, said
    finally:
        gc.enable()


@coexecuting
def test_weak_references(device):
    log = []
    cache = weakref.WeakValueDictionary()
    for step in range(STEPS):
        x = data(4, seed=step).to(device)
        total = torch.zeros(4, device=device)
        dead = weakref.ref(x, lambda _, total=total: total.add_(1))
        cache["x"] = y = x * 2
        weakref.finalize(y, log.append, step)
        if step % 2:
            del x
        z = total * 2
        x = y = None
        yield z, total.clone(), dead() is None, "x" in cache, len(log)


@coexecuting
def test_objects_resurrected(device):
    saved = []

    class Phoenix:
        def __init__(self, x):
            self.x = x

        def __del__(self):
            if len(saved) < 3:
                saved.append(self)
                self.x = self.x + 1

    for step in range(STEPS):
        Phoenix(data(3, seed=step).to(device))
        with contextlib.suppress(IndexError):
            saved[2].x.mul_(2)
            saved.clear() if step % 2 else saved.pop()
        yield [thing.x.clone() for thing in saved]
