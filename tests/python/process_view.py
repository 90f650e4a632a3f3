"""A docstring.

The script of test_process_view.py looks at its process in every way that needs no other package. It writes
what it sees, item by item, to the file that its first argument names. With further arguments it also sees how
forked children of it end, and what a spawned process is like.
"""
# ruff: noqa: E402, SIM115

began_with = list(globals())

import ast
import asyncio
import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib
import inspect
import io
import json
import linecache
import locale
import logging
import multiprocessing
import os
import pickle
import pkgutil
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings

started_in = os.getcwd()
answer: int = 42


class Thing:
    """A class of the script."""

    def __init__(self, value):
        self.value = value

    def method(self):
        return self.value + 1


class OwnError(Exception):
    """An exception of the script."""


class OwnExit(SystemExit):
    """An exit of the script."""


def double(value):
    """A function of the script."""
    return 2 * value


def fail(depth=2):
    if depth:
        fail(depth - 1)
    raise OwnError("it failed")


def failing():
    """The texts of a traceback, with and without the exceptions that led to it."""
    texts = []
    for chain in (True, False):
        try:
            try:
                fail()
            except OwnError as error:
                error.add_note("a note")
                raise ExceptionGroup("several", [error, ValueError(1)]) from error
        except ExceptionGroup:
            texts.append(traceback.format_exc(chain=chain))
    return texts


def lines_of_errors():
    try:
        fail()
    except OwnError as error:
        return [(f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(error.__traceback__)]


def printed(function):
    with contextlib.redirect_stderr(io.StringIO()) as out:
        function()
    return out.getvalue()


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("one", stacklevel=1)
        warnings.warn("two", DeprecationWarning, stacklevel=2)
    return [(w.filename, w.lineno, w.category, str(w.message)) for w in caught]


def registry():
    warnings.warn("for the registry", stacklevel=1)
    return sorted(map(repr, globals()["__warningregistry__"]))


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found


def raise_in_del():
    class Deleted:
        def __del__(self):
            raise OwnError("in __del__")

    Deleted()


def elsewhere(function):
    """The result of a function in another current folder."""
    os.chdir("/")
    try:
        linecache.clearcache()
        return function()
    finally:
        os.chdir(started_in)


def forked(function):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, (4,))


