"""Generates docs/conformance.md."""

from collections.abc import Iterable

from .check import Result
from .known import reason

HEAD = """\
# Conformance of the wgpu executor

PyTorch's own operator database (`torch.testing._internal`, OpInfo) on the wgpu executor against eager CPU:
forward, gradients, dtypes, sizes and strides, non-contiguous and broadcast arguments as the samples have
them. Written by `make conformance`; do not edit.
"""

STATES = """
*native*: WGSL kernels alone. *mixed*: some samples need an operator that takes the host path. *host*: all
do. The host path is PyTorch's CPU kernel with the copies that needs: right, but slow. A dash: not supported
by PyTorch in that dtype.

## Failing

| operator | dtypes | reason |
| --- | --- | --- |"""


def page(results: list[Result], adapter: str, limits: dict[str, int | str]) -> str:
    """Returns the page: totals, failures with reasons, and a row for each operator."""
    dtypes = list(dict.fromkeys(r.dtype for r in results))
    by_name: dict[str, dict[str, Result]] = {}
    for r in results:
        by_name.setdefault(r.name, {})[r.dtype] = r
    main = [r for r in results if r.dtype == "float32" and r.samples]
    right, asked = _counted(main)
    share = 100 * right / max(asked, 1)
    states = {state: sum(r.state == state for r in main) for state in ("native", "mixed", "host", "failing")}
    lines = [
        HEAD,
        f"- Adapter: {adapter}, shaders with bounds checks.",
        f"- Samples of each operator: {', '.join(f'{d} {limits[d]}' for d in dtypes)}.",
        f"- float32: {right:,} of {asked:,} samples (forward and gradient) agree, {share:.2f} %.",
        f"- float32 entries: {states['native']} native in all samples, {states['mixed']} in some, "
        f"{states['host']} on the host, {states['failing']} failing.",
        STATES,
    ]
    for name, of in by_name.items():
        failing = [r for r in of.values() if r.failures]
        if failing:
            why = reason(name, failing[0].dtype) or failing[0].failures[0].replace("|", "\\|")[:200]
            lines.append(_row([f"`{name}`", ", ".join(r.dtype for r in failing), why]))
    lines += ["", "## Operators", "", _row(["operator", *dtypes, "on the host"])]
    lines.append(_row(["---"] * (len(dtypes) + 2)))
    for name, of in sorted(by_name.items()):
        hosted = sorted({op.removeprefix("aten::") for r in of.values() for op in r.host})
        cells = [of[d].state if d in of and of[d].samples else "-" for d in dtypes]
        lines.append(_row([f"`{name}`", *cells, ", ".join(hosted[:6]) + (" ..." if len(hosted) > 6 else "")]))
    return "\n".join(lines) + "\n"


def _counted(results: Iterable[Result]) -> tuple[int, int]:
    results = list(results)
    right = sum(r.forward + r.gradients_right for r in results)
    return right, sum(r.samples + r.gradients for r in results)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
