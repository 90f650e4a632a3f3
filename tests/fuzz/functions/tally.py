"""How often the pieces of programs were replayed, counted by all processes in memory that they share."""

from __future__ import annotations

import multiprocessing
import re
from typing import Any

_SIZE = 4096
_FIELDS = 4
_context = multiprocessing.get_context("fork")
_counts = _context.Array("q", _SIZE * _FIELDS)
_counts_here = [True]
_names: dict[str, int] = {}


def prepare(names: list[str]) -> None:
    """Number the pieces. This must happen before processes are forked."""
    _names.clear()
    _names.update((name, i + 1) for i, name in enumerate(dict.fromkeys(names)))


def stop() -> None:
    """Do not count any further calls in this process."""
    _counts_here[0] = False


def _add(at: int, *values: int) -> None:
    for i, value in enumerate(values):
        _counts[at * _FIELDS + i] += value


def count(source: str, ran: Any) -> None:
    """Count the calls of a program's functions for each piece that the program's comments name."""
    if not _counts_here[0]:
        return
    pieces = dict(re.findall(r"^ *# (f\d): (.*)$", source, re.M))
    with _counts.get_lock():
        for function_name, function in ran.functions:
            info = function.cache_info() if hasattr(function, "cache_info") else None
            hits, calls = (info.hits, info.hits + info.misses) if info else (0, 0)
            _add(0, 1, hits > 0, calls, hits)
            for name in pieces.get(function_name, "").split("; "):
                if at := _names.get(name):
                    _add(at, 1, hits > 0, calls, hits)


def of(name: str | None = None) -> tuple[int, int, int, int]:
    """Numbers of functions, of functions with replays, of calls, and of replayed calls: for a piece, or for
    all programs.
    """
    at = 0 if name is None else _names[name]
    return tuple(_counts[at * _FIELDS : (at + 1) * _FIELDS])


def names() -> list[str]:
    return list(_names)
