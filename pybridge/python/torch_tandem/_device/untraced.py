"""Functions of this package that Dynamo leaves to Python."""

from collections.abc import Callable

from torch._C._dynamo import eval_frame


def untraced(*functions: Callable) -> None:
    """Exclude functions, and the functions that they call, from compilation by Dynamo."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)
