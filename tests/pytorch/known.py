"""What is known not to agree, with reasons: known.txt."""

import fnmatch
import pathlib

FILE = pathlib.Path(__file__).with_name("known.txt")

FAILING = ("failed", "crashed", "hung")


def known() -> dict[str, str]:
    """Reasons by patterns of names."""
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
    """Why a case is known to fail."""
    return next((why for pattern, why in known().items() if fnmatch.fnmatchcase(name, pattern)), None)


def news(outcomes: list[tuple[str, str, str]]) -> list[str]:
    """What was not to be expected of cases: failures that are not listed, and listed ones that pass."""
    entries = known()
    lines = []
    for name, state, why in outcomes:
        listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in entries)
        if state in FAILING and not listed:
            lines.append(f"not known to fail: {name}: {why}")
        if state == "passed" and listed:
            lines.append(f"known to fail, and passes: {name}")
    return lines
