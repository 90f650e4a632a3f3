"""Removal of this package's frames from tracebacks, because they say nothing about the program."""

import os
from types import TracebackType

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The package's folder, with a separator at the end."""


def hide_frames(error: BaseException) -> None:
    """Remove the frames of this package at the beginning of an exception's traceback.

    Must be called in an `except` clause that ends with a bare `raise`, which does not add its frame again.
    """
    error.__traceback__ = _program(error.__traceback__)


def hide_all_frames(error: BaseException) -> None:
    """Remove all frames of this package from the tracebacks of an exception, its causes and its contexts."""
    done: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in done:
            continue
        done.add(id(one))
        hide_frames(one)
        traceback = one.__traceback__
        while traceback is not None:
            traceback.tb_next = traceback = _program(traceback.tb_next)
        pending += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _program(traceback: TracebackType | None) -> TracebackType | None:
    """Return the rest of a traceback after the frames of this package at its beginning."""
    is_own = False
    while traceback is not None:
        frame = traceback.tb_frame
        # The call of an operator of this package has a frame in torch/_ops.py between two of the package's.
        is_operator = is_own and frame.f_globals.get("__name__") == "torch._ops"
        if not is_operator and not frame.f_code.co_filename.startswith(PACKAGE):
            break
        is_own = True
        traceback = traceback.tb_next
    return traceback
