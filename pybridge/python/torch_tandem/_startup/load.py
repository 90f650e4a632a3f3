"""Loading of the extension module `_core` and of the shim for the installed torch.

The shim uses torch's C++ interface, which changes with every minor version of torch. The package has a shim
for each supported version.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

from torch_tandem._startup import environment


def load_core() -> ModuleType:
    """Import `_core` with its shim. On failure, raise an ImportError with the cause and the remedy."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("torch-tandem needs PyTorch: install torch.") from None
    shim = _shim_for(torch.__version__)
    environment.normalize()  # `_core` reads the variable when it is imported
    try:
        core = importlib.import_module("torch_tandem._core")
        core.connect(core.__file__, shim)
    except ImportError as error:
        raise ImportError(f"torch-tandem cannot be loaded ({error}): reinstall it.") from None
    return core


def _shim_for(torch: str) -> Path:
    """Return the file of the shim for a version of torch."""
    shims = {}
    for file in Path(__file__).parents[1].glob("_shim_torch*"):
        if match := re.match(r"_shim_torch(\d)(\d+)\.", file.name):
            shims[int(match[1]), int(match[2])] = file
    if not shims:
        raise ImportError("torch-tandem is not built here: run `make build` in its repository.")
    major, minor = map(int, re.findall(r"\d+", torch)[:2])
    if (major, minor) not in shims:
        supported = ", ".join(f"{major}.{minor}" for major, minor in sorted(shims))
        raise ImportError(
            f"torch-tandem supports torch {supported}, but torch {torch} is installed here: install one that "
            "is supported, or a release of torch-tandem that supports yours (in its repository: make build)."
        )
    return shims[major, minor]
