"""Runs programs of other libraries in eager PyTorch and on Tandem, and compares what they print.

python -m tests.libraries --only einops,timm         # some of them
python -m tests.libraries --write docs/libraries.md
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from .compare import Agreement
from .environments import NotInstalled, groups, interpreter
from .known import KNOWN
from .page import failures, on_host, page, terminal
from .program import Program, all_programs
from .run import Result, compared


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="NAMES", help="programs, with commas between; all others are left out"
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the page")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (1); more disturb the times")
    options = parser.parse_args()
    programs = all_programs()
    names = options.only.split(",") if options.only else [program.name for program in programs]
    if unknown := set(names) - {program.name for program in programs}:
        parser.error(f"there are no programs {', '.join(sorted(unknown))}")

    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    interpreters = _interpreters(programs, names)

    def result_of(program: Program) -> Result:
        python = interpreters[program.name]
        if isinstance(python, NotInstalled):
            return Result(program, Agreement(False, f"not installed: {python}"))
        return compared(program, python)

    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(result_of, [program for program in programs if program.name in names]):
            results.append(result)
            console.print(f"{result.program.name}: {told(result)}", markup=False)
    console.print(terminal(results))
    if options.write:
        options.write.write_text(page(results))
    unexpected = news(results)
    console.print(*unexpected, sep="\n", markup=False)
    return int(bool(unexpected))


def told(result: Result) -> str:
    """Return one line about how a program's results differ, and why it ran on the host."""
    lines = [f"{way}: {text}" for way, text in failures(result)] or ["as in eager"]
    return "; ".join([*lines, *on_host(result)])


def _interpreters(programs: list[Program], names: list[str]) -> dict[str, str | NotInstalled]:
    """Return an interpreter for each of these programs, or the reason why there is none."""
    found: dict[str, str | NotInstalled] = dict.fromkeys(names, sys.executable)
    # All programs form the groups, so that --only does not change the environments.
    for number, group in enumerate(groups(programs), start=1):
        members = {program.name for program in group}.intersection(names)
        if members:
            try:
                python = interpreter(number, group)
            except NotInstalled as failure:
                python = failure
            found |= dict.fromkeys(members, python)
    return found


def news(results: list[Result]) -> list[str]:
    """Return unexpected results: programs that differ but are not listed, and listed programs that do not
    differ.
    """
    lines = []
    for result in results:
        name = result.program.name
        if not result.bits.agrees and name not in KNOWN:
            lines.append(f"not known to differ: {name}: {result.bits.text}")
        if result.bits.agrees and name in KNOWN:
            lines.append(f"known to differ, and does not: {name}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
