"""The callers of a function: another function's call, a transform or tracer, and the program's line."""

import sys
import threading
import warnings

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from torch_tandem._functions import observe
from torch_tandem._program.tracebacks import PACKAGE

_forward_ad = torch.autograd.forward_ad


def is_observed() -> bool:
    """Whether the current call is a part of another function's call that is being recorded."""
    return observe.observing != 0 and observe.observing == threading.get_ident()


def is_transformed() -> bool:
    """Whether a transform, a tracer, a debugger, a mode or autograd's anomaly mode is active."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or _forward_ad._current_level >= 0
        or torch.is_anomaly_enabled()
        or sys.gettrace() is not None
    )


def is_compiled() -> bool:
    """Whether Dynamo compiles the code of functions that are called now."""
    return callable(get_eval_frame_callback())


def users_level() -> int:
    """The `stacklevel` with which a warning of the caller names the program's line that led here."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


class Warner:
    """The warnings about a function, each of which is given once, with the program's line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: set[str] = set()

    def warn(self, text: str, always: bool = False) -> None:
        if always or text not in self._given:
            self._given.add(text)
            warnings.warn(f"torch_tandem.function {self._name}: {text}", stacklevel=users_level())
