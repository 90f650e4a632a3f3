"""Functions whose calls are replayed without Python once they have proven to be equal: docs/functions.md."""

import copy
import functools
import inspect
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._device import iterations, module_calls
from torch_tandem._functions import asked_gradients, refusals
from torch_tandem._functions.arguments import Arguments, described, flatten
from torch_tandem._functions.audits import FIRST_AUDIT, Audits
from torch_tandem._functions.call_backward import EQUAL
from torch_tandem._functions.callers import Warner, is_observed, is_transformed
from torch_tandem._functions.concrete import ConcreteGraph, owners
from torch_tandem._functions.counters import add_gone, with_gone
from torch_tandem._functions.learning import Learning
from torch_tandem._functions.recorded import Attempts, Graph
from torch_tandem._functions.recorder import Recorder
from torch_tandem._functions.recordings import Recordings
from torch_tandem._functions.refusals import IF_A_NUMBER
from torch_tandem._functions.times import Times
from torch_tandem._functions.types import CacheInfo
from torch_tandem._functions.varying import DIFFERS, floats_of
from torch_tandem._report import candidates, residence
from torch_tandem._report.types import Function as Counters

# Number of calls without an optimizer step after which each call ends an iteration, if the program has made
# no steps. After steps, it is twice the largest number of calls between two steps, with an upper limit.
QUIET = 3
MOST_QUIET = 128
# Number of calls in Python that are timed before the first audit.
TIMED = 3

# Attributes in C of functions and of bound methods, for which libraries ask.
_OF_FUNCTIONS = frozenset(
    {"__func__", "__self__", "__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__"}
)

_ops = torch.ops.torch_tandem
_replay, _resume = _ops.replay.default._op, _ops.resume.default._op
_replay_counting = _ops.replay_counting.default._op
_is_compiling = torch.compiler.is_compiling

