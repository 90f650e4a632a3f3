"""Measures a step of one program in eager PyTorch, torch.compile and Tandem, in interleaved blocks of steps.

Each way runs in a separate process that is forked after all imports. The ways therefore do not share threads
or random number generators, and all of them draw the same numbers and get the same batches. A way that
crashes, hangs or compiles for too long is recorded as failed, and the other ways continue.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("eager", "compiled model", "compiled step", "tandem")
WARM_UP = 20
"""Number of steps before the first block. The losses of these steps are compared."""
BLOCK_SECONDS = 0.25
"""Approximate time of a block of eager steps, in seconds."""
PATIENCE = 120
"""Time after which a process that does not answer counts as failed, in seconds."""


class Failed(Exception):
    """A way of running the program cannot be measured."""


class Runner:
    """Runs the program's steps in the measured process. This class uses eager PyTorch."""

    def __init__(self, program: ModuleType) -> None:
        from _main import seed

        seed()
        self.step = self.make(program)
        self.seconds: list[float] = []

    def make(self, program: ModuleType) -> Callable[[], Any]:
        return program.make("cpu")

    def wait(self) -> None:
        """Wait for all work of the device."""

    def settled(self) -> bool:
        """Whether the warm-up may end."""
        return True

    def stalled(self) -> float:
        """Return the total time that Python has waited for the device, in seconds."""
        return 0.0

    def count_pool(self) -> Callable[[], int]:
        """Return a function that returns the peak number of bytes in use in the device's pool, counted from
        now on.
        """
        return lambda: 0

    def warm_up(self) -> dict:
        """Run the first steps and return their losses and times."""
        losses = []
        while len(losses) < WARM_UP or not self.settled():
            start = time.perf_counter()
            losses.append(self.step())
            if len(losses) in (1, 10):
                self.wait()
            self.seconds.append(time.perf_counter() - start)
        return {"losses": [float(loss) for loss in losses[:WARM_UP]], "seconds": self.seconds}

    def run_block(self, steps: int) -> tuple[float, float]:
        """Run a block. Return the seconds per step, in total and without Python's waiting for the device."""
        self.wait()
        stalled, start = self.stalled(), time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()  # pending work of the device is part of the steps
        wall = time.perf_counter() - start
        return wall / steps, (wall - (self.stalled() - stalled)) / steps

    def finish(self) -> dict:
        """Return the additional results at the end of the program."""
        return {}


class CompiledModel(Runner):
    """Uses a model that the program compiles with torch.compile, whose time for compiling is limited."""

    def __init__(self, program: ModuleType) -> None:
        super().__init__(program)
        from torch._dynamo.utils import counters

        self.stats = counters["stats"]
        self.graphs, self.unchanged = 0, 0

    def make(self, program: ModuleType) -> Callable[[], Any]:
        return program.make("cpu", compile=torch.compile)

    def settled(self) -> bool:
        """Whether torch.compile compiled nothing in the latest five steps."""
        self.unchanged = self.unchanged + 1 if self.stats["unique_graphs"] == self.graphs else 0
        self.graphs = self.stats["unique_graphs"]
        return self.unchanged >= 5


class CompiledStep(CompiledModel):
    """Compiles the whole step, as far as torch.compile can."""

    def make(self, program: ModuleType) -> Callable[[], Any]:
        return torch.compile(program.make("cpu"))


class Tandem(Runner):
    """Uses Tandem, with the device alias "cuda"."""

    def make(self, program: ModuleType) -> Callable[[], Any]:
        import torch_tandem
        from torch_tandem import cuda_alias

        self.tandem = torch_tandem
        cuda_alias.install()  # as `tandem run` does, for libraries that choose the device themselves
        return program.make("cuda")

    def wait(self) -> None:
        self.tandem.synchronize()

    def stalled(self) -> float:
        report = self.tandem.report()
        return (report["python_stall_us"] + report["python_kernels_us"]) * 1e-6

    def count_pool(self) -> Callable[[], int]:
        self.tandem.reset_report()
        return lambda: self.tandem.report()["pool_peak"]

    def finish(self) -> dict:
        report = self.tandem.report()
        after = 10 if "ops_after_10" in report else 5
        sys.path.insert(0, str(ROOT / "examples"))
        from captured import Count

        # The counter asks for a report at each call. Reports take long once they have records of many
        # iterations.
        self.tandem.reset_report()
        with Count() as calls:
            self.step()
        return {
            "captured": calls.captured.total() / max(1, calls.calls.total() - calls.host.total()),
            "coexecuted": report[f"ops_coexecuted_after_{after}"] / max(1, report[f"ops_after_{after}"]),
            "block_ops": report["median_block_ops"],
        }


