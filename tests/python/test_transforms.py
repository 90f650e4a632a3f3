"""Compositions of PyTorch's function transforms: on Tandem, and on the host beside it, as without Tandem."""

import json

import forked
import pytest

SCRIPT = """
import itertools, json, sys
import torch
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

which, device = sys.argv[1:]
if which == "imported":
    import torch_tandem
    torch_tandem.function(lambda x: x)

def scalar(f):
    return lambda x: f(x).sum()

def gradient(f):
    return grad(scalar(f))

def with_value(f):
    return lambda x: grad_and_value(scalar(f))(x)[0]

def tangent(f):
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]

def cotangent(f):
    def of(x):
        y, back = vjp(f, x)
        return back(torch.ones_like(y))[0]
    return of

def of_autograd(f):
    def of(x):
        x = x.detach().requires_grad_() if x.is_leaf else x
        return torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]
    return of

def batched(f):
    return lambda x: vmap(f)(x) if x.dim() else f(x)

def batched_last(f):
    return lambda x: vmap(f, in_dims=-1, out_dims=-1)(x) if x.dim() else f(x)

torch.manual_seed(0)
layer = torch.nn.Linear(3, 2).to(device)
x = torch.randn(4, 3).to(device)
TRANSFORMS = dict(
    gradient=gradient, with_value=with_value, jacrev=jacrev, jacfwd=jacfwd, hessian=hessian, tangent=tangent,
    cotangent=cotangent, batched=batched, batched_last=batched_last, of_autograd=of_autograd,
)
FUNCTIONS = {
    "layer": lambda x: layer(x).tanh() if x.shape[-1:] == (3,) else x.exp(),
    "rows": lambda x: x.cumsum(-1).softmax(-1) if x.dim() else x.cos(),
}
for (name, f), depth in itertools.product(FUNCTIONS.items(), (1, 2)):
    for names in itertools.product(TRANSFORMS, repeat=depth):
        transformed = f
        for each in reversed(names):
            transformed = TRANSFORMS[each](transformed)
        try:
            y = transformed(x)
            found = [list(y.shape), y.detach().double().flatten().tolist()[:64]]
        except Exception as error:
            found = type(error).__name__
        print(json.dumps([f"{'('.join(names)}({name}", found]))
"""


def results_of(*args: str) -> dict:
    ran = forked.run(["-c", SCRIPT, *args])
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.fixture(scope="module")
def eager():
    found = results_of("plain", "cpu")
    assert sum(type(result) is list for result in found.values()) > len(found) / 2
    return found


@pytest.mark.parametrize("device", ["cpu", "tandem"])
def test_compositions(eager, device):
    ours = results_of("imported", device)
    assert ours.keys() == eager.keys()
    for name, expected in eager.items():
        found = ours[name]
        if type(expected) is str or type(found) is str:
            assert found == expected, name
        else:
            assert found[0] == expected[0], name
            assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-5), name
