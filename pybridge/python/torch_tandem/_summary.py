"""The report as text."""

import io
import sys
import textwrap
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_tandem._findings import duration, findings, models, short_line, size, verdict

_ROWS = 10  # maximum number of rows of each table
_WIDTH = 110  # width of output that does not go to a terminal, in characters


def show(report: dict[str, Any], file: IO[str] | None = None) -> None:
    """Print the summary to `file`, or to stderr if it is None."""
    file = file or sys.stderr
    _print(Console(file=file, width=None if file.isatty() else _WIDTH, highlight=False), report)


def text(report: dict[str, Any]) -> str:
    """Return the summary as plain text."""
    file = io.StringIO()
    _print(Console(file=file, width=_WIDTH, highlight=False), report)
    return file.getvalue()


def explanation(report: dict[str, Any]) -> str:
    """Return the verdict, the findings with their advice, and the summary, as plain text."""
    lines = [verdict(report)]
    for finding in findings(report):
        lines.append(f"- {finding.text} {finding.advice}".rstrip())
    file = io.StringIO()
    for line in lines:
        file.write(textwrap.fill(line, _WIDTH, subsequent_indent="  " if line.startswith("-") else "") + "\n")
    return file.getvalue() + text(report)


def _line(entry: dict[str, Any]) -> str:
    """Return the source line of an entry, with a short path."""
    return short_line(str(entry.get("line", "")))


def _print(console: Console, report: dict[str, Any]) -> None:
    console.rule("Tandem", style="dim")
    for model in models(report):
        console.print(escape(f"{model.text} {model.advice}"), style="bold")
    if not report.get("ops_captured"):
        console.print("No operator ran on the device tandem.")
    else:
        console.print(_facts(report))
        for title, table in _tables(report):
            console.print(title)
            console.print(table)
    for note in report.get("notes", []):
        console.print(f"note: {escape(note)}", style="dim")


def _facts(report: dict[str, Any]) -> Table:
    def count(key: str) -> int:
        return report.get(key, 0)

    grid = Table.grid(padding=(0, 2))
    grid.add_row("iterations", f"{count('steps_traced')} traced, {count('steps_coexecuted')} co-executed")
    on_host = count("ops_on_host")
    share = _percent(count("ops_coexecuted"), count("ops_captured") + on_host)
    operators = f"{count('ops_captured'):,} captured, {share} co-executed"
    if on_host:
        operators = (
            f"{count('ops_captured'):,} captured, about {on_host:,} on host tensors, {share} co-executed"
        )
    for number, name in ((10, "tenth"), (5, "fifth")):
        if count(f"ops_after_{number}"):
            share = _percent(count(f"ops_coexecuted_after_{number}"), count(f"ops_after_{number}"))
            operators += f" ({share} of the captured ones after the {name} iteration)"
            break
    grid.add_row("operators", operators)
    if count("ops_other_threads"):
        grid.add_row("", f"{count('ops_other_threads'):,} from other threads, run imperatively")
    for runner, title in (("python", "PythonRunner"), ("runner", "GraphRunner")):
        executing, stalled = count(f"{runner}_exec_us"), count(f"{runner}_stall_us")
        grid.add_row(title, f"{duration(executing)} executing, {duration(stalled)} waiting")
    for region in report.get("regions", []):
        if not region["beside_ns"]:
            continue
        who = "GraphRunner's thread" if region["place"] == "beside" else "Python's thread"
        beside, inline = (f"{region[f'{place}_ns'] / 1000:.1f} us" for place in ("beside", "inline"))
        if region["line"]:
            who += f" in the loop from {escape(region['line'])}"
        grid.add_row("kernels", f"on {who}: {beside} an operator beside Python, {inline} on its thread")
    grid.add_row("overlap", f"{duration(count('overlap_us'))} in which both executed")
    grid.add_row(
        "TraceGraph",
        f"{count('tracegraph_nodes'):,} nodes, {_plural(count('paths'), 'path')}, "
        f"{_plural(count('symbolic_blocks'), 'block')}, {count('blocks_sent'):,} sent "
        f"(median {count('median_block_ops')} operators)",
    )
    devices = report.get("devices", [])
    for index, device in enumerate(devices):
        ran = f"{device['native_ops']:,} operators in {device['dispatches']:,} kernels"
        compiled, hosted = _plural(device["pipelines"], "pipeline"), device["host_ops"]
        which = "device" if len(devices) == 1 else f"tandem:{index}"
        grid.add_row(which, f"{escape(device['name'])}: {ran} ({compiled}), {hosted:,} on the host")
        most, cached = size(device["memory_live_peak"]), size(device["memory_peak"])
        grid.add_row(f"{which} memory", f"{most} at most, {cached} with caches")
    grid.add_row("memory", f"{size(count('memory_peak'))} at most")
    return grid


