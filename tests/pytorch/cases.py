"""What is run: cases, each a name and a check that raises where Tandem does something else than eager."""

import dataclasses
import fnmatch
import zlib
from collections.abc import Callable, Iterator

GROUPS = ("errors", "numbers", "values", "ops", "variants", "transforms", "modules", "optimizers")
"""The groups that need the wheel alone. `files` is another: PyTorch's test files."""


class NotACase(Exception):
    """Eager PyTorch on the CPU has nothing to compare with here."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A check; its name is `group/check/subject/dtype`."""

    name: str
    check: Callable[[], None]


def all_cases(groups: tuple[str, ...] = GROUPS) -> Iterator[Case]:
    """The cases of some groups, always in the same order."""
    import importlib

    for group in groups:
        yield from importlib.import_module(f".{group}", __package__).cases()


def chosen(names: list[str], pattern: str | None, shard: tuple[int, int]) -> list[str]:
    """Those whose names hold a pattern, of one shard. A case's shard is by its name, so that it keeps it."""
    number, shards = shard
    return [
        name
        for name in names
        if (not pattern or fnmatch.fnmatchcase(name, f"*{pattern}*"))
        and zlib.crc32(name.encode()) % shards == number
    ]
