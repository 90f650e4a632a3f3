"""Generates docs/conformance-pytorch.md."""

import collections

from .known import FAILING, reason

HEAD = """\
# PyTorch's own tests on the cpu executor

PyTorch's databases of operators, modules and optimizers (`torch.testing._internal`) on Tandem beside eager
CPU, with default kernels. Each case runs traced and co-executed; the second has the first one's bits. Written
by `make conformance-pytorch`; do not edit. `tests/pytorch/known.txt` lists what is known to fail.

- *errors*: what eager refuses raises the same type and words, as the first call of its line and after good
  calls of it were co-executed.
- *numbers*: co-executed calls of a line take a number that changes, to one that PyTorch refuses now and then,
  or windows at other offsets.
- *values*: a tensor's elements change, to ones that PyTorch refuses; `LinAlgError` is raised at the call.
- *ops*: outputs, metadata and gradients in every dtype, and in place.
- *variants*: `out=` of nine kinds, non-contiguous, conjugated and negated arguments, outputs that are views.
- *transforms*: forward AD, `torch.func.jvp`, `vjp` and `vmap`, gradients of gradients.
- *functions*: calls with other elements, as functions that are replayed, with gradients, and compiled.
- *modules*: training and inference; forward, backward and twice, strides, channels last, pickles, `to`.
- *optimizers*: each implementation; steps, groups, closures, states, schedulers, complex numbers, gradients.

*passed* cases agree. *refused*: eager PyTorch raises for all of a case's samples, and Tandem the same type.
*no case*: eager PyTorch has nothing to compare with.
"""

STATES = ("passed", "refused", "no case", "known to fail")


def page(outcomes: list[tuple[str, str, str]]) -> str:
    """Returns the page: counts by kind of case, and the known failures by reason."""
    counts: dict[str, collections.Counter[str]] = {}
    reasons: dict[str, list[str]] = {}
    for name, state, _ in sorted(outcomes):
        if state in FAILING:
            state = "known to fail"
            reasons.setdefault(reason(name) or "not known", []).append(name)
        counts.setdefault("/".join(name.split("/")[:2]), collections.Counter())[state] += 1
    total = sum(counts.values(), collections.Counter())
    lines = [HEAD, _row(["cases", "run", *STATES]), _row(["---"] * (len(STATES) + 2))]
    for kind, count in [*counts.items(), ("**all**", total)]:
        lines.append(_row([kind, f"{count.total():,}", *(f"{count[s]:,}" for s in STATES)]))
    lines += ["", "## Known to fail", "", _row(["reason", "cases", "names"]), _row(["---"] * 3)]
    for why, names in reasons.items():
        shown = ", ".join(f"`{n}`" for n in names[:8]) + (" ..." if len(names) > 8 else "")
        lines.append(_row([why, str(len(names)), shown]))
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
