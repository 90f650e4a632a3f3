"""Seeding in program order.

The device draws from PyTorch's default CPU generator, on GraphRunner. So whoever reads or sets that
generator's state on the host first waits for the draws that the program asked for before.
"""

import functools
from collections.abc import Callable

import torch

from torch_tandem import _core


def _after_draws(method: Callable) -> Callable:
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        _core.wait_random()
        return method(*args, **kwargs)

    return wrapper


# Every method reads or sets the state, and `__reduce__` pickles it.
_METHODS = [name for name, method in vars(torch.Generator).items() if callable(method) and name[0] != "_"]

_OrderedGenerator = type(
    "Generator",
    (torch.Generator,),
    {name: _after_draws(getattr(torch.Generator, name)) for name in [*_METHODS, "__reduce__"]},
)


def install() -> None:
    """Put an ordered generator in the place of torch's default one."""
    generator = _OrderedGenerator()
    if not _core.share_default_generator(generator, torch.default_generator):
        raise RuntimeError("torch's default generator is not where this build of torch-tandem expects it")
    torch.default_generator = torch.random.default_generator = torch._C.default_generator = generator
