"""Ctrl-C in a terminal, which sends a signal to a command and to all of its processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def _heed() -> None:
    # In the background, a shell starts commands with the signal ignored, and their processes inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(command: list[str], folder: Path) -> tuple[int, str, str]:
    """The exit status and output of a command of the interpreter that gets Ctrl-C once its script has written
    a file `ready...`.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed,
    )
    for _ in range(600):
        if list(folder.glob("ready*")) or process.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err
