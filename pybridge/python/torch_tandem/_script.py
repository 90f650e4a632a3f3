"""Running of an unchanged script as `__main__`, as the interpreter does."""

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
    """The script to run: a file, or a module found on the path."""

    path: str
    first_path: str  # value for sys.path[0]
    spec: ModuleSpec | None = None
    module_code: CodeType | None = None

    def source(self) -> str:
        """Return the script's text, or "" if it cannot be read."""
        try:
            with io.open_code(self.path) as file:
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def find_file(path: str) -> Script:
    """Return the script at `path`, or the `__main__.py` in it if it is a directory."""
    if os.path.isdir(path):
        main = os.path.join(path, "__main__.py")
        if not os.path.isfile(main):
            raise NotFound(f"can't find '__main__.py' in {path!r}")
        return Script(main, path)
    if not os.path.isfile(path):
        raise NotFound(f"can't open file {path!r}: no such file")
    return Script(path, os.path.dirname(os.path.realpath(path)))


def find_module(name: str) -> Script:
    """Return the module or package `name`, found as by `python -m`."""
    sys.path.insert(0, os.getcwd())
    try:
        _, spec, code = runpy._get_module_details(name)
    except ImportError as error:
        raise NotFound(str(error)) from None
    finally:
        del sys.path[0]
    return Script(spec.origin or name, os.getcwd(), spec, code)


def run(script: Script, args: list[str], code: CodeType | None = None) -> BaseException | None:
    """Run `script` with `args` and return the exception that ends it, if any.

    `code` is run instead of the script's file, if it is given. The exception's traceback has only the frames
    from the script on.
    """
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=script.path,
        __builtins__=__builtins__,
        __spec__=script.spec,
        __package__=script.spec.parent if script.spec else None,
        __loader__=script.spec.loader if script.spec else SourceFileLoader("__main__", script.path),
        __cached__=None,
    )
    # Pickling and worker processes look for the script's classes in the module `__main__`.
    sys.modules["__main__"] = main
    sys.argv[:] = [script.path, *args]
    sys.path[0] = script.first_path
    try:
        exec(code or script.module_code or _compile(script.path), main.__dict__)
    except BaseException as error:
        return error.with_traceback(_own_frames(error.__traceback__))
    return None


def _compile(path: str) -> CodeType:
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of `traceback` from the script's first frame on."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") != "__main__":
        traceback = traceback.tb_next
    return traceback
