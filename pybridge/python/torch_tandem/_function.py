"""Functions whose calls are replayed without Python once they have proven to be equal: docs/functions.md."""

import functools
import inspect
import math
import os
import random
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_tandem import _core, _iterations, _lint
from torch_tandem._arguments import TENSORS, VALUES, Arguments, described, flatten, varying
from torch_tandem._concrete import ConcreteGraph, Spec, owners, specs
from torch_tandem._report_types import Function as Counters
from torch_tandem._state import State, readable, state_of

# Number of consecutive equal calls before the first one that is replayed.
EQUAL = 3
# Audits run Python once in this many calls: at first, and after all audits have passed for long.
FIRST_AUDIT, LAST_AUDIT = 8, 1024
# Recordings without three equal ones after which a function rests: of calls that read no values, and of those
# that do, which may take many paths. The most calls that it then rests.
PATIENCE, PATHS, LONGEST_REST = 16, 64, 4096
# Calls that could not be recorded, after which a function rests, if a later call may be recorded.
WARM_UP = 64
# Calls with another hindrance, after which a function rests. The first one may make an optimizer's state.
FIRST_CALLS = 2
# Calls without an optimizer step after which each call ends an iteration.
QUIET = 3
# Kinds of calls that are remembered.
MOST_KEYS = 512
# Recorded calls of one key that are compared with the next one, if they read no values.
REMEMBERED = 4

_ops = torch.ops.torch_tandem
_replay, _resume = _ops.replay.default._op, _ops.resume.default._op

# All functions of the program, for the report.
_all: "weakref.WeakSet[Function]" = weakref.WeakSet()


