"""The report as a page: one HTML file that loads no other files.

This module assembles the page from the text, style and scripts in its folder, and embeds the data as JSON.
The scripts only make text nodes from the data, so markup in the names of paths and operators has no effect.
"""

import json
import os
import sys
import time
from importlib.resources import files
from typing import Any

from torch_tandem._report import findings
from torch_tandem._report.types import Graphs, Report, Timeline

# The scripts in order: a script uses definitions of earlier scripts.
_SCRIPTS = ("basics", "tables", "zoom", "timeline", "model", "layout", "picture", "explorer", "main")
_MOST_EVENTS = 20_000  # number of events of the timeline on the page, the newest ones; the trace file has all
_MOST_SOURCES = 5_000  # maximum number of source lines whose text is on the page


def html(
    report: Report, timeline: Timeline, graphs: Graphs, compared: findings.Compared | None = None
) -> str:
    """Return the page's HTML. `compared` is the speed beside eager's, if it was measured."""
    data = {
        "about": _about(),
        **findings.as_data(report, compared),
        "report": report,
        "timeline": _newest(timeline),
        "graph": _packed(graphs),
        "sources": _sources(report, graphs),
    }
    parts = {
        "title": _escaped(f"Tandem: {data['about']['title']}"),
        "style": _file("style.css"),
        "data": _as_script(data),
        "script": "\n".join(_file(f"{name}.js") for name in _SCRIPTS),
    }
    text = _file("page.html")
    for name, part in parts.items():
        before, mark, after = text.partition("{{" + name + "}}")
        assert mark, name
        text = before + part + after
    return text


def write(
    path: str,
    report: Report,
    timeline: Timeline,
    graphs: Graphs,
    compared: findings.Compared | None = None,
) -> None:
    """Write the page to a file."""
    text = html(report, timeline, graphs, compared)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _file(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return _printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("{", "&#123;")


def _as_script(data: Any) -> str:
    """Return JSON for a script element, with the characters escaped that are special in HTML."""
    text = json.dumps(data, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, such as undecodable bytes of paths."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _about() -> dict[str, Any]:
    import torch

    import torch_tandem

    main = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "a program"
    return {
        "title": os.path.basename(main),
        "command": " ".join(sys.argv),
        "directory": os.getcwd(),
        "roots": findings.roots(),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "tandem": torch_tandem.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def _newest(timeline: Timeline) -> Timeline:
    """Return the newest events of the timeline, so that the page stays small."""
    tracks = (timeline["python"], timeline["runs"], timeline["steps"])
    return {
        "python": timeline["python"][-_MOST_EVENTS:],
        "runs": timeline["runs"][-_MOST_EVENTS:],
        "steps": timeline["steps"][-_MOST_EVENTS:],
        "dropped": timeline["dropped"] + sum(max(len(track) - _MOST_EVENTS, 0) for track in tracks),
    }


class _Table:
    """Distinct values, numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


def _packed(graphs: Graphs) -> dict[str, Any]:
    """Return the graphs with strings and stacks in tables, because most nodes have these in common."""
    strings, stacks = _Table(), _Table()
    nodes = []
    for node in graphs["nodes"]:
        flags = node["backward"] + 2 * node["fetched"] + 4 * node["ends"] + 8 * node["dynamic"]
        nodes.append(
            [
                node["id"],
                strings(node["op"]),
                strings(node["line"]),
                stacks(tuple(strings(frame) for frame in node["stack"])),
                flags,
                node["variants"],
                [strings(shape) for shape in node["out"]],
                node["inputs"],
                node["exec_us"],
                strings(node["module"]),
            ]
        )
    return {**graphs, "strings": strings.values(), "stacks": stacks.values(), "nodes": nodes}


def _sources(report: Report, graphs: Graphs) -> dict[str, str]:
    """Return the text of each source line that the page names."""
    entries = (*report["divergences"], *report["fetches"], *report["feeds"], *graphs["nodes"])
    lines = {entry["line"] for entry in entries}
    lines.update(line for kernel in report["kernels"] for line in kernel["lines"])
    texts = ((line, findings.source(line)) for line in sorted(lines)[:_MOST_SOURCES])
    return {line: text for line, text in texts if text}
