"""Notes for the report on what Tandem's Python code did differently from PyTorch, with their counts."""

from collections import Counter

_counts: Counter[str] = Counter()


def add(text: str) -> None:
    """Add a note. If it exists, increase its count."""
    _counts[text] += 1


def remove(text: str) -> None:
    """Remove a note if it exists."""
    _counts.pop(text, None)


def lines() -> list[str]:
    """Return the texts of the notes, each with its count if the count is greater than one."""
    return [text if count == 1 else f"{text} ({count} times)" for text, count in _counts.items()]


def clear() -> None:
    """Forget all notes."""
    _counts.clear()
