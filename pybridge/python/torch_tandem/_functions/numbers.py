"""Python's numbers that differ from call to call of a function: docs/design/functions.md.

A recorded call gets a `Number` in place of a float that varies. A `Number` is a float with the same value, so
the call behaves as with the float. The object also notes on a `Tape` each number that Python computes from
it. A replay computes these numbers again from the new values and feeds the results to the operators. All
other uses of a number are guards: a comparison must have the recorded outcome, and a number in a use that is
not followed must have the recorded value.
"""

import contextlib
import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_BITS = struct.Struct("<d")

# Operators whose results are followed, by the names of their methods.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
_COMPARED = ("lt", "le", "eq", "ne", "gt", "ge")
# Functions of `math` that return a float for float arguments.
_OF_MATH = tuple(
    name
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "copysign", "cos", "cosh",
        "degrees", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "fmod", "gamma", "hypot", "ldexp", "lgamma",
        "log", "log10", "log1p", "log2", "pow", "radians", "sin", "sinh", "sqrt", "tan", "tanh",
    )
    if hasattr(math, name)
)  # fmt: skip
_FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in (*_BINARY, *_UNARY, *_COMPARED)},
    **{f"math.{name}": getattr(math, name) for name in _OF_MATH},
    "bool": bool,
    "bits": _BITS.pack,
}
# Absolute values that code which is not followed may treat specially. A number with one of them must be the
# same in a replay.
_SPECIAL = frozenset({0.0, 0.5, 1.0, 2.0, 3.0, math.inf})


class _At(int):
    """An operand that is a number of the tape, by its index."""

    __slots__ = ()


# The computation of a number or an outcome: the name of a function, and its operands, which are constants or
# numbers of the tape. It is no named tuple, because making one runs Python code that would be observed as the
# program's.
Entry = tuple[str, tuple]


def _computed(entry: Entry, values: list[float]) -> Any:
    """Compute a number or an outcome from the numbers of the tape."""
    function, operands = entry
    return _FUNCTIONS[function](*(values[x] if type(x) is _At else x for x in operands))


def _key(entry: Entry) -> Any:
    """A key that is equal for equal computations.

    It tells 0.0 from -0.0 and 1 from 1.0, and equals itself for a NaN.
    """
    function, operands = entry
    return function, tuple((int, x) if type(x) is _At else (type(x), repr(x)) for x in operands)


class Tape:
    """The numbers of a followed call, and the guards that depend on them.

    The numbers that the call was given come first, followed by the ones that Python has computed from them.
    Indices count both in this order.
    """

    def __init__(self, given: Iterable[float]) -> None:
        self.values: list[float] = list(given)
        self.given = len(self.values)
        # The computations of the numbers after the given ones, in order.
        self.entries: list[Entry] = []
        # Outcomes that must be the same in a replay, by the keys of their computations.
        self.guards: dict[Any, tuple[Entry, Any]] = {}
        self._known: dict[Any, int] = {}
        self._is_open = True

    def numbers(self) -> list["Number"]:
        """The `Number` objects for the call's given numbers."""
        return [Number(self, i) for i in range(self.given)]

    def close(self) -> None:
        """End the call. From now on nothing is noted, so its numbers behave as plain floats."""
        self._is_open = False

    def computed(self, function: str, operands: tuple, value: Any) -> Any:
        """Note a computed number, and return the `Number` for it."""
        if not self._is_open or type(value) is not float:
            self.hold(*operands)
            return value
        entry = function, self._operands(operands)
        key = _key(entry)
        at = self._known.get(key)
        if at is None:
            at = self._known[key] = len(self.values)
            self.entries.append(entry)
            self.values.append(value)
        return Number(self, at)

    def guard(self, function: str, operands: tuple, outcome: Any) -> Any:
        """Note that the call depends on an outcome, and return the outcome."""
        if self._is_open:
            entry = function, self._operands(operands)
            self.guards[_key(entry)] = entry, outcome
        return outcome

    def hold(self, *operands: Any) -> None:
        """Note that the call depends on the values of these operands."""
        for x in operands:
            if type(x) is Number:
                self.guard("bits", (x,), _BITS.pack(x))

    def _operands(self, operands: tuple) -> tuple:
        return tuple(_At(x._at) if type(x) is Number and x._tape is self else _plain(x) for x in operands)

    def places(self, numbers: list[float | None]) -> list[frozenset[int]]:
        """For each fed number of a recorded call, the tape's numbers that have the same bits."""
        by_bits: dict[bytes, set[int]] = {}
        for i, value in enumerate(self.values):
            by_bits.setdefault(_BITS.pack(value), set()).add(i)
        known = {bits: frozenset(found) for bits, found in by_bits.items()}
        return [known.get(_BITS.pack(x), frozenset()) if x is not None else frozenset() for x in numbers]

    def computes_as(self, other: "Tape") -> bool:
        """Whether two calls have the same computations and the same guards with the same outcomes."""
        return (
            self.given == other.given
            and self._known == other._known
            and self.guards.keys() == other.guards.keys()
            and all(self.guards[key][1] == other.guards[key][1] for key in self.guards)
        )

    def compute(self, given: list[float]) -> list[float] | None:
        """Compute all numbers of a new call; None if a guard has another outcome or a computation fails."""
        values = list(given)
        try:
            for entry in self.entries:
                value = _computed(entry, values)
                if type(value) is not float:
                    return None
                values.append(value)
            if any(_computed(entry, values) != outcome for entry, outcome in self.guards.values()):
                return None
        except (ArithmeticError, ValueError):
            return None
        return values


