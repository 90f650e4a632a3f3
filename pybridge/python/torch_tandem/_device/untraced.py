"""Functions of this package that Dynamo leaves to Python."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch._C._dynamo import eval_frame

_PACKAGE = Path(__file__).parent.parent


def inline_only(trace_rules: ModuleType) -> None:
    """Let Dynamo compile functions of this package only where it inlines them, as with PyTorch's files.

    Functions that take the place of PyTorch's also run outside of compiled code, after a graph break. Dynamo
    compiles them there if its version has no such list of files.
    """
    if hasattr(trace_rules, "BUILTIN_INLINE_WHEN_CALLED"):
        trace_rules.BUILTIN_INLINE_WHEN_CALLED.add(f"{_PACKAGE.as_posix()}/")
        trace_rules.add(_PACKAGE.name)


CHANGES = {"torch._dynamo.trace_rules": inline_only}


def untraced(*functions: Callable) -> None:
    """Exclude functions, and the functions that they call, from compilation by Dynamo."""
    _skip(functions, callees=eval_frame._FrameAction.SKIP)


def traced_within_callers(*functions: Callable) -> None:
    """Let Dynamo compile functions only where it inlines them, as it does with functions in PyTorch's files.

    It compiles the functions that they call.
    """
    _skip(functions, callees=eval_frame._FrameAction.DEFAULT)


def _skip(functions: tuple[Callable, ...], callees: eval_frame._FrameAction) -> None:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, callees)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