class CacheInfo(NamedTuple):
    """Counters of a function, as of `functools.lru_cache`: `hits` are the calls that were replayed."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    audits: int


@dataclass
class Recorded:
    """A call that was recorded, with what it returned."""

    id: int
    state: State
    spec: Any
    constants: list
    # The labels of the values that the call itself has changed.
    written: set[str]
    inputs: list[Spec]
    outputs: list[Spec]
    equal: int = 1


@dataclass
class Graph:
    """A recorded call that is replayed."""

    recorded: Recorded
    key: Hashable
    check: Callable[[list], int]
    result: Callable[[list], Any]
    # Whether iterations end within the call.
    steps: bool
    # Number of values that the call reads.
    reads: int
    # Replays until the next audit, and their number between the last two.
    left: int
    period: int
    # Replays since the last audit that passed, and all.
    suspect: int = 0
    replayed: int = 0
    # For the recordings of other graphs that do the same up to a value: the number of this value.
    partings: dict[int, int] = field(default_factory=dict)


@dataclass
class Attempts:
    """The calls of one key so far."""

    recorded: list[Recorded] = field(default_factory=list)
    # Calls that were compared since the last rest, and calls that could not be recorded.
    tries: int = 0
    new: int = 0
    # Calls that are not recorded before the next attempt, and those of the next rest.
    rest: int = 0
    next_rest: int = PATIENCE
    reason: str = "it has not been called three times"


def _random_states() -> list:
    """The states of Python's and NumPy's global generators."""
    states: list = [random.getstate()]
    if numpy := sys.modules.get("numpy"):
        kind, words, *rest = numpy.random.get_state()
        states.append((kind, words.tobytes(), *rest))
    return states


class Function:
    """A callable that behaves like a function, but need not run it. Made by `torch_tandem.function`."""

    def __init__(
        self,
        function: Callable,
        *,
        input_signature: list | None,
        audit: int | None,
        max_graphs: int,
        on_mismatch: str,
        is_proven: bool = False,
        ends_iterations: bool = True,
    ) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"torch_tandem.function needs a function, a method or a module, not {function!r}")
        if on_mismatch not in ("warn", "raise"):
            raise ValueError(f"on_mismatch is 'warn' or 'raise', not {on_mismatch!r}")
        if audit is not None and audit < 1:
            raise ValueError("audit is the number of calls of which one is audited, at least 1")
        if max_graphs < 1:
            raise ValueError("max_graphs is at least 1")
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._signature = input_signature
        self._audit = audit
        self._max_graphs = max_graphs
        self._raises = on_mismatch == "raise"
        self._graphs: dict[Hashable, list[Graph]] = {}
        self._attempts: dict[Hashable, Attempts] = {}
        self._warned: set[str] = set()
        self._last = -1
        self._steps, self._quiet = _iterations.steps, 0
        self._calls = 0
        self._replayed = 0
        self._audited = 0
        # Shortest time of a call in Python, in seconds.
        self._fastest = math.inf
        # Recordings that are kept. They are dropped with the function, but not at the interpreter's end.
        self._kept: set[int] = set()
        weakref.finalize(self, _drop_all, self._kept).atexit = False
        # Whether calls with equal arguments are known to issue equal operators.
        self._is_proven = is_proven
        self._ends_iterations = ends_iterations
        if not is_proven:
            self._lint()
        _all.add(self)

    @classmethod
    def of_graph(cls, graph: Callable, is_inference: bool) -> "Function":
        """Wrap a graph whose operators depend on its arguments only."""
        return cls(
            graph,
            input_signature=None,
            audit=None,
            max_graphs=64,
            on_mismatch="warn",
            is_proven=True,
            ends_iterations=is_inference,
        )

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_function" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return f"<torch_tandem.function {self._name()}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        key, tensors, objects = flatten(args, kwargs)
        if self._signature is not None:
            self._check_signature(tensors)
        if (graphs := self._graphs.get(key)) and not torch._C._len_torch_dispatch_stack():
            for graph in graphs:
                if graph.left > 0 and graph.check(objects) < 0:
                    with torch._C.DisableTorchFunction():
                        results = _replay(graph.recorded.id, tensors)
                    if results is None and graph.reads and _ops.suspended():
                        graph, results = self._resume(graph, graphs, tensors, objects)
                        if results is None:  # all graphs would read the same values
                            break
                    if results is not None:
                        graph.left -= 1
                        graph.suspect += 1
                        graph.replayed += 1
                        self._replayed += 1
                        if graph.steps:
                            _iterations.steps += 1
                        else:
                            self._end_call()
                        return graph.result(results)
        return self._python(args, kwargs, Arguments(key, tensors, objects))

    def _resume(
        self, graph: Graph, graphs: list[Graph], tensors: list, objects: list
    ) -> tuple[Graph, list | None]:
        """Go on with a replay that has read another value, as the graph that has read it too."""
        tried = {graph.recorded.id}
        results = None
        while results is None and (at := _ops.suspended()):
            for other in graphs:
                id = other.recorded.id
                if id in tried or other.partings.get(at[0]) != at[1] or other.left <= 0:
                    continue
                tried.add(id)
                if other.check(objects) < 0:
                    with torch._C.DisableTorchFunction():
                        results = _resume(id, tensors)
                    if results is not None or _ops.suspended() != at:
                        graph = other
                        break
            else:
                _ops.abandon()
        if results is not None:
            graphs.remove(graph)
            graphs.insert(0, graph)
        return graph, results

    def _check_signature(self, tensors: list[torch.Tensor]) -> None:
        """Raise an error if a call's tensors are not those of the signature."""
        if len(tensors) != len(self._signature):
            raise TypeError(f"{self._name()} takes {len(self._signature)} tensors, not {len(tensors)}")
        for i, ((shape, dtype), tensor) in enumerate(zip(self._signature, tensors, strict=True)):
            fits = len(shape) == tensor.dim() and all(
                n in (None, size) for n, size in zip(shape, tensor.shape, strict=True)
            )
            if not fits or tensor.dtype != dtype:
                raise TypeError(
                    f"tensor {i} of {self._name()} has shape {list(tensor.shape)} and dtype {tensor.dtype}; "
                    f"its input_signature has {list(shape)} and {dtype}"
                )

    # --- Calls that run Python -----------------------------------------------------------------------------

    def _python(self, args: tuple, kwargs: dict, arguments: Arguments) -> Any:
        """Run a call in Python, recorded unless it is known to be of no use."""
        attempts = self._attempts_of(arguments.key)
        self._drop_dead(arguments)
        due = [graph for graph in self._graphs.get(arguments.key, ()) if graph.left == 0]
        due = [graph for graph in due if not self._why_not(graph, arguments.tensors, arguments.objects)]
        may_record = _ops.may_record()
        if attempts.rest > 0 and not due:
            attempts.rest -= 1
            return self._plainly(args, kwargs, may_record)
        if self._refuses(arguments, attempts) or not may_record:
            return self._plainly(args, kwargs, may_record)
        state, reached = self._state(arguments)
        draws = _random_states()
        begin = time.perf_counter()
        _ops.record(arguments.tensors, reached, self._last)
        del reached
        try:
            result = self._function(*args, **kwargs)
            leaves, spec = _pytree.tree_flatten(result)
        except BaseException:
            _ops.cancel_recording()
            raise
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        recording = _ops.end_recording(tensors)
        self._end_call()
        self._fastest = min(self._fastest, time.perf_counter() - begin)
        after, _ = self._state(arguments)
        constants = [_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._kept.add(recording)
        recorded = Recorded(
            recording,
            state,
            spec,
            constants,
            state.differences(after),
            specs(arguments.tensors),
            specs(tensors),
        )
        hindrance = self._hindrance(recorded, draws != _random_states())
        # A call that reads another value is another branch, and says nothing about the graph.
        due = [graph for graph in due if _core.parting(graph.recorded.id, recorded.id) is None]
        if due:
            self._audit_with(due[0], recorded, hindrance)
        else:
            self._learn(arguments, attempts, recorded, hindrance)
        return result

    def _state(self, arguments: Arguments) -> tuple[State, list[torch.Tensor]]:
        return (State(), []) if self._is_proven else state_of(self._function, arguments.objects)

    def _attempts_of(self, key: Hashable) -> Attempts:
        if known := self._attempts.get(key):
            return known
        if len(self._attempts) >= MOST_KEYS:
            oldest = next(iter(self._attempts))
            for recorded in self._attempts.pop(oldest).recorded:
                self._forget(recorded)
        return self._attempts.setdefault(key, Attempts())

    def _plainly(self, args: tuple, kwargs: dict, is_outermost: bool) -> Any:
        result = self._function(*args, **kwargs)
        if is_outermost:
            self._end_call()
        return result

    def _end_call(self) -> None:
        """End an iteration with each call if the program makes no optimizer steps."""
        if not self._ends_iterations:
            return
        if self._steps != _iterations.steps:
            self._steps, self._quiet = _iterations.steps, 0
        elif self._quiet < QUIET:
            self._quiet += 1
        else:
            _core.mark_step()

    def _hindrance(self, recorded: Recorded, draws: bool) -> tuple[str, bool] | None:
        """Why a recorded call cannot be replayed, and whether a later one may have no such reason."""
        if found := _core.hindrance(recorded.id):
            return found
        if text := _ops.hindrance(recorded.id):
            return text, False
        if draws:
            return "it draws from Python's or NumPy's random generator", False
        for constant in recorded.constants:
            if constant is not _HOLE and type(constant) not in VALUES:
                return (
                    f"it returns a {type(constant).__name__}; return tensors, numbers and strings only",
                    False,
                )
        return None

    def _learn(
        self,
        arguments: Arguments,
        attempts: Attempts,
        recorded: Recorded,
        hindrance: tuple[str, bool] | None,
    ) -> None:
        """Compare a recorded call with earlier ones of its key; after three equal ones, replay the next."""
        self._keep_last(recorded)
        if hindrance:
            attempts.reason, passes = hindrance
            self._forget(recorded)
            attempts.new += 1
            if attempts.new > (WARM_UP if passes else FIRST_CALLS):
                self._rest(attempts)
            return
        attempts.tries += 1
        for known in reversed(attempts.recorded):
            difference = self._difference(known, recorded)
            if difference is None:
                recorded.equal = known.equal + 1
                recorded.written |= known.written
                attempts.recorded.remove(known)
                self._forget(known)
                break
            attempts.reason = difference
        attempts.recorded.append(recorded)
        if recorded.equal >= EQUAL:
            attempts.recorded.remove(recorded)
            self._add_graph(arguments, recorded)
            attempts.tries = attempts.new = 0
            attempts.next_rest = PATIENCE
        reads = _core.fetches_of(recorded.id)
        if len(attempts.recorded) > (PATHS if reads else REMEMBERED):
            self._forget(attempts.recorded.pop(0))
        if attempts.tries >= (PATHS if reads else PATIENCE):
            self._rest(attempts)

    def _rest(self, attempts: Attempts) -> None:
        """Do not record the next calls of a key."""
        for recorded in attempts.recorded:
            self._forget(recorded)
        attempts.recorded.clear()
        attempts.tries = attempts.new = 0
        attempts.rest = attempts.next_rest
        attempts.next_rest = min(2 * attempts.next_rest, LONGEST_REST)

    def _difference(self, one: Recorded, two: Recorded) -> str | None:
        if text := _core.unequal(one.id, two.id) or _ops.unequal(one.id, two.id):
            return text
        if one.spec != two.spec or [*map(_typed, one.constants)] != [*map(_typed, two.constants)]:
            return "it returns another value that is not a tensor; return a tensor instead"
        if changed := one.state.differences(two.state) - one.written - two.written:
            return f"{readable(min(changed, key=len))} has changed between the calls"
        return None

    def _add_graph(self, arguments: Arguments, recorded: Recorded) -> None:
        if not _core.make_template(recorded.id):
            self._forget(recorded)
            return
        if sum(map(len, self._graphs.values())) >= self._max_graphs:
            self._drop_oldest(arguments)
        period = self._audit or FIRST_AUDIT
        check = _holds if self._is_proven else recorded.state.check(recorded.written)
        left = sys.maxsize if self._is_proven else period - 1
        id = recorded.id
        ends, reads = _core.ends_of(id), _core.fetches_of(id)
        graph = Graph(recorded, arguments.key, check, _builder(recorded), ends, reads, left, period)
        graphs = self._graphs.setdefault(arguments.key, [])
        for other in graphs if reads else ():
            if (number := _core.parting(other.recorded.id, id)) is not None:
                graph.partings[other.recorded.id] = other.partings[id] = number
        graphs.insert(0, graph)

    def _drop_oldest(self, arguments: Arguments) -> None:
        key = next(iter(self._graphs))
        graphs = self._graphs[key]
        self._forget(graphs.pop().recorded)
        if not graphs:
            del self._graphs[key]
            self._attempts.pop(key, None)
        self._warn(
            f"it has more than {self._max_graphs} graphs, so the oldest is dropped. "
            f"{varying(key, arguments.key)}"
        )

    # --- Audits --------------------------------------------------------------------------------------------

    def _audit_with(self, graph: Graph, recorded: Recorded, hindrance: tuple[str, bool] | None) -> None:
        self._audited += 1
        if hindrance is None:
            difference = self._difference(graph.recorded, recorded)
        else:
            difference, passes = hindrance
            if passes and _core.ops_of(graph.recorded.id):
                # Operators ran outside of the graph and cannot be compared. The next call is audited.
                self._keep_last(recorded)
                self._forget(recorded)
                return
        self._keep_last(recorded)
        self._forget(recorded)
        if difference is None:
            graph.period = self._audit or min(2 * graph.period, LAST_AUDIT)
            graph.left, graph.suspect = graph.period - 1, 0
            return
        self._remove(graph)
        text = (
            f"an audit found that a call differs from the one that was replayed: {difference}. The last "
            f"{graph.suspect} replayed calls may have been wrong. The function is recorded anew"
        )
        if self._raises:
            raise RuntimeError(f"torch_tandem.function {self._name()}: {text}")
        self._warn(text, always=True)

    def _drop_dead(self, arguments: Arguments) -> None:
        """Drop graphs that use a tensor which no longer exists."""
        for graph in list(self._graphs.get(arguments.key, ())):
            id = graph.recorded.id
            dead = _ops.dead(id)
            if dead < 0:
                continue
            # The tensor may have been replaced in the state, where the change is seen.
            if graph.check(arguments.objects) < 0:
                self._warn(
                    f"a tensor that it uses no longer exists: {_core.first_use(id, dead)}. "
                    "The function is recorded anew"
                )
            self._remove(graph)

    def _remove(self, graph: Graph) -> None:
        graphs = self._graphs[graph.key]
        graphs.remove(graph)
        if not graphs:
            del self._graphs[graph.key]
        self._forget(graph.recorded)

    # --- Recordings that are needed no more ----------------------------------------------------------------

    def _keep_last(self, recorded: Recorded) -> None:
        """Keep the latest recording, which tells the next one the tensors whose gradients matter."""
        last, self._last = self._last, recorded.id
        if last >= 0 and last not in self._in_use():
            self._drop(last)

    def _forget(self, recorded: Recorded) -> None:
        if recorded.id != self._last:
            self._drop(recorded.id)

    def _drop(self, recording: int) -> None:
        self._kept.discard(recording)
        _drop_all([recording])

    def _in_use(self) -> set[int]:
        graphs = {graph.recorded.id for graphs in self._graphs.values() for graph in graphs}
        return graphs | {r.id for attempts in self._attempts.values() for r in attempts.recorded}

    # --- What users are told -------------------------------------------------------------------------------

    def _name(self) -> str:
        if self._is_proven:
            return "a graph of torch.compile"
        function = self._function
        return getattr(function, "__qualname__", None) or type(function).__name__

    def _warn(self, text: str, always: bool = False) -> None:
        if always or text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"torch_tandem.function {self._name()}: {text}", stacklevel=_users_level())

    def _lint(self) -> None:
        function = getattr(self._function, "__func__", self._function)
        if isinstance(function, torch.nn.Module):
            function = type(function).forward
        if (code := getattr(function, "__code__", None)) and (effects := _lint.effects(code)):
            self._warn(
                "a call that is replayed does not run Python, so these effects are skipped: "
                f"{'; '.join(effects)} ({code.co_filename})"
            )

    def _refuses(self, arguments: Arguments, attempts: Attempts) -> bool:
        for tensor in arguments.tensors:
            if type(tensor) not in TENSORS:
                attempts.reason = f"an argument is a {type(tensor).__name__}"
                return True
        return False

    def cache_info(self) -> CacheInfo:
        """Return how many calls were replayed and how many ran Python, the graphs, and the audits."""
        graphs = sum(map(len, self._graphs.values()))
        return CacheInfo(
            self._replayed, self._calls - self._replayed, self._max_graphs, graphs, self._audited
        )

    def concrete_graph(self, *args: Any, **kwargs: Any) -> ConcreteGraph:
        """Return the graph that a call with these arguments would be replayed from.

        Raises a `LookupError` if the call would run Python.
        """
        key, tensors, objects = flatten(args, kwargs)
        why = (
            self._attempts[key].reason
            if key in self._attempts
            else "it has not been called with these arguments"
        )
        for graph in self._graphs.get(key, ()):
            id = graph.recorded.id
            why = self._why_not(graph, tensors, objects)
            if not why:
                names = owners(id, graph.recorded.state.names_of_tensors())
                return ConcreteGraph(id, names, graph.recorded.inputs, graph.recorded.outputs)
        raise LookupError(f"torch_tandem.function {self._name()} has no graph for this call: {why}")

    def _why_not(self, graph: Graph, tensors: list, objects: list) -> str:
        """Why a graph is not replayed with these arguments; empty if it is."""
        changed = graph.check(objects)
        if changed >= 0:
            return f"{readable(graph.recorded.state.label(changed))} has changed"
        return _ops.not_replayed(graph.recorded.id, tensors)

    def explain(self) -> str:
        """Return a text: how many calls were replayed, the time that this saved, and why others were not."""
        info = self.cache_info()
        lines = [
            f"{self._name()}: {info.hits:,} of {self._calls:,} calls were replayed"
            + (f", which saved about {info.hits * self._fastest:.3g} s" if info.hits else "")
        ]
        for key, attempts in self._attempts.items():
            graphs = self._graphs.get(key, ())
            lines.append(f"  called with {described(key)}:")
            for graph in graphs:
                operators = _core.ops_of(graph.recorded.id)
                lines.append(
                    f"    a graph of {operators:,} operators, replayed {graph.replayed:,} times; "
                    f"one call in {graph.period:,} is audited"
                )
            if not graphs:
                lines.append(f"    runs in Python: {attempts.reason}")
        return "\n".join(lines)

    def reason(self) -> str | None:
        """Return why the latest kind of call is not replayed, or `None` if it is."""
        if not self._attempts:
            return "it has not been called"
        key = next(reversed(self._attempts))
        if self._graphs.get(key):
            return None
        return self._attempts[key].reason


