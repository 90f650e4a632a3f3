"""Indices of devices that programs name."""

from typing import Any

import torch

from torch_tandem import _core


def index_of(device: Any) -> int:
    """Return the index of `device`: an int, a string, a torch.device, or None for the current device."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    if index is None or index < 0:
        return _core.current_device()
    if index > 0 and index >= (count := _core.device_count()):
        there = "there is one tandem device, number 0" if count == 1 else f"there are {count} tandem devices"
        raise RuntimeError(f"invalid device index {index}: {there}; TANDEM_DEVICE may list several")
    return index
