"""`python -m tests.fuzz.functions.reflected --pairs 40`: changes of objects that are found by introspection.

What changes an object is found by trial: an attribute is set, a method is called. What shows the change is
found by trial, too: attributes, methods without arguments, and the protocols of Python. Each pair of the two
becomes a function that reads, is replayed, and is called again after the change. Plain Python, with objects
of its own, shows what the calls return.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import io
import itertools
import linecache
import os
import pathlib
import pickle
import random
import resource
import signal
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TANDEM_KERNELS", "aten")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch_tandem

from tests.fuzz.functions import samples

# Calls before a change. The last of them are replayed.
CALLS = 8
# Seconds of a call, and of all trials with one kind of object.
CALL, ALL = 0.3, 300
# Bytes of address space of a process, for changes that ask for much memory, such as `[0] * 10**9`.
SPACE = 6 << 30
# Pairs of each attribute or method that changes an object.
EACH = 6

# Expressions that read an object `o`. `b` is another object of its kind.
PROTOCOLS = (
    "len(o)", "bool(o)", "list(o)", "str(o)", "repr(o)", "float(o)", "int(o)", "hash(o)", "o()", "o(1)", "o[0]", "o[-1]", "o['a']", "'a' in o", "1 in o",
    "next(iter(o))", "o == b", "o < b", "o + 1", "dict(o)", "sorted(o)", "format(o)", "abs(o)", "min(o)", "vars(o)", "dir(o)", "isinstance(b, o)", "issubclass(int, o)",
    "type(o).__name__", "copy.copy(o)", "copy.deepcopy(o)", "getattr(o, 'a', 5)", "hasattr(o, 'z')", "entered(o)", "matched(o)",
)  # fmt: skip
# Names that are neither set, called nor read: they wait, end the process, start another one, or ask for
# devices that are not there.
EXCLUDED = {
    "wait", "wait_for", "acquire", "acquire_lock", "join", "run", "start", "input", "exit", "fork", "popen", "interact", "serve_forever", "mainloop", "readline", "get", "put", "compile", "enterabs",
    "set_breakpoint", "set_trace", "share_memory_", "share_memory", "cuda", "xpu", "ipu", "mtia", "pin_memory", "mro", "__weakref__", "__del__", "__reduce__", "__reduce_ex__", "__subclasshook__",
    "graphsafe_set_state", "set_state", "__init_subclass__", "__class_getitem__", "__sizeof__", "__dir__", "__subclasses__", "__new__", "__getattribute__", "__setattr__", "__delattr__",
}  # fmt: skip
# Attributes of which None is another value than none at all, which no reading of the attribute shows.
OPTIONAL = {"filename", "filename2"}
VALUES = (
    None, True, 0, 1, 2, 7.5, "a", "b", "value", (), (1, 2), b"a", int, {"a": 5.0}, [5.0, 6.0], {"a"},
    lambda *a, **k: 5.0,
)  # fmt: skip
ARGUMENTS = (
    (),
    (1,),
    (2,),
    ("a",),
    ("a", 5.0),
    (0, 5.0),
    ([5.0, 6.0],),
    ({"a": 5.0},),
    (int,),
    (None,),
    (0.5,),
)


class TimeIsUp(BaseException):
    pass


def tried(call: Callable[[], Any]) -> Any:
    """The result of a call, or the exception that it raises."""

    def stop(*_: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, CALL)
        return call()
    except (Exception, TimeIsUp, SystemExit) as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- What changes and what reads an object -------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of an object, given the object and another one of its kind."""

    text: str
    make: Callable[[Any, Any], Any]
    # The attribute or method.
    name: str


def changes(o: Any, b: Any) -> Iterator[Change]:
    """Changes that may have an effect."""
    # Only Python's own code sets private attributes of Python's objects.
    is_own = type(o).__module__ == samples.__name__
    names = [name for name in dir(o) if is_own or name[0] != "_" or name[-1] == "_"]
    names = [name for name in names if name not in EXCLUDED and name.isidentifier()]
    for name in [*names, "z", "__len__", "__call__"]:
        yield Change(f"o.{name} = b.{name}", lambda o, b, n=name: setattr(o, n, getattr(b, n)), name)
        for value in VALUES:
            if not (value is None and name in OPTIONAL):
                yield Change(f"o.{name} = {value!r}", lambda o, _, n=name, v=value: setattr(o, n, v), name)
        yield Change(f"del o.{name}", lambda o, _, n=name: delattr(o, n), name)
    for name in () if isinstance(o, types.ModuleType) else names:
        if hasattr(type(o), name) and callable(tried(lambda name=name: getattr(o, name))):
            for arguments in ARGUMENTS:
                text = f"o.{name}{arguments}"
                yield Change(text, lambda o, _, n=name, a=arguments: getattr(o, n)(*a), name)
            yield Change(f"o.{name}(b)", lambda o, b, n=name: getattr(o, n)(b), name)


