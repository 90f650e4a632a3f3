"""Runs a program in eager PyTorch, on Tandem with PyTorch's kernels, and on Tandem with its own kernels."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .compare import Agreement, near_values, same_text
from .program import Program

TIMED = str(Path(__file__).with_name("timed.py"))
LIMIT = 120
"""Time limit of a run, in seconds."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "TANDEM_DEVICE": "cpu",
}
EAGER = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
WAYS = {
    "eager": ([TIMED, "eager"], EAGER),
    "eager again": ([], EAGER),
    "PyTorch's kernels": (
        ["-m", "torch_tandem", "run", "--quiet", "--report-json", "report.json"],
        {"TANDEM_KERNELS": "aten"},
    ),
    "own kernels": ([TIMED, "tandem"], {"TANDEM_KERNELS": "own"}),
}
"""Arguments of the interpreter, before the program's path, and environment variables."""
NOT_RUN = Agreement(False, "not run")


class Failed(Exception):
    """A run failed. The exception has the reason."""


@dataclass(frozen=True)
class Run:
    """The text that a run printed, and its figures if the run was timed."""

    text: str
    seconds: float | None
    """Median time of an iteration, or None if there were too few iterations."""
    report: dict


@dataclass(frozen=True)
class Result:
    """The results of a program in all ways of running it."""

    program: Program
    bits: Agreement = NOT_RUN
    """Agreement with eager PyTorch when Tandem uses PyTorch's kernels."""
    values: Agreement = NOT_RUN
    """Agreement with eager PyTorch when Tandem uses its own kernels."""
    eager: float | None = None
    """Seconds per iteration."""
    tandem: float | None = None
    report: dict = field(default_factory=dict)


def compared(program: Program, python: str) -> Result:
    """Run a program in all ways. A failure of a run becomes part of the result."""
    try:
        eager = run(program, python, "eager")
    except Failed as failure:
        return Result(program, Agreement(False, f"in eager PyTorch: {failure}"))
    bits, aten = _agreement(same_text, program, python, "PyTorch's kernels", eager)
    if not bits.agrees:
        again, _ = _agreement(same_text, program, python, "eager again", eager)
        if not again.agrees:
            bits = Agreement(False, f"{bits.text}; eager PyTorch, run again: {again.text}")
    values, own = _agreement(near_values, program, python, "own kernels", eager)
    return Result(program, bits, values, eager.seconds, own and own.seconds, aten.report if aten else {})


def _agreement(
    compare: Callable[[str, str], Agreement], program: Program, python: str, way: str, eager: Run
) -> tuple[Agreement, Run | None]:
    try:
        found = run(program, python, way)
    except Failed as failure:
        return Agreement(False, str(failure)), None
    return compare(eager.text, found.text), found


def run(program: Program, python: str, way: str) -> Run:
    """Run a program in an empty folder, in the way `way` of WAYS."""
    arguments, variables = WAYS[way]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = program.copy_to(folder)
        text = _output([python, *arguments, path.name], folder, variables)
        times, report = _text(folder / "times.json", "[]"), _text(folder / "report.json", "{}")
        return Run(text, _median(json.loads(times)), json.loads(report))


def _text(path: Path, default: str) -> str:
    return path.read_text() if path.exists() else default


def _median(blocks: list[float]) -> float | None:
    """Return the median time of the second half of the blocks, because tracing may slow down the
    first half.
    """
    return statistics.median(blocks[len(blocks) // 2 :]) if len(blocks) > 1 else None


def _output(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Run a command in a folder, and return the text that it prints."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        text, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Failed(f"not finished after {LIMIT} s") from None
    finally:
        # The signal also ends the processes that the command has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise Failed(f"status {process.returncode}: {_error(errors)}")
    return text


def _error(errors: str) -> str:
    """Return the line of a traceback that names the exception. If no line does, return the last line."""
    lines = [line for line in errors.splitlines() if line.strip()] or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
    return (named or lines)[-1].strip()[:300]
