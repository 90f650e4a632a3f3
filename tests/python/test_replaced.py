"""Functions of PyTorch that Tandem replaces, and moves to "cuda": scripts see no difference."""

import forked
import pytest

ADOPTED = """
import copy, functools, pickle, warnings
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")
torch.manual_seed(0)


def show(name, make):
    try:
        value = make()
    except Exception as error:
        value = f"{type(error).__name__}: {error}"
    print(name, value)


# Pickles name PyTorch's functions.
PLAIN = [
    torch.as_tensor, torch.tensor_split, torch.randint_like, torch.sparse_coo_tensor,
    torch.testing.assert_close, torch.Tensor.numpy, torch.Tensor.type, torch.Tensor.register_hook,
    torch.Tensor.share_memory_, torch.Generator,
]
for function in PLAIN:
    show("pickle", lambda: b"tandem" in pickle.dumps(function))
    show("loaded", lambda: pickle.loads(pickle.dumps(function)) is function)
    show("name", lambda: function.__name__)

# TorchScript compiles calls of them.
class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.part = kind(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor):
        return self.part(x)[0][:, -1]

for kind in (nn.LSTM, nn.GRU, nn.RNN):
    model = Recurrent(kind)
    show("script", lambda: torch.jit.script(model)(torch.ones(1, 2, 4)).shape)

@torch.jit.script
def scripted(x: torch.Tensor):
    return torch.tensor_split(x, 2)[1] + torch.as_tensor(2.0)

show("script", lambda: scripted(torch.ones(4)).tolist())

# Modes and subclasses see calls of a method, and not what the method calls.
class Log(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(function.__name__)
        return function(*args, **(kwargs or {}))

class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        seen.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})

x = torch.ones(3)
for call in (lambda t: t.add(1).numpy(), lambda t: t.type(torch.float64), lambda t: np.asarray(t).sum()):
    seen = []
    with Log():
        call(x.clone())
    print("mode", seen)
    seen = []
    call(x.clone().as_subclass(Logged))
    print("subclass", seen)

# Gradients from the host.
def host(*shape):
    return torch.from_numpy(np.full(shape, 2.0, dtype=np.float32))

model = nn.Linear(3, 2)
y = model(torch.ones(3))
y.backward(host(2))
print("backward", model.weight.grad.tolist())
print("grad", torch.autograd.grad(model(torch.ones(3)), model.weight, grad_outputs=host(2))[0].tolist())
h = host(3).requires_grad_()
(h * 2).backward(torch.ones(3))
print("host", h.grad.tolist())
for hook in (
    lambda g: host(2, 3),
    lambda g: torch.from_numpy(g.numpy() * 3),
    lambda g: None,
    lambda g: print(g.numpy().sum()),
):
    model.weight.grad = None
    handle = model.weight.register_hook(hook)
    model(torch.ones(3)).sum().backward()
    handle.remove()
    print("hook", model.weight.grad.tolist())
show("no hook", lambda: model.weight.register_hook(3) and None)

# Gradients that the program assigns: they, and the arrays that they share memory with, may be written later.
def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)

def stepped(model, gradient, make=torch.optim.Adam):
    is_same = model.weight.grad is gradient
    make(model.parameters(), lr=0.5).step()
    return is_same, model.weight.tolist(), model.weight.grad.tolist(), model(torch.ones(3)).tolist()

def of_an_array(model):
    array = np.zeros((2, 3), dtype=np.float32)
    model.weight.grad = torch.from_numpy(array)
    array += 2
    return stepped(model, model.weight.grad, torch.optim.SGD)

def converted(model):
    model.weight.grad = gradient = torch.from_numpy(np.ones((2, 3))).float()
    gradient += 1
    return stepped(model, gradient)

def windows(model):
    flat = torch.from_numpy(np.ones(8)).float()
    model.weight.grad, model.bias.grad = flat[:6].view(2, 3), flat[6:]
    flat.mul_(3)
    return stepped(model, model.weight.grad, torch.optim.SGD)

def accumulated(model):
    model.weight.grad = host(2, 3)
    model.bias.grad = torch.from_numpy(np.ones(2)).float()
    model(torch.ones(3)).sum().backward()
    return model.weight.grad.tolist(), model.bias.grad.tolist()

def assigned_again(model):
    model.weight.grad = host(2, 3)
    model.weight.grad = torch.ones(2, 3)
    return stepped(model, model.weight.grad)

def removed(model):
    model.weight.grad = host(2, 3)
    model.weight.grad = None
    model.bias.grad = host(2)
    del model.bias.grad
    return model.weight.grad, model.bias.grad

def of_many_steps(model):
    optimizer, random = torch.optim.Adam(model.parameters(), lr=0.1), np.random.default_rng(0)
    for _ in range(6):
        for p in model.parameters():
            p.grad = torch.from_numpy(random.standard_normal(p.shape).astype(np.float32))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.tolist() for p in model.parameters()]

for assigned in (of_an_array, converted, windows, accumulated, assigned_again, removed, of_many_steps):
    show(assigned.__name__, lambda: assigned(linear()))
show("shape", lambda: setattr(linear().weight, "grad", host(3)))
show("dtype", lambda: setattr(linear().weight, "grad", host(2, 3).double()))
show("type", lambda: setattr(linear().weight, "grad", 3))

# Parameters on two devices, and what torch.func differentiates.
def as_one(model):
    model.bias.grad = host(2)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return [p.tolist() for p in model.parameters()]

show("vector", lambda: as_one(linear()))
model, x = linear(), host(4, 3)
total = lambda *args: model(args[0]).tanh().sum()
for name in ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian"):
    transform = getattr(torch.func, name)
    show(name, lambda: transform(total)(x))
    show(f"vmap {name}", lambda: torch.vmap(transform(total))(x))
show("vjp", lambda: torch.func.vjp(total, x)[1](torch.tensor(1.0)))
show("second", lambda: torch.func.grad(total, argnums=1)(x, x[0]))
show("nested", lambda: torch.func.grad(lambda x: torch.func.grad(total)(x).pow(2).sum())(x))
state = {name: torch.from_numpy(p.detach().numpy().copy()) for name, p in model.named_parameters()}
call = lambda state, x: torch.func.functional_call(model, state, (x,)).sum()
show("state", lambda: torch.func.grad(call)(state, x))
show("samples", lambda: torch.vmap(torch.func.grad(call), (None, 0))(state, x))
"""

