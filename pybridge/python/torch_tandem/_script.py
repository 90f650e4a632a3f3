"""Running an unchanged script as `__main__`, as the interpreter would."""

import io
import os
import runpy
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType


class NotFound(Exception):
    """There is no such script or module."""


@dataclass(frozen=True)
class Script:
    """What will run: a file, or a module found on the path."""

    path: str
    first_path: str  # what goes to sys.path[0]
    spec: ModuleSpec | None = None
    module_code: CodeType | None = None

    def source(self) -> str:
        """The text, for looking at it; empty if it cannot be read."""
        try:
            with io.open_code(self.path) as file:
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def find_file(path: str) -> Script:
    """The script at `path`, or the `__main__.py` of the directory there."""
    if os.path.isdir(path):
        main = os.path.join(path, "__main__.py")
        if not os.path.isfile(main):
            raise NotFound(f"can't find '__main__.py' in {path!r}")
        return Script(main, path)
    if not os.path.isfile(path):
        raise NotFound(f"can't open file {path!r}: no such file")
    return Script(path, os.path.dirname(os.path.realpath(path)))


def find_module(name: str) -> Script:
    """The module or package `name`, as `python -m` finds it."""
    sys.path.insert(0, os.getcwd())
    try:
        _, spec, code = runpy._get_module_details(name)
    except ImportError as error:
        raise NotFound(str(error)) from None
    finally:
        del sys.path[0]
    return Script(spec.origin or name, os.getcwd(), spec, code)


def run(script: Script, args: list[str]) -> BaseException | None:
    """Run `script` with `args`; what ends it comes back, with the script's own frames only."""
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=script.path,
        __builtins__=__builtins__,
        __spec__=script.spec,
        __package__=script.spec.parent if script.spec else None,
        __loader__=script.spec.loader if script.spec else SourceFileLoader("__main__", script.path),
        __cached__=None,
    )
    # Pickling and worker processes look for the script's classes in the module of this name.
    sys.modules["__main__"] = main
    sys.argv[:] = [script.path, *args]
    sys.path[0] = script.first_path
    try:
        exec(script.module_code or _compile(script.path), main.__dict__)
    except BaseException as error:
        return error.with_traceback(_own_frames(error.__traceback__))
    return None


def _compile(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """What is left of `traceback` from the script's first frame on."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") != "__main__":
        traceback = traceback.tb_next
    return traceback
