"""Functions of every kind: arguments, closures, generators, coroutines, recursion, and code about code."""

import asyncio
import contextvars
import functools
import inspect
import operator
import random
import sys
import types
from unittest import mock

import torch
from helpers import coexecuting, data

STEPS = 18

# --- arguments ----------------------------------------------------------------------------------


def flexible(x, /, y=None, *args, scale=1.0, seen=[], **kwargs):  # noqa: B006
    seen.append(x.sum())
    x = x * scale if y is None else x * y
    for k, z in enumerate(args):
        x = x + z * k
    for name in sorted(kwargs):
        x = x - kwargs[name] * len(name)
    return x, len(seen)


@coexecuting
def test_arguments(device):
    flexible.__kwdefaults__["seen"].clear()
    x, y, z = data(3, 4).to(device)
    calls = [
        lambda: flexible(x),
        lambda: flexible(x, y, *[z] * 2, scale=3),
        lambda: flexible(x, **{"y": y}, name=z),
        lambda: flexible(x, y, z, **{"b": y, "a": x}),
    ]
    for step in range(STEPS):
        out, count = calls[step % 4]()
        yield out, count


counter = 0


@coexecuting
def test_global_and_nonlocal(device):
    global counter
    counter, x = 0, data(4).to(device)

    def advance():
        global counter
        nonlocal x
        counter += 1
        x = x.sin() if counter % 3 else x + counter

    for _ in range(STEPS):
        advance()
        advance()
        yield x, counter


@coexecuting
def test_closures_and_lambdas(device):
    late = 0
    functions = [lambda x: x.cos() * late, *(lambda x, k=k: x * k for k in range(1, 4)), lambda x: -late]
    for step in range(STEPS):
        x, late = data(4, seed=step).to(device), step
        for f in functions[: 2 + step % 3]:
            x = f(x)
        yield x, functions[-1](x)


@coexecuting
def test_decorators(device):
    def repeated(times):
        def decorate(f):
            @functools.wraps(f)
            def wrapper(x):
                wrapper.calls += 1
                for _ in range(times()):
                    x = f(x)
                return x if wrapper.calls % 2 else x * 2

            wrapper.calls = 0
            return wrapper

        return decorate

    def shifted(f):
        return lambda x: f(x + 1) - 1

    step = 0

    @shifted
    @repeated(lambda: step % 3)
    def f(x):
        return x.sin()

    x = data(4).to(device)
    for step in range(STEPS):  # noqa: B007
        yield f(x)


