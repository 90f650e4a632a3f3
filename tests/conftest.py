import torch

from tests.outcomes import pytest_configure

__all__ = ["pytest_configure"]

# Where there is no such device, these modules format the whole stack whenever a program seeds PyTorch.
for accelerator, module in (
    (torch.cuda, torch.cuda.random),
    (torch.xpu, torch.xpu.random),
    (torch.mtia, torch.mtia),
):
    if not accelerator.is_available():
        module._lazy_call = lambda *_, **__: None