def is_same(one: float, two: float) -> bool:
    """Whether two floats have the same bits."""
    return _BITS.pack(one) == _BITS.pack(two)


def is_alike(one: float, two: float) -> bool:
    """Whether code that is not followed treats two numbers alike, even if it compares them with 0 or 1."""
    if is_same(one, two):
        return True
    special = any(abs(x) in _SPECIAL or x != x for x in (one, two))
    return not special and (one < 0) == (two < 0) and (abs(one) < 1) == (abs(two) < 1)


def _plain(x: Any) -> Any:
    return float.__pos__(x) if type(x) is Number else x


class Number(float):
    """A float that notes each number which is computed from it."""

    __slots__ = ("_at", "_tape")
    # A high priority makes NumPy leave operators with its arrays to the methods below.
    __array_priority__ = math.inf

    def __new__(cls, tape: Tape, at: int) -> "Number":
        self = float.__new__(cls, tape.values[at])
        self._tape, self._at = tape, at
        return self

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return float

    def __bool__(self) -> bool:
        return self._tape.guard("bool", (self,), bool(_plain(self)))

    def __complex__(self) -> complex:
        self._tape.hold(self)
        return complex(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        self._tape.hold(self)
        return float, (_plain(self),)

    def __copy__(self) -> "Number":
        return self

    def __deepcopy__(self, memo: dict) -> "Number":
        return self


def _is_followed(x: Any) -> bool:
    return type(x) in (float, int, bool, Number)


def _binary(name: str, reverses: bool) -> Callable:
    function = getattr(operator, name)

    def method(self: Number, other: Any, *modulus: Any) -> Any:
        operands = (other, self) if reverses else (self, other)
        if not _is_followed(other) or modulus:
            # An operator with a tensor is recorded together with the number that it is fed, so the number
            # needs no guard.
            if not isinstance(other, torch.Tensor):
                self._tape.hold(self)
            return (
                function(*map(_plain, operands)) if not modulus else pow(*map(_plain, (*operands, *modulus)))
            )
        return self._tape.computed(name, operands, function(*map(_plain, operands)))

    return method


def _unary(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda self: self._tape.computed(name, (self,), function(_plain(self)))


def _compared(name: str) -> Callable:
    function = getattr(operator, name)

    def method(self: Number, other: Any) -> Any:
        if not _is_followed(other):
            if not isinstance(other, torch.Tensor):
                self._tape.hold(self)
            return function(_plain(self), other)
        return self._tape.guard(name, (self, other), function(_plain(self), _plain(other)))

    return method


def _held(name: str) -> Callable:
    """Return a method of floats. Its result is not followed, so the call depends on the number's value."""
    function = getattr(float, name)

    def method(self: Number, *arguments: Any) -> Any:
        self._tape.hold(self, *arguments)
        return function(_plain(self), *map(_plain, arguments))

    return method


def _held_part(name: str) -> Callable:
    def part(self: Number) -> float:
        self._tape.hold(self)
        return getattr(_plain(self), name)

    return part


def _define_methods() -> None:
    for name in _BINARY:
        setattr(Number, f"__{name}__", _binary(name, reverses=False))
        setattr(Number, f"__r{name}__", _binary(name, reverses=True))
    for name in _UNARY:
        setattr(Number, f"__{name}__", _unary(name))
    for name in _COMPARED:
        setattr(Number, f"__{name}__", _compared(name))
    for name in (
        "__divmod__", "__rdivmod__", "__float__", "__int__", "__trunc__", "__floor__", "__ceil__",
        "__round__", "__hash__", "__repr__", "__str__", "__format__", "as_integer_ratio", "conjugate", "hex",
        "is_integer",
    ):  # fmt: skip
        setattr(Number, name, _held(name))
    for name in ("real", "imag"):
        setattr(
            Number,
            name,
            property(lambda self, name=name: self._tape.hold(self) or getattr(_plain(self), name)),
        )


_define_methods()
# Messages of errors contain the names of the arguments' types.
Number.__name__ = Number.__qualname__ = "float"


def _of_math(name: str) -> Callable:
    function = _FUNCTIONS[f"math.{name}"]

    def followed(*arguments: Any) -> Any:
        numbers = [x for x in arguments if type(x) is Number]
        value = function(*map(_plain, arguments))
        if not numbers:
            return value
        if not all(map(_is_followed, arguments)):
            numbers[0]._tape.hold(*numbers)
            return value
        return numbers[0]._tape.computed(f"math.{name}", arguments, value)

    followed.__name__ = name
    return followed


_followed = {name: _of_math(name) for name in _OF_MATH}


@contextlib.contextmanager
def following_math() -> Iterator[None]:
    """Let functions of `math` follow numbers in code that looks them up as `math.sqrt(x)`."""
    for name, function in _followed.items():
        setattr(math, name, function)
    try:
        yield
    finally:
        for name in _followed:
            setattr(math, name, _FUNCTIONS[f"math.{name}"])
