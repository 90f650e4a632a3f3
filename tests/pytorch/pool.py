"""Worker processes whose crashes and hangs are recorded as the outcome of a case."""

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from .worker import EAGER

LIMIT = 240.0
"""Time limit of a case, in seconds."""

AFRESH = 400
"""Number of cases after which a worker is replaced, which bounds the worker's memory."""


class Worker:
    """A process that checks cases."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 lives as long as the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker", ",".join(groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.done = 0
        if self.line(LIMIT) != "ready":
            raise RuntimeError(f"a worker did not start: {self.last_words()}")

    def line(self, limit: float) -> str | None:
        """Returns the next answer: `None` after the time limit, and "" if the process has ended."""
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        return None if timed_out and not line else line.strip()

    def check(self, name: str) -> tuple[str, str, str, float]:
        """Returns a case's name, state, reason and seconds."""
        self.done += 1
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            line = self.line(LIMIT)
        except BrokenPipeError:
            line = ""
        if line:
            return tuple(json.loads(line))
        code = self.process.wait()
        if line is None:
            return name, "hung", f"no answer in {LIMIT:.0f} s", LIMIT
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return name, "crashed", f"{how}: {self.last_words()}", 0.0

    def last_words(self) -> str:
        """Returns the end of the worker's standard error."""
        self.errors.seek(0)
        return " ".join(self.errors.read()[-1500:].split())[-400:]

    @property
    def worn(self) -> bool:
        """Whether the worker has to be replaced."""
        return self.done >= AFRESH or self.process.poll() is not None

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def run(names: list[str], groups: tuple[str, ...], jobs: int, tell: Callable[..., None]) -> None:
    """Checks cases in several processes, and calls `tell` with the outcome of each case."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    lock = threading.Lock()

    def serve() -> None:
        worker = Worker(groups)
        try:
            while True:
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                if worker.worn:
                    worker.close()
                    worker = Worker(groups)
                outcome = worker.check(name)
                if outcome[1] == "crashed":
                    worker.close()
                    worker = Worker(groups)
                    if worker.check(EAGER + name)[1] == "crashed":
                        outcome = (name, "no case", "eager PyTorch crashes", 0.0)
                with lock:
                    tell(*outcome)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve) for _ in range(min(jobs, max(len(names), 1)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
