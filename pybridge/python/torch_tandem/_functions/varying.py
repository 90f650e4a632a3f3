"""The numbers of a function's calls that vary: detecting them, and replacing them in a followed call."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions import bytecode, kinds
from torch_tandem._functions.arguments import VARIES
from torch_tandem._functions.host_counters import HostCounters
from torch_tandem._functions.numbers import Number, Tape, following_math, is_alike, is_same
from torch_tandem._functions.observe import World, is_torchs
from torch_tandem._functions.place import Place, place_of
from torch_tandem._functions.state import Path, State

# Modules whose types read a float without calling a method of the float.
_READERS = frozenset({"array", "ctypes", "datetime", "decimal", "fractions", "numpy"})

DIFFERS = "a number differs from call to call"


class Varying:
    """The numbers of a function's calls that vary: floats among its arguments, and floats in its state."""

    def __init__(self) -> None:
        # Positions and names of the arguments that vary.
        self.arguments: frozenset[int | str] = frozenset()
        self.paths: dict[Path, str] = {}
        # The paths to host tensors that calls increment.
        self.counters: dict[Path, None] = {}
        # The reason for which numbers cannot be followed; empty if they can. Calls with other values are then
        # other kinds.
        self.refusal = ""

    def __bool__(self) -> bool:
        return bool(self.arguments or self.paths or self.counters)

    def give_up(self, refusal: str) -> None:
        """Follow no numbers from now on: calls with other values are other kinds of calls."""
        self.refusal = refusal.removeprefix(f"{DIFFERS}, and ")
        self.arguments, self.paths, self.counters = frozenset(), {}, {}

    def add_arguments(self, one: tuple, two: tuple) -> bool:
        """Compare the arguments of two calls. Returns whether another argument was found to vary."""
        if self.refusal:
            return False
        (args, kwargs), (other_args, other_kwargs) = one, two
        if len(args) != len(other_args) or kwargs.keys() != other_kwargs.keys():
            return False
        pairs: dict[int | str, tuple] = dict(enumerate(zip(args, other_args, strict=True)))
        pairs |= {name: (kwargs[name], other_kwargs[name]) for name in kwargs}
        vary = {at for at, (x, y) in pairs.items() if type(x) is type(y) is float and x != y}
        known = len(self.arguments)
        self.arguments |= vary
        return len(self.arguments) > known

    def add_state(self, one: State, two: State, changed: dict[Path, str]) -> bool:
        """Note the values that differ between two states, if all are floats.

        Returns whether such values were found.
        """
        new = changed.keys() - self.paths.keys()
        if self.refusal or not new:
            return False
        if not all(one.number_of(path) >= 0 <= two.number_of(path) for path in new):
            return False
        self.paths |= {path: changed[path] for path in new}
        return True

    def add_counters(self, state: State, addresses: list[int]) -> None:
        """Note the host tensors that a call has incremented, given their `_cdata`."""
        if not self.refusal:
            self.counters |= dict.fromkeys(state.paths_of(set(addresses)))

    def split(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[float]]:
        """Replace the arguments that vary by a placeholder.

        Returns the positional and named arguments, and the numbers.
        """
        numbers: list[float] = []

        def taken(at: int | str, value: Any) -> Any:
            if at not in self.arguments or type(value) is not float:
                return value
            numbers.append(value)
            return VARIES

        rest = tuple([taken(i, value) for i, value in enumerate(args)])
        return rest, {name: taken(name, value) for name, value in kwargs.items()}, numbers

    def with_numbers(self, args: tuple, kwargs: dict, numbers: Iterator[Number]) -> tuple[tuple, dict]:
        """Return the arguments of a call with `numbers` in place of the arguments that vary."""

        def put(at: int | str, value: Any) -> Any:
            return next(numbers) if at in self.arguments and type(value) is float else value

        return tuple([put(i, v) for i, v in enumerate(args)]), {n: put(n, v) for n, v in kwargs.items()}


