"""The numbers of a function's calls that vary: which they are, and how calls get them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions import bytecode
from torch_tandem._functions.arguments import VARIES
from torch_tandem._functions.numbers import Number, Tape, following_math, is_alike, is_same
from torch_tandem._functions.observe import World, is_torchs
from torch_tandem._functions.place import Place, place_of
from torch_tandem._functions.state import Path, State

# Modules whose types read a float without asking it.
_READERS = frozenset({"array", "ctypes", "decimal", "fractions", "numpy"})

DIFFERS = "a number differs from call to call"


class Varying:
    """Which numbers of a function's calls vary: floats among its arguments, and floats in its state."""

    def __init__(self) -> None:
        # Positions and names of arguments.
        self.arguments: frozenset[int | str] = frozenset()
        self.paths: dict[Path, str] = {}
        # Why they cannot be followed; empty if they can. Each value is another kind of call then.
        self.refusal = ""

    def __bool__(self) -> bool:
        return bool(self.arguments or self.paths)

    def give_up(self, refusal: str) -> None:
        """Let each value be a kind of its own from now on."""
        self.refusal = refusal.removeprefix(f"{DIFFERS}, and ")
        self.arguments, self.paths = frozenset(), {}

    def add_arguments(self, one: tuple, two: tuple) -> bool:
        """Compare the arguments of two calls. Returns whether more of them vary than was known."""
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
        """Note what differs between two states, if it is floats alone. Returns whether it is new."""
        new = changed.keys() - self.paths.keys()
        if self.refusal or not new:
            return False
        if not all(one.number_of(path) >= 0 <= two.number_of(path) for path in new):
            return False
        self.paths |= {path: changed[path] for path in new}
        return True

    def split(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[float]]:
        """Take the numbers that vary out of the arguments of a call."""
        numbers: list[float] = []

        def taken(at: int | str, value: Any) -> Any:
            if at not in self.arguments or type(value) is not float:
                return value
            numbers.append(value)
            return VARIES

        rest = tuple([taken(i, value) for i, value in enumerate(args)])
        return rest, {name: taken(name, value) for name, value in kwargs.items()}, numbers

    def with_numbers(self, args: tuple, kwargs: dict, numbers: Iterator[Number]) -> tuple[tuple, dict]:
        """Put numbers in place of those that vary."""

        def put(at: int | str, value: Any) -> Any:
            return next(numbers) if at in self.arguments and type(value) is float else value

        return tuple([put(i, v) for i, v in enumerate(args)]), {n: put(n, v) for n, v in kwargs.items()}