@coexecuting
def test_functools(device):
    calls = []

    @functools.lru_cache(maxsize=2)
    def table(k):
        calls.append(k)
        return data(4, seed=k).to(device).exp()

    @functools.singledispatch
    def double(x):
        return x * 2

    @double.register
    def _(x: list):
        return [double(y) for y in x]

    scaled = functools.partial(torch.mul, 3.0)
    for step in range(STEPS):
        x = table(step // 2 % 3)
        total = functools.reduce(operator.add, [x] * (1 + step % 3))
        yield scaled(total), double([x, [x]] if step % 2 else x), len(calls)


@coexecuting
def test_map_filter_and_callbacks(device):
    def each(f, *trees):
        return [each(f, *t) if isinstance(t[0], list) else f(*t) for t in zip(*trees, strict=True)]

    for step in range(STEPS):
        a, b, c = data(3, 4, seed=step % 3).to(device)
        kept = list(filter(lambda x: x.sum() > 0, map(torch.sin, [a, b, c])))
        yield kept, each([torch.add, torch.mul, torch.max][step % 3], [a, [b]], [b, [c]])


# --- generators ---------------------------------------------------------------------------------


@coexecuting
def test_generators(device):
    def halves(x):
        while x.abs().max() > 0.2:
            yield x
            x = x * 0.5

    def pairs(xs):
        before = None
        for x in xs:
            if before is not None:
                yield before + x
            before = x

    for step in range(STEPS):
        x = data(4, seed=step % 6).to(device)
        yield list(pairs(halves(x))), sum(y.sum() for y in halves(x))


@coexecuting
def test_generator_send_throw_and_close(device):
    log = []

    def averaging():
        total = torch.zeros(4, device=device)
        try:
            while True:
                try:
                    total = total * 0.5 + (yield total)
                except KeyError:
                    total = total.neg()
        finally:
            log.append(total.sin())

    averages = averaging()
    next(averages)
    for step in range(STEPS):
        x = data(4, seed=step).to(device)
        out = averages.throw(KeyError) if step % 3 == 2 else averages.send(x)
        if step % 6 == 5:
            averages.close()
            averages = averaging()
            next(averages)
        yield out, log[-1:]


@coexecuting
def test_yield_from(device):
    def leaves(tree):
        if isinstance(tree, torch.Tensor):
            yield tree * 2
            return 1
        count = 0
        for child in tree:
            count += yield from leaves(child)
        return count

    def counted(tree):
        count = yield from leaves(tree)
        yield torch.full((2,), float(count), device=device)

    x = data(2).to(device)
    trees = [[x], [x, [x]], [[[x]]], [[x, x], [x]]]
    for step in range(STEPS):
        yield torch.stack(list(counted(trees[step % 4]))).sum(0)


@coexecuting
def test_generator_that_lives_on_over_iterations(device):
    def walk():
        x = data(4).to(device)
        while True:
            for k in range(3):
                x = x.sin() if k else x + 1
                yield x

    positions = walk()
    for step in range(STEPS):
        x = next(positions)
        yield x * 2 if step % 2 else next(positions)


@coexecuting
def test_comprehensions(device):
    for step in range(STEPS):
        xs = data(3, 4, seed=step % 3).to(device)
        rows = [x.sin() for x in xs if step % 2 or x.sum() > 0]
        table = {k: [y * k for y in x] for k, x in enumerate(xs[: 1 + step % 3])}
        signs = sorted({int(y.sign()) for x in xs for y in x})
        yield rows, table, signs, sum(x.max() for x in xs)


# --- recursion ----------------------------------------------------------------------------------


@coexecuting
def test_recursion_of_varying_depth(device):
    def power(x, n):
        if n == 0:
            return torch.ones_like(x)
        half = power(x, n // 2)
        return half * half * x if n % 2 else half * half

    x = data(4).to(device)
    for step in range(30):
        yield power(x, step)


@coexecuting
def test_recursion_over_trees(device):
    """Each iteration has a different tree."""

    def grow(numbers, depth):
        if depth == 0 or numbers.random() < 0.3:
            return numbers.randrange(5)
        return grow(numbers, depth - 1), grow(numbers, depth - 1)

    leaves = data(5, 4).to(device)
    weight = data(4, seed=1).to(device)

    def value(tree):
        if isinstance(tree, int):
            return leaves[tree]
        left, right = map(value, tree)
        return (left * weight + right).tanh()

    for step in range(30):
        yield value(grow(random.Random(step), 4))


@coexecuting
def test_mutual_recursion(device):
    def even(x, n):
        return x if n == 0 else odd(x.sin(), n - 1)

    def odd(x, n):
        return x * 2 if n == 0 else even(x + 1, n - 1)

    x = data(4).to(device)
    for step in range(STEPS):
        yield even(x, step)


@coexecuting
def test_recursion_with_a_memory(device):
    x = data(4).to(device)

    def fibonacci(n, known):
        if n not in known:
            known[n] = fibonacci(n - 1, known) * 0.5 + fibonacci(n - 2, known)
        return known[n]

    for step in range(STEPS):
        yield fibonacci(step, {0: x, 1: x + 1})


# --- coroutines ---------------------------------------------------------------------------------


@coexecuting
def test_async_functions(device):
    async def squash(x, times):
        for _ in range(times):
            x = x.sin()
            await asyncio.sleep(0)
        return x

    async def step_of(x, step):
        a, b = await asyncio.gather(squash(x, 1 + step % 3), squash(x + 1, 2))
        async with asyncio.timeout(60):
            return a + await squash(b, 1)

    for step in range(STEPS):
        yield asyncio.run(step_of(data(4, seed=step).to(device), step))


@coexecuting
def test_async_producer_and_consumer(device):
    async def produce(queue, step):
        for k in range(1 + step % 3):
            await queue.put(data(4, seed=k).to(device).exp())
        await queue.put(None)

    async def arrivals(queue):
        while (x := await queue.get()) is not None:
            yield x

    async def consume(step):
        queue = asyncio.Queue(maxsize=2)
        task = asyncio.create_task(produce(queue, step))
        out = [x * 2 async for x in arrivals(queue)]
        await task
        return out

    for step in range(STEPS):
        yield asyncio.run(consume(step))


@coexecuting
def test_coroutines_driven_by_hand(device):
    @types.coroutine
    def pause(x):
        return (yield x)

    async def worker(x):
        while True:
            x = (await pause(x * 0.5)) + x.sin()

    workers = [worker(data(4, seed=k).to(device)) for k in range(2)]
    state = [w.send(None) for w in workers]
    for step in range(STEPS):
        for k in range(2) if step % 2 else (1, 0):
            state[k] = workers[k].send(state[1 - k])
        yield list(state)


@coexecuting
def test_context_variables(device):
    depth = contextvars.ContextVar("depth", default=1)

    def scaled(x):
        return x.sin() * depth.get() if depth.get() < 3 else x.cos()

    def inside(x, k):
        depth.set(k)
        return scaled(x)

    x = data(4).to(device)
    for step in range(STEPS):
        y = contextvars.copy_context().run(inside, x, step % 4)
        yield y, scaled(x)


# --- code about code ----------------------------------------------------------------------------


@coexecuting
def test_exec_and_eval(device):
    x = data(4).to(device)
    for step in range(STEPS):
        names = {"x": x, "torch": torch}
        exec(f"y = x\nfor k in range({step % 3}):\n    y = y.sin() + k", names)
        expression = ["torch.exp(y)", "y * 2", "(lambda z: z - 1)(y)"][step % 3]
        yield eval(expression, names), eval(compile("x + y", "<sum>", "eval"), names)


@coexecuting
def test_inspection(device):
    def named(sin, cos=None):
        """exp"""

    def caller():
        return inspect.currentframe().f_back.f_locals["x"]

    for step in range(STEPS):
        x = data(4, seed=step).to(device)
        names = [*inspect.signature(named).parameters, inspect.getdoc(named)]
        x = getattr(x, names[step % 3])()
        x = caller() * sys._getframe().f_code.co_argcount
        yield x, len(inspect.stack()) > 1


@coexecuting
def test_functions_and_modules_made_at_run_time(device):
    x = data(4).to(device)
    for step in range(STEPS):
        module = types.ModuleType("made")
        exec("scale = 2\ndef f(x): return x.sin() * scale", module.__dict__)
        module.scale = step
        other = types.FunctionType(module.f.__code__, {"scale": 3})
        yield module.f(x), other(x) if step % 2 else module.f(x + 1)


@coexecuting
def test_monkey_patching(device):
    class Model:
        def forward(self, x):
            return x.sin()

    model, original = Model(), torch.tanh
    for step in range(STEPS):
        x = data(4, seed=step).to(device)
        if step % 3 == 1:
            Model.forward = lambda self, x: x.cos() * 2
        elif step % 3 == 2:
            model.forward = lambda x: x + 1
        with mock.patch.object(torch, "tanh", lambda x, k=step: original(x) * k):
            y = torch.tanh(model.forward(x))
        model.__dict__.clear()
        yield y, torch.tanh(x)


@coexecuting
def test_torch_functions_overridden(device):
    class Swap(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.sin:
                return torch.cos(*args) * 2
            return function(*args, **(kwargs or {}))

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            log.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs)

    log = []
    for step in range(STEPS):
        x = data(4, seed=step).to(device)
        y = x.as_subclass(Noted) * 2
        with Swap() if step % 2 else torch.no_grad():
            z = torch.sin(x) + torch.sin(y)
        yield torch.Tensor.as_subclass(z, torch.Tensor), type(z).__name__, len(log)
