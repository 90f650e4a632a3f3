"""Programs of several processes: each rank runs a case of `cases.py` and returns a value."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Rank:
    """The end of a rank's process: the value that its case returned, and its exit status and output."""

    code: int
    value: Any
    output: str


def start(count: int, case: str, *arguments: str, environment: dict[str, str] | None = None) -> list[Rank]:
    """Run a case in `count` processes, which are killed after two minutes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared |= {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(count)} | (environment or {})
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "RANK_VALUE": f"{folder}/{rank}"}
            command = [sys.executable, "-m", "tests.python.ranks.cases", case, *arguments]
            with open(f"{folder}/{rank}.txt", "w") as output:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=output))
        until = time.monotonic() + 120
        ranks = []
        for rank, process in enumerate(processes):
            try:
                code = process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            value, output = Path(folder, str(rank)), Path(folder, f"{rank}.txt").read_text()
            ranks.append(Rank(code, json.loads(value.read_text()) if value.exists() else None, output))
        return ranks


def values(count: int, case: str, *arguments: str, environment: dict[str, str] | None = None) -> list[Any]:
    """Run a case, and return the values that the ranks returned. All ranks must have ended
    without an error.
    """
    ranks = start(count, case, *arguments, environment=environment)
    failed = [f"rank {i} ended with {r.code}:\n{r.output[-3000:]}" for i, r in enumerate(ranks) if r.code]
    assert not failed, "\n".join(failed)
    return [rank.value for rank in ranks]
