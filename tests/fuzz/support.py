"""Names that random programs use."""

import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import gc
import io
import itertools
import pickle
import random
import re
import sys
import types
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import torch
import torch_tandem
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Bare", "Counted", "During", "F", "Functions", "Ghost", "Ghostly", "Mixed", "Net", "Once", "Same", "Saves", "Scale", "Setup",
    "State", "Tagged", "Twice", "TwoDirty", "Views", "Wrong", "asyncio_sum", "checkpoint", "contextlib", "copy", "data", "fail",
    "functools", "gc", "halfway", "halve", "in_thread", "io", "itertools", "late", "mark_step", "nn", "np", "pickle", "safe", "start",
    "sys", "text", "torch", "types", "warnings", "weakref",
]  # fmt: skip

SIDE = 4

mark_step = torch_tandem.mark_step


VERSIONS = [True]
"""Whether tensors' version counters are compared. In programs with inference mode they are not, because for
operands of inference mode, PyTorch's kernels count the writes to their own outputs.
"""

NOISE = [0.0]
"""Relative change of a program's inputs, by which a run shows whether the program's results depend on last
bits.
"""


def _noisy(x: torch.Tensor, seed: int) -> torch.Tensor:
    if not NOISE[0] or not x.is_floating_point():
        return x
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * (1 + NOISE[0] * noise.to(x.device))).to(x.dtype)


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns random numbers on the host, a few of which are equal."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _noisy((numbers * 8).round().div(8), seed).to(dtype)


