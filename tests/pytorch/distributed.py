"""PyTorch's own tests of torch.distributed (`torch.testing._internal.distributed`) on this device.

The tests run as for CUDA and NCCL, with as many ranks as each test needs.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Iterator

from .agree import Unlike, seen
from .cases import Case, NotACase
from .ranks import LIMIT, tests

SIZES = (2, 4, 8)
"""Numbers of ranks. A test runs with the first number that is not too small for it."""

TOO_SMALL = ("world size", "accelerator devices")
"""Words in the reason for skipping a test, if the number of ranks is too small."""


class Server:
    """A process that forks the ranks of tests."""

    def __init__(self, size: int) -> None:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 lives as long as the server
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.ranks", str(size)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.process.stdout.readline()

    def ask(self, test: str) -> tuple[str | None, str | None]:
        """Returns the reason for which a test was skipped, or `None`, and the test's failure, or `None`."""
        timer = threading.Timer(LIMIT + 30, self.process.kill)
        timer.start()
        self.process.stdin.write(test + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        timer.cancel()
        self.errors.seek(0)
        said = self.errors.read()[-600:]
        self.errors.truncate(0)
        if not answer:
            server.cache_clear()
            return None, f"the process that starts the ranks ended: {said}"
        skipped, failure = json.loads(answer)
        # A rank that exits by itself tells its parent no error, so its output is added.
        return skipped, failure + said if failure and "Expected exit code" in failure else failure


server = functools.cache(Server)


def cases() -> Iterator[Case]:
    """Yields the tests by name."""
    # PyTorch reads these variables when it defines the tests. The names of the tests do not depend on them.
    os.environ |= {"BACKEND": "nccl", "WORLD_SIZE": str(SIZES[0])}
    for test in unittest.defaultTestLoader.getTestCaseNames(tests()):
        yield Case(f"distributed/collectives/{test}", functools.partial(run, test))


def run(test: str) -> None:
    """Runs a test."""
    for size in SIZES:
        skipped, failure = server(size).ask(test)
        if not skipped or not any(words in skipped for words in TOO_SMALL):
            break
    if skipped:
        raise NotACase(skipped)
    if failure:
        raise Unlike(f"{size} ranks: {summary(failure)}")
    seen["accepted"] += 1


def summary(failure: str) -> str:
    """Returns the first rank's error, with the error that caused it."""
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*(?:\n .*)*", failure, re.MULTILINE)
    # The first error is the parent's, which quotes the rank's error.
    return " | ".join((errors[1:] or errors or [failure[-500:]])[:2])[:560]
