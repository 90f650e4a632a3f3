"""`tandem compare`: a script in eager PyTorch and on Tandem, in two processes that run in turn."""

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from torch_tandem._command.compared import PAGE, PROFILE, RECORD
from torch_tandem._report.findings import Compared

WARM_UP = 20
"""Number of iterations before the first measured block."""
BLOCK_SECONDS = 0.25
"""Approximate time of a block of eager iterations, in seconds."""
BLOCKS = 20
"""Maximum number of measured blocks of each side."""
FEWEST = 10
"""Minimum value of the option --steps."""
UNSTABLE = 1.5
"""Ratio between the upper and the lower quartile above which a note warns that the ratios vary widely."""
FAR = 1e-4
"""Relative difference of the first unequal losses that rounding cannot explain."""
PROFILED = 10
"""Number of iterations after the measured ones that are profiled by operator."""
LOSS = 0.05
"""Share of an iteration's time that operators must lose to eager for PyTorch's kernels to be tried."""
TRIED = 8
"""Maximum number of measured blocks with PyTorch's kernels."""
GAIN = 1.03
"""Lower quartile of the ratios from which PyTorch's kernels are recommended."""
RECORDED = 60
"""Maximum number of iterations that the page shows."""
_ROWS = 8
_SHOWN_LOSSES = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


class Failed(Exception):
    """A side of the comparison cannot run the script."""


@dataclass
class Process:
    """A process that runs the script on one side."""

    name: str
    command: list[str]
    iterations: int = 0
    losses: list[float] = field(default_factory=list)
    per_step: list[float] = field(default_factory=list)
    """Mean time of an iteration in each measured block, in seconds."""
    resident: int = 0
    asked: dict[str, str] = field(default_factory=dict)
    """Answers to the script's queries for accelerators, by query and line."""
    operators: dict[str, list[float]] = field(default_factory=dict)
    ended: bool = False
    has_recorded: bool = False

    def start(self, side: str, **variables: str) -> None:
        """Start the process, with these environment variables, up to the end of the first iteration."""
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        path = os.path.join(os.path.dirname(__file__), "compared.py")
        env = os.environ | variables | {"KINETO_LOG_LEVEL": "99"}  # PyTorch's profiler logs to stderr
        if side == "eager":  # PyTorch must not load Tandem by itself
            env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        command = [sys.executable, path, side, str(requests), str(answers), *self.command]
        self._process = subprocess.Popen(command, pass_fds=(requests, answers), env=env)
        os.close(requests), os.close(answers)
        self._lines = os.fdopen(self._answers)
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the end of a block, keep its losses and return the process's answer."""
        line = self._lines.readline()
        if not line:
            raise Failed(f"{self.name}: the script ended with status {self._process.wait()}")
        block = json.loads(line)
        self.iterations += block["steps"]
        self.losses += block["losses"]
        self.resident = max(self.resident, block["resident"])
        self.asked |= block["asked"]
        self.ended = block["last"]
        return block

    def run(self, steps: int, *options: str) -> dict[str, Any]:
        """Run a block of iterations."""
        os.write(self._requests, f"{steps} {' '.join(options)}\n".encode())
        self.has_recorded |= RECORD in options
        return self.answer()

    def write_page(self, path: str, compared: Compared | None) -> None:
        """Let the process write the page of the block that it has recorded."""
        page = quote(json.dumps({"path": path, "compared": compared and asdict(compared)}))
        os.write(self._requests, f"0 {PAGE}{page}\n".encode())
        if not self._lines.readline():
            raise Failed(f"{self.name}: the page cannot be written to {path}")

    def stop(self) -> None:
        """End the process, even if the script is still running."""
        self._process.kill()
        self._process.wait()


def compare(command: list[str], steps: int, page: str | None = None) -> int:
    """Compare both sides of `command` (a kind, a name, and arguments) in about `steps` iterations.

    `page` is the path of the page that explains the speed on Tandem, or None.
    """
    sides = eager, tandem = Process("eager", command), Process("Tandem", command)
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    try:
        for side, name in zip(sides, ("eager", "tandem"), strict=True):
            side.start(name)
        measure(eager, tandem, steps, records=page is not None)
        advice = kernels_advice(eager, tandem, steps)
        if page is not None and tandem.has_recorded:
            tandem.write_page(page, beside_eager(eager, tandem))
    except Failed as failure:
        console.print(f"tandem: {failure}", style="bold")
        return 1
    finally:
        for side in sides:
            if hasattr(side, "_process"):
                side.stop()
    console.print(speed(eager, tandem, steps))
    for note in (spread(eager, tandem), branches(eager, tandem)):
        if note:
            console.print(f"\n{note}", style="bold")
    if advice:
        console.print(f"\n{advice}", style="bold")
    for title, table in (losses(eager.losses, tandem.losses), operators(eager, tandem)):
        console.print(f"\n{title}")
        if table is not None:
            console.print(table)
    if page is not None and not tandem.has_recorded:
        console.print(f"\ntandem: {page} was not written, because the script made too few iterations")
        return 1
    return 0


