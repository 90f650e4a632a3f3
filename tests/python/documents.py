"""The code on the pages: fenced blocks, code in sentences and tables, and the commands in both."""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from torch_tandem import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("accelerate", "cargo", "make", "pip", "pytest", "python", "tandem", "torchrun")
"""Programs of commands. A line is a command if it begins with one of them, after any variables."""
STAND_INS = {"NAME": "step", "N": "20", "FILE": "out.html", "script.py": "train.py", "...": ""}
"""Words to replace what the reader has to fill in."""


@dataclass(frozen=True)
class Code:
    """A fenced block with its language, or code in a sentence, with the language `inline`."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line for a shell: variables, and words, which begin with one of `PROGRAMS` if there are any."""

    where: Code
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.variables), *self.words])


def codes() -> list[Code]:
    """All code of all pages, in order."""
    return [code for page in PAGES for code in _codes(page)]


def _codes(path: Path) -> Iterator[Code]:
    page = str(path.relative_to(ROOT))
    for token in MarkdownIt().enable("table").parse(path.read_text()):
        line = (token.map or [0])[0] + 1
        if token.type in ("fence", "code_block"):
            yield Code(page, line, token.info or "text", token.content)
        for child in token.children or ():
            if child.type == "code_inline":
                yield Code(page, line, "inline", child.content)


def commands(code: Code) -> Iterator[Command]:
    """The commands in code. For shell blocks, also the commands in comments."""
    if code.language == "sh":
        for line in code.text.splitlines():
            shown, _, comment = line.partition(" #")
            yield from _commands(code, shown)
            for quoted in re.findall("`([^`]+)`", comment):
                yield from commands(Code(code.page, code.line, "inline", quoted))
    elif code.language == "inline" and re.match(rf"[A-Z_]+=|({'|'.join(PROGRAMS)}) ", code.text):
        yield from _commands(code, code.text)


def _commands(code: Code, line: str) -> Iterator[Command]:
    for part in line.partition(" > ")[0].split("&&"):
        words = [word for word in (STAND_INS.get(word, word) for word in shlex.split(part)) if word]
        variables = []
        while words and re.match("[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables.append((name, value))
        if words or variables:
            yield Command(code, tuple(variables), tuple(words))


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each subcommand of `tandem`."""
    found: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise StopIteration

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        cli.main(["devices"])
    [subcommands] = (a for a in found[0]._actions if isinstance(a, argparse._SubParsersAction))
    return dict(subcommands.choices)


def options(parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """The options of a parser except `--help`, each with its forms."""
    return [tuple(a.option_strings) for a in parser._actions if a.option_strings and a.dest != "help"]
