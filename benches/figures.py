"""The figures of README.md and docs/benchmarks.md, which are kept in results/programs.json.

`run.py --record RUN` replaces the figures of a run, and `pendulum.py` those of the demo. `figures.py` writes
the pages' sections again, and with `--check` fails if they differ from the figures.
"""

import argparse
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measure import ROOT
from tables import PAGE, milliseconds, table, with_section

RESULTS = ROOT / "benches" / "results" / "programs.json"
README = ROOT / "README.md"
WAYS = ("eager", "torch.compile", "tandem")
PAPERS = "bert_cls bert_qa dcgan dropblock faster_rcnn gpt2 music_transformer resnet50 sdpoint yolov3"
RUNS: dict[str, Callable[[str], bool]] = {
    "suite": lambda name: not name.endswith("_function"),
    "functions": lambda name: name.endswith("_function"),
    "paper": PAPERS.split().__contains__,
}
"""The runs whose figures are kept, and their programs: all without torch.compile, those whose step is a
function, and those of Terra's paper with torch.compile.
"""

CONVOLUTIONS = (
    "convnext dcgan diffusion diffusion_sampling digits dropblock faster_rcnn resnet50 sdpoint unet vae "
    "yolov3"
)
TRANSFORMERS = "bert_cls bert_qa gpt2 hf_trainer llama_generate lora music_transformer t5 vit whisper"

KEPT = ("first", "ten", "captured", "coexecuted", "block_ops", "agreement")

Records = Mapping[str, dict[str, Any]]


def programs(run: str, names: list[str]) -> list[str]:
    """The programs of a run."""
    return [name for name in names if RUNS[run](name)]


def record(result: dict) -> dict:
    """Summarize the measurement of a program: times in milliseconds, of the first steps in seconds."""
    record: dict[str, Any] = {}
    for way in WAYS:
        side = result["sides"].get(way, {})
        kept = {key: side[key] for key in KEPT if key in side}
        kept |= {key: quartiles(side[key]) for key in ("wall", "busy") if key in side}
        if kept:
            record[way] = kept
    texts = {way: side.get("failure") or side.get("warning") for way, side in result["sides"].items()}
    record["failures"] = {way: text for way, text in texts.items() if text}
    for way in WAYS[:2]:
        walls = [result["sides"].get(side, {}).get("wall") for side in (way, "tandem")]
        if all(walls):
            record[f"{way} / tandem"] = statistics.median(a / b for a, b in zip(*walls, strict=True))
    return _rounded(record)


