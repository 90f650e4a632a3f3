"""safetensors, which only opens files for devices that it knows. Files for tandem are read on the host."""

import sys
from types import ModuleType
from typing import Any

import torch


class _Moved:
    """An open file, or a slice of a tensor in a file. It moves the tensors that it reads to a device."""

    def __init__(self, source: Any, device: Any) -> None:
        self._source, self._device = source, device

    def __enter__(self) -> "_Moved":
        return _Moved(self._source.__enter__(), self._device)

    def __exit__(self, *exc: object) -> Any:
        return self._source.__exit__(*exc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._source[index].to(self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._source.get_tensor(name).to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._source.get_tensors().items()}

    def get_slice(self, name: str) -> "_Moved":
        return _Moved(self._source.get_slice(name), self._device)


def _package(package: ModuleType) -> None:
    original = package.safe_open

    # The C type cannot be subclassed, so a class takes its place. isinstance must accept its files too.
    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (original, _Moved))

    class safe_open(metaclass=Kind):
        __doc__ = original.__doc__

        def __new__(cls, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            if str(device).split(":")[0] != "tandem":
                return original(filename, framework, device, **options)
            return _Moved(original(filename, framework, "cpu", **options), device)

    package.safe_open = safe_open


def _torch(module: ModuleType) -> None:
    # `load_file` calls `safe_open`. If this module was imported before Tandem, it has the original under this
    # name.
    module.safe_open = sys.modules["safetensors"].safe_open


CHANGES = {"safetensors": _package, "safetensors.torch": _torch}
"""Functions that change a module, by the module's name."""
