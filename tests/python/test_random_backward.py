"""Random autograd graphs with hooks of all kinds, registered at all times: Tandem must make the calls that
the CPU makes.

`python tests/python/test_random_backward.py SECONDS [SEED]` runs until a program differs.
"""

import contextlib
import random
import re
import sys
import time

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class Tagged(torch.Tensor):
    """Subclass whose results show whether `__torch_function__` is enabled."""


class Acting(torch.autograd.Function):
    """Multiplies and subtracts. `backward` runs an action before it computes gradients."""

    @staticmethod
    def forward(ctx, program, action, a, b):
        ctx.program, ctx.action = program, action
        ctx.set_materialize_grads(program.once.random() < 0.5)
        ctx.save_for_backward(a, b)
        return a * b, a - b

    @staticmethod
    def backward(ctx, product, difference):
        ctx.program.note("function", product, difference, ctx.needs_input_grad)
        ctx.action()
        a, b = ctx.saved_tensors
        first = 0 if product is None else product * b
        second = 0 if product is None else product * a
        if difference is not None:
            first, second = first + difference, second - difference
        return None, None, *(g if isinstance(g, torch.Tensor) else None for g in (first, second))


class Counting(TorchFunctionMode):
    """Mode around a pass that records the functions that are called in the pass."""

    def __init__(self, program) -> None:
        super().__init__()
        self.program = program

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.program.note("mode", getattr(func, "__name__", str(func)))
        return func(*args, **kwargs or {})


