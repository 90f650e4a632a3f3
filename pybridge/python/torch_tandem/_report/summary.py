"""The report as text."""

import io
import sys
import textwrap
from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_tandem._report.findings import (
    candidate,
    duration,
    failed_audits,
    findings,
    is_settled,
    iterations,
    late_calls,
    models,
    percent,
    shares_of_time,
    short_line,
    size,
    speed,
    verdict,
)
from torch_tandem._report.types import Divergence, Feed, Fetch, Kernel, Machine, Report

_ROWS = 10  # maximum number of rows of each table
_WIDTH = 110  # width of output that does not go to a terminal, in characters


def show(report: Report, file: IO[str] | None = None, verbose: bool = False) -> None:
    """Print the summary to `file`, by default to stderr."""
    file = file or sys.stderr
    _print(_console(file, None if file.isatty() else _WIDTH), report, verbose)


def text(report: Report, verbose: bool = False) -> str:
    """Return the summary as plain text."""
    file = io.StringIO()
    _print(_console(file, _WIDTH), report, verbose)
    return file.getvalue()


def _console(file: IO[str], width: int | None) -> Console:
    # In a notebook, rich takes any file for a terminal, and displays its output as well.
    is_terminal = False if isinstance(file, io.StringIO) else None
    return Console(file=file, width=width, highlight=False, force_jupyter=False, force_terminal=is_terminal)


def explanation(report: Report) -> str:
    """Return the verdict, the findings with their advice, and the summary, as plain text."""
    lines = [verdict(report)]
    for finding in findings(report):
        lines.append(f"- {finding.text} {finding.advice}".rstrip())
    file = io.StringIO()
    for line in lines:
        file.write(textwrap.fill(line, _WIDTH, subsequent_indent="  " if line.startswith("-") else "") + "\n")
    return file.getvalue() + text(report)


def _print(console: Console, report: Report, verbose: bool) -> None:
    console.rule("Tandem", style="dim")
    for finding in (*failed_audits(report), *models(report)):
        console.print(escape(f"{finding.text} {finding.advice}".rstrip()), style="bold")
    if not report["ops_captured"]:
        console.print("No operator ran on the device tandem.")
    else:
        console.print(_facts(report, verbose))
        for title, table in _tables(report, verbose):
            console.print(title)
            console.print(table)
    if advice := candidate(report):
        console.print(escape(advice))
    for note in report["notes"]:
        console.print(f"note: {escape(note)}", style="dim")