class Links(NamedTuple):
    """How the fed numbers of operators follow from the numbers of a tape, as equal calls have shown."""

    # Indices of given numbers, and places of fed ones, that have differed between equal calls.
    differed: frozenset[int]
    moved: frozenset[int]
    # For places of fed numbers, the indices of the tape's numbers that were equal to it in all of these
    # calls.
    equal: dict[int, frozenset[int]]


class Followed:
    """The followed numbers of a recorded call."""

    def __init__(self, varying: Varying, state: State, objects: list, numbers: list[float]) -> None:
        self._varying, self._state = varying, state
        self.paths = frozenset(varying.paths)
        # The numbers of the state's values that vary.
        self._at = [state.number_of(path) for path in varying.paths]
        self._count = len(numbers)
        counters = map(state.tensor_at, varying.counters)
        self.counters = HostCounters([tensor for tensor in counters if tensor is not None])
        values = self._given(numbers, objects)
        # Whether all numbers that vary are floats at places where they can be replaced.
        self.is_complete = values is not None and self.counters.is_complete
        self.tape = Tape([*(values or []), *self.counters.given])
        # The fed numbers of the recorded operators, and for each the indices of the tape's numbers that are
        # equal to it.
        self._fed: list[float | None] = []
        self._equal: list[frozenset[int]] = []
        self.links = Links(frozenset(), frozenset(), {})

    def _places(self, objects: list) -> list[Place] | None:
        places = [place_of(self._state, at, objects) if at >= 0 else None for at in self._at]
        return None if None in places else places  # type: ignore[return-value]

    def _given(self, numbers: list[float], objects: list) -> list[float] | None:
        """The numbers that a call is given: the arguments `numbers`, and the numbers in the state.

        None if one is missing. Those of the counters come after them.
        """
        places = self._places(objects)
        if places is None:
            return None
        given = [*numbers, *(place.read() for place in places)]
        return given if all(type(x) is float for x in given) else None

    @contextlib.contextmanager
    def given(self, args: tuple, kwargs: dict, objects: list) -> Iterator[tuple[tuple, dict]]:
        """Put `Number` objects into the arguments and the state of a call, for the time of this context."""
        numbers = self.tape.numbers()
        # Places that were written, with the value before and the new one.
        replaced: list[tuple[Place, Any, Any]] = []
        places = self._places(objects) or []
        counted = self._count + len(places)
        try:
            for place, number in zip(places, numbers[self._count : counted], strict=True):
                root = place.root()
                before = root.read()
                place.write(number)
                replaced.append((root, before, root.read()))
            with following_math(), self.counters.followed(numbers[counted:]):
                yield self._varying.with_numbers(args, kwargs, iter(numbers[: self._count]))
        finally:
            for root, before, by in reversed(replaced):
                # A place that the call has written itself is left as it is. The comparison of states shows
                # this effect.
                with contextlib.suppress(LookupError, ValueError):
                    if root.read() is by:
                        root.write(before)
            self.tape.close()

    def end(self, recording: int) -> None:
        """Find the fed numbers of the recorded operators that equal numbers of the tape."""
        self._fed = _core.numbers_of(recording)
        self._equal = self.tape.places(self._fed)
        self.links = self.links._replace(equal={i: at for i, at in enumerate(self._equal) if at})

    def match(self, later: "Followed") -> Links | str:
        """Compare the numbers of this call with a later one's.

        Returns the links that hold in both calls if their operators are equal, too, or the difference.
        """
        if not self.counters.counts_as(later.counters):
            return "it increments other host tensors, or not as often"
        if not self.tape.computes_as(later.tape) or self.paths != later.paths:
            return "Python computes something else with numbers that vary, or compares them otherwise"
        if not all(map(is_alike, self.tape.values, later.tape.values)):
            return "numbers that vary have other signs, or are 0, 1 or the like"
        known, links, moved = self.links, {}, set()
        for i, (x, y) in enumerate(zip(self._fed, later._fed, strict=False)):
            if equal := known.equal.get(i, frozenset()) & later._equal[i]:
                links[i] = equal
            if i in known.moved or not (x is None or y is None or is_same(x, y)):
                # A fed number that differs without a link is found by the comparison of operators.
                if equal:
                    moved.add(i)
                elif i in known.moved:
                    return "an operator is fed a number that is not computed as before"
        given = enumerate(zip(self.tape.values[: self.tape.given], later.tape.values, strict=False))
        differed = known.differed | {i for i, (x, y) in given if not is_same(x, y)}
        return Links(differed, frozenset(moved), links)

    def beyond(self, known: "Followed") -> str | None:
        """The difference between the fed numbers of this call and of a replay of `known`, or None."""
        return (
            "an operator is fed a number that had not varied before"
            if self.links.moved - known.links.moved
            else None
        )

    def without_numbers(self, result: Any) -> Any:
        """Return a call's result with plain floats for its numbers. The call then depends on their values."""
        leaves, spec = _pytree.tree_flatten(result)
        numbers = [leaf for leaf in leaves if type(leaf) is Number]
        if not numbers:
            return result
        self.tape.hold(*numbers)
        return _pytree.tree_unflatten(map(plain, leaves), spec)

    def refusal(self, recording: int, reads: int, has_backward: bool, reader: str) -> str:
        """The reason for which the numbers of a recorded call cannot be followed; empty if they can."""
        if reader:
            return f"{reader} may read it"
        if torch.ops.torch_tandem.uses_made_values(recording):
            return "the call makes tensors on the host, which may depend on it"
        if reads:
            return "the call reads values of tensors"
        return "its backward pass runs outside of the call" if has_backward else ""

    def values(self, numbers: list[float], objects: list) -> list[tuple[int, float]] | None:
        """The places and values that a replay feeds; None if the numbers may lead to other operators."""
        given, counted = self._given(numbers, objects), self.counters.now()
        if given is None or counted is None or len(given) + len(counted) != self.tape.given:
            return None
        given += counted
        known = self.tape.values
        if not all(i in self.links.differed or is_same(x, known[i]) for i, x in enumerate(given)):
            return None
        values = self.tape.compute(given)
        if values is None or not all(map(is_alike, known, values)):
            return None
        fed = []
        for place, equal in self.links.equal.items():
            first, *others = (values[i] for i in equal)
            if place not in self.links.moved:
                # This fed number has not varied yet: it may come from one of the linked numbers, or be a
                # constant.
                others.append(self._fed[place])  # type: ignore[arg-type]
            if not all(is_same(first, other) for other in others):
                return None
            if place in self.links.moved:
                fed.append((place, first))
        return fed


