"""Markdown tables of figures, and the sections of pages that scripts of this folder write."""

import os
import platform
import statistics
from pathlib import Path

from measure import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def milliseconds(low: float | None, middle: float, high: float | None) -> str:
    """Format a median in milliseconds, with the first and third quartiles if they are known."""
    digits = 3 if middle < 1 else 2 if middle < 10 else 1
    text = f"{middle:.{digits}f}"
    return text if low is None or high is None else f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def times(seconds: list[float]) -> str:
    """Format the median and the first and third quartiles, in milliseconds."""
    low, middle, high = (figure * 1e3 for figure in statistics.quantiles(seconds, n=4))
    return milliseconds(low, middle, high)


def ratio(side: dict, other: dict) -> str:
    """Format the median of the ratios of two sides' blocks."""
    if "wall" not in side or "wall" not in other:
        return ""
    return f"{statistics.median(a / b for a, b in zip(side['wall'], other['wall'], strict=True)):.2f}"


def machine() -> str:
    """Describe the machine and the versions that the figures were measured with."""
    import torch
    from torch_tandem import _core

    objects = statistics.median(_core.time_torch_objects(100_000) for _ in range(15))
    kernels = os.environ.get("TANDEM_KERNELS", "default")
    return (
        f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), 2 threads, TANDEM_KERNELS={kernels}. Making and "
        f"freeing one tensor and its storage takes PyTorch {objects:.0f} ns here."
    )


def with_section(page: str, script: str, text: str) -> str:
    """Replace the text between the markers of a script."""
    begin, end = (f"<!-- {word}: benches/{script} -->" for word in ("begin", "end"))
    before, rest = page.split(begin + "\n")
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def write_section(script: str, text: str, path: Path = PAGE) -> None:
    """Write the results of a script of this folder between its markers on a page."""
    path.write_text(with_section(path.read_text(), script, text))
