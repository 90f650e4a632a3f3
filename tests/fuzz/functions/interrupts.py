"""Interrupts at chosen lines of Tandem's code, as by Ctrl-C."""

import sys
import types
from collections.abc import Callable
from typing import Any


def interrupted(call: Callable, lines: int) -> bool:
    """Call a function, and raise KeyboardInterrupt when this many lines of Tandem's code have run.

    Returns whether so many lines have run.
    """
    left = lines

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if "torch_tandem" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    # Calls that a debugger traces are not recorded.
    gettrace, sys.gettrace = sys.gettrace, lambda: None
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        sys.gettrace = gettrace
    return left <= 0
