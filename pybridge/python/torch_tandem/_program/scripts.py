"""Runs an unchanged script as `__main__`, in the same environment as under `python script.py`."""

import builtins
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any

Hide = Callable[[BaseException], None]


class NotFound(Exception):
    """The error that a script or module does not exist."""


@dataclass(frozen=True)
class Script:
    """The script to run: a file, standard input, or a module that `runpy` finds."""

    path: str  # value for __file__
    argument: str  # value for sys.argv[0]
    first_path: str | None  # value for sys.path[0]; None if the interpreter adds none
    data: bytes | None  # the source, which can be read only once if it comes from a pipe
    spec: ModuleSpec | None = None
    module: str | None = None  # name for runpy

    def source(self) -> str:
        """Return the script's text, or "" if it is not known."""
        return (self.data or b"").decode(errors="replace")


def find_file(path: str) -> Script:
    """Return the script in a file, a folder or a zip application, or in standard input if `path` is `-`."""
    if path == "-":
        data = sys.stdin.buffer.read() if sys.stdin else b""
        return Script("<stdin>", "-", _unless_safe(""), data)
    absolute = os.path.join(os.getcwd(), path)  # "." and ".." are kept, as by the interpreter
    if importer := pkgutil.get_importer(absolute):
        spec = importer.find_spec("__main__")
        if spec is None:
            raise NotFound(f"can't find '__main__' module in {path!r}")
        return Script(spec.origin or absolute, path, absolute, _data(spec), spec, "__main__")
    try:
        with io.open_code(absolute) as file:
            data = file.read()
    except OSError as error:
        raise NotFound(f"can't open file {path!r}: {error.strerror}") from None
    return Script(absolute, path, _unless_safe(_folder(absolute)), data)


def find_module(name: str) -> Script:
    """Return the module or package `name`, found as by `python -m`."""
    first_path = _unless_safe(os.getcwd())
    before = sys.path[:]
    if first_path is not None:
        sys.path.insert(0, first_path)
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise NotFound(f"No module named {name}")
        spec = _find_spec(name)
    except (ImportError, ValueError) as error:
        raise NotFound(str(error)) from None
    finally:
        sys.path[:] = before
    return Script((spec and spec.origin) or name, "-m", first_path, _data(spec), spec, name)


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module, or the `__main__` of a package, without importing the packages around it.

    The code of these packages must not run before the script does. Returns None if a package can find its
    modules only by running code.
    """
    names, path, spec = name.split("."), None, None
    for number in range(len(names)):
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = (finder.find_spec(".".join(names[: number + 1]), path) for finder in finders)
        spec = next((spec for spec in found if spec), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and number + 1 < len(names):
            return None
    return spec if path is None or names[-1] == "__main__" else _find_spec(f"{name}.__main__")


def _data(spec: ModuleSpec | None) -> bytes | None:
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    get_data = getattr(spec.loader, "get_data", None)
    return get_data(spec.origin) if get_data else None


def _unless_safe(path: str) -> str | None:
    return None if sys.flags.safe_path else path


def _folder(path: str) -> str:
    try:
        return os.path.dirname(os.path.realpath(path, strict=True))
    except OSError:  # such as a pipe in /dev/fd
        return os.path.dirname(path)


def run(
    script: Script, args: list[str], hide_frames: Hide, code: CodeType | None = None
) -> tuple[int, BaseException | None]:
    """Run `script` with `args`.

    If an exception ends the script, show it without the frames that `hide_frames` removes.

    Returns the exit status and the exception. `code` replaces the script's own code.
    """
    main = _main_module()
    # Pickling and worker processes look for the script's classes in the module `__main__`.
    sys.modules["__main__"] = main
    sys.argv[:] = [script.argument, *args]
    if not sys.flags.safe_path:
        del sys.path[0]  # the command's own
    if script.first_path is not None:
        sys.path.insert(0, script.first_path)
    error = None
    try:
        if script.module is not None:
            _run_module(script, main, code)
        else:
            _run_file(script, main, code)
    except BaseException as raised:
        error = raised
    error = _shown(error, hide_frames) if error else None
    status = _status(error)
    if script.module is None and not isinstance(error, SystemExit):
        # The interpreter also removes these names, before the exit handlers run.
        main.__dict__.pop("__file__", None)
        main.__dict__.pop("__cached__", None)
    return status, error


def _main_module() -> ModuleType:
    """Return a module like the one that the interpreter starts with."""
    main = ModuleType("__main__")
    main.__loader__ = BuiltinImporter
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    return main


def _run_file(script: Script, main: ModuleType, code: CodeType | None) -> None:
    main.__file__ = script.path
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    is_compiled = script.path.endswith(".pyc")
    if script.path != "<stdin>":
        loader = SourcelessFileLoader if is_compiled else SourceFileLoader
        main.__loader__ = loader("__main__", script.path)
    if code is None and is_compiled:
        code = main.__loader__.get_code("__main__")
    exec(code or compile(script.data, script.path, "exec", dont_inherit=True), main.__dict__)


def _run_module(script: Script, main: ModuleType, code: CodeType | None) -> None:
    if code is None:
        runpy._run_module_as_main(script.module, alter_argv=script.argument == "-m")
        return
    if script.argument == "-m":
        sys.argv[0] = script.path
    runpy._run_code(code, main.__dict__, None, "__main__", script.spec)


def _shown(error: BaseException, hide_frames: Hide) -> BaseException:
    """Print an exception as the interpreter does. Returns it, or the exit that `sys.excepthook` raises."""
    if isinstance(error, SystemExit):
        return error
    hide_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ended:
        return ended
    except BaseException as failure:
        hide_frames(failure)
        write("Error in sys.excepthook:\n")
        _print(failure)
        write("\nOriginal exception was:\n")
        _print(error)
    return error


def _status(error: BaseException | None) -> int:
    """Return the exit status of a script. If it has ended with `sys.exit(text)`, print the text."""
    if not isinstance(error, SystemExit):
        return int(error is not None)
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    write(f"{error.code}\n")
    return 1


def _print(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def write(text: str, stream: Any = None) -> None:
    """Write text to stderr or `stream`. A closed stream, or a pipe without a reader, is ignored."""
    stream = stream or sys.stderr
    try:
        stream.write(text)
        stream.flush()
    except (AttributeError, OSError, ValueError):
        pass