def _tables(report: dict[str, Any]) -> Iterable[tuple[str, Table]]:
    divergences = report.get("divergences", [])
    if divergences:
        yield f"divergences: {_total(divergences)}", _divergences(divergences)
    fetches = report.get("fetches", [])
    if fetches:
        # A source line may contain several fetches.
        lines: dict[str, list[float]] = {}
        for fetch in fetches:
            total = lines.setdefault(_line(fetch), [0, 0])
            total[0] += fetch.get("count", 0)
            total[1] += fetch.get("wait_us", 0)
        rows = [
            (times, line, duration(waited), duration(waited / max(times, 1)))
            for line, (times, waited) in sorted(lines.items(), key=lambda item: (-item[1][1], -item[1][0]))
        ]
        yield f"fetches: {_total(fetches)}", _table(("times", "line", "waited", "each"), rows)
    feeds = sorted(report.get("feeds", []), key=lambda f: -f.get("bytes", 0))
    if feeds:
        rows = [
            (f.get("count"), _line(f), f.get("op"), f.get("kind"), size(f.get("bytes", 0))) for f in feeds
        ]
        columns = ("times", "line", "operator", "what was fed", "size")
        yield f"feeds: {_total(feeds)}", _table(columns, rows)
    kernels = report.get("kernels", [])
    if kernels and report.get("machine"):
        yield f"kernels: {_total(kernels)} runs", _kernels(kernels, report["machine"])
    host = sorted(report.get("host_ops", {}).items(), key=lambda item: -item[1])
    if host:
        rows = [(times, name) for name, times in host]
        yield f"operators without a native kernel: {len(host)}", _table(("times", "operator"), rows)


def _divergences(entries: list[dict[str, Any]]) -> Table:
    """Return a table of divergences, sorted by cost or, if costs are not known, by count."""
    if not any("cost_us" in d for d in entries):
        entries = sorted(entries, key=lambda d: -d.get("count", 0))
        rows = [(d.get("count"), _line(d), d.get("op"), d.get("reason")) for d in entries]
        return _table(("times", "line", "operator", "what differed"), rows)
    entries = sorted(entries, key=lambda d: (-d.get("cost_us", 0), -d.get("count", 0)))
    rows = []
    for d in entries:
        # The table has many columns, so names are shortened.
        where, op, expected, got = (
            _line(d).rpartition(" in ")[0],
            *(str(d.get(name) or "").removeprefix("aten::") for name in ("op", "expected", "got")),
        )
        expected = expected or ("" if got else d.get("reason", ""))
        cost = duration(d.get("cost_us", 0))
        rows.append((d.get("count"), where or _line(d), op, d.get("what", ""), expected, got, cost))
    return _table(("times", "line", "operator", "what", "expected", "got", "cost"), rows)


def _kernels(entries: list[dict[str, Any]], machine: dict[str, float]) -> Table:
    """Return a table of kernels with their time and their share of the machine's peak rates."""
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


def _total(entries: list[dict[str, Any]]) -> str:
    return f"{sum(entry.get('count', 0) for entry in entries):,}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
