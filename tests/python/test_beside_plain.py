"""Programs on the host that import Tandem: each prints what it prints without the import."""

import json
import subprocess
import sys

import pytest

IMPORT = "import torch_tandem\ntorch_tandem.function(lambda x: x)\n"

PROGRAMS = {
    "swapped parameters": """
        torch.__future__.set_swap_module_params_on_conversion(True)
        m = nn.Linear(2, 2)
        m(torch.ones(1, 2))
        show(lambda: m.load_state_dict(nn.Linear(2, 2).state_dict()))
        show(lambda: m.double())
        a, b = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
        a(torch.ones(2))
        show(lambda: torch.utils.swap_tensors(t1=a.weight, t2=b))
        show(lambda: a.weight)
        """,
    "traced gradients": """
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils._python_dispatch import TorchDispatchMode
        show(lambda: make_fx(torch.func.grad(lambda x: (x * x).sum()), pre_dispatch=True)(torch.ones(2)).code)
        class Log(TorchDispatchMode):
            def __torch_dispatch__(self, f, types, args=(), kwargs=None):
                print(f)
                return f(*args, **(kwargs or {}))
        with Log():
            show(lambda: torch.func.grad(lambda x: (x * x).sum())(torch.ones(2)))
            with torch.inference_mode():
                show(lambda: torch.ones(2).register_hook(print))
        """,
    "classes with methods of their own": """
        class Policy(nn.Module):
            def parameters(self, state): return state
            def forward(self, x): return x * 2
        @dataclasses.dataclass
        class Scale(nn.Module):
            by: int
            def __post_init__(self): super().__init__()
            def forward(self, x): return x * self.by
        class Frozen(torch.optim.SGD):
            def step(self):
                self.param_groups[0]["params"] = ["frozen"]
                return 3
        class Equal(torch.optim.SGD):
            def __eq__(self, other): return self.param_groups == other.param_groups
        show(lambda: Policy()(torch.ones(2)))
        show(lambda: Scale(3)(torch.ones(2)))
        for kind in (Frozen, Equal):
            show(lambda: kind([torch.ones(1, requires_grad=True)], 0.1).step())
        """,
    "data parallel": """
        m = nn.DataParallel(nn.Linear(2, 2))
        show(lambda: (m(torch.ones(1, 2)).shape, next(m.parameters()).device))
        """,
    "overrides": """
        from torch.overrides import TorchFunctionMode, resolve_name
        class Log(TorchFunctionMode):
            def __torch_function__(self, f, types, args=(), kwargs=None):
                print(resolve_name(f))
                return f(*args, **(kwargs or {}))
        x = torch.ones(2, requires_grad=True)
        m = nn.Linear(2, 2)
        with Log():
            np.asarray(x.detach())
            m(x).sum().register_hook(print)
        class Duck:
            @classmethod
            def __torch_function__(cls, f, types, args=(), kwargs=None): return f.__name__
        for name in ("__array__", "__dlpack__", "__dlpack_device__", "share_memory_"):
            show(lambda: getattr(torch.Tensor, name)(Duck()))
        show(lambda: torch.fx.symbolic_trace(lambda x: torch.Tensor.share_memory_(x)).code)
        show(lambda: torch.to_dlpack(3))
        """,
    "pickles of methods": """
        for name in ("register_hook", "retain_grad", "share_memory_", "__array__", "__dlpack__"):
            method = getattr(torch.Tensor, name)
            show(lambda: pickle.loads(pickle.dumps(method)) == method)
        """,
    "the engine's arguments": """
        y = torch.ones(2, requires_grad=True) * 2
        show(lambda: torch.autograd.Variable._execution_engine.run_backward(
            tensors=(y,), grad_tensors=(torch.ones(2),), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True))
        """,
    "compiled": """
        warnings.simplefilter("always")
        torch._logging.set_logs(all=50)
        counter = torch._dynamo.testing.CompileCounter()
        @torch.compile(backend=counter)
        def hooked(x):
            x.register_hook(lambda g: g * 2)
            return (x * x).sum()
        hooked(torch.ones(2, requires_grad=True)).backward()
        @torch.compile(backend=counter)
        def gradient(x):
            return torch.autograd.grad((x * x).sum(), x)[0]
        show(lambda: gradient(torch.ones(2, requires_grad=True)))
        @torch.compile(backend=counter, fullgraph=True)
        def retained(x):
            y = x * 2
            torch.Tensor.retain_grad(y)
            return y.sum()
        show(lambda: retained(torch.ones(2, requires_grad=True)))
        """,
}

BEGIN = """
import dataclasses, pickle, sys, textwrap, json, warnings
import numpy as np
import torch
import torch._dynamo.testing
from torch import nn

warnings.showwarning = lambda message, category, *_: print(category.__name__, str(message)[:80])

def show(make):
    try:
        print(make())
    except Exception as error:
        print(type(error).__name__, str(error)[:120])

torch.manual_seed(0)
"""

# Replacements before the import remain.
EARLY = """
import torch
from multiprocessing import reduction
calls, call = [], torch.nn.Module.__call__

def counted(self, *args, **kwargs):
    calls.append("call")
    return call(self, *args, **kwargs)

torch.nn.Module.__call__ = counted
reduction.register(torch.Tensor, lambda tensor: calls.append("reduce") or (torch.zeros, (1,)))
import torch_tandem
torch.nn.Linear(1, 1)(torch.ones(1))
reduction.ForkingPickler.dumps(torch.ones(2))
print(calls)
"""


def output(source: str) -> str:
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


RUN = f"""
for name, program in json.loads({json.dumps(json.dumps(PROGRAMS))}).items():
    print("==", name)
    exec(textwrap.dedent(program), dict(globals()))
"""


@pytest.fixture(scope="module")
def printed() -> list[dict[str, str]]:
    """What each program prints, without Tandem and with it."""
    outputs = [output(BEGIN + RUN), output(BEGIN + IMPORT + RUN)]
    return [dict(part.split("\n", 1) for part in text.split("== ")[1:]) for text in outputs]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_the_host(printed, name):
    plain, beside = printed
    assert beside[name] == plain[name]


def test_replacements_before_the_import_remain():
    assert output(EARLY) == "['call', 'reduce']\n"
