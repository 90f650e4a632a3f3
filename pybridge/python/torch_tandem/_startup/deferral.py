"""Deferred loading of torch: the command line reads its arguments before it loads torch, which takes seconds.

Python imports this package before it finds the module of the command. In a process of the command, the
package therefore registers nothing until `load` is called.
"""

import importlib
import os
import sys


def _is_command() -> bool:
    """Whether the interpreter was started for `tandem` or `python -m torch_tandem`."""
    if sys.argv[:1] == ["-m"]:  # at this time the interpreter is looking for the module
        return sys.orig_argv[-len(sys.argv)] == "torch_tandem"
    folder = os.path.dirname(sys.executable)
    return bool(sys.argv) and os.path.abspath(sys.argv[0]) == os.path.join(folder, "tandem")


is_command = _is_command()
"""Whether this process runs the command `tandem`."""
is_waiting = is_command
"""Whether the rest of the package is not loaded yet."""


def load() -> None:
    """Load torch and the rest of the package, unless they are loaded."""
    global is_waiting
    if is_waiting:
        is_waiting = False
        importlib.reload(sys.modules["torch_tandem"])
