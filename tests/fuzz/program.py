"""Programs as small trees, and their source text.

A node is a text with holes for other nodes; a statement may have a body. The generator creates the trees, the
shrinker cuts them, and Python runs their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HOLE = re.compile(r"\{(\w+)\}")


def holes(text: str) -> list[str]:
    """Returns the kinds of the holes in a text, in order."""
    return _HOLE.findall(text)


@dataclass
class Node:
    """An expression or a statement."""

    kind: str
    text: str
    parts: list[Node] = field(default_factory=list)
    body: list[Node] | None = None
    after: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Returns the node's text without its body."""
        parts = iter(self.parts)
        return _HOLE.sub(lambda _: next(parts).line(), self.text)

    def lines(self, indent: int = 0) -> Iterator[str]:
        """Yields the lines of a statement."""
        space = "    " * indent
        yield from (space + line for line in self.line().split("\n"))
        if self.body is not None:
            yield from block(self.body, indent + 1)
        yield from (space + line for line in self.after)


def block(body: list[Node], indent: int) -> Iterator[str]:
    """Yields the lines of a list of statements."""
    for node in body:
        yield from node.lines(indent)
    if not body:
        yield "    " * indent + "pass"


@dataclass
class Program:
    """Functions, statements before the first iteration, and the iterations."""

    functions: list[Node]
    before: list[Node]
    iteration: list[Node]
    iterations: int
    tidy: str
    end: str

    def source(self) -> str:
        """Returns the source of a function `program(s)`, where `s` is the state."""
        lines = ["from tests.fuzz.support import *", "", "", "def program(s):"]
        lines += block(self.functions, 1) if self.functions else []
        lines += block(self.before, 1) if self.before else []
        lines += [f"    for step in range({self.iterations}):", "        try:"]
        lines += block(self.iteration, 3)
        lines += ["        except Exception as error:", "            s.failed(error)"]
        lines += [f"        {line}" for line in (self.tidy, self.end) if line]
        return "\n".join(lines) + "\n"
