"""Ctrl-C, for commands that run a script or other processes."""

import subprocess
import sys
from typing import NoReturn

PATIENCE = 5
"""Seconds until a process is taken to have got no signal from the terminal."""


def end() -> NoReturn:
    """End as the interpreter does: by the signal, after functions that run at exit. Prints nothing."""
    hook = sys.excepthook

    def print_nothing(*_: object) -> None:
        sys.excepthook = hook

    sys.excepthook = print_nothing
    raise KeyboardInterrupt


def wait(process: subprocess.Popen) -> None:
    """Wait for a process. On Ctrl-C, which it also gets from the terminal, wait for its end and raise."""
    try:
        process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise
