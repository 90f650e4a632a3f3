"""Seeding in program order.

GraphRunner draws the device's random numbers from PyTorch's default CPU generator. A method that reads or
sets the generator's state on the host therefore first waits for the draws that the program issued earlier.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch

from torch_tandem import _core


def _after_draws(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        _core.wait_random()
        return method(*args, **kwargs)

    return wrapper


# All public methods of a generator read or set its state, and `__reduce__` pickles the state.
_METHODS = [name for name, method in vars(torch.Generator).items() if callable(method) and name[0] != "_"]

_OrderedGenerator = type(
    "Generator",
    (torch.Generator,),
    {name: _after_draws(getattr(torch.Generator, name)) for name in [*_METHODS, "__reduce__"]},
)


def _break_graphs() -> None:
    """Let methods of the generator break graphs of torch.compile, as methods of PyTorch's generator do.

    torch has registered its class for graphs. A subclass of a registered class also counts as registered, and
    torch.compile raises an error for a method of such an object, except if its class is PyTorch's generator
    itself.
    """
    registered = getattr(sys.modules.get("torch._library.opaque_object"), "_OPAQUE_TYPES", {})
    if info := registered.get(torch.Generator):
        registered[_OrderedGenerator] = dataclasses.replace(info, class_name="")


def install() -> None:
    """Replace torch's default generator by a generator whose methods wait for pending draws."""
    generator = _OrderedGenerator()
    if not _core.share_default_generator(generator, torch.default_generator):
        raise RuntimeError("torch's default generator is not where this build of torch-tandem expects it")
    _break_graphs()
    torch.default_generator = torch.random.default_generator = torch._C.default_generator = generator
