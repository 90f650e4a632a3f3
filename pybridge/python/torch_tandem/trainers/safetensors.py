"""safetensors, which opens files for the devices that it knows: files for tandem are read on the host."""

import functools
from types import ModuleType
from typing import Any

import torch


def _torch(module: ModuleType) -> None:
    load = module.load_file

    @functools.wraps(load)
    def load_file(filename: Any, device: Any = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        if str(device).split(":")[0] != "tandem":
            return load(filename, device, **options)
        return {name: tensor.to(device) for name, tensor in load(filename, **options).items()}

    module.load_file = load_file


CHANGES = {"safetensors.torch": _torch}
"""Functions that change a module, by the module's name."""