class Followed:
    """A recorded call whose numbers are followed."""

    def __init__(self, varying: Varying, state: State, objects: list, numbers: list[float]) -> None:
        self._varying, self._state = varying, state
        self.paths = frozenset(varying.paths)
        # The values in the state that vary.
        self._at = [state.number_of(path) for path in varying.paths]
        self._count = len(numbers)
        values = self._given(numbers, objects)
        # Whether all numbers are floats in places where they can be replaced.
        self.is_complete = values is not None
        self.tape = Tape(values or [])
        # The fed numbers of the recorded operators, and for each the numbers of the tape that are equal.
        self._fed: list[float | None] = []
        self._equal: list[frozenset[int]] = []
        # Given numbers, and fed ones, that have differed in equal calls.
        self.differed: frozenset[int] = frozenset()
        self.moved: frozenset[int] = frozenset()
        # Fed numbers, with those of the tape that were equal in all of these calls.
        self.links: dict[int, frozenset[int]] = {}

    def _places(self, objects: list) -> list[Place] | None:
        places = [place_of(self._state, at, objects) if at >= 0 else None for at in self._at]
        return None if None in places else places  # type: ignore[return-value]

    def _given(self, numbers: list[float], objects: list) -> list[float] | None:
        """The numbers that a call is given, if they are all found."""
        places = self._places(objects)
        if places is None:
            return None
        given = [*numbers, *(place.read() for place in places)]
        return given if all(type(x) is float for x in given) else None

    @contextlib.contextmanager
    def given(self, args: tuple, kwargs: dict, objects: list) -> Iterator[tuple[tuple, dict]]:
        """Give a call its numbers, in its arguments and in its state."""
        numbers = self.tape.numbers()
        # What was replaced, by what.
        replaced: list[tuple[Place, Any, Any]] = []
        try:
            for place, number in zip(self._places(objects) or [], numbers[self._count :], strict=True):
                root = place.root()
                before = root.read()
                place.write(number)
                replaced.append((root, before, root.read()))
            with following_math():
                yield self._varying.with_numbers(args, kwargs, iter(numbers[: self._count]))
        finally:
            for root, before, by in reversed(replaced):
                # What the call has replaced itself is an effect, which is seen in the state.
                with contextlib.suppress(LookupError, ValueError):
                    if root.read() is by:
                        root.write(before)
            self.tape.close()

    def end(self, recording: int) -> None:
        """Look for the numbers among those that the recorded operators were fed."""
        self._fed = _core.numbers_of(recording)
        self._equal = self.tape.places(self._fed)
        self.links = {i: equal for i, equal in enumerate(self._equal) if equal}

    def match(self, later: "Followed") -> str:
        """Compare the numbers of a later call, which gets the links of both. Returns how they differ."""
        if not self.tape.computes_as(later.tape) or self.paths != later.paths:
            return "Python computes something else with numbers that vary, or compares them otherwise"
        if not all(map(is_alike, self.tape.values, later.tape.values)):
            return "numbers that vary have other signs, or are 0, 1 or the like"
        links, moved = {}, set()
        for i, (x, y) in enumerate(zip(self._fed, later._fed, strict=False)):
            if equal := self.links.get(i, frozenset()) & later._equal[i]:
                links[i] = equal
            if i in self.moved or not (x is None or y is None or is_same(x, y)):
                # Without a link, it is a difference between the operators.
                if equal:
                    moved.add(i)
                elif i in self.moved:
                    return "an operator is fed a number that is not computed as before"
        given = enumerate(zip(self.tape.values[: self.tape.given], later.tape.values, strict=False))
        later.differed = self.differed | {i for i, (x, y) in given if not is_same(x, y)}
        later.moved, later.links = frozenset(moved), links
        return ""

    def widen(self, equal: "Followed") -> None:
        """Take over what an equal call has shown."""
        self.differed, self.moved, self.links = equal.differed, equal.moved, equal.links

    def beyond(self, known: "Followed") -> str | None:
        """How the numbers of a call differ from those that a replay would have fed, or None."""
        return "an operator is fed a number that had not varied before" if self.moved - known.moved else None

    def without_numbers(self, result: Any) -> Any:
        """The result of a call with plain floats, whose values then count."""
        leaves, spec = _pytree.tree_flatten(result)
        numbers = [leaf for leaf in leaves if type(leaf) is Number]
        if not numbers:
            return result
        self.tape.hold(*numbers)
        return _pytree.tree_unflatten(map(plain, leaves), spec)

    def refusal(self, recording: int, reads: int, has_backward: bool, reader: str) -> str:
        """Why the numbers of a recorded call cannot be followed; empty if they can."""
        if reader:
            return f"{reader} may read it"
        if torch.ops.torch_tandem.uses_made_values(recording):
            return "the call makes tensors on the host, which may depend on it"
        if reads:
            return "the call reads values of tensors"
        return "its backward pass runs outside of the call" if has_backward else ""

    def values(self, numbers: list[float], objects: list) -> list[tuple[int, float]] | None:
        """What a replay feeds, by place; None if the call may go another way than the recorded one."""
        given = self._given(numbers, objects)
        if given is None or len(given) != self.tape.given:
            return None
        known = self.tape.values
        if not all(i in self.differed or is_same(x, known[i]) for i, x in enumerate(given)):
            return None
        values = self.tape.compute(given)
        if values is None or not all(map(is_alike, known, values)):
            return None
        fed = []
        for place, links in self.links.items():
            first, *others = (values[i] for i in links)
            if place not in self.moved:
                # It may be one of these, or another number.
                others.append(self._fed[place])  # type: ignore[arg-type]
            if not all(is_same(first, other) for other in others):
                return None
            if place in self.moved:
                fed.append((place, first))
        return fed


def floats_of(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The floats among the arguments of a call, None for others."""

    def float_of(value: Any) -> float | None:
        return value if type(value) is float else None

    return tuple(map(float_of, args)), {name: float_of(value) for name, value in kwargs.items()}


def unfollowed(world: World, state: State) -> str:
    """What code that has run may do to a number that a `Number` does not see; empty if there is nothing."""
    formats = any("%" in value.expected for value in state.values if type(value.expected) is str)
    for code, _ in world.codes.values():
        if is_torchs(code):
            continue
        reads = bytecode.reads(code)
        at = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        if any(chain[0] == "type" for chain in reads.globals):
            return f"{at} looks at the types of objects"
        if reads.has_modulo and (formats or any("%" in c for c in code.co_consts if type(c) is str)):
            return f"{at} may format it with %"
    for kind in state.types():
        if kind.__module__.partition(".")[0] in _READERS:
            return f"code that it runs uses {kind.__module__}.{kind.__qualname__}"
    return ""


def plain(leaf: Any) -> Any:
    """A result of a call, without its tape."""
    return float.__pos__(leaf) if type(leaf) is Number else leaf