def quartiles(seconds: list[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile, in milliseconds."""
    return [figure * 1e3 for figure in statistics.quantiles(seconds, n=4)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def keep(run: str, machine: str, records: Records) -> None:
    """Replace the figures of a run, and write the pages."""
    runs = json.loads(RESULTS.read_text())
    runs[run] = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "programs": records}
    RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    write()


# --- Tables -------------------------------------------------------------------------------------------------


def tables(records: Records) -> str:
    """Return all figures of a run as Markdown tables."""
    steps, starts, phases, failures = [], [], [], []
    for name, figures in records.items():
        three = [figures.get(way, {}) for way in WAYS]
        compiled, tandem = three[1:]
        ratios = [_ratio(figures, way) for way in WAYS[:2]]
        steps.append([name, *map(_wall, three), *ratios, _busy(tandem)])
        keys = ("first", "ten")
        starts.append([name, *(f"{side[key]:.3g}" if key in side else "" for key in keys for side in three)])
        shares = [f"{tandem[key]:.1%}" if key in tandem else "" for key in ("captured", "coexecuted")]
        losses = [side.get("agreement", "") for side in (tandem, compiled)]
        phases.append([name, *shares, str(tandem.get("block_ops", "")), *losses])
        failures += [f"- {name}, {way}: {text}" for way, text in figures.get("failures", {}).items()]
    ways = ["eager", "torch.compile", "Tandem"]
    parts = [
        "A step, in milliseconds:",
        table(["program", *ways, "eager / Tandem", "torch.compile / Tandem", "PythonRunner busy"], steps),
        "The first step, and the first ten together, in seconds:",
        table(["program", *(f"{count}, {way}" for count in ("first", "ten") for way in ways)], starts),
        "The share of operators that Tandem captured, the share of them that it co-executed after the tenth "
        "iteration, operators a block, and how near the first losses are to eager's:",
        table(["program", "captured", "co-executed", "block", "Tandem", "torch.compile"], phases),
    ]
    if failures:
        parts += ["What could not be measured, and what is wrong:", "\n".join(failures)]
    return "\n\n".join(parts)


def _wall(side: dict) -> str:
    return milliseconds(*side["wall"]) if "wall" in side else ""


def _busy(tandem: dict) -> str:
    return milliseconds(*tandem["busy"]) if "busy" in tandem else ""


def _ratio(figures: dict, way: str) -> str:
    return f"{figures[f'{way} / tandem']:.2f}" if f"{way} / tandem" in figures else ""


def mean(records: Records, names: list[str] | None = None, way: str = "eager") -> str:
    """The geometric mean of the ratios to Tandem's time."""
    chosen = [figures for name, figures in records.items() if names is None or name in names]
    ratios = [figures[f"{way} / tandem"] for figures in chosen if f"{way} / tandem" in figures]
    return f"{statistics.geometric_mean(ratios):.2f}"


def slower(records: Records) -> str:
    """The programs that are slower than eager, slowest first."""
    found = {name: figures.get("eager / tandem", 1.0) for name, figures in records.items()}
    names = sorted((name for name in found if round(found[name], 2) < 1), key=lambda name: found[name])
    return ", ".join(f"`{name}` {found[name]:.2f}" for name in names) or "none"


# --- Sections of pages --------------------------------------------------------------------------------------


def summary(run: dict) -> str:
    """The suite's figures in words."""
    programs = run["programs"]
    convolutions, transformers = CONVOLUTIONS.split(), TRANSFORMERS.split()
    rest = [name for name in programs if name not in convolutions + transformers]
    return (
        f"The geometric means of eager's time to Tandem's are {mean(programs)} for all {len(programs)} "
        f"programs, {mean(programs, convolutions)} for those with convolutions, "
        f"{mean(programs, transformers)} for transformers and {mean(programs, rest)} for the others. Slower "
        f"than eager: {slower(programs)}."
    )


def functions(run: dict) -> str:
    """The programs whose step is a function."""
    head = ["program", "eager", "Tandem", "eager / Tandem", "PythonRunner busy"]
    rows = []
    for name, found in run["programs"].items():
        walls = [_wall(found[way]) for way in ("eager", "tandem")]
        rows.append([name, *walls, _ratio(found, "eager"), _busy(found["tandem"])])
    text = f"{_measured(run)} The geometric mean of the ratios is {mean(run['programs'])}:"
    return "\n\n".join([text, table(head, rows)])


def paper(run: dict) -> str:
    """The programs of the paper, with torch.compile."""
    head = ["program", "eager", "torch.compile", "Tandem", "eager / Tandem", "torch.compile / Tandem"]
    head += ["ten steps, torch.compile", "ten, Tandem"]
    rows = [
        [
            name,
            *(_wall(found[way]) for way in WAYS),
            *(_ratio(found, way) for way in WAYS[:2]),
            *(f"{found[way]['ten']:.3g} s" for way in WAYS[1:]),
        ]
        for name, found in run["programs"].items()
    ]
    mean_ratio = mean(run["programs"], way="torch.compile")
    return (
        f"{_measured(run)} The geometric mean of the ratios of torch.compile's time to Tandem's is "
        f"{mean_ratio}:\n\n{table(head, rows)}"
    )


def _measured(run: dict) -> str:
    return f"Measured on {run['date']}. {run['machine']}".rstrip()


def first_figures(runs: dict) -> str:
    """README's figures."""
    suite, paper = (runs[name]["programs"] for name in ("suite", "paper"))
    names = sorted(paper, key=lambda name: -suite[name]["eager / tandem"])
    head = ["program", "eager", "Tandem", "eager / Tandem", "ten steps, eager", "ten steps, Tandem"]
    rows = [
        [
            name,
            *(f"{suite[name][way]['wall'][1]:.1f}" for way in ("eager", "tandem")),
            _ratio(suite[name], "eager"),
            *(f"{suite[name][way]['ten']:.3g} s" for way in ("eager", "tandem")),
        ]
        for name in names
    ]
    tens = [[found[way]["ten"] for found in paper.values()] for way in WAYS[1:]]
    spans = [f"{min(ten):.2g} to {max(ten):.2g} s" for ten in tens]
    return (
        "One training step on the CPU, in milliseconds (2 cores, medians), and ten steps from the start:\n\n"
        f"{table(head, rows)}\n\n"
        f"These are programs of the paper. In a run beside torch.compile, their steps take it "
        f"{mean(paper, way='torch.compile')} times as long as Tandem in the geometric mean, and ten steps "
        f"from the start take it {spans[0]}, Tandem {spans[1]}. Of all {len(suite)} programs, whose "
        f"geometric mean is {mean(suite)}, these are slower than eager: {slower(suite)}. With their step as "
        f"a function, programs are {mean(runs['functions']['programs'])} times as fast as eager in this mean."
    )


def demo(run: dict) -> str:
    """README's sentence about the program with which `make demo` ends."""
    seconds = run["programs"]["pendulum"]
    eager, tandem, function = (f"{seconds[way]:.1f} s" for way in ("eager", "tandem", "function"))
    return (
        f"`make demo` ends with a small network in which Python sets the pace: its training takes {eager} in "
        f"eager, {tandem} on Tandem, and {function} with its step as a function (2 cores, one thread), with "
        "equal losses. A page, `target/demo.html`, says why."
    )


def pages() -> dict[Path, str]:
    """The pages with their sections as the figures say."""
    runs = json.loads(RESULTS.read_text())
    suite = runs["suite"]
    sections = {
        "run.py, in words": summary(suite),
        "run.py": f"{_measured(suite)}\n\n{tables(suite['programs'])}",
        "run.py --record functions": functions(runs["functions"]),
        "run.py --record paper": paper(runs["paper"]),
    }
    page = PAGE.read_text()
    for name, text in sections.items():
        page = with_section(page, name, _filled(text))
    readme = with_section(README.read_text(), "pendulum.py", _filled(demo(runs["demo"])))
    return {PAGE: page, README: with_section(readme, "figures.py", _filled(first_figures(runs)))}


def _filled(text: str) -> str:
    """Break the lines of paragraphs, but not those of tables and lists."""
    parts = text.split("\n\n")
    return "\n\n".join(part if part[0] in "|-" else textwrap.fill(part, 120) for part in parts)


def write() -> None:
    for path, text in pages().items():
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare the pages with the figures")
    if not parser.parse_args().check:
        write()
        return 0
    differing = [path.name for path, text in pages().items() if path.read_text() != text]
    print(
        *(f"{name} differs from {RESULTS.name}: run python benches/figures.py" for name in differing),
        sep="\n",
    )
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
