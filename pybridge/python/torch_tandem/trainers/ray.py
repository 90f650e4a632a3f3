"""Ray Train: training runs on the device tandem in workers whose process group has the backend tandem.

Ray creates the process group before it calls the training function. With `TorchConfig(backend="tandem")`,
PyTorch then imports Tandem through the entry point of the backend. By this time Ray has already told
Accelerate to use the CPU.
"""

import functools
import os
from types import ModuleType
from typing import Any

import torch


def _device() -> torch.device | None:
    """Return this worker's device, or None if the process group does not carry tandem tensors."""
    if torch.distributed.is_initialized():
        kinds = {device.type for device in torch.distributed.group.WORLD._device_types}
        if "tandem" not in kinds:
            return None
    rank = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("tandem", rank if rank < torch.tandem.device_count() else 0)


def _utils(utils: ModuleType) -> None:
    get_devices = utils.get_devices

    @functools.wraps(get_devices)
    def devices() -> list[torch.device]:
        device = _device()
        return [device] if device else get_devices()

    utils.get_devices = devices
    if "LOCAL_RANK" in os.environ and (device := _device()):
        torch.tandem.set_device(device)
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)


def _loops(loops: ModuleType) -> None:
    manager = loops.get_torch_device_manager_by_device_type

    @functools.wraps(manager)
    def manager_of(kind: str) -> Any:
        # Ray only has CUDA streams. Copies to tandem are asynchronous without a stream.
        return manager("cpu" if kind == "tandem" else kind)

    loops.get_torch_device_manager_by_device_type = manager_of


CHANGES = {
    "ray.air._internal.torch_utils": _utils,
    "ray.train.torch.train_loop_utils": _loops,
}
"""Functions that change a module, by the module's name."""
