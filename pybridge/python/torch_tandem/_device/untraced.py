"""Functions of this package that Dynamo leaves to Python."""

from collections.abc import Callable

from torch._C._dynamo import eval_frame


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