def spawned():
    """The text that a spawned process returns about the script's function, or the exception of a script
    without a file.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(described, (Thing(3),))


def described(thing):
    main = sys.modules["__main__"]
    return (
        thing.method(), type(thing).__module__, __name__, main.__name__, sys.argv, main.__spec__ is None,
        getattr(main, "__file__", None), double.__code__.co_filename, sys.path,
    )  # fmt: skip


ITEMS = {
    "argv": lambda: sys.argv,
    "argv[0]": lambda: sys.argv[0],
    "orig_argv": lambda: sys.orig_argv,
    "path[0]": lambda: sys.path[0],
    "path": lambda: sys.path,
    "executable": lambda: (sys.executable, sys.prefix, sys.base_prefix),
    "names at the start": lambda: began_with,
    "__file__": lambda: __file__,
    "__name__": lambda: __name__,
    "__spec__": lambda: __spec__,
    "__spec__.name": lambda: __spec__ and (__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached),
    "__package__": lambda: __package__,
    "__loader__": lambda: (__loader__, getattr(__loader__, "name", None), getattr(__loader__, "path", None)),
    "__cached__": lambda: globals().get("__cached__", "none"),
    "__builtins__": lambda: (type(__builtins__), __builtins__ is builtins),
    "__annotations__": lambda: __annotations__,
    "__doc__": lambda: __doc__,
    "__debug__": lambda: __debug__,
    "builtins": lambda: sorted(vars(builtins)),
    "flags": lambda: (sys.flags, sys._xoptions, sys.warnoptions, sys.dont_write_bytecode),
    "main module": lambda: (
        type(sys.modules["__main__"]),
        vars(sys.modules["__main__"]) is globals(),
        repr(sys.modules["__main__"]),
    ),
    "import __main__": lambda: vars(importlib.import_module("__main__")) is globals(),
    "file of the code": lambda: (fail.__code__.co_filename, fail.__code__.co_firstlineno),
    "frame": lambda: [
        (f.f_code.co_filename, f.f_code.co_name, f.f_lineno)
        for f in [sys._getframe(1)]
    ],
    "stack": lambda: traceback.format_stack(),
    "source of a class": lambda: inspect.getsource(Thing),
    "source of a function": lambda: inspect.getsource(double),
    "source of the module": lambda: inspect.getsource(sys.modules["__main__"])[:50],
    "source elsewhere": lambda: elsewhere(lambda: (inspect.getsource(Thing), inspect.getsource(double))),
    "file of a class": lambda: (inspect.getfile(Thing), inspect.getsourcefile(Thing)),
    "module of a class": lambda: inspect.getmodule(Thing),
    "file beside it": lambda: open(os.path.join(os.path.dirname(__file__), "beside.txt")).read(),
    "file beside it, elsewhere": lambda: elsewhere(ITEMS["file beside it"]),
    "linecache": lambda: (linecache.getline(__file__, 1), len(linecache.getlines(__file__))),
    "linecache elsewhere": lambda: elsewhere(lambda: linecache.getline(__file__, 1)),
    "data of the loader": lambda: len(__loader__.get_data(__file__)),
    "source of the loader": lambda: __loader__.get_source("__main__")[:12],
    "data of the package": lambda: pkgutil.get_data("__main__", "beside.txt"),
    "relative import": lambda: importlib.import_module(".sibling", __package__).VALUE,
    "import": lambda: importlib.import_module("sibling").VALUE,
    "warnings": warned,
    "warnings that are printed": lambda: printed(lambda: warnings.warn("printed", stacklevel=1)),
    "deprecations that are printed": lambda: printed(
        lambda: warnings.warn("printed", DeprecationWarning, stacklevel=1)
    ),
    "filters of warnings": lambda: warnings.filters,
    "registry of warnings": lambda: printed(registry) and registry(),
    "tracebacks": failing,
    "lines of errors": lines_of_errors,
    "errors elsewhere": lambda: elsewhere(lines_of_errors),
    "error of a thread": lambda: printed(lambda: in_thread(fail)),
    "error in __del__": lambda: printed(raise_in_del),
    "hooks": lambda: [
        (name, getattr(sys, name) is getattr(sys, f"__{name}__"))
        for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook")
    ],
    "hook of threads": lambda: threading.excepthook is threading.__excepthook__,
    "tracing": lambda: (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
    "stdin": lambda: (sys.stdin.name, sys.stdin.isatty(), sys.stdin.encoding, sys.stdin.read()),
    "streams": lambda: [
        (type(f), f.name, f.encoding, f.errors, f.line_buffering, f.isatty())
        for f in (sys.stdout, sys.stderr)
    ],
    "pickled": lambda: pickle.loads(pickle.dumps(Thing(3))).method(),
    "pickle": lambda: (Thing.__module__, pickle.dumps(double)),
    "forked": lambda: forked(double),
    "method of starting processes": lambda: multiprocessing.get_start_method(allow_none=True),
    "process": lambda: (multiprocessing.current_process().name, multiprocessing.parent_process()),
    "handlers of signals": lambda: {s.name: signal.getsignal(s) for s in sorted(signal.valid_signals())
                                    if isinstance(s, signal.Signals)},
    "mask of signals": lambda: (signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1)),
    "timers": lambda: signal.getitimer(signal.ITIMER_REAL),
    "threads": lambda: [thread.name for thread in threading.enumerate()],
    "main thread": lambda: threading.current_thread() is threading.main_thread(),
    "locale": lambda: [locale.setlocale(kind) for kind in (locale.LC_ALL, locale.LC_CTYPE)],
    "encodings": lambda: (sys.getdefaultencoding(), sys.getfilesystemencoding(), locale.getencoding()),
    "environment": lambda: dict(os.environ),
    "folder": lambda: (os.getcwd(), tempfile.gettempdir()),
    "umask": lambda: (os.umask(0o22), os.nice(0), sorted(os.sched_getaffinity(0))),
    "limits": lambda: [resource.getrlimit(kind) for kind in range(16)],
    "recursion": lambda: (sys.getrecursionlimit(), sys.get_int_max_str_digits()),
    "intervals": lambda: (sys.getswitchinterval(), gc.get_threshold(), gc.isenabled(), gc.get_debug()),
    "faults": lambda: faulthandler.is_enabled(),
    "logging": lambda: (logging.root.handlers, logging.root.level, logging.getLevelName(30)),
    "event loop": lambda: type(asyncio.get_event_loop_policy()),
    "importing": lambda: ([str(f) for f in sys.meta_path], [str(f) for f in sys.path_hooks]),
    "dynamic flags": lambda: (sys.getdlopenflags(), time.get_clock_info("time").implementation),
    "compiler flags": lambda: compile("1", "", "eval").co_flags,
    "evaluation": lambda: eval("__name__"),
    "syntax tree": lambda: ast.dump(ast.parse("x: int = 1")),
    "types": lambda: types.ModuleType.__module__,
}  # fmt: skip
"""The script's observations of its process, by name. An exception counts as an observation."""


