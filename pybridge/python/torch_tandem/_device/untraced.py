"""Functions of this package that Dynamo leaves to Python."""

from collections.abc import Callable

from torch._C._dynamo import eval_frame


def untraced(*functions: Callable) -> None:
    """Let Dynamo compile neither these functions nor what they call."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)
