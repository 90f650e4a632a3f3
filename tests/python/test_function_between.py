"""Changes between a replayed call and its backward pass: the pass does what eager's does, or raises.

The cases are all combinations of a kind of tensor that the pass uses, a change of it, and the mode of the
pass.
"""

import contextlib

import pytest
import torch
import torch_tandem
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.filterwarnings("error:.*an audit found")
CALLS = 10


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


class Tensors:
    """The tensors of a program: `w` is trained, and each of the others belongs to one kind."""

    def __init__(self, device):
        self.device = device
        self.w = torch.full((4,), 0.5, device=device, requires_grad=True)
        self.captured = torch.full((4,), 2.0, device=device)
        self.buffer = torch.arange(8.0, device=device)
        self.host = torch.tensor(3.0)
        flat = torch.arange(1.0, 9.0, device=device)
        self.parts = [torch.nn.Parameter(torch.empty(4, device=device)) for _ in range(2)]
        for i, part in enumerate(self.parts):
            part.data = flat[4 * i : 4 * i + 4]


# Kinds of tensors: a function, its arguments after the first one, and the tensor that is changed, found from
# the tensors, the arguments and the results.
KINDS = {
    "captured": (lambda t: lambda x: (x * t.w * t.captured,), lambda t: (), lambda t, a, r: t.captured),
    "a view of a buffer": (
        lambda t: lambda x: (x * t.w * t.buffer[2:6],),
        lambda t: (),
        lambda t, a, r: t.buffer,
    ),
    "parameter": (lambda t: lambda x: (torch.tanh(x * t.w) * t.w,), lambda t: (), lambda t, a, r: t.w),
    "part of a flat parameter": (
        lambda t: lambda x: (x * t.w * t.parts[0] * t.parts[1],),
        lambda t: (),
        lambda t, a, r: t.parts[1],
    ),
    "argument": (
        lambda t: lambda x, y: (x * t.w * y,),
        lambda t: (torch.full((4,), 2.0, device=t.device),),
        lambda t, a, r: a[1],
    ),
    "host argument": (
        lambda t: lambda x, y: (torch.tanh(x * t.w) * y,),
        lambda t: (torch.tensor(3.0),),
        lambda t, a, r: a[1],
    ),
    "captured on the host": (
        lambda t: lambda x: (torch.tanh(x * t.w) * t.host,),
        lambda t: (),
        lambda t, a, r: t.host,
    ),
    "host indices": (
        lambda t: lambda x, i: (x * t.w[i],),
        lambda t: (torch.tensor([0, 1, 2, 3]),),
        lambda t, a, r: a[1],
    ),
    "result": (lambda t: lambda x: (torch.tanh(x * t.w) * 2,), lambda t: (), lambda t, a, r: r[0]),
    "result that is saved": (lambda t: lambda x: (torch.tanh(x * t.w),), lambda t: (), lambda t, a, r: r[0]),
    "result without grad": (
        lambda t: lambda x: (x * t.w * (mask := (x > 0).float()), mask),
        lambda t: (),
        lambda t, a, r: r[1],
    ),
    "detached result": (
        lambda t: lambda x: ((h := torch.tanh(x * t.w)) * t.w, h.detach()),
        lambda t: (),
        lambda t, a, r: r[1],
    ),
}


def add_in_place(t):
    with torch.no_grad():
        t.add_(1)


def fill_in_place(t):
    with torch.no_grad():
        t.zero_()


def write_to_data(t):
    t.data.mul_(0)


def write_to_a_view(t):
    with torch.no_grad():
        t.view(-1)[0].fill_(0)


CHANGES = {f.__name__: f for f in (add_in_place, fill_in_place, write_to_data, write_to_a_view)}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "as before": contextlib.nullcontext,
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
}


def outcomes(device, wraps, kind, change, mode):
    """The gradients after each call, or "RuntimeError" if the pass raises. The last call has the change."""
    make, others, changed = KINDS[kind]
    tensors = Tensors(device)
    function = wraps(make(tensors))
    found = []
    for n in range(CALLS):
        arguments = (torch.ones(4, device=device), *others(tensors))
        results = function(*arguments)
        tensors.w.grad = None
        if n == CALLS - 1:
            if change:
                CHANGES[change](changed(tensors, arguments, results))
            try:
                with MODES[mode]():
                    results[0].sum().backward()
                    found.append(tensors.w.grad.clone().tolist())
            except RuntimeError:
                found.append("RuntimeError")
        else:
            results[0].sum().backward()
            found.append(tensors.w.grad.tolist())
    if isinstance(function, torch_tandem._functions.function.Function):
        assert function.cache_info().hits > 2, function.reason()
    return found