def seen(function):
    try:
        found = repr(function())
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return plain(found)


def plain(text):
    """Text without addresses and reference counts, which differ in each process."""
    return re.sub(r"0x[0-9a-f]+|(?<=object refcount : )\d+", "", text)


def hooked(kind, error, trace):
    print("hooked", kind.__name__, [f.name for f in traceback.extract_tb(trace)], "__file__" in globals())


def failing_hook(kind, error, trace):
    raise ValueError("in the hook")


def exiting_hook(kind, error, trace):
    sys.exit(9)


def end(name):
    """End the process in some way."""
    if name == "with an object":
        sys.exit([1, Thing.__name__])
    if name == "with a text":
        sys.exit("a text")
    if name == "with a number":
        sys.exit(300)
    if name == "with nothing":
        sys.exit()
    if name == "with an own exit":
        raise OwnExit(5)
    if name == "with an error":
        fail()
    if name == "with notes and a group":
        try:
            fail()
        except OwnError as error:
            error.add_note("a note\nin two lines")
            raise ExceptionGroup("several", [error, ExceptionGroup("inner", [KeyError("key")])]) from error
    if name == "with an error in an error":
        try:
            fail()
        finally:
            raise ZeroDivisionError
    if name == "by the keyboard":
        raise KeyboardInterrupt
    if name == "with a syntax error":
        compile("def (", "text.py", "exec")
    if name == "of a generator":
        raise GeneratorExit("ended")
    if name == "in a hook":
        sys.excepthook = hooked
        fail()
    if name == "in a hook that fails":
        sys.excepthook = failing_hook
        fail()
    if name == "in a hook that exits":
        sys.excepthook = exiting_hook
        fail()
    if name == "without a hook":
        sys.excepthook = None
        fail()
    if name == "in a thread":
        threading.Thread(target=fail).start()
    if name == "late in a thread":
        threading.Timer(0.1, lambda: print("late", "__file__" in globals())).start()
    if name == "at exit":
        atexit.register(fail)
    if name == "at exit, with a number":
        atexit.register(sys.exit, 7)
    if name == "with stderr closed":
        sys.stderr.close()
        fail()
    if name == "without stderr":
        sys.stderr = None
        sys.exit("a text")


ENDINGS = [
    "at the end", "with an object", "with a text", "with a number", "with nothing", "with an own exit",
    "with an error", "with notes and a group", "with an error in an error", "by the keyboard",
    "with a syntax error", "of a generator", "in a hook", "in a hook that fails", "in a hook that exits",
    "without a hook", "in a thread", "late in a thread", "at exit", "at exit, with a number",
    "with stderr closed", "without stderr",
]  # fmt: skip


def fork(name):
    """Fork. In the child, redirect its output; in the parent, return how the child ended and the text that it
    wrote.
    """
    files = [tempfile.TemporaryFile() for _ in range(2)]
    sys.stdout.flush()
    gc.freeze()  # a child that ends need not look at all objects
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, start=1):
            os.dup2(file.fileno(), number)
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    return repr((status, *(plain(file.read().decode()) for file in files)))


def when_it_ends(order):
    print("at exit", order, sorted(name for name in globals() if name.startswith("__")))


if __name__ == "__main__":
    view = {name: seen(function) for name, function in ITEMS.items()}
    if "spawned" in sys.argv[2:]:
        view["spawned"] = seen(spawned)
    atexit.register(when_it_ends, 1)
    atexit.register(when_it_ends, 2)
    tried = {"endings": ENDINGS, "few endings": ENDINGS[::8]}
    for ending in next((tried[word] for word in sys.argv[2:] if word in tried), []):
        view[f"ends {ending}"] = fork(ending)
        if view[f"ends {ending}"] is None:
            end(ending)
            break
    else:
        # `tandem compare` runs the script twice, so there are two names for the file.
        name = next(name for name in (sys.argv[1] + end for end in ("", ".2")) if not os.path.exists(name))
        with open(name, "w") as file:
            json.dump(view, file)
