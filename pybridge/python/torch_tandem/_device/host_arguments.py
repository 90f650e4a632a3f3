"""Arguments that PyTorch refuses for their device, in scripts whose tensors are adopted.

Some of PyTorch's composite operators read the elements of an argument, and refuse a tensor that is not on the
host. Other composite operators refuse tensors on two devices. A script that names no device has no reason to
move such tensors, so the functions here move them.
"""

from collections.abc import Callable
from typing import Any

import torch

from torch_tandem._device.replaced import replace

HOST_ARGUMENTS: tuple[tuple[Any, str, int, tuple[str, ...]], ...] = (
    (torch, "tensor_split", 1, ("tensor_indices_or_sections", "indices_or_sections")),
    (torch.Tensor, "tensor_split", 1, ("tensor_indices_or_sections", "indices_or_sections")),
    (torch._VF, "_pack_padded_sequence", 1, ("lengths",)),
    (torch, "_pack_padded_sequence", 1, ("lengths",)),
    (torch, "randint_like", 1, ("high",)),
    *(
        (torch, f"_foreach_{name}{in_place}", 3, ("scalars",))
        for name in ("addcdiv", "addcmul")
        for in_place in ("", "_")
    ),
)
"""Functions that read an argument's elements: owner, name, and the argument's position and names.

PyTorch's messages for such arguments are "to be on cpu", "should be a 1D CPU int64 tensor", "must be a scalar
tensor and on CPU" and "Expected scalars to be on CPU".
"""


def install() -> None:
    """From now on, move `HOST_ARGUMENTS` to the host, and arguments of other operators to one device."""
    torch.ops.torch_tandem.move_mixed_arguments()
    for owner, name, position, names in HOST_ARGUMENTS:
        if function := getattr(owner, name, None):
            replace(owner, name, _on_host(function, position, names))


def _on_host(function: Callable, position: int, names: tuple[str, ...]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], _moved(args[position]), *args[position + 1 :])
        for name in names:
            if name in kwargs:
                kwargs[name] = _moved(kwargs[name])
        return function(*args, **kwargs)

    return call


def _moved(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) and value.device.type == "tandem" else value
