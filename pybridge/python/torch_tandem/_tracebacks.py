"""Exceptions that pass through this package, without its frames: they say nothing about the program."""

import os
from types import TracebackType

_FOLDER = os.path.dirname(__file__) + os.sep


def hide_frames(error: BaseException) -> None:
    """Take the frames of this package, up to the next of the program, out of the traceback's beginning.

    To be called in an `except` clause that ends with a bare `raise`, which does not add its frame again.
    """
    traceback = error.__traceback__
    while traceback is not None and _is_own(traceback):
        traceback = traceback.tb_next
    error.__traceback__ = traceback


def _is_own(traceback: TracebackType) -> bool:
    # Calls of this package's operators have a frame in torch/_ops.py.
    frame = traceback.tb_frame
    return frame.f_code.co_filename.startswith(_FOLDER) or frame.f_globals.get("__name__") == "torch._ops"
