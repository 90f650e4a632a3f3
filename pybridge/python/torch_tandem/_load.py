"""Loading of the extension module, which works with one minor version of torch only."""

import importlib
from types import ModuleType

_REBUILD = "reinstall torch-tandem for the installed torch (in its repository: make build)"


def load_core() -> ModuleType:
    """Import `torch_tandem._core`. On failure, raise an ImportError that names the cause and the remedy."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("torch-tandem needs PyTorch: install torch.") from None
    try:
        from torch_tandem import _built_for
    except ImportError:
        raise ImportError("torch-tandem is not built here: run `make build` in its repository.") from None
    # The shim uses torch's C++ interface, which changes with every minor version: another one may crash.
    if _minor(_built_for.TORCH) != _minor(torch.__version__):
        raise ImportError(
            f"torch-tandem was built for torch {_built_for.TORCH}, but torch {torch.__version__} is "
            f"installed: {_REBUILD}, or install torch {_minor(_built_for.TORCH)}."
        )
    try:
        return importlib.import_module("torch_tandem._core")
    except ImportError as error:
        raise ImportError(f"torch-tandem's extension cannot be loaded ({error}): {_REBUILD}.") from None


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