def floats_of(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a call, with None in place of values other than floats."""

    def float_of(value: Any) -> float | None:
        return value if type(value) is float else None

    return tuple(map(float_of, args)), {name: float_of(value) for name, value in kwargs.items()}


# Methods of floats that code may call by their names, past those of `Number`.
_SLOTS = frozenset(name for name in vars(float) if name.startswith("__")) - frozenset(
    {
        "__new__",
        "__repr__",
        "__doc__",
        "__getattribute__",
        "__hash__",
        "__format__",
        "__getnewargs__",
        "__getformat__",
    }
)


def unfollowed(world: World, state: State) -> str:
    """A use of a number, in the code that has run, that a `Number` cannot notice; empty if there is none."""
    formats = any("%" in value.expected for value in state.values if type(value.expected) is str)
    for code, _ in world.codes.values():
        if is_torchs(code):
            continue
        reads = bytecode.reads(code)
        if slots := _SLOTS & reads.attributes.union(*reads.globals):
            return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) calls {min(slots)} by its name"
        at = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        if any(chain[0] == "type" for chain in reads.globals):
            return f"{at} looks at the types of objects"
        if reads.has_modulo and (formats or any("%" in c for c in code.co_consts if type(c) is str)):
            return f"{at} may format it with %"
    for kind in state.types():
        if kinds.package_of(kind) in _READERS:
            return f"code that it runs uses {kind.__module__}.{kind.__qualname__}"
    return ""


def plain(leaf: Any) -> Any:
    """Return a result of a call, as a plain float if it is a `Number`."""
    return float.__pos__(leaf) if type(leaf) is Number else leaf