def counters() -> list[Counters]:
    """Return the counters of all functions that have been called."""
    return [
        {
            "name": f._name(),
            "replayed": f._replayed,
            "ran": f._calls - f._replayed,
            "audits": f._audited,
            "graphs": sum(map(len, f._graphs.values())),
            "saved_us": int(f._replayed * f._fastest * 1e6) if f._replayed else 0,
            "reason": f.reason(),
        }
        for f in sorted(_all, key=lambda f: -f._calls)
        if f._calls
    ]


def _drop_all(recordings: Iterable[int]) -> None:
    for recording in recordings:
        _core.drop_recording(recording)
        _ops.drop_recording(recording)


def _holds(objects: list) -> int:
    """Stand for the check of a state that is proven to be as it was."""
    return -1


def _users_level() -> int:
    """The `stacklevel` of the program's line that has called this package, for its caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__):
        level, frame = level + 1, frame.f_back
    return level


class _Hole:
    """Stands for a tensor among the leaves of a result."""

    def __repr__(self) -> str:
        return "a tensor"


_HOLE = _Hole()


def _typed(value: Any) -> tuple:
    return type(value), value


def _builder(recorded: Recorded) -> Callable[[list], Any]:
    """A function that makes the result of a call from its tensors."""
    spec, constants = recorded.spec, recorded.constants
    if len(constants) == 1 and spec.is_leaf():
        if constants[0] is _HOLE:
            return lambda results: results[0]
        return lambda results, constant=constants[0]: constant
    holes = [i for i, constant in enumerate(constants) if constant is _HOLE]
    if spec.type is tuple and len(holes) == len(constants) and all(c.is_leaf() for c in spec.children()):
        return tuple

    def build(results: list) -> Any:
        leaves = list(constants)
        for i, result in zip(holes, results, strict=True):
            leaves[i] = result
        return _pytree.tree_unflatten(leaves, spec)

    return build


def function(
    function: Callable | None = None,
    *,
    input_signature: list | None = None,
    audit: int | None = None,
    max_graphs: int = 32,
    on_mismatch: str = "warn",
) -> Any:
    """Wrap a function, a method or a module so that equal calls are replayed without running Python.

    A call is replayed after three calls with equal arguments (tensors may have other values) and equal
    state have issued the same operators on the same tensors. Then one call in `audit` runs Python and is
    compared; by default, one in 8 at first and one in 1,024 later. If it differs, a warning says how, or an
    error with `on_mismatch="raise"`. At most `max_graphs` kinds of calls are kept. `input_signature` has a
    shape and a dtype for each tensor argument, such as `[((None, 3), torch.float32)]`; calls with others
    raise a `TypeError`. Effects other than on tensors, such as prints, happen only in calls that run
    Python. See docs/functions.md.
    """
    options = {
        "input_signature": input_signature,
        "audit": audit,
        "max_graphs": max_graphs,
        "on_mismatch": on_mismatch,
    }
    if function is None:
        return lambda decorated: _wrap(decorated, options)
    return _wrap(function, options)


def _wrap(function: Any, options: dict) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(Function(function.__func__, **options))
    return Function(function, **options)
