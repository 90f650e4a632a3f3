"""Exceptions without the frames of this package, which say nothing about the program."""

import os
from types import TracebackType

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder that all files of this package are in."""


def hide_frames(error: BaseException) -> None:
    """Take the frames of this package, up to the next of the program, out of the traceback's beginning.

    To be called in an `except` clause that ends with a bare `raise`, which does not add its frame again.
    """
    error.__traceback__ = _program(error.__traceback__)


def hide_all_frames(error: BaseException) -> None:
    """Take all frames of this package out of the tracebacks of an exception and of those it belongs with."""
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
    """Return the part of a traceback that follows the frames of this package at its beginning."""
    is_own = False
    while traceback is not None:
        frame = traceback.tb_frame
        # Calls of this package's operators have a frame in torch/_ops.py.
        is_operator = is_own and frame.f_globals.get("__name__") == "torch._ops"
        if not is_operator and not frame.f_code.co_filename.startswith(PACKAGE):
            break
        is_own = True
        traceback = traceback.tb_next
    return traceback
