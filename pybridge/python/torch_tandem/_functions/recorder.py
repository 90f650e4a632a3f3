"""The recording of one call: Python runs it, its code is observed, and its operators are recorded."""

import random
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions import call_backward, refusals, results
from torch_tandem._functions.arguments import Arguments, flatten, records
from torch_tandem._functions.call_backward import Call, Hole, Passes
from torch_tandem._functions.concrete import specs
from torch_tandem._functions.observe import Observed, World
from torch_tandem._functions.place import release_numbers
from torch_tandem._functions.recorded import Recorded
from torch_tandem._functions.recordings import Recordings
from torch_tandem._functions.refusals import Refusal
from torch_tandem._functions.state import State, without_torch_function
from torch_tandem._functions.varying import Followed, Varying, unfollowed
from torch_tandem._functions.walk import state_of

_ops = torch.ops.torch_tandem


class Prepared(NamedTuple):
    """What is known of a call before it runs: the state that it can read, and its numbers that vary."""

    state: State
    followed: Followed | None


class Run(NamedTuple):
    """A call that Python has run: its result and its recording, with the reason against a replay, if any.

    `recorded` is None if tensors were swapped meanwhile, which ends the recording.
    """

    result: Any
    recorded: Recorded | None
    refusal: Refusal | None


class _Open:
    """A recording that has begun. It ends with this object at the latest: interrupts arrive anywhere."""

    def __init__(self) -> None:
        self.is_open = True

    def cancel(self) -> None:
        if self.is_open:
            _ops.cancel_recording()
            self.is_open = False

    __del__ = cancel