class Lazy(Tandem):
    """Uses Tandem's lazy mode, which runs nothing until a value is needed."""

    def make(self, program: ModuleType) -> Callable[[], Any]:
        import torch_tandem

        torch_tandem.set_mode("lazy")
        return super().make(program)


class Inline(Tandem):
    """Uses Tandem with all runs on Python's own thread."""

    place = "inline"

    def make(self, program: ModuleType) -> Callable[[], Any]:
        os.environ["TANDEM_RUNNER"] = self.place
        return super().make(program)


class Beside(Inline):
    place = "beside"


RUNNERS = dict(zip(WAYS, (Runner, CompiledModel, CompiledStep, Tandem), strict=True)) | {
    "lazy": Lazy,
    "inline": Inline,
    "beside": Beside,
}


def load(name: str) -> ModuleType:
    """Import a program of the suite."""
    sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benches.programs.{name}")


def serve(connection: Connection, program: ModuleType, way: str, compile_limit: int) -> None:
    """Run the program in this process, on requests from the connection."""
    os.setpgrp()  # so that compiler processes are killed with this one
    torch.set_num_threads(2)

    def give_up(*_: Any) -> None:
        so_far = f"{len(runner.seconds)} steps done, {runner.stats['unique_graphs']} graphs compiled"
        connection.send(Failed(f"still compiling after {compile_limit} s: {so_far}"))
        os._exit(1)

    try:
        runner = RUNNERS[way](program)
        if isinstance(runner, CompiledModel):
            signal.signal(signal.SIGALRM, give_up)
            signal.alarm(compile_limit)
        start = runner.warm_up()
        signal.alarm(0)
        connection.send(start)
        while steps := connection.recv():
            connection.send(runner.run_block(steps))
        connection.send(runner.finish())
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        connection.send(Failed(f"{type(error).__name__}: {text[:200]}"))


class Side:
    """A process that runs the program in one way, and the results of this way."""

    def __init__(self, program: ModuleType, way: str, compile_limit: int) -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, theirs = fork.Pipe()
        self.process = fork.Process(target=serve, args=(theirs, program, way, compile_limit))
        self.process.start()
        theirs.close()
        self.failure: str | None = None
        self.facts: dict = {}
        self.blocks: list[tuple[float, float]] = []

    def warm_up(self) -> None:
        """Wait until the process has run the first steps."""
        self.facts |= self.answer() or {}

    def run_block(self, steps: int) -> None:
        """Let the process run a block."""
        if self.failure is None:
            self.connection.send(steps)
            if block := self.answer():
                self.blocks.append(block)

    def finish(self) -> None:
        """Request the additional results."""
        if self.failure is None:
            self.connection.send(0)
            self.facts |= self.answer() or {}

    def answer(self) -> Any:
        """Return the process's next message, or None if the process has failed."""
        try:
            if not self.connection.poll(PATIENCE):
                raise Failed(f"no answer within {PATIENCE} s")
            answer = self.connection.recv()
            if isinstance(answer, Failed):
                raise answer
            return answer
        except EOFError:
            self.process.join()
            self.failure = f"the process died with status {self.process.exitcode}"
        except Failed as error:
            self.failure = str(error)
        self.end()  # also ends compiler processes
        return None

    def end(self) -> None:
        """Kill the process and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def result(self, blocks: int) -> dict:
        """Return plain data: the failure if the way has failed, and the figures if all blocks were run."""
        result = {} if self.failure is None else {"failure": self.failure}
        if len(self.blocks) == blocks:
            wall, busy = zip(*self.blocks, strict=True)
            seconds = self.facts.pop("seconds")
            result |= {
                "wall": wall,
                "busy": busy,
                "first": seconds[0],
                "ten": sum(seconds[:10]),
                **self.facts,
            }
        return result


def measure(name: str, ways: list[str], blocks: int, steps: int | None, compile_limit: int) -> dict:
    """Return the results of each way to run a program, and the number of steps whose losses can
    be compared.
    """
    program = load(name)
    sides: dict[str, Side] = {}
    try:
        for way in ways:
            sides[way] = Side(program, way, compile_limit)
            sides[way].warm_up()
        if steps is None:
            seconds = sides[ways[0]].facts.get("seconds", [1.0])
            steps = max(2, round(BLOCK_SECONDS / statistics.median(seconds[-10:])))
        for _ in range(blocks):
            for side in sides.values():
                side.run_block(steps)
        for side in sides.values():
            side.finish()
    finally:
        for side in sides.values():
            if side.failure is None:
                side.end()
    return {
        "program": name,
        "comparable": program.COMPARABLE,
        "sides": {way: side.result(blocks) for way, side in sides.items()},
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
