"""Runs programs in processes that are forked from a process that has imported large packages.

At its end, such a process waits for threads, calls exit handlers and deletes the objects of the program, as
the interpreter does. It does not delete those of the packages, which takes as long as importing them.
"""

import atexit
import gc
import importlib.machinery
import io
import multiprocessing
import multiprocessing.process
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ["torch", "torchvision", "torchmetrics.functional", "scipy.stats", "sklearn.metrics", "datasets"]
"""Packages that many programs import. Tandem does not treat them specially when a program imports them."""


def run(
    arguments: Sequence[str | Path],
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 280,
) -> subprocess.CompletedProcess:
    """Run the interpreter with arguments: a path, `-m module` or `-c code`, followed by the program's own
    arguments.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        environment = dict(os.environ if env is None else env)
        given = [str(argument) for argument in arguments], environment, str(cwd or os.getcwd()), files
        process = context.Process(target=_run, args=given)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        out, err = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _run(arguments: list[str], env: dict[str, str], cwd: str, files: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # Unlike tests, programs must not find tests and their helpers.
    sys.path[:] = [entry for entry in sys.path if entry not in (str(HERE), str(HERE.parents[1]))]
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), errors="backslashreplace", line_buffering=True
    )
    process = multiprocessing.current_process()
    process.name, process._identity = "MainProcess", ()
    multiprocessing.process._parent_process = None
    gc.freeze()  # The collector of garbage would read, and so copy, all objects of the packages.
    status = 0
    try:
        _interpret(arguments)
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException as error:
        within = error.__traceback__
        while within and within.tb_frame.f_code.co_filename in (_run.__code__.co_filename, "<frozen runpy>"):
            within = within.tb_next
        sys.excepthook(type(error), error.with_traceback(within), within)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    sys.stdout.flush()
    os._exit(status & 0xFF)


def _interpret(arguments: list[str]) -> None:
    first, *rest = arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    if first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(module)
        return
    if first == "-c":
        code, *rest = rest
        sys.argv, name = ["-c", *rest], "<string>"
        sys.path.insert(0, "")
    else:
        sys.argv, name, code = arguments, first, Path(first).read_bytes()
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        main.__file__, main.__cached__ = first, None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", first)
    exec(compile(code, name, "exec"), main.__dict__)
