"""PyTorch's global settings in program order.

Kernels read settings when they run, which is later than the program issues the ops. A function that changes a
setting therefore first waits for pending work, which was issued under the old value.
"""

import functools
from collections.abc import Callable

import torch

from torch_tandem import _core

# Setters of the settings that CPU kernels read. A setting that only selects an operator needs no waiting,
# because it takes effect when the operator is issued.
_IN_TORCH_C = (
    "_set_blas_preferred_backend",
    "_set_cpu_allow_fp16_reduced_precision_reduction",
    "_set_default_dtype",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_linalg_preferred_backend",
    "_set_mkldnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_nnpack_enabled",
    "_set_onednn_allow_tf32",
)
_IN_TORCH = ("set_num_threads", "set_flush_denormal")


def install() -> None:
    """Make the functions that change settings wait for pending work."""
    for owner, names in ((torch._C, _IN_TORCH_C), (torch, _IN_TORCH)):
        for name in names:
            # Some versions of PyTorch lack some of these functions.
            if function := getattr(owner, name, None):
                setattr(owner, name, _after_pending(function))


def _after_pending(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        _core.drain()
        return function(*args, **kwargs)

    return wrapper
