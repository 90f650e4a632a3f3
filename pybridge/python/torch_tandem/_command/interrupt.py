"""Ctrl-C, for commands that run a script or other processes."""

import subprocess
import sys
from typing import NoReturn

PATIENCE = 5
"""Seconds after Ctrl-C until a process that still runs is terminated: it may have got no signal."""


def end() -> NoReturn:
    """End this process as the interpreter does after Ctrl-C: run the exit handlers, then die by the signal.

    Unlike the interpreter, print nothing.
    """
    hook = sys.excepthook

    def print_nothing(*_: object) -> None:
        sys.excepthook = hook

    sys.excepthook = print_nothing
    raise KeyboardInterrupt


def wait(process: subprocess.Popen) -> None:
    """Wait for a process. On Ctrl-C, whose signal the process gets too, wait for its end and raise."""
    try:
        process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise
