"""Functions whose calls are replayed without Python once they have proven to be equal: docs/functions.md."""

import copy
import functools
import inspect
import math
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._device import iterations
from torch_tandem._functions import call_backward
from torch_tandem._functions.arguments import TENSORS, VALUES, Arguments, described, flatten, varying
from torch_tandem._functions.call_backward import EQUAL, Call, Hole, Passes
from torch_tandem._functions.callers import is_compiled, is_observed, is_transformed, users_level
from torch_tandem._functions.concrete import ConcreteGraph, owners, specs
from torch_tandem._functions.counters import add_gone, with_gone
from torch_tandem._functions.observe import Observed, World, is_observable
from torch_tandem._functions.place import release_numbers
from torch_tandem._functions.recorded import PATIENCE, Attempts, Graph, Recorded, builder
from torch_tandem._functions.state import Path, State
from torch_tandem._functions.types import CacheInfo
from torch_tandem._functions.varying import DIFFERS, Followed, Varying, floats_of, unfollowed
from torch_tandem._functions.walk import state_of
from torch_tandem._report.types import Function as Counters

# One call in this many is an audit, which runs Python: for the first audits, and after many that have passed.
FIRST_AUDIT, LAST_AUDIT = 8, 1024
# Maximum number of recordings of which no three are equal, for calls that read values and may take many
# paths; and the maximum number of calls in a rest. During a rest a function does not record.
PATHS, LONGEST_REST = 64, 4096
# Number of calls that could not be recorded before a rest, if the reason may pass.
WARM_UP = 64
# Number of calls that could not be recorded before a rest, if the reason is a lasting one. It is more than
# one because the first call may create an optimizer's state.
FIRST_CALLS = 2
# Number of calls without an optimizer step after which each call ends an iteration.
QUIET = 3
# Maximum number of kinds of calls that are remembered.
MAX_KEYS = 512
# Number of calls in Python that are timed before the first audit.
TIMED = 3
# Calls are observed only while that takes less time than these seconds and this share of the time since the
# first call: the state of a call that may reach all objects of large libraries takes seconds to list.
OBSERVED, OBSERVED_SHARE = 5.0, 0.1
# Number of consecutive calls of new kinds after which new kinds are not recorded, and the number of calls in
# the first such rest.
NEW_KINDS, FIRST_REST_OF_KINDS = 8, 512
# Maximum number of new kinds of calls whose hashes are remembered in such a rest.
MAX_HASHES = 4096
# Number of recorded calls of one key that the next one is compared with, if they read no values.
REMEMBERED = 4

IF_A_NUMBER = (
    "If it is a number, keep it in a tensor on the device (a learning rate: lr=torch.tensor(...), fused=True)"
)

_ops = torch.ops.torch_tandem
_replay, _resume = _ops.replay.default._op, _ops.resume.default._op
_is_compiling = torch.compiler.is_compiling

all_functions: "weakref.WeakSet[Function]" = weakref.WeakSet()
# Functions with replayed calls whose results require grad, by the ids of their recordings.
_differentiable: "weakref.WeakValueDictionary[int, Function]" = weakref.WeakValueDictionary()


def _random_states() -> list:
    """The states of Python's and NumPy's global generators."""
    states: list = [random.getstate()]
    if numpy := sys.modules.get("numpy"):
        kind, words, *rest = numpy.random.get_state()
        states.append((kind, words.tobytes(), *rest))
    return states


class Function:
    """A callable with the interface of a function, which replays calls instead of running Python.

    `torch_tandem.function` makes these objects.
    """

    def __init__(
        self,
        function: Callable,
        *,
        input_signature: list | None,
        audit: int | None,
        max_graphs: int,
        on_mismatch: str,
        effects: str = "refuse",
        is_proven: bool = False,
        ends_iterations: bool = True,
    ) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"torch_tandem.function needs a function, a method or a module, not {function!r}")
        if on_mismatch not in ("warn", "raise"):
            raise ValueError(f"on_mismatch is 'warn' or 'raise', not {on_mismatch!r}")
        if effects not in ("refuse", "skip"):
            raise ValueError(f"effects is 'refuse' or 'skip', not {effects!r}")
        if audit is not None and audit < 1:
            raise ValueError("audit is the number of calls of which one is audited, at least 1")
        if max_graphs < 1:
            raise ValueError("max_graphs is at least 1")
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._options = {
            "input_signature": input_signature,
            "audit": audit,
            "max_graphs": max_graphs,
            "on_mismatch": on_mismatch,
            "effects": effects,
        }
        self._signature = input_signature
        self._audit = audit
        self._max_graphs = max_graphs
        self._raises = on_mismatch == "raise"
        self._skips_effects = effects == "skip"
        self._world = World()
        self._varying = Varying()
        # The floats among the arguments of the latest call that had a new key.
        self._floats: tuple[tuple, dict] | None = None
        self._lock = threading.RLock()
        # The state that was listed last, and the state before the call that is being recorded.
        self._latest = State(version=-1)
        self._open: State | None = None
        # The reason for which an audit has ended replays for good; empty if none has.
        self._failed = ""
        self._graphs: dict[Hashable, list[Graph]] = {}
        self._attempts: dict[Hashable, Attempts] = {}
        self._warned: set[str] = set()
        self._last = -1
        self._steps, self._quiet = iterations.steps, 0
        # Number of consecutive calls of new kinds; calls left in the current rest of new kinds; calls in the
        # next rest.
        self._new_kinds, self._rest_of_kinds, self._next_rest_of_kinds = 0, 0, FIRST_REST_OF_KINDS
        self._hashes: set[int] = set()
        self._calls = 0
        self._replayed = 0
        self._audited = 0
        # Shortest time of a call that Python ran without being observed, in seconds, and the number of such
        # calls.
        self._fastest = math.inf
        self._timed = 0
        # The time by which calls took longer because they were observed, in seconds, and when the first of
        # them began.
        self._observed = 0.0
        self._began = 0.0
        # Recordings to drop when the function is freed. At the interpreter's end they are left alone.
        self._kept: set[int] = set()
        weakref.finalize(self, _drop_all, self._kept).atexit = False
        # Whether calls with equal arguments always issue equal operators, so that checks and audits are not
        # needed.
        self._is_proven = is_proven
        self._ends_iterations = ends_iterations
        all_functions.add(self)

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

    def __del__(self) -> None:
        # At the interpreter's end, the globals of modules, such as `sys`, are None.
        if sys is not None and not sys.is_finalizing() and self.__dict__.get("_calls"):
            add_gone(self._counters())

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_function" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return f"<torch_tandem.function {self._name()}>"

    def __deepcopy__(self, memo: dict) -> "Function":
        return Function(copy.deepcopy(self._function, memo), **self._options)

    def __reduce__(self) -> tuple | str:
        name = getattr(self._function, "__qualname__", None)
        if name and getattr(sys.modules.get(self._function.__module__), name, None) is self:
            return name
        return functools.partial(Function, **self._options), (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or is_transformed() or self._failed or is_observed():
            return self._function(*args, **kwargs)
        self._calls += 1
        if self._varying.arguments:
            arguments = self._arguments(args, kwargs)
            key, tensors, objects, numbers = arguments
        else:
            (key, tensors, objects), numbers = flatten(args, kwargs), []
        if self._signature is not None:
            self._check_signature(tensors)
        if graphs := self._graphs.get(key):
            for graph in graphs:
                if graph.left > 0 and graph.check(objects) < 0:
                    if graph.recorded.followed:
                        results = self._replay_with(graph, tensors, objects, numbers)
                    else:
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
                            iterations.steps += 1
                        else:
                            self._end_call()
                        return graph.result(results)
        return self._python(args, kwargs, Arguments(key, tensors, objects, numbers))

    def _arguments(self, args: tuple, kwargs: dict) -> Arguments:
        rest, named, numbers = self._varying.split(args, kwargs)
        return Arguments(*flatten(rest, named), numbers)

    def _replay_with(self, graph: Graph, tensors: list, objects: list, numbers: list[float]) -> list | None:
        """Replay a graph with new numbers, or return None if the numbers may lead to other operators."""
        assert graph.recorded.followed is not None
        fed = graph.recorded.followed.values(numbers, objects)
        # The new numbers are stored in the graph until the replay has sent them, so only one thread may set
        # them.
        if fed is None or not self._lock.acquire(blocking=False):
            return None
        try:
            _core.set_numbers(graph.recorded.id, fed)
            with torch._C.DisableTorchFunction():
                return _replay(graph.recorded.id, tensors)
        finally:
            self._lock.release()

    def _resume(
        self, graph: Graph, graphs: list[Graph], tensors: list, objects: list
    ) -> tuple[Graph, list | None]:
        """Continue a suspended replay of `graph` with another graph, which has read the same value.

        Returns the graph that has replayed the call, and None for the results if there is none.
        """
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
        """Raise an error if the tensors of a call do not match the signature."""
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
        """Run a call in Python, and record it if a recording can be of use."""
        if arguments.key not in self._attempts and not self._is_proven:
            floats = floats_of(args, kwargs)
            if self._floats and self._varying.add_arguments(self._floats, floats):
                arguments = self._arguments(args, kwargs)
            self._floats = floats
        if not self._is_known_kind(arguments.key):
            return self._function(*args, **kwargs)
        attempts = self._attempts_of(arguments.key)
        self._drop_dead(arguments)
        if self._has_new_replay(arguments, attempts):
            self._calls -= 1
            return self(*args, **kwargs)
        if self._failed:
            return self._function(*args, **kwargs)
        due = [graph for graph in self._graphs.get(arguments.key, ()) if graph.left == 0]
        due = [graph for graph in due if not self._why_not(graph, arguments)]
        may_record = _ops.may_record()
        if attempts.rest > 0 and (attempts.errors or not due):
            attempts.rest -= 1
            return self._plainly(args, kwargs, may_record)
        if self._refuses(arguments, attempts) or not may_record or self._is_observed_enough(attempts):
            return self._plainly(args, kwargs, may_record)
        # The time that a replay saves is measured in calls that are not observed: one before the first graph,
        # and two more after it.
        is_next = any(recorded.equal == EQUAL - 1 for recorded in attempts.recorded)
        if self._timed < (TIMED if due else int(is_next)):
            return self._plainly(args, kwargs, may_record)
        # While one thread records, calls of other threads run in Python instead of waiting.
        if not self._lock.acquire(blocking=False):
            return self._plainly(args, kwargs, False)
        begin = time.perf_counter()
        try:
            return self._record(args, kwargs, arguments, attempts, due)
        finally:
            self._lock.release()
            self._began = self._began or begin
            plain = self._fastest if math.isfinite(self._fastest) else 0.0
            self._observed += max(time.perf_counter() - begin - plain, 0.0)

    def _record(
        self, args: tuple, kwargs: dict, arguments: Arguments, attempts: Attempts, due: list[Graph]
    ) -> Any:
        """Run a call in Python and record it, as an audit if graphs are due and otherwise as an attempt."""
        inputs = specs(arguments.tensors)
        state = self._state(arguments)
        followed = self._follow(state, arguments)
        if self._varying.refusal and arguments.numbers:
            return self._plainly(args, kwargs, True)
        if due and state.refusal and not any(graph.is_in_doubt for graph in due):
            # Other calls have run code that reaches what cannot be compared, so an audit could not pass.
            for graph in due:
                self._remove(graph)
            self._rest(attempts)
            attempts.reason = state.refusal
            return self._plainly(args, kwargs, True)
        self._open = state
        containers = state.containers(arguments.objects)
        draws = _random_states()
        is_open = True
        try:
            # `record` is within the `try`, so that an interrupt in this operator also ends the recording.
            reads_gradients = self._is_proven or self._world.may_read("grad")
            if not _ops.record(arguments.tensors, state.tensors(), self._last, reads_gradients):
                is_open = False  # another thread has become the program's meanwhile
                return self._plainly(args, kwargs, False)
            observed = nullcontext() if self._is_proven else Observed(self._world)
            if followed:
                with followed.given(args, kwargs, arguments.objects) as (given, named):
                    with observed:
                        result = self._function(*given, **named)
                    result = followed.without_numbers(result)
            else:
                with observed:
                    result = self._function(*args, **kwargs)
            if self._open is None:  # the program has swapped tensors meanwhile
                is_open = False
                return result
            leaves, spec = _pytree.tree_flatten(result)
            # A tensor that occurs twice in the returned structure is one result.
            results = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
            tensors = list(results.values())
            after = self._state(arguments)
            release_numbers(after, arguments.objects)
            if not self._is_proven:
                self._world.find_functions(after.explained)
            written = state.differences(after) or state.replaced(containers, arguments.objects)
            changes = self._changes_arguments(args, kwargs, arguments)
            unknown = None if self._is_proven else self._unknown(state, after, written, changes)
            # If the call changes the state, the program may keep a tensor of the call, which belongs to the
            # graph that autograd has recorded. The results then also keep this graph, instead of getting a
            # node of the call.
            attaches = not (self._is_proven or unknown or written or changes)
            attaches = attaches and call_backward.may_attach(arguments.tensors, leaves, self._world)
            recording, attached = _ops.end_recording(tensors, attaches)
            is_open = False
        except Exception as error:
            self._count_error(attempts, error)
            raise
        finally:
            self._open = None
            if is_open:
                _ops.cancel_recording()
        attempts.errors = 0
        self._end_call()
        holes = {key: Hole(i) for i, key in enumerate(results)}
        constants = [holes.get(id(leaf), leaf) for leaf in leaves]
        self._kept.add(recording)
        recorded = Recorded(recording, state, spec, constants, written, inputs, specs(tensors))
        if _ops.has_backward(recording):
            recorded.passes, recorded.call = Passes(), Call(args, kwargs, arguments.tensors)
            leaves = [attached[leaf.number] if type(leaf) is Hole else leaf for leaf in constants]
            result = _pytree.tree_unflatten(leaves, spec)
        if followed:
            followed.end(recording)
            recorded.followed = followed
        refusal = self._refusal(recorded, arguments, unknown, draws != _random_states())
        # A call that reads another value than a graph did takes another branch, and cannot confirm or refute
        # the graph.
        due = [graph for graph in due if _core.parting(graph.recorded.id, recorded.id) is None]
        # Numbers that have turned out to vary since a graph was made are followed now, so the call cannot be
        # compared with the graph.
        for graph in [graph for graph in due if bool(graph.recorded.followed) != bool(followed)]:
            due.remove(graph)
            self._remove(graph)
        if due:
            self._audit_with(due[0], recorded, refusal)
        else:
            self._learn(arguments, attempts, recorded, refusal)
        return result

    def _is_observed_enough(self, attempts: Attempts) -> bool:
        """Whether observing another call now would take too large a share of the program's time."""
        since_first = time.perf_counter() - self._began if self._began else 0.0
        if self._observed <= OBSERVED + OBSERVED_SHARE * since_first:
            return False
        if not attempts.is_refused:
            values = len(self._latest.values)
            attempts.reason = f"it takes too long to compare the {values:,} values that it may depend on"
        return True

    def _follow(self, state: State, arguments: Arguments) -> Followed | None:
        """Return the numbers of a call that vary, prepared for being followed, or None."""
        if not self._varying or not self._world.is_settled:
            return None
        if refusal := unfollowed(self._world, state):
            self._varying.give_up(refusal)
            return None
        followed = Followed(self._varying, state, arguments.objects, arguments.numbers)
        if not followed.is_complete:
            self._varying.give_up("one of them is no float any more")
            return None
        return followed

    def _state(self, arguments: Arguments) -> State:
        """Return the state that a call can read. It is listed anew only if the last list is outdated."""
        if self._is_proven:
            return State()
        latest = self._latest
        if latest.version != self._world.version or not latest.holds(arguments.objects):
            self._latest = latest = state_of(self._function, arguments.objects, self._world)
        return latest

    def _is_known_kind(self, key: Hashable) -> bool:
        """Whether a call with this key may be recorded. New keys may not while nearly every call has one."""
        if key in self._attempts:
            self._new_kinds = 0
            return True
        if self._rest_of_kinds > 0:
            self._rest_of_kinds -= 1
            if hash(key) in self._hashes:
                return True
            if len(self._hashes) < MAX_HASHES:
                self._hashes.add(hash(key))
            return False
        self._new_kinds += 1
        if self._new_kinds > NEW_KINDS:
            self._rest_of_kinds = self._next_rest_of_kinds
            self._next_rest_of_kinds = min(2 * self._next_rest_of_kinds, LONGEST_REST)
            self._warn(
                "each call is of another kind, so none is replayed. "
                f"{varying(next(reversed(self._attempts)), key)}"
            )
            return False
        return True

    def _attempts_of(self, key: Hashable) -> Attempts:
        if known := self._attempts.get(key):
            return known
        if len(self._attempts) >= MAX_KEYS:
            oldest = next(iter(self._attempts))
            for recorded in self._attempts.pop(oldest).recorded:
                self._forget(recorded)
        return self._attempts.setdefault(key, Attempts())

    def _plainly(self, args: tuple, kwargs: dict, is_outermost: bool) -> Any:
        begin = time.perf_counter()
        result = self._function(*args, **kwargs)
        self._fastest = min(self._fastest, time.perf_counter() - begin)
        self._timed += 1
        if is_outermost:
            self._end_call()
        return result

    def _end_call(self) -> None:
        """End an iteration with each call if the program makes no optimizer steps."""
        if not self._ends_iterations:
            return
        if self._steps != iterations.steps:
            self._steps, self._quiet = iterations.steps, 0
        elif self._quiet < QUIET:
            self._quiet += 1
        else:
            _core.mark_step()

    def _refusal(
        self, recorded: Recorded, arguments: Arguments, unknown: tuple[str, bool] | None, draws: bool
    ) -> tuple[str, bool] | None:
        """The reason against a replay of a recorded call, if any, and whether a later call may lack it."""
        if found := _core.refusal(recorded.id):
            return found
        if text := _ops.refusal(recorded.id):
            is_attached = not text.startswith(call_backward.NOT_ATTACHED)
            return (text, False) if is_attached or not unknown else unknown
        if draws:
            return "it draws from Python's or NumPy's random generator", False
        for tensor in () if self._is_proven else arguments.tensors:
            if _core.attributes_of(tensor):
                return "it sets an attribute of a tensor among the arguments. Return the value", False
        for constant in recorded.constants:
            if type(constant) not in VALUES and type(constant) is not Hole:
                return (
                    f"it returns a {type(constant).__name__}; return tensors, numbers and strings only",
                    False,
                )
        if self._varying and not recorded.followed:
            return unknown or (f"{DIFFERS}, and it was not followed yet", True)
        if recorded.followed and not unknown:
            reads, passes = _core.fetches_of(recorded.id), recorded.passes is not None
            if text := recorded.followed.refusal(recorded.id, reads, passes, self._world.reader):
                self._varying.give_up(text)
                return f"{DIFFERS}, and {text}. {IF_A_NUMBER}", True
        return unknown

    def _changes_arguments(self, args: tuple, kwargs: dict, arguments: Arguments) -> bool:
        """Whether a call has changed the containers among its arguments."""
        key, tensors, objects, _ = self._arguments(args, kwargs)
        same = [*map(id, tensors)] == [*map(id, arguments.tensors)]
        return key != arguments.key or not same or [*map(id, objects)] != [*map(id, arguments.objects)]

    def _unknown(
        self, state: State, after: State, written: dict[Path, str], changes: bool
    ) -> tuple[str, bool] | None:
        """An effect or a dependence of a recorded call that is unknown or would be skipped, if there is one.

        The second value says whether a later call may lack it.
        """
        world = self._world
        for text in world.refusals:
            return text, False
        if world.unseen:
            return world.unseen, False
        if state.version != world.version or after.version != world.version:
            return "it has run code that no call before had run", True
        if refusal := state.refusal or after.refusal:
            return refusal, False
        if self._skips_effects:
            return None
        for text in world.effects:
            return f"{text}. If that is right: function(..., effects='skip')", False
        if changes:
            return (
                "the call itself changes a container among its arguments, which a replay would not do. "
                "Return what it adds; if it may stay as it is: function(..., effects='skip')",
                False,
            )
        for path, label in written.items():
            return (
                f"the call itself changes {label}{self._line_of(path)}, which a replay would not do. Keep it "
                "in a tensor on the device, or change it outside of the function; if it may stay as it is: "
                "function(..., effects='skip')",
                False,
            )
        return None

    def _line_of(self, path: Path) -> str:
        """The program's line that sets the value at the end of a path, in parentheses; empty if not found."""
        kind, last = path[-1][0], path[-1][-1]
        name = (
            last
            if kind in ("k", "a", "value") and isinstance(last, str) and last != "cell_contents"
            else None
        )
        places = [*self._world.lines_of_store(name), *(self._world.lines_of_store(None) if name else ())]
        return f" ({places[0]})" if places else ""

    def _learn(
        self,
        arguments: Arguments,
        attempts: Attempts,
        recorded: Recorded,
        refusal: tuple[str, bool] | None,
    ) -> None:
        """Compare a recorded call with earlier ones of its key.

        After three equal calls, a graph replays the next one.
        """
        self._keep_last(recorded)
        attempts.is_refused = False
        if refusal:
            attempts.reason, passes = refusal
            attempts.is_refused = not passes
            self._forget(recorded)
            attempts.new += 1
            if attempts.new > (WARM_UP if passes else FIRST_CALLS):
                self._rest(attempts)
            return
        if recorded.followed and self._widens_a_graph(arguments, recorded):
            return
        attempts.tries += 1
        for known in reversed(attempts.recorded):
            difference = self._difference(known, recorded)
            if difference is not None:
                changed = known.state.differences(recorded.state)
                if self._skips_effects:
                    written = known.written.keys() | recorded.written.keys()
                    changed = {path: label for path, label in changed.items() if path not in written}
                if self._varying.add_state(known.state, recorded.state, changed):
                    self._forget_recorded(attempts, recorded)
                    return
            if difference is None:
                recorded.equal = known.equal + 1
                recorded.written |= known.written
                attempts.recorded.remove(known)
                if known.passes:
                    # The backward pass of the earlier call may still run.
                    recorded.passes = known.passes
                    recorded.passes.take(known.id, self._drop)
                else:
                    self._forget(known)
                break
            attempts.reason = difference
        attempts.recorded.append(recorded)
        if recorded.equal >= EQUAL:
            if recorded.passes:
                attempts.reason = recorded.passes.reason
            else:
                self._add_graph(arguments, attempts, recorded)
        reads = _core.fetches_of(recorded.id)
        if len(attempts.recorded) > (PATHS if reads else REMEMBERED):
            self._forget(attempts.recorded.pop(0))
        if attempts.tries >= (PATHS if reads else PATIENCE):
            self._rest(attempts)

    def _rest(self, attempts: Attempts) -> None:
        """Record none of the next calls of a key."""
        if self._varying and not any(g.recorded.followed for graphs in self._graphs.values() for g in graphs):
            self._varying.give_up(attempts.reason)
        self._forget_recorded(attempts)
        attempts.tries = attempts.new = 0
        attempts.rest = attempts.next_rest
        attempts.next_rest = min(2 * attempts.next_rest, LONGEST_REST)

    def _count_error(self, attempts: Attempts, error: Exception) -> None:
        """Count an error of a call that was to be recorded: if calls keep raising, a rest begins."""
        attempts.errors += 1
        if attempts.errors > FIRST_CALLS:
            self._rest(attempts)
            attempts.reason = f"it raises {type(error).__name__}"

    def _forget_recorded(self, attempts: Attempts, *others: Recorded) -> None:
        for recorded in (*attempts.recorded, *others):
            self._forget(recorded)
        attempts.recorded.clear()

    def _widens_a_graph(self, arguments: Arguments, recorded: Recorded) -> bool:
        """Let a graph be replayed with other numbers, if this call differs from the graph in numbers alone.

        Two equal calls with other numbers show at which places the numbers are fed. Returns whether there was
        a graph.
        """
        for graph in self._graphs.get(arguments.key, ()):
            if graph.recorded.followed and self._difference(graph.recorded, recorded) is None:
                graph.recorded.followed.widen(recorded.followed)
                self._forget(recorded)
                return True
        return False

    def _difference(self, one: Recorded, two: Recorded, compares_state: bool = True) -> str | None:
        free: list[int] = []
        followed = frozenset[Path]()
        if one.followed and two.followed:
            if text := one.followed.match(two.followed):
                return f"{text}. {IF_A_NUMBER}"
            free, followed = list(two.followed.moved), two.followed.paths
        elif one.followed or two.followed:
            return DIFFERS
        if text := _core.unequal(one.id, two.id, free) or _ops.unequal(one.id, two.id):
            return text
        if one.spec != two.spec or [*map(_typed, one.constants)] != [*map(_typed, two.constants)]:
            return "it returns another value that is not a tensor; return a tensor instead"
        changed = one.state.differences(two.state) if compares_state else {}
        written = one.written.keys() | two.written.keys() if self._skips_effects else set()
        if changed := [label for path, label in changed.items() if path not in written | followed]:
            return f"{min(changed, key=len)} has changed between the calls. {IF_A_NUMBER}"
        return None

    def _has_new_replay(self, arguments: Arguments, attempts: Attempts) -> bool:
        """Compare the backward passes that have run since the last call.

        Returns whether this call can now be replayed.
        """
        for recorded in list(attempts.recorded):
            if not recorded.passes:
                continue
            recorded.passes.take(recorded.id, self._drop)
            if recorded.passes.creates_graph or recorded.equal >= EQUAL:
                attempts.reason = recorded.passes.reason
            if recorded.passes.creates_graph:
                self._rest(attempts)
                attempts.rest = sys.maxsize
                return False
            if recorded.equal >= EQUAL and (backwards := recorded.passes.proven()):
                self._add_graph(arguments, attempts, recorded, backwards)
                return recorded in [graph.recorded for graph in self._graphs.get(arguments.key, ())]
        for graph in list(self._graphs.get(arguments.key, ())):
            if graph.audited is not None and not self._failed:
                self._audit_backward(graph)
                if graph.left > 0 and not self._failed:
                    return True
        return False

    def _add_graph(
        self, arguments: Arguments, attempts: Attempts, recorded: Recorded, backwards: Sequence[int] = ()
    ) -> None:
        attempts.recorded.remove(recorded)
        attempts.tries = attempts.new = 0
        attempts.next_rest = PATIENCE
        if not all(map(_core.make_template, (recorded.id, *backwards))):
            self._forget(recorded)
            return
        if recorded.passes:
            # From now on the recorded call's replays hold these passes.
            recorded.passes.recorded = [p for p in recorded.passes.recorded if p.id not in backwards]
            recorded.passes.waiting.remove(recorded.id)
            for backward in backwards:
                _ops.add_backward(recorded.id, backward)
            _differentiable[recorded.id] = self
        if sum(map(len, self._graphs.values())) >= self._max_graphs:
            self._drop_oldest(arguments)
        period = self._audit or FIRST_AUDIT
        without = set(recorded.written) | (recorded.followed.paths if recorded.followed else set())
        check = _holds if self._is_proven else recorded.state.check(without)
        left = sys.maxsize if self._is_proven else period - 1
        id = recorded.id
        ends, reads = _core.ends_of(id), _core.fetches_of(id)
        if not backwards and (changed := check(arguments.objects)) >= 0:
            # The state was listed just now. A check that already fails would fail before every call.
            attempts.vain += 1
            if attempts.vain >= EQUAL:
                attempts.reason = f"{recorded.state.label(changed)} cannot be compared"
                self._forget(recorded)
                self._rest(attempts)
                return
        graph = Graph(recorded, arguments.key, check, builder(recorded), ends, reads, left, period)
        graph.backwards, graph.changes = list(backwards), _core.changes(id)
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

    def _audit_with(self, graph: Graph, recorded: Recorded, refusal: tuple[str, bool] | None) -> None:
        self._audited += 1
        if refusal is None:
            # The state was found equal before the call.
            difference = self._difference(graph.recorded, recorded, compares_state=False)
            if difference is None and recorded.followed and graph.recorded.followed:
                difference = recorded.followed.beyond(graph.recorded.followed)
        else:
            difference, passes = refusal
            if passes and _core.ops_of(graph.recorded.id):
                # Operators of this call ran outside of the recording and cannot be compared, so the next call
                # is the audit.
                graph.is_in_doubt = True
                self._keep_last(recorded)
                self._forget(recorded)
                return
        self._keep_last(recorded)
        self._forget(recorded)
        if difference is not None:
            self._fail(graph, difference)
        elif recorded.passes:
            graph.audited = recorded.id
        else:
            self._pass(graph)

    def _audit_backward(self, graph: Graph) -> None:
        """Compare the backward passes that an audited call has had since the audit."""
        audited, graph.audited = graph.audited, None
        for backward in _ops.take_backwards(audited):
            if backward < 0:
                continue
            alike = [b for b in graph.backwards if not call_backward.is_other_kind(b, backward)]
            texts = [call_backward.difference(known, backward) for known in alike]
            call_backward.drop(backward)
            if alike and None not in texts:
                return self._fail(graph, f"in its backward pass, {texts[0]}")
        self._pass(graph)

    def _pass(self, graph: Graph) -> None:
        graph.period = self._audit or min(2 * graph.period, LAST_AUDIT)
        graph.left, graph.suspect, graph.is_in_doubt = graph.period - 1, 0, False

    def _fail(self, graph: Graph, difference: str) -> None:
        text = (
            f"an audit found that a call differs from the one that was replayed: {difference}. The last "
            f"{graph.suspect} replayed calls may have been wrong. The function runs in Python from now on"
        )
        self._failed = text
        self._forget_all()
        if self._raises:
            raise RuntimeError(f"torch_tandem.function {self._name()}: {text}")
        self._warn(text, always=True)

    def _make_again(self, recording: int, tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Make a replayed call again in Python, where later calls of its key run, and return its tensors."""
        graphs = [graph for graphs in self._graphs.values() for graph in graphs]
        graph = next((graph for graph in graphs if graph.recorded.id == recording), None)
        call = graph.recorded.call if graph else None
        objects = flatten(*call.arguments(tensors))[2] if call else []
        if call is None or graph.changes or graph.check(objects) >= 0:
            raise RuntimeError(
                f"torch_tandem.function {self._name()}: the backward pass of a replayed call differs from "
                "those of recorded calls (create_graph=True, or gradients of other results), and the call "
                "cannot be made again, since it changes tensors, draws random numbers, or depends on what "
                "has changed since. Call it without torch_tandem.function"
            )
        attempts = self._attempts_of(graph.key)
        attempts.reason = (
            "a backward pass of it differed from those of recorded calls (create_graph=True, ...)"
        )
        attempts.rest, graph.left = sys.maxsize, -1
        result = call.again(self._function, tensors)
        leaves = _pytree.tree_leaves(result)
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())

    def _drop_dead(self, arguments: Arguments) -> None:
        """Drop graphs that are no longer replayed, or that use a tensor which no longer exists."""
        for graph in list(self._graphs.get(arguments.key, ())):
            if graph.left < 0 or _ops.dead(graph.recorded.id) >= 0:
                self._remove(graph)

    def _forget_all(self) -> None:
        """Drop all graphs and recordings, and with their states all references to the program's objects."""
        for graph in [graph for graphs in self._graphs.values() for graph in graphs]:
            self._remove(graph)
        for attempts in self._attempts.values():
            for recorded in attempts.recorded:
                self._forget(recorded)
            attempts.recorded.clear()
        if self._last >= 0:
            self._drop(self._last)
            self._last = -1
        self._latest.forget()
        self._latest = State(version=-1)
        if self._open is not None:
            _ops.cancel_recording()
            self._open.forget()
            self._open = None

    def _remove(self, graph: Graph) -> None:
        graphs = self._graphs[graph.key]
        graphs.remove(graph)
        if not graphs:
            del self._graphs[graph.key]
        self._forget(graph.recorded)

    # --- Recordings that are needed no more ----------------------------------------------------------------

    def _keep_last(self, recorded: Recorded) -> None:
        """Keep the latest recording, from which the next one learns the tensors whose gradients matter."""
        last, self._last = self._last, recorded.id
        if last >= 0 and last not in self._in_use():
            self._drop(last)

    def _forget(self, recorded: Recorded) -> None:
        if recorded.passes:
            recorded.passes.forget(self._drop)
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
        return self.__dict__.get("__qualname__") or type(self._function).__name__

    def _warn(self, text: str, always: bool = False) -> None:
        if always or text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"torch_tandem.function {self._name()}: {text}", stacklevel=users_level())

    def _refuses(self, arguments: Arguments, attempts: Attempts) -> bool:
        for tensor in arguments.tensors:
            if self._is_proven and tensor.layout == torch.strided:
                continue
            if type(tensor) not in TENSORS or tensor.layout != torch.strided:
                attempts.reason = f"an argument is a {type(tensor).__name__} of layout {tensor.layout}"
                return True
            if _core.attributes_of(tensor):
                attempts.reason = "a tensor among the arguments has attributes of its own"
                return True
        if not self._is_proven and not is_observable():
            attempts.reason = "a profiler is active, so what it runs cannot be observed"
            return True
        if not self._is_proven and is_compiled():
            attempts.reason = "it is called by code that torch.compile has compiled"
            return True
        return False

    def cache_info(self) -> CacheInfo:
        """Return the numbers of replayed calls, of calls that ran Python, of graphs, and of audits."""
        graphs = sum(map(len, self._graphs.values()))
        return CacheInfo(
            self._replayed, self._calls - self._replayed, self._max_graphs, graphs, self._audited
        )

    def concrete_graph(self, *args: Any, **kwargs: Any) -> ConcreteGraph:
        """Return the graph that would replay a call with these arguments.

        Raises a `LookupError` if the call would run Python.
        """
        arguments = self._arguments(args, kwargs)
        key = arguments.key
        why = (
            self._attempts[key].reason
            if key in self._attempts
            else "it has not been called with these arguments"
        )
        for graph in self._graphs.get(key, ()):
            id = graph.recorded.id
            why = self._why_not(graph, arguments)
            if not why:
                names = owners(id, graph.recorded.state.names_of_tensors())
                return ConcreteGraph(id, names, graph.recorded.inputs, graph.recorded.outputs)
        raise LookupError(f"torch_tandem.function {self._name()} has no graph for this call: {why}")

    def _why_not(self, graph: Graph, arguments: Arguments) -> str:
        """The reason for which a graph does not replay a call with these arguments; empty if it does."""
        changed = graph.check(arguments.objects)
        if changed >= 0:
            return f"{graph.recorded.state.label(changed)} has changed"
        followed = graph.recorded.followed
        if followed and followed.values(arguments.numbers, arguments.objects) is None:
            return "a number that varies may lead another way"
        return _ops.not_replayed(graph.recorded.id, arguments.tensors)

    def _counters(self) -> Counters:
        return {
            "name": self._name(),
            "replayed": self._replayed,
            "ran": self._calls - self._replayed,
            "audits": self._audited,
            "graphs": sum(map(len, self._graphs.values())),
            "saved_us": int(self._replayed * self._fastest * 1e6) if self._replayed else 0,
            "reason": self.reason(),
            "failed": bool(self._failed),
        }

    def explain(self) -> str:
        """Return a text: the number of replayed calls, the time that they saved, and why others were not."""
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
        """Return the reason for which the latest kind of call is not replayed, or None if it is."""
        if self._failed:
            return self._failed
        if not self._attempts:
            return "it has not been called"
        key = next(reversed(self._attempts))
        if self._graphs.get(key):
            return None
        if self._varying.refusal:
            return (
                f"{DIFFERS}, and {self._varying.refusal}".removesuffix(f". {IF_A_NUMBER}")
                + f". {IF_A_NUMBER}"
            )
        return self._attempts[key].reason


def counters() -> list[Counters]:
    """Return the counters of all functions that have been called, also those that no longer exist."""
    return with_gone(function._counters() for function in list(all_functions) if function._calls)


def _forgetting(swap: Callable) -> Callable:
    @functools.wraps(swap)
    def swap_tensors(one: torch.Tensor, two: torch.Tensor) -> None:
        # PyTorch refuses to swap tensors that have weak references, and states have such references.
        for function in list(all_functions):
            function._forget_all()
        return swap(one, two)

    return swap_tensors


torch.utils.swap_tensors = _forgetting(torch.utils.swap_tensors)


def _drop_all(recordings: Iterable[int]) -> None:
    for recording in recordings:
        _ops.drop_backwards(recording)
        call_backward.drop(recording)


def _recompute(recording: int, tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Make a replayed call again in Python, for a backward pass that differs from those of recorded calls."""
    function = _differentiable.get(recording)
    if function is None:
        raise RuntimeError("torch_tandem.function: a replayed call has no backward pass, as it was forgotten")
    return function._make_again(recording, tensors)


_library = torch.library.Library("torch_tandem", "IMPL")
_library.impl("recompute", _recompute, "CompositeImplicitAutograd")


def _holds(objects: list) -> int:
    """The check of a graph that needs none: no value differs."""
    return -1


def _typed(value: Any) -> tuple:
    return type(value), value
