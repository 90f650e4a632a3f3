"""A program of `programs/`, with the metadata in its comments (PEP 723)."""

import ast
import re
import shutil
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Program:
    """A program, named after the library that it uses."""

    name: str
    does: str
    requirements: tuple[str, ...]

    @property
    def library(self) -> str:
        """Name of the library's distribution: the program's first requirement."""
        return Requirement(self.requirements[0]).name

    @property
    def version(self) -> str:
        """The version that is required of the library."""
        return str(Requirement(self.requirements[0]).specifier).removeprefix("==")

    def is_installed(self) -> bool:
        """Whether this interpreter's environment has all that the program requires."""
        return all(map(_is_met, self.requirements))

    def copy_to(self, folder: Path) -> Path:
        """Copy the file to a folder without the other programs, because their names would hide
        the libraries.
        """
        return Path(shutil.copy(FOLDER / f"{self.name}.py", folder / "program.py"))


def _is_met(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(metadata.version(wanted.name))
    except metadata.PackageNotFoundError:
        return False


def read(path: Path) -> Program:
    """Read a program's docstring and metadata."""
    text = path.read_text()
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)
    does = ast.get_docstring(ast.parse(text, str(path)))
    if not block or not does:
        raise ValueError(f"{path} lacks a docstring or the metadata of a script")
    fields = tomllib.loads("\n".join(line[2:] for line in block[1].splitlines()))
    return Program(path.stem, " ".join(does.split()), tuple(fields["dependencies"]))


def all_programs() -> list[Program]:
    """Return the programs by name."""
    return [read(path) for path in sorted(FOLDER.glob("*.py"))]