def measure(eager: Process, tandem: Process, steps: int, records: bool = False) -> None:
    """Run both sides in turn: the warm-up, the measured blocks, and a profiled block.

    `records`: also blocks before and after the measured ones that are recorded for the page. It shows the
    later one, which is longer, unless the script ends before.
    """
    sides = (eager, tandem)
    answers = [side.run(_warm_up(steps)) for side in sides if not side.ended]
    if not answers:
        return
    each = answers[0]["seconds"] / max(1, answers[0]["steps"])
    longest = max(1, round(BLOCK_SECONDS / max(1e-9, each)))
    done = 1 + _warm_up(steps)
    if records:
        done += record(sides, done)
    for _ in range(BLOCKS):
        block = min(longest, _block(done))
        if done + block > steps or eager.ended or tandem.ended:
            break
        for side in sides:
            answer = side.run(block)
            if not answer["last"]:
                side.per_step.append(answer["seconds"] / answer["steps"])
        done += block
    if records:
        record(sides, done)
    for side in sides:
        if not eager.ended and not tandem.ended:
            side.operators = side.run(PROFILED, PROFILE)["operators"]


def record(sides: tuple[Process, Process], done: int) -> int:
    """Record a block of each side after `done` iterations, and return its length."""
    if any(side.ended for side in sides):
        return 0
    block = min(RECORDED, _block(done))
    for side in sides:
        side.run(block, RECORD)
    return block


def kernels_advice(eager: Process, tandem: Process, steps: int) -> str:
    """Return a text that recommends PyTorch's kernels if Tandem is faster with them, or else an empty one.

    They are tried, in turn with Tandem's own, if operators lose time to eager.
    """
    if len(tandem.per_step) < 2 or tandem.ended or os.environ.get("TANDEM_KERNELS") == "aten":
        return ""
    each = statistics.median(tandem.per_step)
    if sum(lost for lost, *_ in slower(eager, tandem)) / PROFILED < LOSS * each:
        return ""
    other = Process("Tandem with PyTorch's kernels", tandem.command)
    try:
        other.start("tandem", TANDEM_KERNELS="aten")
        other.run(_warm_up(steps))
        found = []
        for _ in range(TRIED):
            block = max(1, min(round(BLOCK_SECONDS / each), _block(other.iterations)))
            answers = [side.run(block) for side in (tandem, other) if not tandem.ended and not other.ended]
            if len(answers) < 2 or answers[1]["last"]:
                break
            found.append([answer["seconds"] / answer["steps"] for answer in answers])
    except Failed:
        return ""
    finally:
        if hasattr(other, "_process"):  # it has been started
            other.stop()
    low, middle, _ = quartiles([own / pytorchs for own, pytorchs in found] or [1.0])
    if len(found) < 2 or low < GAIN:
        return ""
    return (
        f"With PyTorch's kernels (TANDEM_KERNELS=aten) Tandem is {middle:.2f} times as fast as with its own, "
        f"in the median of {len(found)} pairs of blocks."
    )


