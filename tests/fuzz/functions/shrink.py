"""Shrinks a failing program, with a process that checks one candidate after another."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection, wait

from tests.fuzz import workers
from tests.fuzz.functions import tally
from tests.fuzz.functions.generate import Program


def _serve(connection: Connection, settings: workers.Settings) -> None:
    check = workers.checker(settings)
    tally.stop()
    while source := connection.recv():
        connection.send(check(source, settings.modes))


class Process:
    """A process that checks programs, and is started anew after a program has ended it."""

    def __init__(self, settings: workers.Settings):
        self.settings = settings
        self.process = None

    def check(self, source: str) -> str | None:
        if self.process is None:
            self.connection, far = workers.context.Pipe()
            self.process = workers.context.Process(target=_serve, args=(far, self.settings), daemon=True)
            self.process.start()
            far.close()
        self.connection.send(source)
        try:
            if not wait([self.connection], timeout=workers.SECONDS):
                self.close()
                return "hang: no answer"
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            self.process = None
            return f"crash: exit code {code}"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def shrink(program: Program, result: str, process: Process, seconds: float) -> tuple[Program, str]:
    """Returns a smaller program with a finding of the same sort, and the smaller program's finding."""
    deadline = time.monotonic() + seconds
    sort = result.split(":")[0]
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in program.smaller():
            if time.monotonic() > deadline:
                break
            try:
                source = candidate.source()
                compile(source, "<program>", "exec")
            except (SyntaxError, IndexError, KeyError):
                continue
            found = process.check(source)
            if found is not None and found.split(":")[0] == sort:
                program, result, progress = candidate, found, True
                break
    return program, result
