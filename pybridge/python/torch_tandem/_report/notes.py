"""Notes for the report: what Tandem's Python code did differently from PyTorch, and how often."""

from collections import Counter

_counts: Counter[str] = Counter()


def add(text: str) -> None:
    """Add a note, or increase its count."""
    _counts[text] += 1


def remove(text: str) -> None:
    """Remove a note, if it is there."""
    _counts.pop(text, None)


def lines() -> list[str]:
    """Return the notes, with their counts if greater than one."""
    return [text if count == 1 else f"{text} ({count} times)" for text, count in _counts.items()]


def clear() -> None:
    """Forget all notes."""
    _counts.clear()