class Recorder:
    """Records calls of a function, one at a time.

    - `is_proven`: calls with equal arguments always issue equal operators, so no code is observed and no
      state is compared.
    - `skips_effects`: effects of a call, such as printing, do not refuse its replay.
    """

    def __init__(self, function: Callable, is_proven: bool, skips_effects: bool) -> None:
        self._function = function
        self.is_proven, self.skips_effects = is_proven, skips_effects
        self.world = World()
        self.varying = Varying()
        # The classes of arguments that are other objects in each call, and whose tensors are arguments; and
        # the latest argument of each class.
        self.data: set[type] = set()
        self._objects: dict[type, weakref.ref] = {}
        # The state that was listed last, and the state before the call that is being recorded.
        self._latest = State(version=-1)
        self._open: State | None = None

    def values(self) -> int:
        """The number of values in the state that was listed last."""
        return len(self._latest.values)

    def arguments(self, args: tuple, kwargs: dict) -> Arguments:
        rest, named, numbers = self.varying.split(args, kwargs)
        return Arguments(*flatten(rest, named, self.data), numbers)

    def finds_data(self, arguments: Arguments) -> bool:
        """Whether an argument shows that the tensors of its class are arguments, which was not known."""
        found = False
        for value in records(arguments.objects):
            kind = type(value)
            latest = self._objects.get(kind)
            is_new = latest is not None and latest() is not value
            try:
                self._objects[kind] = weakref.ref(value)
            except TypeError:  # the identity of such an object is not compared
                is_new = True
            if is_new and kind not in self.data:
                self.data.add(kind)
                found = True
        return found

    def prepare(self, arguments: Arguments) -> Prepared:
        state = self._state(arguments)
        return Prepared(state, self._follow(state, arguments))

    def run(
        self, args: tuple, kwargs: dict, arguments: Arguments, prepared: Prepared, recordings: Recordings
    ) -> Run | None:
        """Run a call and add its recording to `recordings`.

        Returns None if the call was not run, because another thread is the program's now.
        """
        state, followed = prepared
        inputs = specs(arguments.tensors)
        self._open = state
        containers = state.containers(arguments.objects)
        draws = _random_states(state)
        may_read_gradients = self.is_proven or self.world.may_read("grad")
        opened = _Open()
        try:
            counters = followed.counters.tensors() if followed else []
            begun = arguments.tensors, state.tensors(), counters, recordings.last, may_read_gradients
            if not without_torch_function(_ops.record, *begun):
                opened.is_open = False
                return None
            result = self._observed(args, kwargs, arguments, followed)
            if self._open is None:  # the program has swapped tensors meanwhile
                opened.is_open = False
                return Run(result, None, None)
            leaves, spec = results.flatten(result)
            # A tensor that occurs twice in the returned structure is one result.
            numbers = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
            tensors = list(numbers.values())
            after = self._state(arguments)
            release_numbers(after, arguments.objects)
            if not self.is_proven:
                self.world.find_functions(after.explained)
            written = state.differences(after) or state.replaced(containers, arguments.objects)
            changes = self._changes(args, kwargs, arguments)
            unknown = None
            if not self.is_proven:
                unknown = refusals.unknown(self.world, state, after, written, changes, self.skips_effects)
            # If the call changes the state, the program may keep a tensor of the call, which belongs to the
            # graph that autograd has recorded. The results then also keep this graph, instead of getting a
            # node of the call.
            unreturnable = ""
            if not self.is_proven:
                existed = {id(container) for _, container in containers}
                existed.update(map(id, results.containers((args, kwargs))))
                known = [*arguments.tensors, *state.tensors()]
                unreturnable = without_torch_function(
                    results.refusal, result, leaves, existed, known, self.data
                )
            attaches = not (self.is_proven or unknown or written or changes or unreturnable)
            attaches = attaches and call_backward.may_attach(arguments.tensors, leaves, self.world)
            recording, attached = without_torch_function(_ops.end_recording, tensors, attaches)
            opened.is_open = False
        finally:
            self._open = None
            opened.cancel()
        recordings.keep(recording)
        holes = {key: Hole(i) for i, key in enumerate(numbers)}
        constants = [holes.get(id(leaf), leaf) for leaf in leaves]
        outputs = specs(tensors)
        recorded = Recorded(
            recording, state, spec, constants, written, inputs, outputs, may_read_gradients
        )  # fmt: skip
        if _ops.has_backward(recording):
            recorded.passes, recorded.call = Passes(), Call(args, kwargs, arguments.tensors)
            leaves = [attached[leaf.number] if type(leaf) is Hole else leaf for leaf in constants]
            if not unreturnable:
                result = _pytree.tree_unflatten(leaves, spec)
        if followed:
            followed.end(recording)
            recorded.followed = followed
        has_drawn = draws != _random_states(state)
        unknown = unknown or (Refusal(unreturnable) if unreturnable else None)
        refusal = self._refusal(recorded, arguments, unknown, has_drawn)
        return Run(result, recorded, refusal)

    def forget(self) -> None:
        """Drop all references to objects of the program. A recording that is open ends."""
        self._latest.forget()
        self._latest = State(version=-1)
        if self._open is not None:
            _ops.cancel_recording()
            self._open.forget()
            self._open = None

    def _observed(self, args: tuple, kwargs: dict, arguments: Arguments, followed: Followed | None) -> Any:
        """Run the function and observe its code."""
        if self.is_proven:
            return self._function(*args, **kwargs)
        observed = Observed(self.world)
        try:
            if followed is None:
                with observed:
                    return self._function(*args, **kwargs)
            with followed.given(args, kwargs, arguments.objects) as (given, named):
                with observed:
                    result = self._function(*given, **named)
                return followed.without_numbers(result)
        finally:
            observed.end()

    def _state(self, arguments: Arguments) -> State:
        """Return the state that a call can read. It is listed anew only if the last list is outdated."""
        if self.is_proven:
            return State()
        latest = self._latest
        is_outdated = latest.version != self.world.version or not latest.holds(arguments.objects)
        if is_outdated or not latest.lists_all_hooks():
            self._latest = latest = state_of(self._function, arguments, self.data, self.world)
        return latest

    def _follow(self, state: State, arguments: Arguments) -> Followed | None:
        """Return the numbers of a call that vary, prepared for being followed, or None."""
        if not self.varying or not self.world.is_settled:
            return None
        if refusal := unfollowed(self.world, state):
            self.varying.give_up(refusal)
            return None
        followed = Followed(self.varying, state, arguments.objects, arguments.numbers)
        if not followed.is_complete:
            self.varying.give_up("one of them is no float any more")
            return None
        return followed

    def _changes(self, args: tuple, kwargs: dict, arguments: Arguments) -> bool:
        """Whether a call has changed the containers among its arguments."""
        key, tensors, objects, _ = self.arguments(args, kwargs)
        same = [*map(id, tensors)] == [*map(id, arguments.tensors)]
        return key != arguments.key or not same or [*map(id, objects)] != [*map(id, arguments.objects)]

    def _refusal(
        self, recorded: Recorded, arguments: Arguments, unknown: Refusal | None, has_drawn: bool
    ) -> Refusal | None:
        """The reason against a replay of a recorded call, if any."""
        counters = [] if self.is_proven else _ops.incremented(recorded.id)
        if counters and not (recorded.followed and recorded.followed.counters.include(counters)):
            # The state of the next calls leads to the counters, if the code that has run does.
            self.varying.add_counters(recorded.state, counters)
            return Refusal(_ops.refusal(recorded.id), may_pass=not self.varying.refusal)
        if found := refusals.of_recording(recorded, unknown):
            return found
        if has_drawn:
            return Refusal(
                "it draws from a random generator of Python or NumPy. Draw on the device, or outside of the "
                "function"
            )
        if not self.is_proven and any(map(_core.attributes_of, arguments.tensors)):
            return Refusal("it sets an attribute of a tensor among the arguments. Return the value")
        if found := refusals.of_result(recorded):
            return found
        if self.varying or recorded.followed:
            return unknown or refusals.of_numbers(recorded, self.varying, self.world)
        return unknown


def _random_states(state: State) -> list:
    """The states of Python's and NumPy's global generators, and of those in the state of a call."""
    states: list = [random.getstate(), state.states_of_generators()]
    if numpy := sys.modules.get("numpy"):
        kind, words, *rest = numpy.random.get_state()
        states.append((kind, words.tobytes(), *rest))
    return states
