"""Virtual environments for the programs, layered over the project's, whose torch they share.

If the project's environment meets a program's requirements, the program runs there. The other programs form
groups, each with versions that fit all programs of the group. A program that fits no group starts a new
group.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from uv import find_uv_bin

from .program import Program

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "libraries"
FOLDER = CACHE / hashlib.sha256(f"{sys.prefix} {sys.version}".encode()).hexdigest()[:12]
"""Folder of the environments, one for each project environment (of a clone) and version of Python."""
SHARED = ("torch", "torchvision", "torchaudio", "triton", "numpy")
"""Packages of the project's environment that no group may replace."""


class NotInstalled(Exception):
    """No versions of the required packages can be installed together."""


def groups(programs: list[Program]) -> list[list[Program]]:
    """Divide programs that need an environment of their own into groups whose requirements agree."""
    wanted = {program.name: program for program in programs if not program.is_installed()}
    text, kept = _requirements(wanted.values()), FOLDER / "groups.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = json.loads(kept.read_text()) if kept.exists() else {}
    names = [name for group in found.get("groups", []) for name in group]
    if found.get("requirements") != text or sorted(names) != sorted(wanted):
        divided = [[program.name for program in group] for group in _divide(list(wanted.values()))]
        found = {"requirements": text, "groups": divided}
        kept.write_text(json.dumps(found))
    return [[wanted[name] for name in group] for group in found["groups"]]


def _divide(programs: list[Program]) -> list[list[Program]]:
    if not programs or _agree(programs):
        return [programs] if programs else []
    found: list[list[Program]] = []
    for program in programs:
        group = next((group for group in found if _agree([*group, program])), None)
        if group is None:
            found.append(group := [])
        group.append(program)
    return found


def _agree(programs: list[Program]) -> bool:
    done = _uv("compile", "-", requirements=_requirements(programs))
    if "Failed to fetch" in done.stderr:
        raise ConnectionError(done.stderr)  # versions are unknown without an answer
    return done.returncode == 0


def _requirements(programs: Iterable[Program]) -> str:
    return "\n".join(sorted({text for program in programs for text in program.requirements}))


def interpreter(number: int, group: list[Program]) -> str:
    """Return the interpreter of a group's environment, which is created or updated first."""
    folder, requirements = FOLDER / f"group-{number}", _requirements(group)
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if stamp.exists() and stamp.read_text() == requirements:
        return str(python)
    if not python.exists():
        subprocess.run([find_uv_bin(), "venv", "--quiet", "--python", sys.executable, folder], check=True)
        base = sysconfig.get_path("purelib")
        site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        # A line of code in a .pth file adds the folder so that its own .pth files are read too, such as the
        # editable package's.
        Path(site, "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    stamp.unlink(missing_ok=True)
    done = _uv("install", "-r", "-", python=str(python), requirements=requirements)
    if done.returncode:
        raise NotInstalled(" ".join(done.stderr.split())[:300])
    stamp.write_text(requirements)
    return str(python)


def _uv(*command: str, requirements: str, python: str = sys.executable) -> subprocess.CompletedProcess:
    """Run `uv pip` with requirements as its input."""
    overrides = FOLDER / "overrides.txt"
    overrides.write_text("\n".join(f'{name} ; sys_platform == "never"' for name in SHARED))
    options = ["--quiet", "--python", python, "--override", str(overrides)]
    return subprocess.run(
        [find_uv_bin(), "pip", *command, *options], input=requirements, capture_output=True, text=True
    )
