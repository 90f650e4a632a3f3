"""Changes between a replayed call and its backward pass: the pass does what eager's does, or raises.

The cases are all combinations of a kind of tensor that the pass uses, a change of it, and the mode of the
pass.
"""

import contextlib

import pytest
import torch
import torch_tandem

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
    """Whether a pass makes the call again, and cannot know that elements have changed: no version counts it."""
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
