"""The command line reads its arguments before it loads torch, which takes seconds.

To find the module of the command, Python imports this package first. In a process of the command it then
registers nothing until `load` is called.
"""

import importlib
import os
import sys


def _is_command() -> bool:
    """Whether the interpreter was started for `tandem` or `python -m torch_tandem`."""
    if sys.argv[:1] == ["-m"]:  # while it looks for the module
        return sys.orig_argv[-len(sys.argv)] == "torch_tandem"
    folder = os.path.dirname(sys.executable)
    return bool(sys.argv) and os.path.abspath(sys.argv[0]) == os.path.join(folder, "tandem")


is_command = _is_command()
"""Whether this process is the command's."""
is_waiting = is_command
"""Whether importing the package loads nothing yet."""


def load() -> None:
    """Load torch and the rest of the package, if that has not been done."""
    global is_waiting
    if is_waiting:
        is_waiting = False
        importlib.reload(sys.modules["torch_tandem"])
