"""Numbers that differ from call to call of a function. Either replays are fed the numbers, or Python runs the
call.
"""

import contextlib
import copy
import math
import random
import types
import warnings

import pytest
import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F
from torch_tandem._functions import numbers

from tests.fuzz.functions import support
from tests.fuzz.functions.scenes import VARYING

# Values of the number in consecutive calls: ordinary values, special values, and ordinary values again.
VALUES = [0.37 + 0.11 * i for i in range(30)]
VALUES += [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.41,
    -0.52,
    -0.63,
    -0.74,
    2.0,
    1.07,
    1.19,
    math.inf,
    1.21,
    1e-9,
    0.42,
    7.7,
    0.43,
]
# Minimum number of uses in which the number is followed up to the operators, so that calls are replayed.
FOLLOWED = 22


def program(use: str, where: str):
    """A function of a tensor and a number, made from a statement that uses the number, and a way to call the
    function.
    """
    names = dict(vars(support))
    names |= {"device": "tandem", "torch": torch}
    places = {"attribute": "k.v", "class": "C.v", "global": "g", "tuple": "t[0][1]", "cell": "c"}
    body = use.replace("a{n}", places.get(where, "a")).format()
    source = "\n".join(
        [
            "class C: v = 0.3",
            "k, g, t = types.SimpleNamespace(v=0.3), 0.3, [(0.3, 0.3)]",
            "def make():",
            "    c = 0.3",
            "    def f(y, a):",
            f"        {body}",
            "        return y",
            "    def set_c(v):",
            "        nonlocal c",
            "        c = v",
            "    return f, set_c",
        ]
    )
    exec(source, names)
    f, set_c = names["make"]()

    def call(f, y, v):
        names["k"].v, names["C"].v, names["g"], names["t"][0] = v, v, v, (0.3, v)
        set_c(v)
        if where == "keyword":
            return f(y=y, a=v)
        return f(y, v if where == "argument" else None)

    return f, call


def outcome(call, *arguments):
    try:
        return call(*arguments).cpu()
    except Exception as error:
        return type(error), str(error)


def same(one, two) -> bool:
    if isinstance(one, tuple) or isinstance(two, tuple):
        return one == two
    return one.dtype == two.dtype and torch.equal(one.nan_to_num(9e9), two.nan_to_num(9e9))


@pytest.mark.parametrize("where", ["argument", "keyword", "attribute", "class", "global", "tuple", "cell"])
def test_calls_with_numbers_that_vary_have_eagers_bits(where):
    replayed = 0
    x = torch.linspace(-2, 2, 6, device="tandem").reshape(2, 3)
    for use in VARYING:
        f, call = program(use, where)
        function = torch_tandem.function(f, audit=64)
        with torch.no_grad():
            for i, v in enumerate(VALUES):
                torch.manual_seed(i)
                ours = outcome(call, function, x, v)
                torch.manual_seed(i)
                plain = outcome(call, f, x, v)
                assert same(ours, plain), (use, where, i, v, ours, plain, function.reason())
        replayed += function.cache_info().hits > 10
    assert replayed >= FOLLOWED, replayed


def differences(function, calls) -> list[int]:
    """Indices of the calls whose results differ from the plain function's results."""
    found = []
    for i, arguments in enumerate(calls):
        ours, plain = function(*arguments), function._function(*arguments)
        if not all(same(a.cpu(), b.cpu()) for a, b in zip(ours, plain, strict=True)):
            found.append(i)
    return found


@torch.no_grad()
def test_numbers_of_classes_are_put_where_python_finds_them():
    """CPython keeps the values of class attributes in caches."""
    settings = type("Settings", (), {"scale": 1.0})()
    functions = [torch_tandem.function(lambda x: x * settings.scale) for _ in range(2)]
    for i in range(120):
        if i in (5, 14, 50, 51, 52):
            type(settings).scale = 2.0 + i
        for function in functions[i % 2 :]:
            x = torch.full((2, 3), float(i), device="tandem")
            assert torch.equal(function(x), x * settings.scale)


