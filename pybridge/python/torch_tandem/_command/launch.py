"""`tandem launch`: torchrun, with `tandem run` in each process."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_tandem._command import interrupt
from torch_tandem._report import ranks


def launch(processes: str, torchrun: list[str], run: list[str], report: str | None) -> int:
    """Start torchrun with the options `torchrun`. Each process runs `tandem run` with the arguments `run`.

    Returns torchrun's exit status. `report` is the file for the page of all ranks, or None.
    """
    if not re.search(r"--(standalone|nnodes|node.rank|rdzv|master)", " ".join(torchrun)):
        # Each torchrun gets a store of its own, so that several programs can run on a machine at the same
        # time.
        torchrun = ["--standalone", *torchrun]
    with tempfile.TemporaryDirectory(prefix="tandem") as folder:
        if report:
            run = ["--report-json", f"{folder}/%r.json", *run]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, *torchrun]
        command += ["--no-python", sys.executable, "-m", "torch_tandem", "run", *run]
        process = subprocess.Popen(command)
        try:
            interrupt.wait(process)
        finally:
            if report:
                files = sorted(Path(folder).glob("*.json"), key=lambda file: int(file.stem))
                ranks.write(report, {int(file.stem): json.loads(file.read_text()) for file in files})
    return process.returncode


def split(rest: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments at the first `--` if they begin with an option: torchrun's, and the rest."""
    if rest[0].startswith("-") and "--" in rest:
        at = rest.index("--")
        return rest[:at], rest[at + 1 :]
    return [], rest