def _facts(report: Report, verbose: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("iterations", iterations(report))
    if time := speed(report):
        grid.add_row("speed", f"{time}; [bold]tandem compare[/bold] measures eager's")
    grid.add_row("operators", _operators(report))
    if report["ops_other_threads"]:
        grid.add_row("", f"{report['ops_other_threads']:,} from other threads, run imperatively")
    whole = "" if is_settled(report) else " (of the whole run, with imports)"
    for runner, shares in shares_of_time(report).items():
        grid.add_row(runner, ", ".join(f"{share} {what}" for what, share in shares.items()) + whole)
    if verbose:
        for row in _details(report):
            grid.add_row(*row)
    grid.add_row("memory", f"{size(report['memory_peak'])} at most")
    return grid


def _operators(report: Report) -> str:
    """Return the number of operator calls that were co-executed, of the later iterations and of all."""
    captured, on_host = report["ops_captured"], report["ops_on_host"]
    share = percent(report["ops_coexecuted"], captured + on_host)
    calls = f"{captured:,} captured" + (f", about {on_host:,} on host tensors" if on_host else "")
    late = late_calls(report)
    if late is None:
        return f"{calls}, {share} co-executed"
    name = {10: "tenth", 5: "fifth"}[late.after]
    settled = percent(late.coexecuted, late.calls)
    return f"{settled} co-executed after the {name} iteration ({calls}, {share} of all calls co-executed)"


def _details(report: Report) -> Iterable[tuple[str, str]]:
    """Yield details for developers of Tandem, as names and values."""
    for region in report["regions"]:
        beside, inline = region["beside_ns"], region["inline_ns"]
        if beside is None or inline is None:
            continue
        who = "GraphRunner's thread" if region["place"] == "beside" else "Python's thread"
        if region["line"]:
            who += f" in the loop from {escape(region['line'])}"
        each = f"{beside / 1000:.1f} us an operator beside Python, {inline / 1000:.1f} us on its thread"
        yield "placement", f"kernels on {who}: {each}"
    yield (
        "TraceGraph",
        f"{report['tracegraph_nodes']:,} nodes, {_plural(report['paths'], 'path')}, "
        f"{_plural(report['symbolic_blocks'], 'block')}, {report['blocks_sent']:,} sent "
        f"(median {report['median_block_ops']} operators)",
    )
    devices = report["devices"]
    for index, device in enumerate(devices):
        ran = f"{device['native_ops']:,} operators in {device['dispatches']:,} kernels"
        compiled, hosted = _plural(device["pipelines"], "pipeline"), sum(device["host_ops"].values())
        which = "device" if len(devices) == 1 else f"tandem:{index}"
        yield which, f"{escape(device['name'])}: {ran} ({compiled}), {hosted:,} on the host"
        most, cached = size(device["memory_live_peak"]), size(device["memory_peak"])
        yield f"{which} memory", f"{most} at most, {cached} with caches"


def _tables(report: Report, verbose: bool) -> Iterable[tuple[str, Table]]:
    divergences = report["divergences"]
    if divergences:
        yield f"divergences: {_total(divergences)}", _divergences(divergences)
    functions = report["functions"]
    if functions:
        rows = [
            (f["replayed"], f["ran"], f["name"], duration(f["saved_us"]), f["reason"] or "")
            for f in functions
        ]
        columns = ("replayed", "in Python", "function", "saved", "why not replayed")
        yield (
            f"functions: {sum(f['replayed'] for f in functions):,} calls without Python",
            _table(columns, rows),
        )
    fetches = report["fetches"]
    if fetches:
        yield f"fetches: {_total(fetches)}", _fetches(fetches)
    feeds = report["feeds"]
    if feeds and verbose:
        rows = [(f["count"], short_line(f["line"]), f["op"], f["kind"], size(f["bytes"])) for f in feeds]
        columns = ("times", "line", "operator", "what was fed", "size")
        yield f"feeds: {_total(feeds)}", _table(columns, rows)
    kernels, machine = report["kernels"], report["machine"]
    if kernels and machine:
        yield f"kernels: {_total(kernels)} runs", _kernels(kernels, machine)
    host = sorted(report["host_ops"].items(), key=lambda item: -item[1])
    if host:
        rows = [(times, name) for name, times in host]
        yield f"operators without a native kernel: {len(host)}", _table(("times", "operator"), rows)


def _fetches(entries: list[Fetch]) -> Table:
    """Return a table of the lines that read values. A row may stand for several fetches at a line."""
    lines: dict[str, list[int]] = {}
    for fetch in entries:
        total = lines.setdefault(short_line(fetch["line"]), [0, 0, 0])
        for i, name in enumerate(("count", "wait_us", "kernels_us")):
            total[i] += fetch[name]  # type: ignore[literal-required]
    rows = [
        (times, line, duration(waited), duration(kernels), duration((waited + kernels) / max(times, 1)))
        for line, (times, waited, kernels) in sorted(
            lines.items(), key=lambda item: (-item[1][1], -item[1][0])
        )
    ]
    return _table(("times", "line", "waited", "kernels", "each"), rows)


def _divergences(entries: list[Divergence]) -> Table:
    """Return a table of divergences, sorted by cost."""
    rows = []
    for d in sorted(entries, key=lambda d: (-d["cost_us"], -d["count"])):
        # The table has many columns, so names are shortened.
        line = short_line(d["line"])
        op, expected, got = (name.removeprefix("aten::") for name in (d["op"], d["expected"], d["got"]))
        expected = expected or ("" if got else d["reason"])
        where = line.rpartition(" in ")[0] or line
        rows.append((d["count"], where, op, d["what"], expected, got, duration(d["cost_us"])))
    return _table(("times", "line", "operator", "what", "expected", "got", "cost"), rows)


def _kernels(entries: list[Kernel], machine: Machine) -> Table:
    """Return a table of kernels, with their times and their shares of the machine's peak rates."""
    rows = []
    for kernel in entries:
        seconds = max(kernel["exec_us"], 1) / 1e6
        names = [name.removeprefix("aten::") for name in kernel["ops"]]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        first, *rest = [short_line(line).rpartition(" in ")[0] or line for line in kernel["lines"]] or [""]
        rows.append(
            (
                kernel["count"],
                duration(kernel["exec_us"]),
                first + (f" and {_plural(len(rest), 'line')}" if rest else ""),
                ", ".join(names[:3]) + more,
                f"{kernel['bytes'] / seconds / machine['copy']:.0%}",
                f"{kernel['flops'] / seconds / machine['matmul']:.0%}",
            )
        )
    return _table(("runs", "time", "line", "operators", "of copying", "of multiplying"), rows)


def _table(columns: Iterable[str], rows: list[tuple]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number == 0 else "left", overflow="fold")
    for row in rows[:_ROWS]:
        table.add_row(*(escape(str(cell)) for cell in row))
    if len(rows) > _ROWS:
        table.add_row("", f"and {len(rows) - _ROWS} more")
    return table


def _total(entries: Iterable[Divergence | Feed | Fetch | Kernel]) -> str:
    return f"{sum(entry['count'] for entry in entries):,}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