def _warm_up(steps: int) -> int:
    return min(WARM_UP, max(1, steps // 3))


def _block(done: int) -> int:
    """Return the maximum length of a block after `done` iterations.

    It is a share of `done`, because the script may end at any time.
    """
    return max(1, done // 4)


def needed(steps: int, records: bool = False) -> int:
    """Return a number of iterations that is enough for the warm-up and two blocks.

    `records`: and for one that is recorded.
    """
    done = 1 + _warm_up(steps)
    if records:
        done += _block(done)
    done += _block(done)
    return done + _block(done)


def too_few(eager: Process, steps: int) -> str:
    """Return a text that says why nothing was measured, and how to change that."""
    seen = eager.iterations
    if seen == 0 and eager.losses:
        return (
            f"No iteration was seen, but {len(eager.losses)} backward passes: the script updates its "
            "parameters by itself, and an iteration ends with optimizer.step(). Let an optimizer of "
            "torch.optim make the update to compare the script."
        )
    if seen == 0:
        return (
            "No iteration was seen: one ends with optimizer.step() or, without an optimizer, with a call of "
            "a model under torch.no_grad()."
        )
    records = eager.has_recorded
    fewest = next((n for n in range(FEWEST, steps) if needed(n, records) <= seen), None)
    remedy = f", or use --steps {min(seen, steps) if seen >= FEWEST else FEWEST}" if fewest else ""
    return (
        f"Too few iterations: the script made {seen}, and {needed(steps, records)} are enough, "
        f"{_warm_up(steps)} of them to warm up. Let it make more{remedy}."
    )


def ratios(eager: Process, tandem: Process) -> list[float]:
    """Return the time of each of eager's blocks, as a multiple of the time of Tandem's block."""
    return [a / b for a, b in zip(eager.per_step, tandem.per_step, strict=False)]


def beside_eager(eager: Process, tandem: Process) -> Compared | None:
    """Return the medians of the measured blocks, or None if there were too few."""
    found = ratios(eager, tandem)
    if len(found) < 2:
        return None
    times = (1e6 * statistics.median(side.per_step) for side in (eager, tandem))
    return Compared(*times, ratio=statistics.median(found), pairs=len(found))


def spread(eager: Process, tandem: Process) -> str:
    """Return a note if the ratios vary so much that their median means little, or else an empty text."""
    low, _, high = quartiles(ratios(eager, tandem) or [1.0])
    if high < UNSTABLE * low:
        return ""
    return (
        f"The ratios vary widely ({low:.2f} to {high:.2f}), so their median is rough: other programs may use "
        "the machine, or iterations differ. Compare again, or with more iterations (--steps)."
    )


def speed(eager: Process, tandem: Process, steps: int) -> Table | str:
    """Return the table of times and memory."""
    found = ratios(eager, tandem)
    if len(found) < 2:
        return too_few(eager, steps)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "ms a step", "quartiles", "resident memory"):
        table.add_column(column, justify="left" if not column else "right")
    for side in (eager, tandem):
        low, middle, high = (1e3 * t for t in quartiles(side.per_step))
        memory = f"{side.resident / 2**20:.0f} MiB"
        table.add_row(side.name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", memory)
    low, middle, high = quartiles(found)
    table.add_row("eager / Tandem, by pairs of blocks", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", "")
    return table


def quartiles(values: list[float]) -> list[float]:
    """Return the three quartiles. For a single value, each of them is this value."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def branches(eager: Process, tandem: Process) -> str:
    """Return a note if the losses suggest that the sides took other branches, or else an empty text."""
    first = first_difference(eager.losses, tandem.losses)
    if first is None or apart(eager.losses[first], tandem.losses[first]) < FAR:
        return ""
    for query, answer in eager.asked.items():
        ours = tandem.asked.get(query, answer)
        if ours != answer:
            return (
                f"The two sides may not run the same program: {query} is {answer} in eager and {ours} on "
                "Tandem. Compare a script that shuffles, pins memory and starts workers alike on both."
            )
    return ""


def first_difference(eager: list[float], tandem: list[float]) -> int | None:
    """Return the index of the first pair of unequal losses. Two NaNs are equal."""
    pairs = zip(eager, tandem, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b and not (a != a and b != b)), None)


def apart(eager: float, tandem: float) -> float:
    """Return the difference of two losses relative to the loss in eager."""
    return abs(eager - tandem) / max(abs(eager), 1e-12)


def losses(eager: list[float], tandem: list[float]) -> tuple[str, Table | None]:
    """Return a title with the first difference, and a table of the losses of both sides."""
    pairs = list(zip(eager, tandem, strict=False))
    if not pairs:
        return "losses: none, because the script computes no gradients", None
    first = first_difference(eager, tandem)
    if first is None:
        title = f"losses: the same bits in {len(pairs)} backward passes"
    else:
        share = f"{apart(*pairs[first]):.0e} of the value"
        title = f"losses: first different in backward pass {first + 1}, by {share}"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("pass", "eager", "Tandem", "difference"):
        table.add_column(column, justify="right")
    shown = {*_SHOWN_LOSSES, len(pairs)} | ({first + 1} if first is not None else set())
    for number in sorted(n for n in shown if n <= len(pairs)):
        a, b = pairs[number - 1]
        difference = apart(a, b) if math.isfinite(a) and math.isfinite(b) else 0.0
        table.add_row(str(number), f"{a:.6g}", f"{b:.6g}", f"{difference:.0e}" if difference else "")
    return title, table


def slower(eager: Process, tandem: Process) -> list[tuple[float, str, float, float, float]]:
    """Return the operators that take more time on Tandem than in eager, the largest loss first.

    Each is the loss in seconds, the name, the number of calls, and the times in eager and on Tandem.
    """
    # The time of a fused kernel is divided among its operators in proportion to the operators' times in
    # eager.
    before = {name: seconds / count for name, (seconds, count) in eager.operators.items() if count}
    after: dict[str, float] = {}
    for names, (seconds, _) in tandem.operators.items():
        ops = [name.partition(".")[0] for name in names.split()]
        weights = [before.get(op, 1e-6) for op in ops]
        for op, weight in zip(ops, weights, strict=True):
            after[op] = after.get(op, 0.0) + seconds * weight / sum(weights)
    lost = []
    for op, seconds in after.items():
        spent, calls = eager.operators.get(op, [0.0, 0])
        if calls and seconds > spent:
            lost.append((seconds - spent, op, calls, spent, seconds))
    return sorted(lost, reverse=True)


def operators(eager: Process, tandem: Process) -> tuple[str, Table | None]:
    """Return a table of the operators that take more time on Tandem than in eager, the largest loss first."""
    if not eager.operators or not tandem.operators:
        return "operators: not measured, because the script ended before they could be (more --steps)", None
    lost = slower(eager, tandem)
    if not lost:
        return "operators: none takes more time on Tandem than in eager", None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("operator", "calls", "eager, us", "Tandem, us"):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for _, op, calls, spent, seconds in lost[:_ROWS]:
        row = (f"{1e6 * t / PROFILED:.1f}" for t in (spent, seconds))
        table.add_row(op, f"{calls / PROFILED:.4g}", *row)
    return "operators that take more time on Tandem, a step, with the cost of measuring them", table
