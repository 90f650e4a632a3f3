"""Cases: a name and a check that raises if Tandem differs from eager."""

import dataclasses
import fnmatch
import zlib
from collections.abc import Callable, Iterator

GROUPS = (
    "errors",
    "numbers",
    "values",
    "ops",
    "variants",
    "transforms",
    "functions",
    "modules",
    "optimizers",
)
"""Groups that need only the installed torch. The group `files` also needs PyTorch's test files."""


class NotACase(Exception):
    """Eager PyTorch on the CPU has no result for comparison."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A check; its name is `group/check/subject/dtype`."""

    name: str
    check: Callable[[], None]


def all_cases(groups: tuple[str, ...] = GROUPS) -> Iterator[Case]:
    """Yields the cases of some groups, always in the same order."""
    import importlib

    for group in groups:
        yield from importlib.import_module(f".{group}", __package__).cases()


def chosen(names: list[str], pattern: str | None, shard: tuple[int, int]) -> list[str]:
    """Returns the names in a shard that match a pattern. A name alone determines its shard, so shards are
    stable.
    """
    number, shards = shard
    return [
        name
        for name in names
        if (not pattern or fnmatch.fnmatchcase(name, f"*{pattern}*"))
        and zlib.crc32(name.encode()) % shards == number
    ]
