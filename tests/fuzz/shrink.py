"""Shrinks a failing program: fewer statements, simpler expressions, fewer iterations."""

import copy
import time
from collections.abc import Callable, Iterator

from tests.fuzz.generate import SIMPLEST, simplest
from tests.fuzz.program import Node, Program

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, seconds: float) -> Program:
    """Returns a smaller program that still fails."""
    deadline = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidates in (_without_statements, _simpler_parts, _shorter):
            again = True
            while again and time.monotonic() < deadline:
                again = False
                for candidate in candidates(program):
                    if time.monotonic() > deadline:
                        break
                    if fails(candidate):
                        program, again, progress = candidate, True, True
                        break
    return program


def _bodies(program: Program) -> Iterator[list[Node]]:
    def inner(body: list[Node]) -> Iterator[list[Node]]:
        yield body
        for node in body:
            if node.body is not None:
                yield from inner(node.body)

    for body in (program.iteration, program.before, program.functions):
        yield from inner(body)


def _without_statements(program: Program) -> Iterator[Program]:
    for number, body in enumerate(_bodies(program)):
        size = len(body)
        while size:
            for start in range(0, len(body), size):
                smaller = copy.deepcopy(program)
                del list(_bodies(smaller))[number][start : start + size]
                yield smaller
            size //= 2
        for i, node in enumerate(body):
            if node.body is not None and not node.text.startswith("def "):
                smaller = copy.deepcopy(program)
                list(_bodies(smaller))[number][i : i + 1] = copy.deepcopy(node.body)
                yield smaller
            lines = node.text.split("\n")
            if node.body is None and len(lines) > 1:
                for j in range(len(lines)):
                    smaller = copy.deepcopy(program)
                    _drop_line(list(_bodies(smaller))[number][i], j)
                    yield smaller


def _drop_line(node: Node, j: int) -> None:
    from tests.fuzz.program import holes

    lines = node.text.split("\n")
    first = sum(len(holes(line)) for line in lines[:j])
    del node.parts[first : first + len(holes(lines[j]))]
    del lines[j]
    node.text = "\n".join(lines)


def _nodes(program: Program) -> Iterator[Node]:
    def inner(node: Node) -> Iterator[Node]:
        yield node
        for part in node.parts:
            yield from inner(part)

    for body in _bodies(program):
        for node in body:
            yield from inner(node)


def _simpler_parts(program: Program) -> Iterator[Program]:
    for number, node in enumerate(_nodes(program)):
        if node.kind in ("statement", "fixed"):
            continue
        simpler = []
        if node.text != SIMPLEST[node.kind]:
            simpler.append(simplest(node.kind))
        simpler += [part for part in node.parts if part.kind == node.kind]
        for other in simpler:
            smaller = copy.deepcopy(program)
            target = list(_nodes(smaller))[number]
            target.text, target.parts = other.text, copy.deepcopy(other.parts)
            yield smaller


def _shorter(program: Program) -> Iterator[Program]:
    for iterations in (program.iterations // 2, program.iterations - 1):
        if iterations > 0:
            yield _changed(program, iterations=iterations)
    if program.tidy:
        yield _changed(program, tidy="")
    if program.end:
        yield _changed(program, end="")


def _changed(program: Program, **changes: object) -> Program:
    smaller = copy.deepcopy(program)
    for name, value in changes.items():
        setattr(smaller, name, value)
    return smaller
