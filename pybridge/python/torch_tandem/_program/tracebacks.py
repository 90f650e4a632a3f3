"""Removal of this package's frames from tracebacks, because they say nothing about the program."""

import os
import sysconfig
import traceback
from types import TracebackType

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The package's folder, with a separator at the end."""

_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))


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
        shown = one.__traceback__
        while shown is not None:
            shown.tb_next = shown = _program(shown.tb_next)
        pending += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def summary(error: BaseException) -> str:
    """An exception in one line, with the program's line that led to it: `ValueError at train.py:12: text`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen "))] or frames
    place = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    text = "".join(traceback.format_exception_only(error)).strip()
    name, _, message = text.partition("\n")[0].partition(": ")
    return f"{name}{place}" + (f": {message}" if message else "")


def _program(rest: TracebackType | None) -> TracebackType | None:
    """Return the rest of a traceback after the frames of this package at its beginning."""
    is_own = False
    while rest is not None:
        frame = rest.tb_frame
        # The call of an operator of this package has a frame in torch/_ops.py between two of the package's.
        is_operator = is_own and frame.f_globals.get("__name__") == "torch._ops"
        if not is_operator and not frame.f_code.co_filename.startswith(PACKAGE):
            break
        is_own = True
        rest = rest.tb_next
    return rest