ALIAS = """
import numpy as np, torch

x = torch.zeros(3, device="cuda")
for name, move in {
    "to str": lambda t: t.to("cuda"),
    "to index": lambda t: t.to("cuda:0"),
    "to device": lambda t: t.to(torch.device("cuda")),
    "to keyword": lambda t: t.to(device="cuda"),
    "to dtype": lambda t: t.to("cuda", torch.float32),
    "to other": lambda t: t.to(torch.ones(1, device="cuda")),
    "cuda": lambda t: t.cuda(),
    "cuda index": lambda t: t.cuda(0),
    "as_tensor": lambda t: torch.as_tensor(t, device="cuda"),
    "asarray": lambda t: torch.asarray(t, device="cuda"),
    "to cuda of a parameter": lambda t: torch.nn.Parameter(t).to("cuda"),
}.items():
    before = x.clone()
    y = move(before)
    y.detach().add_(1)
    print(name, before.tolist(), type(y).__name__)
print("copy", x.to("cuda", copy=True) is x, x.to("cuda", torch.float64).dtype, x.to("cpu").is_cuda)
w = torch.ones(3, device="cuda", requires_grad=True).to("cuda")
(w * 2).sum().backward()
print(w.is_leaf, w.grad.tolist())
with torch.inference_mode():
    z = torch.ones(2, device="cuda")
    print(z.to("cuda") is z)
print(torch.ones(2).to("cuda").is_cuda, torch.ones(2).to("cuda", non_blocking=True).tolist())
torch.cuda._sleep(10)
"""


def test_an_adopted_script_sees_no_difference(tmp_path):
    (tmp_path / "script.py").write_text(ADOPTED)
    plain = forked.run(["script.py"], cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    ran = forked.run(["-m", "torch_tandem", "run", "--quiet", "script.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain.stdout


DEFAULT_TYPES = """
import sys, warnings
import torch

for kind in ("torch.DoubleTensor", torch.FloatTensor, torch.HalfTensor, torch.IntTensor, "torch.NoTensor", 3):
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.set_default_tensor_type(kind)
        print(kind, [str(w.message).partition(" (Trig")[0] for w in caught])
    except Exception as error:
        print(kind, type(error).__name__, error)
    print(torch.ones(2).dtype, torch.tensor([1.5, 2]).dtype, torch.Tensor(2).dtype, torch.get_default_dtype())
print(torch.ones(2).device.type, file=sys.stderr)
"""


def test_default_types_of_the_host_keep_tensors_adopted(tmp_path):
    (tmp_path / "script.py").write_text(DEFAULT_TYPES)
    plain = forked.run(["script.py"], cwd=tmp_path)
    ran = forked.run(["-m", "torch_tandem", "run", "--quiet", "--adopt", "always", "script.py"], cwd=tmp_path)
    assert ran.stdout == plain.stdout
    assert (plain.stderr, ran.stderr) == ("cpu\n", "tandem\n")


def test_moves_to_cuda_return_what_is_there(tmp_path):
    """As on CUDA, `to` returns the tensor itself if it is on the device, so writes are not lost."""
    (tmp_path / "script.py").write_text(ALIAS)
    ran = forked.run(["-m", "torch_tandem", "run", "--quiet", "script.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    moves = [line for line in ran.stdout.splitlines() if "[1.0, 1.0, 1.0]" in line]
    assert len(moves) == 11, ran.stdout
    assert moves[-1].endswith("Parameter")
    rest = ran.stdout.splitlines()[11:]
    assert rest == [
        "copy False torch.float64 False",
        "True [2.0, 2.0, 2.0]",
        "True",
        "True [1.0, 1.0]",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "print(x.is_cpu)",
        "y = x.to_mkldnn()",
        "torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)",
        "torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)",
    ],
)
def test_a_script_that_asks_for_the_host_is_not_adopted(source):
    from torch_tandem._program.adoptable import names_a_device

    assert names_a_device(source)