def readers(make: Callable[[int], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Expressions that read an object and do not change it, and functions of an object and another one."""
    o = make(1)
    texts = list(PROTOCOLS)
    for name in dir(o):
        if name.isidentifier() and name not in EXCLUDED and (name[0] != "_" or name[-1] == "_"):
            texts.append(f"o.{name}")
            if name[0] != "_" and callable(tried(lambda name=name: getattr(o, name))):
                texts.append(f"o.{name}()")
    found = {}
    for text in texts:
        with contextlib.suppress(SyntaxError):  # a name may be a keyword
            read = eval(f"lambda o, b: {text}", dict(NAMES))
            o, b = make(1), make(2)
            contents = contents_of(o)
            values = [tried(lambda read=read, o=o, b=b: read(o, b)) for _ in range(2)]
            if is_same(*values) and contents_of(o) == contents:
                found[text] = read
    return found


def entered(manager: Any) -> Any:
    with manager as value:
        return value


def matched(value: Any) -> int:
    match value:
        case [_, *_]:
            return 1
        case {"a": _}:
            return 2
        case str():
            return 3
        case float(_) | int(_):
            return 4
        case _:
            return 5


NAMES = {"copy": copy, "entered": entered, "matched": matched}


def contents_of(o: Any) -> list[str]:
    """Texts that show whether an object has changed."""
    return [str(tried(lambda call=call: call(o))) for call in (repr, vars, list, len, pickle.dumps)]


def shown(value: Any) -> Any:
    """What is compared of a value; None if that is only its identity."""
    if isinstance(value, int | float | str | bytes):
        return str(value)
    if isinstance(value, BaseException):
        return type(value)
    if isinstance(value, torch.Tensor):
        elements = tried(lambda: str(value.tolist()) if value.numel() < 100 else "")
        return str(value.shape), str(value.dtype), elements if isinstance(elements, str) else type(elements)
    if isinstance(value, list) and value and isinstance(value[0], float):
        return str(value)
    return None


def is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or shown(a) != shown(b):
        return False
    if isinstance(a, list | dict | tuple | set | frozenset):
        return len(a) == len(b)
    return shown(a) is not None or a is b or str(tried(lambda: repr(a))) == str(tried(lambda: repr(b)))


def values_of(reads: dict[str, Callable[[Any, Any], Any]], o: Any, b: Any) -> dict[str, Any]:
    return {text: tried(functools.partial(read, o, b)) for text, read in reads.items()}


def pairs(make: Callable[[int], Any], rng: random.Random) -> Iterator[tuple[Change, str, list[str]]]:
    """Changes, readers that show them, and sources of functions that use the readers, in random order."""
    reads = readers(make)
    every = list(changes(make(1), make(2)))
    rng.shuffle(every)
    seen: Counter = Counter()
    for change in every:
        if seen[change.name] >= EACH:
            continue
        o, b = make(1), make(2)
        olds = values_of(reads, o, b)
        if isinstance(tried(functools.partial(change.make, o, b)), BaseException):
            continue
        news = values_of(reads, o, b)
        showing = [text for text in reads if not is_same(olds[text], news[text])]
        for text in rng.sample(showing, min(2, len(showing))):
            seen[change.name] += 1
            yield change, text, list(sources(text, olds[text], news[text]))


def sources(reader: str, before: Any, after: Any) -> Iterator[str]:
    """Functions of `x` whose results show whether a reader's value has changed."""
    if isinstance(before, BaseException) or isinstance(after, BaseException):
        yield f"def f(x):\n    try:\n        {reader}\n        return x * 2\n    except BaseException:\n        return x * 3\n"
    elif type(before) in (int, float, bool, str, bytes, type(None)):
        yield f"def f(x):\n    return x * (2.0 if {reader} == {before!r} else 3.0)\n"
        if type(before) is not type(None) and type(after) in (int, float, bool):
            yield f"def f(x):\n    return x * float({reader})\n"
    else:
        yield f"def f(x):\n    return x * (2.0 if {reader} is first else 3.0)\n"
        yield f"def f(x):\n    return x * (2.0 if {reader} == copied else 3.0)\n"
        yield f"def f(x):\n    return x * len(str({reader}))\n"


# --- Trials -------------------------------------------------------------------------------------------------


class Side:
    """Objects, and a function that reads them."""

    _files = itertools.count()

    def __init__(
        self, make: Callable[[int], Any], reader: str, source: str, x: torch.Tensor, is_argument: bool
    ) -> None:
        self.o, self.b, self.x, self.is_argument = make(1), make(2), x, is_argument
        first = tried(lambda: eval(reader, {"o": self.o, "b": self.b, **NAMES}))
        copied = tried(lambda: copy.copy(first))
        names: dict[str, Any] = {"o": self.o, "b": self.b, "first": first, "copied": copied, **NAMES}
        if is_argument:
            del names["o"]
            source = source.replace("f(x)", "f(x, o)")
        path = f"{samples.PLACE}/reflected{next(Side._files)}.py"
        linecache.cache[path] = len(source), None, source.splitlines(True), path
        exec(compile(source, path, "exec"), names)
        self.function = names["f"]

    def calls(self, n: int) -> list[Any]:
        arguments = (self.x, self.o) if self.is_argument else (self.x,)
        return [shown(tried(lambda: self.function(*arguments).tolist())) for _ in range(n)]


def trial(
    make: Callable[[int], Any], change: Change, reader: str, source: str, is_argument: bool
) -> tuple[str, str]:
    """Compare calls around a change with plain Python's: `right`, `wrong`, `refused` or `unseen`, and more."""
    plain = Side(make, reader, source, torch.ones(1), is_argument)
    wrapped = Side(make, reader, source, torch.ones(1, device="tandem"), is_argument)
    wrapped.function = function = torch_tandem.function(wrapped.function, audit=10**6)
    before, got = plain.calls(CALLS), wrapped.calls(CALLS)
    if any(isinstance(value, type) for value in before):
        return "unseen", ""
    if TimeIsUp in got:
        return "unseen", ""
    if got != before:
        return "wrong", f"{got} instead of {before} before the change"
    if not function.cache_info().hits:
        return "refused", str(function.reason())
    for side in (plain, wrapped):
        tried(functools.partial(change.make, side.o, side.b))
    want, got = plain.calls(2), wrapped.calls(2)
    if got != want and TimeIsUp not in (*got, *want):
        return "wrong", f"{got} instead of {want}"
    return "right" if want != before[-2:] else "unseen", ""


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def check(
    make: Callable[[int], Any], number: int, seed: int, is_argument: bool = False
) -> Iterator[tuple[str, str]]:
    """The outcomes of trials with `number` pairs, each with a text.

    Functions read a global, or their argument.
    """
    with silent():
        found = list(itertools.islice(pairs(make, random.Random(seed)), number))
    for change, reader, texts in found:
        for source in texts:
            with silent():
                outcome, text = trial(make, change, reader, source, is_argument)
            yield outcome, f"{change.text}: {text}\n{source}"


def check_apart(name: str, make: Callable[[int], Any], options: argparse.Namespace) -> None:
    """Check in a process of its own, as a change may crash it, and print what is wrong."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        if status := os.waitpid(child, 0)[1]:
            print(f"{name}: ends with status {status}", flush=True)
        return
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    os.chdir(tempfile.mkdtemp())  # some methods write files
    faulthandler.enable()
    faulthandler.dump_traceback_later(ALL, exit=True)
    count: Counter = Counter()
    try:
        for outcome, text in check(make, options.pairs, options.seed, options.argument):
            count[outcome] += 1
            if outcome in options.tell.split(","):
                print(f"--- {outcome}: {name}: {text}", flush=True)
        print(f"{name}: {dict(count)}", flush=True)
    except BaseException as error:
        print(f"{name}: stopped by {error!r}", flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.functions.reflected", description=__doc__)
    parser.add_argument("--only", default="", help="names of samples, with commas")
    parser.add_argument("--constructed", action="store_true", help="objects of the classes of libraries")
    parser.add_argument("--argument", action="store_true", help="objects as arguments, not as globals")
    parser.add_argument("--pairs", type=int, default=40, help="of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="the samples to check: 1/2 for every second one")
    parser.add_argument("--tell", default="wrong", help="outcomes that are printed")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    every = samples.constructed() if options.constructed else iter(samples.SAMPLES.items())
    for i, (name, make) in enumerate(every):
        if i % parts == part and (not options.only or name in options.only.split(",")):
            check_apart(name, make, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
