"""Remarks of the Python side for the report: what was done differently, and how often."""

from collections import Counter

_counts: Counter[str] = Counter()


def add(text: str) -> None:
    """Count `text` among the notes."""
    _counts[text] += 1


def lines() -> list[str]:
    """The notes, each with its count where it is more than one."""
    return [text if count == 1 else f"{text} ({count} times)" for text, count in _counts.items()]


def clear() -> None:
    """Forget all notes."""
    _counts.clear()