def is_known(change, mode):
    """Whether a pass makes the call again with elements that have changed, which no version counts."""
    return change == "write_to_data" and mode in ("inference mode", "deterministic")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_after_a_change_is_eagers(kind, change, mode):
    if is_known(change, mode):
        return
    ours = outcomes("tandem", torch_tandem.function, kind, change, mode)
    assert ours == outcomes("cpu", lambda f: f, kind, change, mode)


def hooks_with_the_same_code(wraps, device):
    weights = [torch.ones(2, device=device, requires_grad=True) for _ in range(2)]

    def step(x):
        loss = (x * weights[0] * weights[1]).sum()
        loss.backward()
        return loss.detach()

    step = wraps(step)
    for n in range(34):
        if n in (8, 16, 25):
            weights[n > 8].register_hook(lambda gradient: gradient * 1.5)
        for weight in weights:
            weight.grad = None
        yield step(torch.ones(2, device=device))
        yield from [weight.grad for weight in weights]


def dtypes_of_gradients(wraps, device):
    weight = torch.ones(4, device=device, requires_grad=True)
    step = wraps(lambda x: (x * weight).sum().backward())
    for n in range(12):
        weight.grad = None
        if n == 8:
            weight.grad_dtype = torch.bfloat16
        step(torch.full((4,), 0.1, device=device))
        yield weight.grad


def implementations_of_attention(wraps, device):
    queries = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0)).to(device)
    step = wraps(lambda q: F.scaled_dot_product_attention(q, q, q))
    for n in range(14):
        with sdpa_kernel(SDPBackend.MATH) if n == 10 else contextlib.nullcontext():
            yield step(queries)


def casts_without_their_cache(wraps, device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).to(device)
    a, b = (torch.randn(3, 4).to(device) for _ in range(2))
    step = wraps(lambda a, b: layer(a) * layer(b))
    for n in range(14):
        layer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=n != 10):
            result = step(a, b)
        result.float().sum().backward()
        yield layer.weight.grad


def numbers_and_flags(wraps, device):
    """A number changes together with the operators, and then alone."""
    config = {"extra": True}

    @wraps
    @torch.no_grad()
    def step(x, weight):
        return (x + 1.0 if config["extra"] else x) * weight

    for calls, weight, extra in ((8, 0.2, True), (6, 0.3, True), (6, 0.4, False), (6, 0.6, False)):
        config["extra"] = extra
        for _ in range(calls):
            yield step(torch.ones(2, device=device), weight)


def signs_of_complex_zeros(wraps, device):
    step = wraps(lambda x, z: x * z)
    for n in range(12):
        yield torch.view_as_real(step(torch.ones(2, device=device), complex(1, -0.0 if n == 10 else 0.0)))


PROGRAMS = [
    hooks_with_the_same_code,
    dtypes_of_gradients,
    implementations_of_attention,
    casts_without_their_cache,
    numbers_and_flags,
    signs_of_complex_zeros,
]


def of(program, wraps, device):
    return [(x.dtype, x.detach().cpu().double().flatten().tolist()) for x in program(wraps, device)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_replay_compares(program):
    made = []

    def wraps(function):
        made.append(torch_tandem.function(function))
        return made[-1]

    found = of(program, wraps, "tandem")
    assert repr(found) == repr(of(program, lambda f: f, "cpu"))
    assert made[0].cache_info().hits > 2, made[0].reason()


def test_a_gradient_from_inference_mode_is_refused_as_in_eager():
    weight = torch.ones(4, device="tandem", requires_grad=True)
    step = torch_tandem.function(lambda x: (x * weight).sum().backward())
    for _ in range(12):
        step(torch.ones(4, device="tandem"))
    with torch.inference_mode():
        weight.grad = torch.ones(4, device="tandem")
    with pytest.raises(RuntimeError, match="InferenceMode"):
        step(torch.ones(4, device="tandem"))


def test_a_wrapped_method_has_the_attributes_of_one():
    weight = torch.ones(4, device="tandem", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    plain = optimizer.step
    optimizer.step = torch_tandem.function(plain)
    assert optimizer.step.__func__ is plain.__func__ and optimizer.step.__self__ is optimizer
    torch.optim.lr_scheduler.StepLR(optimizer, 2)


def test_hooks_that_are_removed_again_fail_no_audit():
    layer = torch.nn.Linear(4, 4).to("tandem")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    seen = []

    @torch_tandem.function
    def step(x):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    def calls(n):
        for _ in range(n):
            step(torch.ones(2, 4, device="tandem"))

    calls(10)
    hook = optimizer.register_step_post_hook(lambda *_: seen.append(1))
    calls(5)
    hook.remove()
    before = step.cache_info().hits
    calls(40)
    assert step.cache_info().hits > before + 20 and len(seen) == 5