all_functions: "weakref.WeakSet[Function]" = weakref.WeakSet()


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
        # The name by which the command line has named the function, or its module.
        self._label = ""
        self._function = function
        self._options = {
            "input_signature": input_signature,
            "audit": audit,
            "max_graphs": max_graphs,
            "on_mismatch": on_mismatch,
            "effects": effects,
        }
        self._signature = input_signature
        self._raises = on_mismatch == "raise"
        self._is_proven = is_proven
        self._ends_iterations = ends_iterations
        self._warner = Warner(self._name())
        self._recordings = Recordings(max_graphs, self._warner)
        self._recorder = Recorder(function, is_proven, skips_effects=effects == "skip")
        self._learning = Learning(self._recorder, self._recordings, audit or FIRST_AUDIT)
        self._audits = Audits(self._learning, self._recordings, audit)
        self._times = Times()
        # For calls that are replayed: shared with the recordings and the recorder.
        self._graphs, self._varying = self._recordings.graphs, self._recorder.varying
        # The floats among the arguments of the latest call that had a new key.
        self._floats: tuple[tuple, dict] | None = None
        # Held while a call is recorded.
        self._lock = threading.RLock()
        # The reason for which an audit has ended replays for good; empty if none has.
        self._failed = ""
        self._steps, self._quiet, self._most = iterations.steps, 0, 0
        self._calls = 0
        self._replayed = 0
        if not is_proven:
            candidates.end()
            module_calls.use_torchs()
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
        if (name.startswith("__") and name not in _OF_FUNCTIONS) or "_function" not in self.__dict__:
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
            key, tensors, objects, numbers = self._recorder.arguments(args, kwargs)
        else:
            (key, tensors, objects), numbers = flatten(args, kwargs, self._recorder.data), []
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
            counters = graph.recorded.followed.counters
            counted = (counters.tensors(), counters.increments)
            with torch._C.DisableTorchFunction():
                return _replay_counting(graph.recorded.id, tensors, *counted)
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
        recordings = self._recordings
        if arguments.key not in recordings.attempts and not self._is_proven:
            floats = floats_of(args, kwargs)
            if self._floats and self._varying.add_arguments(self._floats, floats):
                arguments = self._recorder.arguments(args, kwargs)
            self._floats = floats
        if not self._is_proven and self._recorder.finds_data(arguments):
            arguments = self._recorder.arguments(args, kwargs)
        if not recordings.admits(arguments.key):
            return self._function(*args, **kwargs)
        attempts = recordings.attempts_of(arguments.key)
        recordings.drop_dead(arguments.key)
        if self._can_replay_now(arguments, attempts):
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
        if reason := refusals.before(arguments, self._is_proven):
            attempts.reason = reason
            return self._plainly(args, kwargs, may_record)
        if not may_record:
            return self._plainly(args, kwargs, is_outermost=False)
        if self._times.is_observed_enough():
            if not attempts.is_refused:
                values = self._recorder.values()
                attempts.reason = f"it takes too long to compare the {values:,} values that it may depend on"
            return self._plainly(args, kwargs)
        # The time that a replay saves is measured in calls that are not observed: one before the first graph,
        # and two more after it.
        is_next = any(recorded.equal == EQUAL - 1 for recorded in attempts.recorded)
        if self._times.plain_calls < (TIMED if due else int(is_next)):
            return self._plainly(args, kwargs)
        # While one thread records, calls of other threads run in Python instead of waiting.
        if not self._lock.acquire(blocking=False):
            return self._plainly(args, kwargs, is_outermost=False)
        begin = time.perf_counter()
        try:
            return self._record(args, kwargs, arguments, attempts, due)
        finally:
            self._lock.release()
            self._times.add_observed(begin)

    def _can_replay_now(self, arguments: Arguments, attempts: Attempts) -> bool:
        """Whether backward passes since the last call have shown that this call can be replayed."""
        if self._learning.take_passes(arguments, attempts):
            return True
        for graph in list(self._graphs.get(arguments.key, ())):
            if graph.audited is not None and not self._failed:
                self._fail_if(self._audits.compare_backward(graph))
                if graph.left > 0 and not self._failed:
                    return True
        return False

    def _record(
        self, args: tuple, kwargs: dict, arguments: Arguments, attempts: Attempts, due: list[Graph]
    ) -> Any:
        """Run a call in Python and record it, as an audit if graphs are due and otherwise as an attempt."""
        recordings = self._recordings
        prepared = self._recorder.prepare(arguments)
        if self._varying.refusal and arguments.numbers:
            return self._plainly(args, kwargs)
        if due and prepared.state.refusal and not any(graph.is_in_doubt for graph in due):
            # Other calls have run code that reaches what cannot be compared, so an audit could not pass.
            for graph in due:
                recordings.remove(graph)
            self._learning.rest(attempts)
            attempts.reason = prepared.state.refusal
            return self._plainly(args, kwargs)
        try:
            run = self._recorder.run(args, kwargs, arguments, prepared, recordings)
        except Exception as error:
            self._learning.count_error(attempts, error)
            raise
        if run is None:
            return self._plainly(args, kwargs, is_outermost=False)
        result, recorded, refusal = run
        if recorded is None:
            return result
        attempts.errors = 0
        self._end_call()
        # A call that reads another value than a graph did takes another branch, and cannot confirm or refute
        # the graph.
        due = [graph for graph in due if _core.parting(graph.recorded.id, recorded.id) is None]
        # Numbers that have turned out to vary since a graph was made are followed now, and code that has run
        # since may read gradients, so the call cannot be compared with the graph.
        for graph in [graph for graph in due if not graph.recorded.is_comparable(recorded)]:
            due.remove(graph)
            recordings.remove(graph)
        if due:
            self._fail_if(self._audits.compare(due[0], recorded, refusal))
        else:
            self._learning.learn(arguments, attempts, recorded, refusal)
        return result

    def _plainly(self, args: tuple, kwargs: dict, is_outermost: bool = True) -> Any:
        begin = time.perf_counter()
        result = self._function(*args, **kwargs)
        self._times.add_plain(time.perf_counter() - begin)
        if is_outermost:
            self._end_call()
        return result

    def _end_call(self) -> None:
        """End an iteration with each call if the program makes no optimizer steps, or none any more."""
        if not self._ends_iterations:
            return
        if self._steps != iterations.steps:
            if self._steps:
                self._most = max(self._most, min(self._quiet, MOST_QUIET))
            self._steps, self._quiet = iterations.steps, 0
        elif self._quiet < max(QUIET, 2 * self._most):
            self._quiet += 1
        else:
            iterations.ended["a function's call"] += 1
            _core.mark_step()

    def _fail_if(self, difference: str) -> None:
        """End replays for good if an audit has found a difference."""
        if not difference:
            return
        self._failed = difference
        self._forget_all()
        if self._raises:
            raise RuntimeError(f"torch_tandem.function {self._name()}: {difference}")
        self._warner.warn(difference, always=True)

    def _may_be_made_again(self, recording: int, tensors: list[torch.Tensor | None]) -> bool:
        """Whether a replayed call would do the same if it were made again."""
        graph = self._recordings.graph_of(recording)
        call = graph.recorded.call if graph else None
        if graph is None or call is None or graph.changes or not call.is_complete:
            return False
        return graph.check(flatten(*call.arguments(tensors), self._recorder.data)[2]) < 0

    def _make_again(self, recording: int, tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Make a replayed call again in Python, where later calls of its key run, and return its tensors."""
        graph = self._recordings.graph_of(recording)
        assert graph is not None and graph.recorded.call is not None
        attempts = self._recordings.attempts_of(graph.key)
        may = self._may_be_made_again(recording, tensors)
        self._learning.rest(attempts)
        attempts.reason = (
            "a backward pass of it differed from those of recorded calls (create_graph=True, gradients with "
            "other strides, ...)"
        )
        graph.left = -1
        call = graph.recorded.call
        if not may:
            attempts.rest = sys.maxsize
            raise _cannot_be_made_again(
                "it changes tensors, draws random numbers, or depends on what has changed since"
            )
        result = call.again(self._function, tensors)
        leaves = _pytree.tree_leaves(result)
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())

    def _forget_all(self) -> None:
        """Drop all graphs and recordings, and with their states all references to the program's objects."""
        self._recordings.forget_all()
        self._recorder.forget()

    # --- What users are told -------------------------------------------------------------------------------

    def _name(self) -> str:
        if self._is_proven:
            return "a graph of torch.compile"
        return self._label or self.__dict__.get("__qualname__") or type(self._function).__name__

    def cache_info(self) -> CacheInfo:
        """Return the numbers of replayed calls, of calls that ran Python, of graphs, and of audits."""
        return CacheInfo(
            hits=self._replayed,
            misses=self._calls - self._replayed,
            maxsize=self._options["max_graphs"],
            currsize=self._recordings.count(),
            audits=self._audits.count,
        )

    def concrete_graph(self, *args: Any, **kwargs: Any) -> ConcreteGraph:
        """Return the graph that would replay a call with these arguments.

        Raises a `LookupError` if the call would run Python.
        """
        arguments = self._recorder.arguments(args, kwargs)
        attempts = self._recordings.attempts.get(arguments.key)
        why = attempts.reason if attempts else "it has not been called with these arguments"
        for graph in self._graphs.get(arguments.key, ()):
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
            "audits": self._audits.count,
            "graphs": self._recordings.count(),
            "saved_us": int(self._replayed * self._times.fastest * 1e6) if self._replayed else 0,
            "reason": self.reason(),
            "failed": bool(self._failed),
        }

    def explain(self) -> str:
        """Return a text: the number of replayed calls, the time that they saved, and why others were not."""
        info = self.cache_info()
        lines = [
            f"{self._name()}: {info.hits:,} of {self._calls:,} calls were replayed"
            + (f", which saved about {info.hits * self._times.fastest:.3g} s" if info.hits else "")
        ]
        for key, attempts in self._recordings.attempts.items():
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
        attempts = self._recordings.attempts
        if not attempts:
            return "it has not been called"
        key = next(reversed(attempts))
        if self._graphs.get(key):
            return None
        if self._varying.refusal:
            why = self._varying.refusal.removesuffix(f". {IF_A_NUMBER}")
            return f"{DIFFERS}, and {why}. {IF_A_NUMBER}"
        return self._recordings.varies or attempts[key].reason


