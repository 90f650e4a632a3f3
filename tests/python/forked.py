"""Runs programs in processes that are forked from a process that has imported large packages."""

import atexit
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ["torch", "torchvision", "torchmetrics.functional", "scipy.stats", "sklearn.metrics", "datasets"]
"""Packages that many programs import. Tandem does not treat them specially when a program imports them."""


def run(
    arguments: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 280
) -> subprocess.CompletedProcess:
    """Run the interpreter with arguments: a path, `-m module` or `-c code`, followed by the program's own
    arguments.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        given = list(arguments), dict(env or os.environ), str(cwd or os.getcwd()), files
        process = context.Process(target=_run, args=given)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
        out, err = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _run(arguments: list[str], env: dict[str, str], cwd: str, files: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # Unlike tests, programs must not find tests and their helpers.
    sys.path[:] = [entry for entry in sys.path if entry not in (str(HERE), str(HERE.parents[1]))]
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(n, "wb", 0), write_through=True) for n in (1, 2))
    status = 1
    try:
        _interpret(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)


def _interpret(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")