def safe(x: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor with values limited to small finite numbers."""
    return _noisy(x.nan_to_num(0.5, 2.0, -2.0).clamp(-2, 2), 0)


def text(x: torch.Tensor) -> str:
    """Returns the text of a tensor without the name of its device."""
    return "".join(re.sub(r",\s*device='[^']*'", "", str(x)).split())


def late(x: torch.Tensor) -> float:
    """Reads a value whose operator may have failed: an index out of range is detected only when the operator
    runs.
    """
    return x.sum().item()


def halve(p: torch.Tensor) -> None:
    """Hook that changes a gradient."""
    p.grad.mul_(0.5)


def fail() -> None:
    """Raises an exception, for use in a hook or a thread."""
    raise LookupError


_pool = concurrent.futures.ThreadPoolExecutor


def start(function):
    """Calls a function on a new thread and returns the future."""
    pool = _pool(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def in_thread(function):
    """Calls a function on another thread and waits for its result."""
    return start(function).result()


def halfway(s, x):
    """Generator that the program may leave at any `yield`. It issues operators when it ends."""
    try:
        with torch.no_grad():
            x.add_(1)
            sent = yield x.sum()
            x.mul_(sent or 0.5)
            yield x.mean()
    except KeyError:
        yield x.max()
    finally:
        s.m0 = s.m0 + 1


def asyncio_sum(tensors):
    """Returns a sum that coroutines compute in turn."""
    import asyncio

    async def one(x):
        await asyncio.sleep(0)
        return x.sum()

    async def every():
        return sum(await asyncio.gather(*map(one, tensors)))

    return asyncio.run(every())


class _Heap(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "fordblks", "keepcost")]  # fmt: skip


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Heap


def heap() -> int:
    """Returns the number of bytes in use in the C library's heap."""
    return _mallinfo().used


class Ghostly(contextlib.AbstractContextManager):
    """Context manager that issues operators at its end."""

    def __init__(self, s, x):
        self.s, self.x = s, x

    def __exit__(self, *_):
        self.x.add_(1)
        self.s.m1 = self.s.m1 * 0.5


class Tagged(torch.Tensor):
    """Subclass of `Tensor` without any changes."""


class Functions(torch.overrides.TorchFunctionMode):
    """Records the names of functions that are called while it is active."""

    def __init__(self, s):
        self.s = s

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.s.seen.append(getattr(function, "__name__", "?"))
        return function(*args, **(kwargs or {}))


class Scale(torch.autograd.Function):
    """Multiplies by a number, with a backward formula of its own."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.factor + x.sign() * 0.125, None


class Twice(torch.autograd.Function):
    """Writes its input in place and returns the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class During(torch.autograd.Function):
    """Calls a function during the backward pass."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.act()
        return g, None


class Mixed(torch.autograd.Function):
    """Has one output that is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        high = x > 0
        ctx.mark_non_differentiable(high)
        ctx.save_for_backward(high)
        return x * 2, high

    @staticmethod
    def backward(ctx, g, none):
        (high,) = ctx.saved_tensors
        return g * 2 + high


class Once(torch.autograd.Function):
    """Has a backward pass that is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Bare(torch.autograd.Function):
    """Has two outputs, whose missing gradients may be `None`."""

    @staticmethod
    def forward(ctx, x, materialize):
        ctx.set_materialize_grads(materialize)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        if a is None or b is None:
            return (a if b is None else b), None
        return a * 2 + b * 3, None


class TwoDirty(torch.autograd.Function):
    """Writes one of two inputs in place, and reads `needs_input_grad`."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        x.add_(y)
        return x, y * 2

    @staticmethod
    def backward(ctx, a, b):
        (y,) = ctx.saved_tensors
        return a if ctx.needs_input_grad[0] else None, a + b * 2 + y * 0


class Same(torch.autograd.Function):
    """Returns its input."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Saves(torch.autograd.Function):
    """Saves its output for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Views(torch.autograd.Function):
    """Returns a view."""

    @staticmethod
    def forward(ctx, x):
        return x[1:]

    @staticmethod
    def backward(ctx, g):
        return F.pad(g, (0, 0, 1, 0))


class Wrong(torch.autograd.Function):
    """Returns gradients that PyTorch refuses or converts."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if ctx.how == "raise":
            raise LookupError
        return {"shape": (g[:3], None), "number": (g,), "dtype": (g.double(), None), "none": (None, None)}[
            ctx.how
        ]


class Setup(torch.autograd.Function):
    """Function in PyTorch's newer style with `setup_context`, for function transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor):
        return x * factor, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * ctx.factor + h + 0 * x, None

    @staticmethod
    def jvp(ctx, t, _):
        return t * ctx.factor, t.sum()

    @classmethod
    def apply(cls, *args):
        return super().apply(*args)[0]


class Counted(torch.autograd.Function):
    """Records the state of the context and of grad mode in both passes."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.s = s
        s.seen.append(ctx.needs_input_grad)
        return x.exp().clamp(max=3)

    @staticmethod
    def backward(ctx, g):
        ctx.s.seen.append(
            (torch.is_grad_enabled(), ctx.needs_input_grad, tuple(g.shape), g.stride(), g.requires_grad)
        )
        return g + 1, None


class Net(nn.Module):
    """Module whose path depends on its attributes and its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.norm = nn.LayerNorm(SIDE)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(SIDE, SIDE)
        self.rounds = 1
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        h = self.first(x)
        for _ in range(self.rounds):
            h = self.norm(h).relu() + x
        self.count += 1
        return self.last(self.drop(h))


class Ghost:
    """Object that issues an operator in its finalizer."""

    def __init__(self, x, n):
        self.x, self.n = x, n

    def __del__(self):
        with torch.no_grad():
            self.x.mul_(0.5).add_(self.n)


def layout(x: torch.Tensor) -> tuple:
    """Returns the metadata of a tensor."""
    return (
        tuple(x.shape), str(x.dtype), x.stride(), x.storage_offset(), x.is_contiguous(), x.untyped_storage().nbytes(),
        x._version if VERSIONS[0] and not x.is_inference() else None, x.requires_grad, x.grad_fn is None, x.is_leaf, x.is_inference(), x.is_conj(), x.is_neg(),
    )  # fmt: skip


_forever: list[torch.inference_mode] = []


class State(SimpleNamespace):
    """The state of a program on a device, and the values that it records for comparison."""

    def __init__(self, device: str):
        super().__init__(
            device=device, seen=[], rng=random.Random(0), kept=[], hooks=[], ref=None, it=iter(()),
            modes=[], states=[], codes=[], later=None, half=None, saved=None, checked=False, notes={}, cache=None, wk=None, acc=None,
        )  # fmt: skip
        self.pool = _pool(1)
        torch.manual_seed(0)
        self.g, self.g1, self.hg = torch.Generator(device), torch.Generator(device), torch.Generator()
        self.gens = [self.g1]
        for k, g in enumerate((self.g, self.g1, self.hg)):
            g.manual_seed(1 + k)
        for i in range(3):
            setattr(self, f"m{i}", data(i, SIDE, SIDE).to(device))
            setattr(self, f"v{i}", data(3 + i, SIDE).to(device))
        self.d0 = data(6, SIDE, SIDE, dtype=torch.float64).to(device)
        self.h0 = data(7, SIDE, SIDE, dtype=torch.bfloat16).to(device)
        self.b0 = data(8, SIDE, SIDE).gt(0).to(device)
        self.i0 = torch.tensor([2, 0, 3, 2]).to(device)
        self.r0 = data(9, 3, SIDE).to(device)
        self.u0 = data(10, 5).to(device)
        self.host = data(11, SIDE, SIDE)
        self.w = data(12, SIDE, SIDE).to(device).requires_grad_()
        self.c = data(13, SIDE).to(device).requires_grad_()
        self.p0 = data(14, 2 * SIDE, 2 * SIDE).to(device)
        self.wide = data(15, 2 * SIDE, 2 * SIDE)
        self.nums = data(16, 2 * SIDE, 2 * SIDE).numpy().copy()
        self.leaf = torch.tensor(0.5, requires_grad=True)
        self.t0 = (data(17, SIDE, SIDE) * 100).to(torch.int32).to(device)
        self.t1 = (data(18, SIDE, SIDE) * 100).to(torch.uint8).to(device)
        self.t2 = torch.complex(data(19, SIDE, SIDE), data(20, SIDE, SIDE)).to(device)
        self.store = data(21, SIDE).to(device).untyped_storage()

    def net(self, x):
        return self.module(x)

    def train(self, optimizer: str, foreach: bool):
        """Creates the module and the optimizer."""
        self.module = Net().to(self.device)
        rule = {
            "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
            "adam": functools.partial(torch.optim.Adam, lr=0.01),
            "adamw": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        }[optimizer]
        self.opt = rule([self.w, self.c, *self.module.parameters()], foreach=foreach)

    def see(self, x):
        """Records a value for comparison; of a tensor, the metadata and a copy."""
        self.notes[len(self.seen)] = (sys._getframe(1).f_lineno, "")
        if isinstance(x, torch.Tensor):
            self.seen.append(layout(x))
            # A clone has no views, and no version counter that later writes change.
            x = x.detach().clone()
        self.seen.append(x)

    def watch(self, x):
        """Records a tensor itself, so that its values at the end of the program are compared."""
        self.seen.append(x.detach())

    def failed(self, error):
        """Records an exception and the line of the program that raised it."""
        line, trace = None, error.__traceback__
        # After a few runs of the code, CPython fuses instructions, and reports the line of the first of them.
        while trace is not None and not isinstance(error, UnboundLocalError):
            if trace.tb_frame.f_code.co_filename == "<program>":
                line = trace.tb_lineno
            trace = trace.tb_next
        self.notes[len(self.seen)] = (line, f"{type(error).__name__}: {error}"[:200])
        self.seen.append(("raised", type(error).__name__, line))

    def died(self, number):
        """Records the end of a tensor's life."""
        self.seen.append(("died", number))

    def leaks(self, function):
        """Records whether each call of a function leaks memory on Tandem. The check takes long, so each
        program makes it once.
        """
        if self.checked:
            return
        self.checked, used = True, []
        # The node that accumulates a leaf's gradient lives as long as a graph that ends at the leaf, so this
        # graph keeps it.
        graph = self.m0.detach() * self.leaf
        # Allocations of other threads grow the heap in some rounds only; a leak grows it in all rounds.
        for _ in range(9):
            for _ in range(50):
                function()
            if self.device != "cpu":
                torch_tandem.synchronize()
            used.append(heap())
        del graph
        # Only tracing is checked: graphs grow with the number of recorded operators. Eager PyTorch is taken
        # to be free of leaks.
        counts = self.device != "cpu" and torch_tandem.mode() == "trace"
        self.seen.append(counts and all(b - a >= 800 for a, b in itertools.pairwise(used[1:])))

    def enter(self, mode):
        """Enters a mode and leaves it on."""
        mode.__enter__()
        self.modes.append(mode)

    def leave(self):
        """Ends the latest mode that was left on."""
        if self.modes:
            self.modes.pop().__exit__(None, None, None)

    def made(self, text, names):
        """Runs code that is compiled anew in each call. `names` are the program's variables."""
        code = compile(text.replace("STEP", str(names["step"])), "<made>", "exec")
        self.codes.append(weakref.ref(code))
        exec(code, {**globals(), **names})

    def fresh(self, function):
        """Returns a function with a copy of another's code object."""
        code = function.__code__.replace()
        self.codes.append(weakref.ref(code))
        return types.FunctionType(code, function.__globals__, closure=function.__closure__)

    def tidy(self, in_place: bool):
        """Keeps the values of all tensors small, and their graphs short."""
        for name, x in sorted(vars(self).items()):
            if isinstance(x, torch.Tensor) and name not in ("host", "b0", "wide"):
                try:
                    with torch.no_grad():
                        self._tidy(name, x, in_place)
                except Exception as error:
                    self.failed(error)
        for x in (self.host, self.wide):
            x.nan_to_num_(0.5, 2.0, -2.0).clamp_(-2, 2)
        np.clip(np.nan_to_num(self.nums, copy=False), -2, 2, out=self.nums)

    def _tidy(self, name: str, x: torch.Tensor, in_place: bool):
        if name == "leaf":
            return
        if name in ("w", "c"):
            x.requires_grad_().copy_(safe(x))
        elif name == "i0":
            self.i0 = x % SIDE
        elif not x.is_floating_point():
            setattr(self, name, x.detach())
        elif in_place and not x.is_inference() and all(x.stride()) and name != "t0":
            x = x.detach()
            x.nan_to_num_(0.5, 2.0, -2.0).clamp_(-2, 2)
            setattr(self, name, x)
        else:
            setattr(self, name, safe(x.detach()))

    def settle(self):
        """Leaves the modes that the program has left on, and records the program's tensors."""
        while self.modes:
            with contextlib.suppress(Exception):
                self.leave()
        if torch.is_inference_mode_enabled():
            # Python may close the program's own context later, which restores the context's mode.
            _forever.append(torch.inference_mode(False))
            _forever[-1].__enter__()
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        torch.set_autocast_enabled(self.device, False)
        torch.clear_autocast_cache()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        self.pool.shutdown()
        if self.later is not None:
            concurrent.futures.wait([self.later])
        storages: dict[int, int] = {}
        with torch.no_grad():
            for name, x in sorted(vars(self).items()):
                for k, y in enumerate(x if name == "kept" else [x]):
                    if not isinstance(y, torch.Tensor):
                        continue
                    shared = storages.setdefault(y.untyped_storage()._cdata, len(storages))
                    self.notes[len(self.seen)] = (1, f"{name} at the end")
                    self.seen += [(name, k, shared), y.detach()]
                    try:
                        self.seen += [layout(y), y.grad if y.is_leaf else None]
                    except RuntimeError as error:
                        # PyTorch refuses to create the graph of such a view.
                        self.seen.append(type(error).__name__)
        self.seen += [g.get_state() for g in (self.g, self.g1, self.hg)]
