"""The reports of several ranks as one page, side by side."""

from collections.abc import Callable, Iterable
from html import escape
from importlib.resources import files

from torch_tandem._report.types import Collective, Report

Reports = dict[int, Report]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Tandem: {title}</title>
<style>{style}</style>
<main><h1>{title}</h1>
<p>Time in collectives is from the start of each, when the tensors that are sent have been computed, to its
end, when the others' have arrived. It is hidden while the executor does something else: runs kernels that
do not need what is received. A rank that waits much less than the others is the one that they wait for.</p>
<h2>Ranks</h2>{ranks}
<h2>Collectives</h2>{collectives}</main></html>
"""

_ROWS: dict[str, Callable[[Report], str]] = {
    "operators": lambda r: f"{r['ops_captured']:,}",
    "co-executed": lambda r: _percent(r["ops_coexecuted"], r["ops_captured"]),
    "executor": lambda r: r["executor"],
    "kernels, s": lambda r: _seconds(r["runner_exec_us"] + r["python_kernels_us"]),
    "Python waited, s": lambda r: _seconds(r["python_stall_us"]),
    "collectives": lambda r: f"{_sum(r, 'count'):,}",
    "sent, MB": lambda r: f"{_sum(r, 'bytes') / 1e6:,.1f}",
    "in collectives, s": lambda r: _seconds(_sum(r, "took_us")),
    "of which hidden": lambda r: _percent(_sum(r, "took_us") - _sum(r, "waited_us"), _sum(r, "took_us")),
    "divergences": lambda r: f"{sum(d['count'] for d in r['divergences']):,}",
}


def page(reports: Reports) -> str:
    """Return the page's HTML."""
    names = [f"rank {rank}" for rank in reports]
    ranks = [[title, *map(cell, reports.values())] for title, cell in _ROWS.items()]
    collectives = [
        [f"{op} at {line}", *(_collective(report, op, line) for report in reports.values())]
        for op, line in _places(reports.values())
    ]
    return _PAGE.format(
        title=f"{len(reports)} ranks",
        style=files("torch_tandem._report.page").joinpath("style.css").read_text(encoding="utf-8"),
        ranks=_table(["", *names], ranks),
        collectives=_table(["seconds (hidden)", *names], collectives) if collectives else "<p>none</p>",
    )


def write(path: str, reports: Reports) -> None:
    """Write the page to a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(page(reports))


def _sum(report: Report, key: str) -> int:
    return sum(row[key] for row in report["collectives"])


def _seconds(us: int) -> str:
    return f"{us / 1e6:.3f}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * max(part, 0) / whole:.1f} %" if whole else "-"


def _places(reports: Iterable[Report]) -> list[tuple[str, str]]:
    """Return the operators and lines of all collectives, ordered by their longest time in any rank."""
    longest: dict[tuple[str, str], int] = {}
    for report in reports:
        for row in report["collectives"]:
            place = row["op"], row["line"]
            longest[place] = max(longest.get(place, 0), row["took_us"])
    return sorted(longest, key=lambda place: -longest[place])


def _collective(report: Report, op: str, line: str) -> str:
    found: list[Collective] = [r for r in report["collectives"] if (r["op"], r["line"]) == (op, line)]
    if not found:
        return "-"
    took, waited = found[0]["took_us"], found[0]["waited_us"]
    return f"{_seconds(took)} ({_percent(took - waited, took)})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    def line(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"
