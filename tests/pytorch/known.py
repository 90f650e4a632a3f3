"""Known failures with their reasons, from known.txt and, on a GPU, from known_gpu.txt."""

import fnmatch
import os
import pathlib

FOLDER = pathlib.Path(__file__).parent
GPU = os.environ.get("TANDEM_DEVICE", "cpu") != "cpu"

FAILING = ("failed", "crashed", "hung")


def known(names: tuple[str, ...] = ("known.txt", "known_gpu.txt")[: 1 + GPU]) -> dict[str, str]:
    """Returns the reasons in the files `names`, by patterns of cases' names."""
    reason, entries = "", {}
    for line in "\n".join((FOLDER / name).read_text() for name in names).splitlines():
        if line.startswith("= "):
            reason = line[2:]
        elif line and not line.startswith("#"):
            if line in entries:
                raise ValueError(f"{line} is listed twice")
            entries[line] = reason
    return entries


def reason(name: str) -> str | None:
    """Returns why a case is known to fail."""
    return next((why for pattern, why in known().items() if fnmatch.fnmatchcase(name, pattern)), None)


def news(outcomes: list[tuple[str, str, str]]) -> list[str]:
    """Returns the unexpected outcomes: failures that are not listed, and listed cases that pass."""
    entries = known()
    # A case that fails on the CPU may pass on a GPU, so only the GPU's own list must fail there.
    must_fail = known(("known_gpu.txt",)) if GPU else entries
    lines = []
    for name, state, why in outcomes:
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in entries)
        if state in FAILING and not listed:
            lines.append(f"not known to fail: {name}: {why}")
        if state == "passed" and any(fnmatch.fnmatchcase(name, pattern) for pattern in must_fail):
            lines.append(f"known to fail, and passes: {name}")
    return lines