class Program:
    """The random program with a seed, on one device. Numbers are small integers, so that results
    are exact.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.once = random.Random(seed)
        self.log: list = []
        self.handles: list = []
        self.budget = 12
        self.depth = 0
        self.leaves = [self.leaf() for _ in range(3)]
        self.tensors = list(self.leaves)

    def leaf(self) -> torch.Tensor:
        values = [float(self.once.randint(-2, 2)) for _ in range(3)]
        return torch.tensor(values, device=self.device, requires_grad=True)

    def note(self, what, *values) -> None:
        shown = [v.tolist() if isinstance(v, torch.Tensor) else v for v in values]
        inside = torch._C._current_graph_task_id() >= 0
        modes = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch._C._is_torch_function_enabled(),
        )
        self.log.append((what, shown, modes, inside))

    # --- actions of hooks and functions, between passes or during one

    def action(self):
        """Returns an action, which is chosen now and runs later."""
        kind = self.once.choice(ACTIONS)
        number, seed = len(self.handles), self.once.random()

        def act() -> None:
            if self.budget <= 0:
                return
            self.budget -= 1
            before, self.once = self.once, random.Random(f"{seed} {self.budget}")
            try:
                kind(self)
            finally:
                self.once = before

        act.__name__ = f"{kind.__name__} {number}"
        return act

    def hook(self, kind: str):
        """Returns a hook that records its arguments, and may change them or run an action."""
        number, factor = len(self.handles), self.once.choice([None, None, 2, -1])
        act = self.action() if self.once.random() < 0.5 else lambda: None

        def scaled(grads):
            if factor is None:
                return None
            return tuple(None if g is None else g * factor for g in grads)

        def called(*args):
            flat = [a for arg in args for a in (arg if isinstance(arg, tuple | list) else [arg])]
            self.note(f"{kind} {number}", *flat)
            act()
            if kind == "tensor":
                return None if factor is None else args[0] * factor
            return scaled(args[0]) if kind in ("before", "after") else None

        return called

    def register(self) -> None:
        kind = self.once.choice(["tensor", "before", "after", "accumulated", "several", "retain", "leaf"])
        tensor = self.once.choice(self.tensors)
        node = tensor.grad_fn
        if kind == "tensor":
            self.handles.append(tensor.register_hook(self.hook(kind)))
        elif kind == "leaf" or (kind == "accumulated" and node is None):
            tensor = self.once.choice(self.leaves)
            self.handles.append(tensor.register_post_accumulate_grad_hook(self.hook("accumulated")))
        elif kind == "before" and node is not None:
            self.handles.append(node.register_prehook(self.hook(kind)))
        elif kind == "after" and node is not None:
            self.handles.append(node.register_hook(self.hook(kind)))
        elif kind == "several":
            some = self.once.sample(self.tensors, 2)
            mode = self.once.choice(["all", "any"])
            self.handles.append(register_multi_grad_hook(some, self.hook(kind), mode=mode))
        elif kind == "retain" and node is not None:
            tensor.retain_grad()

    def remove(self) -> None:
        if self.handles:
            self.once.choice(self.handles).remove()

    def leak(self) -> None:
        kind = self.once.choice(["grad", "autocast", "no function"])
        if kind == "grad":
            torch._C._set_grad_enabled(self.once.random() < 0.6)
        elif kind == "autocast":
            torch.set_autocast_enabled("cpu", True)
        else:
            torch._C._set_torch_function_state(torch._C._TorchFunctionState.DISABLED)

    def subclass(self) -> None:
        tagged = torch.ones(2, device=self.device).as_subclass(Tagged)
        self.note("class", type(tagged + 1).__name__)

    def nested(self) -> None:
        if self.depth > 2:
            return
        self.depth += 1
        try:
            with torch.enable_grad():
                x = self.leaf()
                y = Acting.apply(self, self.action(), x, x * 2)[0].sum()
                if self.once.random() < 0.5:
                    y.backward()
                    self.note("nested", x.grad)
                else:
                    self.note("nested", *torch.autograd.grad(y, x))
        finally:
            self.depth -= 1

    def later(self) -> None:
        act = self.action() if self.once.random() < 0.3 else lambda: None
        Variable._execution_engine.queue_callback(lambda: (self.note("callback"), act()))

    def fail(self) -> None:
        if self.once.random() < 0.5:
            raise KeyError("of the program")
        torch.ones(2, device=self.device) + torch.ones(3, device=self.device)

    def watch(self) -> None:
        torch.autograd.set_detect_anomaly(False)
        self.note("nodes", torch._C._current_graph_task_id() >= 0)

    # --- the graph

    def saved(self, kind: str):
        def called(t):
            self.note(kind, t)
            return t

        return called

    def extend(self) -> None:
        a, b = self.once.choices(self.tensors, k=2)
        kind = self.once.choice(
            ["mul", "add", "relu", "sum", "part", "acting", "acting", "hooked", "checkpoint"]
        )
        if kind == "mul":
            self.tensors.append(a * b)
        elif kind == "add":
            self.tensors.append(a + b)
        elif kind == "relu":
            self.tensors.append((a - b).relu())
        elif kind == "sum":
            self.tensors.append(a.sum() * b)
        elif kind == "part":
            parts = (a * 1).unbind()
            self.tensors.append(torch.stack([parts[2], parts[0], parts[0]]))
        elif kind == "acting":
            self.tensors.extend(Acting.apply(self, self.action(), a, b))
        elif kind == "hooked":
            with saved_tensors_hooks(self.saved("pack"), self.saved("unpack")):
                self.tensors.append(a * b)
        else:
            act = self.action()
            self.tensors.append(
                checkpoint(
                    lambda x, y: Acting.apply(self, act, x, y * 2)[0],
                    a,
                    b,
                    use_reentrant=self.once.random() < 0.5,
                    preserve_rng_state=False,
                )
            )

    def differentiate(self) -> None:
        roots = self.once.choices(self.tensors[3:], k=self.once.choice([1, 1, 2]))
        grads = [torch.full_like(r, float(self.once.randint(1, 2))) for r in roots]
        kept = {"retain_graph": self.once.random() < 0.5, "create_graph": self.once.random() < 0.15}
        kind = self.once.choice(["backward", "backward", "grad", "inputs"])
        some = self.once.sample(self.tensors, self.once.randint(1, 3))
        surrounding = Counting(self) if self.once.random() < 0.2 else contextlib.nullcontext()
        with surrounding:
            if kind == "grad":
                found = torch.autograd.grad(roots, some, grads, allow_unused=self.once.random() < 0.7, **kept)
                self.note("found", *found)
            else:
                torch.autograd.backward(roots, grads, inputs=some if kind == "inputs" else None, **kept)

    def attempt(self, step) -> None:
        """Runs a step, and records the exception if it raises one."""
        try:
            step()
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            # Names of devices and addresses of nodes are left out of the text.
            self.note("raised", type(error).__name__, re.sub(r"tandem(:\d)?|cpu|0x\w+", "", text))

    def run(self) -> list:
        def state():
            return (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch._C._get_torch_function_state(),
            )

        before = state()
        try:
            for _ in range(self.once.randint(2, 7)):
                self.attempt(self.extend)
                if self.once.random() < 0.5:
                    self.attempt(self.register)
            for _ in range(self.once.randint(1, 3)):
                self.budget = 12
                self.attempt(self.differentiate)
                self.log.append(("state", state() == before))
                for tensor in self.tensors:
                    grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
                    self.log.append(("grad", None if grad is None else (grad.tolist(), grad.requires_grad)))
                if self.once.random() < 0.5:
                    self.attempt(self.register)
        finally:
            torch._C._set_grad_enabled(before[0])
            torch.set_autocast_enabled("cpu", before[1])
            torch._C._set_torch_function_state(before[2])
        return self.log


ACTIONS = [
    Program.register,
    Program.register,
    Program.register,
    Program.remove,
    Program.leak,
    Program.subclass,
    Program.nested,
    Program.later,
    Program.fail,
    Program.watch,
]


def difference(seed: int):
    """Returns the first entries in which the logs differ, or `None`."""
    expected, got = (Program(seed, device).run() for device in ("cpu", "tandem"))
    # Entries are compared as text, because gradients may have become NaN.
    for i in range(max(len(expected), len(got))):
        pair = [str(log[i]) if i < len(log) else "nothing" for log in (expected, got)]
        if pair[0] != pair[1]:
            return f"seed {seed}, entry {i}: the CPU has {pair[0]}, Tandem has {pair[1]}"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_backward(start):
    for seed in range(start, start + 100):
        assert not difference(seed)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    began, seed = time.time(), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    while time.time() - began < float(sys.argv[1]):
        if found := difference(seed):
            print(f"after {time.time() - began:.1f} s: {found}")
            sys.exit(1)
        seed += 1
    print(f"nothing up to seed {seed}")
