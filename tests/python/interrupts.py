"""Ctrl-C in a terminal: the signal that it sends to a command and all of its processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def _heed() -> None:
    # A shell starts what runs in the background with the signal ignored, and all its processes inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(command: list[str], folder: Path) -> tuple[int, str, str]:
    """How a command of the interpreter ends on Ctrl-C, once its script has written a file `ready...`."""
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