def counters() -> list[Counters]:
    """Return the counters of all functions that have been called, also those that no longer exist."""
    return with_gone(function._counters() for function in list(all_functions) if function._calls)


def _forgetting(swap: Callable) -> Callable:
    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        # PyTorch refuses to swap tensors that have weak references. The report, states and recordings have
        # such references, and nodes of autograd keep recordings.
        residence.clear()
        for function in list(all_functions):
            function._forget_all()
        _ops.clear_weak_tensors()
        return swap(t1, t2)

    return swap_tensors


torch.utils.swap_tensors = _forgetting(torch.utils.swap_tensors)
asked_gradients.install()


def _recompute(recording: int, tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Make a replayed call again in Python, for a backward pass that differs from those of recorded calls."""
    for function in list(all_functions):
        if function._recordings.graph_of(recording):
            return function._make_again(recording, tensors)
    raise _cannot_be_made_again("the graph that replayed it was dropped")


def _may_recompute(recording: int, tensors: list[torch.Tensor | None]) -> bool:
    return any(function._may_be_made_again(recording, tensors) for function in list(all_functions))


def _cannot_be_made_again(why: str) -> RuntimeError:
    return RuntimeError(
        "torch_tandem.function: the backward pass of a replayed call differs from those of recorded calls "
        "(create_graph=True, or gradients of other results), and the call cannot be made again, since "
        f"{why}. Call the function without torch_tandem.function"
    )


_library = torch.library.Library("torch_tandem", "IMPL")
_library.impl("recompute", _recompute, "CompositeImplicitAutograd")
_library.impl("may_recompute", _may_recompute, "CompositeImplicitAutograd")
