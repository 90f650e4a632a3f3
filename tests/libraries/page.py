"""Generates docs/libraries.md and the terminal's table."""

import datetime
import os
import platform
import re
from pathlib import Path

import torch
import torch_tandem
from rich.table import Table

from .compare import ABSOLUTE, FIRST, RELATIVE
from .known import KNOWN
from .run import NOT_RUN, Result

HEAD = """\
# Libraries

A program for each library, as a user of the library would write it, run in eager PyTorch and unchanged by
`tandem run`. Written by `make libraries`; do not edit. The programs are in `tests/libraries/programs`.

- *bits*: whether a run with PyTorch's kernels prints eager's text, to the last digit.
- *own kernels*: the largest difference of a printed value from eager's, relative or, where that is less,
  absolute. The first {first} values must be within {relative:g} or {absolute:g}; training amplifies roundings
  without a bound, so later values are only shown.
- *co-executed*: the share of all operators that GraphRunner executed, tracing included. *On the host*: the
  share of those on host tensors, which Tandem does not see.
- *eager*, *Tandem*: an optimizer's step, or a model's call in programs without one: the median of the second
  half of the run. No figure: fewer than ten of them.

{machine}
"""
HOSTED = """\
## What runs on the host

A program that names no device is not adopted if a module that it imports chooses the host.

"""
BITS = "PyTorch's kernels"
COLUMNS = (
    "library",
    "version",
    "program",
    "bits",
    "own kernels",
    "co-executed",
    "on the host",
    "eager",
    "Tandem",
    "eager / Tandem",
)


def machine() -> str:
    """Describe the machine and the versions."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = found[1] if found else platform.machine()
    versions = f"torch-tandem {torch_tandem.__version__}, torch {torch.__version__}"
    versions += f", Python {platform.python_version()}"
    return f"Measured on {datetime.date.today()} with {versions}, on {os.cpu_count()} cores of {processor}."


def row(result: Result) -> list[str]:
    """Return the cells of a program's row."""
    program, report = result.program, result.report
    return [
        program.library,
        program.version,
        program.does,
        "same" if result.bits.agrees else "no",
        result.values.text if result.values.agrees else "no",
        _share(report["ops_coexecuted"], _operators(report)) if report else "",
        _share(report["ops_on_host"], _operators(report)) if report else "",
        _milliseconds(result.eager),
        _milliseconds(result.tandem),
        f"{result.eager / result.tandem:.2f}" if result.eager and result.tandem else "",
    ]


def _operators(report: dict) -> int:
    """Return the number of a program's operators: the captured ones, and the ones on host tensors."""
    return report["ops_captured"] + report["ops_on_host"]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _milliseconds(seconds: float | None) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds else ""


def failures(result: Result) -> list[tuple[str, str]]:
    """Return each way in which the results are not eager's, with the difference."""
    ways = {BITS: result.bits, "own kernels": result.values}
    return [(way, found.text) for way, found in ways.items() if not found.agrees and found != NOT_RUN]


def on_host(result: Result) -> list[str]:
    """Return the reasons why operators run on the host, from the report."""
    notes, models = (result.report.get(key, []) for key in ("notes", "models_elsewhere"))
    found = [re.search(r"not adopted, because (\S+ chooses the host)", note) for note in notes]
    lines = [line[1] for line in found if line]
    lines = lines or [f"{m['what']} at {m['line']} is on {m['device']}" for m in models]
    return [re.sub(r"\S*/(site-packages/|(?=program\.py))", "", line) for line in lines]


def page(results: list[Result]) -> str:
    """Return the page."""
    head = HEAD.format(first=FIRST, relative=RELATIVE, absolute=ABSOLUTE, machine=machine())
    parts = [head + "\n" + _markdown(COLUMNS, [row(result) for result in results])]
    refused = [
        [result.program.library, way, text, KNOWN.get(result.program.name, "") if way == BITS else ""]
        for result in results
        for way, text in failures(result)
    ]
    if refused:
        parts.append("## What fails or differs\n\n" + _markdown(("library", "with", "what", "why"), refused))
    hosted = [[result.program.library, text] for result in results for text in on_host(result)]
    if hosted:
        parts.append(HOSTED + _markdown(("library", "why"), hosted))
    return "\n\n".join(parts) + "\n"


def _markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    cells = [
        list(columns),
        ["---"] * len(columns),
        *([text.replace("|", "\\|") for text in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in cells)


def terminal(results: list[Result]) -> Table:
    """Return the table for the terminal, in which the failures replace the descriptions of the programs."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in (*COLUMNS[:2], *COLUMNS[3:], "what differs"):
        table.add_column(column)
    for result in results:
        library, version, _, *cells = row(result)
        table.add_row(library, version, *cells, "; ".join(f"{way}: {text}" for way, text in failures(result)))
    return table
