"""`flex_attention`, which accepts the devices that it knows by name."""

from types import ModuleType

import torch


def _accept(module: ModuleType) -> None:
    check = module._validate_device

    def validate(*tensors: torch.Tensor) -> None:
        if tensors[0].device.type != "tandem":
            check(*tensors)
        elif torch._C._get_default_device() == "tandem":
            # An adopted program gets the errors of the host, where there are no gradients.
            check(*(torch.empty(0, device="cpu", requires_grad=x.requires_grad) for x in tensors))

    module._validate_device = validate


CHANGES = {"torch.nn.attention.flex_attention": _accept}
"""Functions that change a module, by the module's name."""
