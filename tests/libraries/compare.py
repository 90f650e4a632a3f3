"""Comparison of the text that a program prints, with other kernels, with the text that it prints in eager
PyTorch.

With PyTorch's kernels the texts must be the same. Tandem's own kernels round differently, by a relative error
of about 1e-7 per operator. The first values therefore differ by a few roundings, which the program's
computation amplifies. RELATIVE leaves room for that; a wrong operator is far outside of it. ABSOLUTE is for
values that are differences of larger values, such as a loss near zero. Training amplifies roundings from step
to step without a bound, so later values show no error: only the first FIRST values must be within the
tolerance. The constants are the same for all programs.
"""

import difflib
import math
import re
from dataclasses import dataclass

RELATIVE, ABSOLUTE = 1e-3, 1e-4
FIRST = 10
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf\b|nan\b)", re.IGNORECASE)


@dataclass(frozen=True)
class Agreement:
    """Whether two texts agree, with a sentence on how near their values are, or on how they differ."""

    agrees: bool
    text: str


def same_text(expected: str, found: str) -> Agreement:
    """Compare texts exactly."""
    if expected == found:
        return Agreement(True, "same")
    ours, theirs = found.splitlines(), expected.splitlines()
    for number, (line, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if line != other:
            return Agreement(False, f"line {number} is {line!r}, not {other!r}")
    return Agreement(False, f"{len(ours)} lines, not {len(theirs)}")


def near_values(expected: str, found: str) -> Agreement:
    """Compare the first values of two texts, and the words between all values."""
    if NUMBER.sub("0", expected) != NUMBER.sub("0", found):
        before, after = NUMBER.sub("0", expected).splitlines(), NUMBER.sub("0", found).splitlines()
        changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        return Agreement(False, f"other words: {' '.join(changed[:2])!r}")
    pairs = list(zip(map(float, NUMBER.findall(expected)), map(float, NUMBER.findall(found)), strict=True))
    for number, (x, y) in enumerate(pairs[:FIRST], start=1):
        if not _is_near(x, y):
            return Agreement(False, f"value {number} is {y!r}, not {x!r}")
    first, worst = (max((difference(*pair) for pair in part), default=0.0) for part in (pairs[:FIRST], pairs))
    if len(pairs) <= FIRST:
        return Agreement(True, f"{first:.0e}")
    return Agreement(True, f"{first:.0e}, later {worst:.0e}")


def _is_near(x: float, y: float) -> bool:
    both_nan = math.isnan(x) and math.isnan(y)
    return both_nan or math.isclose(x, y, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def difference(x: float, y: float) -> float:
    """Return the relative or the absolute difference of two values, whichever is smaller."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    distance = abs(x - y)
    return min(distance, distance / max(abs(x), abs(y))) if math.isfinite(distance) else math.inf
