"""Processes that a program under `tandem run` spawns: "cuda" means Tandem there, too.

`multiprocessing` pickles data for the new process, which unpickles them before it imports the script. An
object among the data installs in the process what `tandem run` has installed in the program.
"""

from collections.abc import Callable
from multiprocessing import spawn
from typing import Any


class _Installation:
    """Installs what `tandem run` has installed, when it is unpickled."""

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
