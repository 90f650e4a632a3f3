"""Processes that a program under `tandem run` spawns: "cuda" means Tandem there, too.

`multiprocessing` pickles data for a new process. The new process unpickles the data before it imports the
script. One object among the data makes the new process install the same alias, mode and `torch.compile` as
the program.
"""

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any


class _Installation:
    """An object that, when it is unpickled, installs the alias "cuda" and the settings of `tandem run`."""

    def __init__(self, mode: str | None, compiles: bool) -> None:
        self._options = mode, compiles

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _install_all, self._options


def install(mode: str | None, compiles: bool) -> None:
    """Give spawned processes the alias "cuda", the mode and `torch.compile` of `tandem run`."""
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"torch_tandem": _Installation(mode, compiles), **original(name)}

    spawn.get_preparation_data = get_preparation_data


def _install_all(mode: str | None, compiles: bool) -> None:
    from torch_tandem import api, cuda_alias
    from torch_tandem._compile import torch_compile

    if mode:
        api.set_mode(mode)
    torch_compile.install(compiles)
    cuda_alias.install()
    install(mode, compiles)
