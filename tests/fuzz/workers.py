"""Processes that check programs. They are forked with PyTorch imported and Tandem not imported, so that each
starts from a fresh state.

A process that dies or hangs is a finding about the program that it ran.
"""

import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
import torch._dynamo
import torch._functorch.apis  # noqa: F401

SECONDS = 90
BATCH = 16


@dataclass(frozen=True)
class Settings:
    """How to run programs: the modes to choose from, the number of PyTorch's threads, and the module whose
    `check` runs the programs.
    """

    modes: tuple[str, ...] = ("coexec", "lazy", "coexec")
    threads: int = 1
    runner: str = "tests.fuzz.run"


context = multiprocessing.get_context("fork")


def checker(settings: Settings) -> Callable[[str, tuple[str, ...]], str | None]:
    """Prepares a process for programs, and returns the function that checks them."""
    import torch

    torch.set_num_threads(settings.threads)
    faulthandler.enable()
    # A `__del__` may raise in eager PyTorch too, so its exceptions are not shown.
    sys.unraisablehook = lambda _: None
    check = importlib.import_module(settings.runner).check
    # Excludes PyTorch's objects from later garbage collections.
    gc.collect()
    gc.freeze()
    return check


def _work(connection: Connection, sources: list[str], settings: Settings) -> None:
    check = checker(settings)
    for source in sources:
        try:
            result = check(source, settings.modes)
        except BaseException as error:
            result = "harness: " + "".join(traceback.format_exception(error)[-3:])
        connection.send(result)
        if result is not None:
            # A failure may affect later programs, so these run in another process.
            break
    connection.close()
    sys.stdout.flush()
    os._exit(0)


class Worker:
    """A process with some programs to check."""

    def __init__(self, seeds: list[int], sources: list[str], settings: Settings):
        self.seeds = seeds
        self.connection, far = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(far, sources, settings))
        self.process.start()
        far.close()
        self.done: list[tuple[int, str | None]] = []
        self.deadline = time.monotonic() + SECONDS

    def step(self) -> bool:
        """Receives a result. Returns whether more results may follow."""
        try:
            result = self.connection.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode != 0:
                self._failed(f"crash: exit code {self.process.exitcode}")
            return False
        self._add(result)
        self.deadline = time.monotonic() + SECONDS
        return True

    def expire(self) -> None:
        """Kills the process if it hangs."""
        self.process.kill()
        self.process.join()
        self._failed(f"hang: nothing for {SECONDS} s")

    def _add(self, result: str | None) -> None:
        self.done.append((self.seeds[len(self.done)], result))

    def _failed(self, result: str) -> None:
        self._add(result)
        self.seeds = self.seeds[: len(self.done)]


def check_all(
    programs: Iterable[tuple[int, str]], jobs: int, settings: Settings
) -> Iterator[tuple[int, str | None, list[int]]]:
    """Checks programs. Each result comes with the seeds of the programs that ran before it in the same
    process.
    """
    # After a freeze, collections in forked processes visit only the objects that these processes create.
    gc.collect()
    gc.freeze()
    try:
        yield from _check_all(iter(programs), jobs, settings)
    finally:
        gc.unfreeze()


def _check_all(
    programs: Iterator[tuple[int, str]], jobs: int, settings: Settings
) -> Iterator[tuple[int, str | None, list[int]]]:
    todo: list[tuple[int, str]] = []
    text: dict[int, str] = {}
    running: list[Worker] = []
    while True:
        while len(running) < jobs:
            new = list(itertools.islice(programs, max(0, BATCH - len(todo))))
            text.update(new)
            batch, todo = [*todo, *new][:BATCH], [*todo, *new][BATCH:]
            if not batch:
                break
            running.append(Worker([s for s, _ in batch], [p for _, p in batch], settings))
        if not running:
            return
        ready = wait([w.connection for w in running], timeout=1)
        for worker in list(running):
            seeds = list(worker.seeds)
            before = len(worker.done)
            alive = True
            if worker.connection in ready:
                alive = worker.step()
            elif time.monotonic() > worker.deadline:
                worker.expire()
                alive = False
            for i in range(before, len(worker.done)):
                seed, result = worker.done[i]
                yield seed, result, seeds[:i]
            if not alive:
                running.remove(worker)
                worker.connection.close()
                # Programs that the process did not reach are checked by another process.
                todo = [(seed, text[seed]) for seed in seeds[len(worker.done) :]] + todo
                for seed in seeds[: len(worker.done)]:
                    del text[seed]


def check_alone(sources: list[str], settings: Settings) -> str | None:
    """Returns the last result of programs that run one after the other in a new process."""
    worker = Worker(list(range(len(sources))), sources, settings)
    while True:
        if not wait([worker.connection], timeout=max(0.1, worker.deadline - time.monotonic())):
            worker.expire()
            break
        if not worker.step():
            break
    return worker.done[-1][1]
