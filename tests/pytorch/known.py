"""Known failures, with their reasons, from known.txt."""

import fnmatch
import pathlib

FILE = pathlib.Path(__file__).with_name("known.txt")

FAILING = ("failed", "crashed", "hung")


def known() -> dict[str, str]:
    """Returns the reasons by patterns of names."""
    reason, entries = "", {}
    for line in FILE.read_text().splitlines():
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
    lines = []
    for name, state, why in outcomes:
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in entries)
        if state in FAILING and not listed:
            lines.append(f"not known to fail: {name}: {why}")
        if state == "passed" and listed:
            lines.append(f"known to fail, and passes: {name}")
    return lines