@torch.no_grad()
def test_a_graph_that_is_older_than_the_variation_fails_no_audit():
    """The number is found to vary in calls of another kind."""
    settings = types.SimpleNamespace(scale=2.0)
    function = torch_tandem.function(lambda x: x * settings.scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(120):
            if i > 40:
                settings.scale = 2.0 + (i // 20)
            for rows in (2, 3) if i > 40 else (2,):
                x = torch.full((rows, 3), float(i), device="tandem")
                assert torch.equal(function(x), x * settings.scale)


@torch.no_grad()
def test_numbers_that_are_equal_by_chance_are_told_apart():
    x = torch.ones(3, device="tandem")
    function = torch_tandem.function(lambda x, a, b: (x * a, x + b, x * 0.73, x * (a - b + 0.61)), audit=64)
    calls = [(x, 0.4 + 0.01 * i, 0.4 + 0.01 * i) for i in range(12)]  # all numbers are equal
    calls += [(x, 0.4 + 0.01 * i, 0.9 - 0.01 * i) for i in range(12)]
    calls += [(x, 0.73, 0.41 + 0.01 * i) for i in range(12)]  # one equals a constant
    calls += [(x, 0.33 + 0.01 * i, 0.73) for i in range(12)]
    assert not differences(function, calls)
    assert function.cache_info().hits > 24


@torch.no_grad()
def test_a_number_that_did_not_vary_is_not_fed():
    x = torch.ones(3, device="tandem")
    function = torch_tandem.function(lambda x, a, b: (x * a, x * b), audit=64)
    calls = [(x, 0.4 + 0.01 * i, 0.6) for i in range(10)]
    calls += [(x, 0.45, 0.6 + 0.01 * i) for i in range(10)]
    calls += [(x, 0.4 + 0.01 * i, 0.6 + 0.01 * i) for i in range(10)]
    assert not differences(function, calls)
    assert function.cache_info().hits > 15


@torch.no_grad()
def test_an_exception_leaves_the_state_as_it_was():
    class Rate:
        value = 0.3

    rate, calls = Rate(), []
    rate.value = 0.3

    @torch_tandem.function
    def f(x):
        if rate.value > 0.75:
            raise ValueError("too large")
        return x * rate.value

    x = torch.ones(3, device="tandem")
    for i in range(12):
        rate.value = value = 0.3 + 0.05 * i
        with contextlib.suppress(ValueError):
            calls.append(f(x).sum().item())
        assert rate.value is value and type(rate.value) is float
    assert calls == [(torch.ones(3) * (0.3 + 0.05 * i)).sum().item() for i in range(10)]


@torch.no_grad()
def test_a_number_that_is_returned_or_kept_is_a_float():
    class Kept:
        last = 0.0

    kept = Kept()

    @torch_tandem.function
    def returns(x, a):
        return x * a, a * 2, [a]

    @torch_tandem.function
    def keeps(x, a):
        kept.last = a + 0.0
        return x * a

    x = torch.ones(3, device="tandem")
    for i in range(10):
        value = 0.3 + 0.01 * i
        y, twice, (itself,) = returns(x, value)
        assert type(twice) is type(itself) is float and (twice, itself) == (value * 2, value)
        assert torch.equal(y.cpu(), torch.ones(3) * value)
        assert torch.equal(keeps(x, value).cpu(), torch.ones(3) * value)
        assert kept.last == value and type(kept.last) is float
    assert keeps.cache_info().hits == 0 and "changes" in (keeps.reason() or "")


def test_a_step_with_a_schedule_is_replayed_with_eagers_losses():
    def losses(wraps, device):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wraps(step)
        found = []
        for i in range(40):
            found.append(step(torch.full((2, 4), 1.0 + i % 7 / 8, device=device)).item())
            schedule.step()
        return found, step

    ours, step = losses(torch_tandem.function, "tandem")
    assert ours == losses(lambda f: f, "cpu")[0]
    assert step.cache_info().hits > 20, step.explain()


@pytest.mark.parametrize("kind", ["epoch", "weight"])
def test_a_number_that_changes_now_and_then_is_followed(kind):
    """All calls of an epoch are equal, so they become a graph before the number is seen to vary."""

    def losses(wrap, device):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        holder = {"weight": 1.0}

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean() * holder["weight"]
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = []
        for _ in range(20):
            found += [step(torch.full((3, 4), float(i)).to(device)).item() for i in range(10)]
            if kind == "epoch":
                schedule.step()
            else:
                holder["weight"] *= 1.1
        return found, step

    ours, step = losses(torch_tandem.function, "tandem")
    assert ours == losses(lambda f: f, "cpu")[0]
    info = step.cache_info()
    assert info.currsize <= 2 and info.hits > 150, step.explain()


def test_a_tape_computes_what_python_computes():
    rng = random.Random(0)
    operators = ["+", "-", "*", "/", "//", "%", "**"]
    for _ in range(400):
        text = "a"
        for _ in range(rng.randint(1, 5)):
            other = rng.choice(["a", "b", repr(rng.uniform(0.1, 3)), str(rng.randint(1, 4)), "abs(b)", "-a"])
            text = (
                f"({text} {rng.choice(operators)} {other})" if rng.random() < 0.5 else f"({other} - {text})"
            )
        text = rng.choice(
            ["{}", "max({}, b)", "math.exp(-abs({}))", "min({}, 2)", "round({}, 1)", "float({})"]
        ).format(text)
        names = {"math": math}

        def value(a, b, text=text, names=names):
            try:
                return eval(text, names, {"a": a, "b": b})
            except (ArithmeticError, TypeError, ValueError) as error:
                return type(error)

        first = [rng.uniform(0.1, 3), rng.uniform(-3, 3)]
        tape = numbers.Tape(first)
        with numbers.following_math():
            result = value(*tape.numbers())
        tape.close()
        assert result == value(*first) or result != result or isinstance(result, type), text
        if type(result) is not numbers.Number:
            continue
        for _ in range(5):
            later = [rng.uniform(0.1, 3), rng.uniform(-3, 3)]
            values = tape.compute(later)
            if values is not None:
                assert numbers.is_same(values[result._at], value(*later)), text


class Training:
    """A random training program. Its step has numbers in its arguments, in its optimizer and in a dict."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng, self.device = random.Random(seed), device
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).to(device)
        self.average = copy.deepcopy(self.model)
        groups = [
            {"params": list(self.model[0].parameters()), "lr": 0.05},
            {"params": list(self.model[2].parameters()), "lr": 0.02, "weight_decay": 0.01},
        ]
        self.optimizer = self.rng.choice(
            [
                lambda: torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9),
                lambda: torch.optim.SGD(groups, momentum=0.5),
                lambda: torch.optim.Adam(self.model.parameters(), 1e-2, fused=True),
                lambda: torch.optim.AdamW(groups, fused=True),
                lambda: torch.optim.RMSprop(self.model.parameters(), 1e-3, capturable=device != "cpu"),
            ]
        )()
        schedules = torch.optim.lr_scheduler
        self.schedule = self.rng.choice(
            [
                lambda: schedules.ExponentialLR(self.optimizer, 0.97),
                lambda: schedules.CosineAnnealingWarmRestarts(self.optimizer, 7),
                lambda: schedules.LinearLR(self.optimizer, 0.1, 1.0, 12),
                lambda: schedules.CyclicLR(self.optimizer, 1e-3, 0.1, 6, cycle_momentum=False),
                lambda: schedules.PolynomialLR(self.optimizer, 40, 2.0),
            ]
        )()
        self.weights = {"size": 0.1, "decay": 0.9}

    def step(self, x, y, temperature, noise=0.0):
        self.optimizer.zero_grad()
        out = self.model(x / temperature)
        loss = (out - y).square().mean() + self.weights["size"] * out.abs().mean()
        if noise > 0.05:
            loss = loss * (1 + noise)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - self.weights["decay"])
        return loss.detach()

    def run(self, step, seed: int) -> list[float]:
        inputs, found, saved = torch.Generator().manual_seed(seed), [], None
        for i in range(70):
            x = torch.randn(4, 6, generator=inputs).to(self.device)
            self.weights["size"] = 0.1 + 0.01 * (i % 9) * (seed % 2)
            if self.rng.random() < 0.03:
                self.weights["decay"] = self.rng.uniform(0.5, 0.99)
            if i == 20:
                saved = copy.deepcopy(self.optimizer.state_dict())
            if i == 45 and seed % 3 == 0:
                self.optimizer.load_state_dict(saved)
            noise = self.rng.choice([0.0, 0.01 * i / 7, 0.06])
            found.append(step(x, x.sum(1, keepdim=True), 1.1 + 0.02 * i, noise=noise).item())
            self.schedule.step()
        return found + [p.sum().item() for p in self.average.parameters()]


@pytest.mark.parametrize("seed", range(8))
def test_training_with_random_schedules_has_eagers_bits(seed):
    training = Training(seed, "tandem")
    step = torch_tandem.function(training.step)
    plain = Training(seed, "cpu")
    assert training.run(step, seed) == plain.run(plain.step, seed)
    assert step.cache_info().hits > 20, step.reason()


# Functions of PyTorch that take a float. Their C++ code may compare the float, or compute sizes from it.
TAKEN = {
    "interpolate": lambda y, n: F.interpolate(y[None], scale_factor=1 + n),
    "bilinear": lambda y, n: F.interpolate(y[None, None], scale_factor=1 + n, mode="bilinear"),
    "Upsample": lambda y, n: nn.Upsample(scale_factor=1.2 + n)(y[None]),
    "quantile": lambda y, n: torch.quantile(y, n),
    "kaiser_window": lambda y, n: torch.kaiser_window(6, True, n * 10, device="tandem") * y,
    "an error": lambda y, n: torch.kaiser_window(6, beta=n * 10, device="tandem") * y,
    "arange": lambda y, n: torch.arange(0.0, 4 * n, 0.5, device="tandem").sum() + y,
    "linspace": lambda y, n: torch.linspace(n, 2.0, 6, device="tandem") * y,
    "vector_norm": lambda y, n: torch.linalg.vector_norm(y, 1.2 + n),
    "cdist": lambda y, n: torch.cdist(y, y, p=1.2 + n),
    "renorm": lambda y, n: torch.renorm(y, 2, 0, n),
    "celu": lambda y, n: F.celu(-y, n),
    "huber_loss": lambda y, n: F.huber_loss(y, y * 2, delta=n),
    "cross_entropy": lambda y, n: F.cross_entropy(y, y.argmax(1), label_smoothing=n),
    "attention": lambda y, n: F.scaled_dot_product_attention(y[None], y[None], y[None], scale=n),
    "nan_to_num": lambda y, n: torch.nan_to_num(y, nan=n),
    "threshold": lambda y, n: F.threshold(y, n, n * 2),
    "allclose": lambda y, n: y if torch.allclose(y, y * 1.5, rtol=n) else -y,
    "histc": lambda y, n: torch.histc(y, 4, 0.0, n),
    "clip": lambda y, n: torch.clip(y, n, n + 0.2),
    "pad": lambda y, n: F.pad(y, (1, 1), value=n),
    "addcmul": lambda y, n: torch.addcmul(y, y, y, value=n),
    "var": lambda y, n: torch.var(y, correction=n),
    "batch_norm": lambda y, n: F.batch_norm(y, None, None, training=True, eps=n),
    "full of integers": lambda y, n: torch.full((3,), n, dtype=torch.int64, device="tandem") + y[0, 0],
    "fill_ of integers": lambda y, n: torch.zeros(3, dtype=torch.int32, device="tandem").fill_(n * 5),
    "product of integers": lambda y, n: torch.arange(5, device="tandem") * n,
    "dropout": lambda y, n: F.dropout(y, n),
    "softplus": lambda y, n: F.softplus(y, beta=n, threshold=2 * n),
    "isin": lambda y, n: torch.isin(y.round(), n).float(),
    "gaussian_nll_loss": lambda y, n: F.gaussian_nll_loss(y, y * 2, y, eps=n),
    "triplet_margin_loss": lambda y, n: F.triplet_margin_loss(y, y * 2, y * 3, margin=n, p=1.5 + n),
    "uniform_": lambda y, n: torch.empty(3, device="tandem").uniform_(0.0, n) * y[0, 0],
    "normal": lambda y, n: torch.normal(0.0, n, (3,), device="tandem") * y[0, 0],
}


@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_functions_of_pytorch_that_take_a_float_have_eagers_bits(name):
    # The number grows in small steps, so that sizes that depend on it stay the same for several calls and
    # then change.
    y = torch.linspace(0.1, 3, 24, device="tandem").reshape(4, 6)
    function = torch_tandem.function(TAKEN[name], audit=512)
    for i in range(90):
        n = 0.11 + 0.0093 * i
        torch.manual_seed(i)
        ours = outcome(function, y, n)
        torch.manual_seed(i)
        assert same(ours, outcome(TAKEN[name], y, n)), (i, n, function.reason())
