"""The end of `make test`: the time of each part, the slowest files, and the tests that did not run.

A skipped test is a hole, unless another part runs it with other kernels, or on a GPU with other features.
Each part writes its outcomes to the folder `TANDEM_OUTCOMES`. `python -m tests.outcomes` prints the tests
that no part has run. If `CI` is set, it fails for a skipped test whose reason is not in `REASONS`.
"""

import json
import os
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

REASONS: dict[str, str] = {
    "iterations were too short for the trials to end": "measurements that a busy machine does not finish",
    "this driver keeps no pipelines": "Mesa's software driver has no cache of pipelines",
    "refused, as PyTorch's devices refuse it": "results on the host are refused, or right",
    "this PyTorch does not have it": "names of later versions",
    "this processor cannot|the CPU cannot": "features of other processors",
}
"""Reasons of skipped tests, as regular expressions, each with why such tests need not run here."""

if os.geteuid() or not shutil.which("apt-get"):
    for reason in ("there is no graphics adapter", "no Chromium is installed"):
        REASONS[reason] = "it could not be installed"

SLOWEST = 12
"""Number of files whose times are printed."""


class Outcomes:
    """A plug-in of pytest that records the outcomes of tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: set[str] = set()
        self.seconds: dict[str, float] = defaultdict(float)
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        test = report.nodeid
        self.seconds[test.partition("::")[0]] += report.duration
        if report.skipped:
            self.skipped[test] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call":
            self.ran.add(test)

    def pytest_collectreport(self, report) -> None:
        if report.skipped:  # a whole file
            self.skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"ran": sorted(self.ran), "skipped": self.skipped, "seconds": self.seconds})
        (self.folder / f"{os.getpid()}.json").write_text(text)


def pytest_configure(config) -> None:
    folder = os.environ.get("TANDEM_OUTCOMES")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(folder)))


def main(folder: Path) -> int:
    print((folder / "times").read_text(), end="")
    parts = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    ran = {test for part in parts for test in part["ran"]}
    seconds: dict[str, float] = defaultdict(float)
    for part in parts:
        for file, spent in part["seconds"].items():
            seconds[file] += spent
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SLOWEST]
    print("Slowest files: " + ", ".join(f"{file} {seconds[file]:.0f} s" for file in slowest))
    by_reason = defaultdict(set)
    for part in parts:
        for test, reason in part["skipped"].items():
            if test not in ran:
                by_reason[reason].add(test)
    print(f"{len(ran)} Python tests ran. Skipped in all parts: {sum(map(len, by_reason.values()))}")
    unlisted = 0
    for reason, tests in by_reason.items():
        why = next((why for listed, why in REASONS.items() if re.fullmatch(listed, reason)), None)
        unlisted += why is None
        print(f"  {len(tests)}: {reason} ({why or 'NOT LISTED in tests/outcomes.py'})")
        for test in sorted(tests):
            print(f"    {test}")
    return unlisted if os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main(Path(os.environ["TANDEM_OUTCOMES"])))
