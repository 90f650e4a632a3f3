"""The names of globals and attributes that code reads, and its imports, as far as its bytecode has them."""

import dis
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

# Names through which code can reach attributes whose names are not in its bytecode.
_DYNAMIC = frozenset(
    {
        "__dict__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "vars", "attrgetter",
        "methodcaller",
    }
)  # fmt: skip
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
# Methods in C that change an attribute by its name. The profiling hook does not show their calls.
_WRITERS = frozenset({"__setattr__", "__delattr__"})
_OWNERS_OF_WRITERS = frozenset({"object", "type", "__dataclass_builtins_object__"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTES = frozenset(
    {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
)
_NO_OPERATION = frozenset(
    {"CACHE", "EXTENDED_ARG", "PRECALL", "NOP", "PUSH_NULL", "COPY_FREE_VARS", "RESUME"}
)


class Reads(NamedTuple):
    """The names that a code object uses."""

    # Globals, each with the chain of attributes that is read from it, such as `torch.nn.functional`.
    globals: frozenset[tuple[str, ...]]
    # The globals with their chains that are used for more than a call, for example passed as an argument.
    passed: frozenset[tuple[str, ...]]
    # Other attributes. The bytecode does not tell the objects that they are read from.
    attributes: frozenset[str]
    # Imports: level, module, and the names that are imported from it.
    imports: frozenset[tuple[int, str, tuple[str, ...]]]
    # Whether the code may reach attributes whose names are not in its bytecode, and the strings in it that
    # may be such names.
    is_dynamic: bool
    strings: frozenset[str]
    # The name of the method's own object (`self`), if the code reaches unnamed attributes of no other object.
    of: str | None
    # Whether the code has the operator `%`, which formats a string.
    has_modulo: bool
    # Attributes that are read for more than a call, and all strings that could be names of attributes.
    values: frozenset[str]
    texts: frozenset[str]
    # Whether the code has a bare `raise`, which raises the exception that is being handled.
    raises_again: bool


_known: dict[int, tuple[types.CodeType, Reads]] = {}


def reads(code: types.CodeType) -> Reads:
    """Return the names that a code object uses."""
    # The key is the identity: code objects compare by value, which takes long, and equal code may belong to
    # different functions.
    if known := _known.get(id(code)):
        return known[1]
    found = _reads(code)
    _known[id(code)] = code, found
    return found


def _reads(code: types.CodeType) -> Reads:
    chains: set[tuple[str, ...]] = set()
    attributes: set[str] = set()
    imports: set[tuple[int, str, tuple[str, ...]]] = set()
    passed: set[tuple[str, ...]] = set()
    chain: list[str] = []
    values: set[str] = set()
    is_called = is_matching = follows_null = has_modulo = raises_again = False
    # Whether the first argument, which is the object of a method, is replaced.
    is_rebound = False
    constants: list[object] = []
    # The variables from whose objects attributes are reached without their names; None for another
    # expression.
    receivers: set[str | None] = set()
    first = code.co_varnames[0] if code.co_argcount and not code.co_name.startswith("<") else "self"
    receiver: list[object] = [None, None]
    every = list(dis.get_instructions(code))
    for at, instruction in enumerate(every):
        operation, name = instruction.opname, instruction.argval
        if operation in _NO_OPERATION:
            # The compiler pushes a null beside a function that is called: before the function, and since
            # Python 3.13 after it.
            follows_null |= operation == "PUSH_NULL"
            is_called |= operation == "PUSH_NULL"
            continue
        is_unnamed = name in _DYNAMIC or (
            name in _WRITERS and not _has_constant_name(every[at + 1 :], receiver[1] in _OWNERS_OF_WRITERS)
        )
        stored = name if isinstance(name, tuple) else (name,)
        is_rebound |= operation.startswith(("STORE_FAST", "STORE_DEREF")) and first in stored
        if operation in _ATTRIBUTES and is_unnamed:
            is_super = operation == "LOAD_SUPER_ATTR" or receiver[0] == "super"
            receivers.add(first if is_super or receiver[1] == first else None)
        is_variable = operation in _VARIABLES or operation in _GLOBALS
        receiver = [receiver[1], name if is_variable else None]
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(name)
            is_method = operation == "LOAD_METHOD" or (sys.version_info >= (3, 12) and instruction.arg & 1)
            is_called |= bool(is_method)
            continue
        if chain:
            chains.add(tuple(chain))
            if not is_called:
                passed.add(tuple(chain))
            chain = []
        is_matching |= operation == "MATCH_CLASS"
        raises_again |= operation == "RAISE_VARARGS" and instruction.arg == 0
        has_modulo |= operation == "BINARY_OP" and instruction.argrepr in ("%", "%=")
        if operation in _GLOBALS:
            chain = [name]
            is_called = follows_null or (operation == "LOAD_GLOBAL" and bool(instruction.arg & 1))
        elif operation in _ATTRIBUTES:
            attributes.add(name)
            if operation == "LOAD_ATTR" and not (sys.version_info >= (3, 12) and instruction.arg & 1):
                values.add(name)
        elif operation == "IMPORT_NAME":
            level, names = constants if len(constants) == 2 else (0, None)
            imports.add((level if isinstance(level, int) else 0, name, tuple(names or ())))
        constants = [*constants[-1:], name] if operation == "LOAD_CONST" else constants
        follows_null = False
    names = attributes.union(*chains)
    has_strings = bool(names & (_DYNAMIC | _BY_NAME | _WRITERS))
    strings = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    is_dynamic = bool(names & _DYNAMIC or receivers)
    is_own = receivers == {first} and not is_rebound and not _DYNAMIC.intersection(*chains, ())
    return Reads(
        frozenset(chains),
        frozenset(passed),
        frozenset(attributes),
        frozenset(imports),
        is_matching or (is_dynamic and not is_own),
        frozenset(strings if has_strings else ()),
        first if is_own else None,
        has_modulo,
        frozenset(values).union(chain[-1] for chain in passed if len(chain) > 1),
        frozenset(strings),
        raises_again,
    )


_VARIABLES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST_CHECK")


def _has_constant_name(after: list[dis.Instruction], is_unbound: bool) -> bool:
    """Whether the name in a call of a writer is a constant. `after` are the instructions after its load.

    The name is the first argument, or the second one if the function is `is_unbound`. In this case, the first
    argument has to be a variable.
    """
    operations = (i for i in after if i.opname not in _NO_OPERATION)
    for instruction in operations:
        is_variable = instruction.opname in _VARIABLES or instruction.opname in _GLOBALS
        if not (is_unbound and is_variable):
            is_text = instruction.opname == "LOAD_CONST" and type(instruction.argval) is str
            return is_text and _is_argument(after[after.index(instruction) + 1 :])
        is_unbound = False
    return False


def _is_argument(after: list[dis.Instruction]) -> bool:
    """Whether a value on the stack is an argument of a call, and no operand.

    `after` are the instructions after its load.
    """
    depth = 1  # of the value and of those above it
    for instruction in after:
        name = instruction.opname
        effect = dis.stack_effect(instruction.opcode, instruction.arg)
        is_load = name.startswith("LOAD_") and name not in _ATTRIBUTES
        is_marker = name in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "KW_NAMES")
        # An instruction that takes values replaces them by one at most.
        takes = 0 if is_load or is_marker else max(1 - effect, 1)
        if takes >= depth:
            return name in ("PRECALL", "CALL", "CALL_KW")
        depth += effect
    return False


def second_argument(frame: types.FrameType) -> object:
    """Return the second argument of the call that a frame is about to make, or None if it is not simple.

    The arguments of `getattr` and the like are an object, a name, and perhaps a value.
    """
    key = id(frame.f_code), frame.f_lasti
    if key not in _second_arguments:
        _second_arguments[key] = frame.f_code, _second_argument(frame.f_code, frame.f_lasti)
    _, evaluate = _second_arguments[key]
    try:
        return evaluate(frame) if evaluate else None
    except (_NotSimple, KeyError, IndexError):
        return None


class _NotSimple(Exception):
    """An expression whose evaluation could run code of the program."""


_Evaluate = Callable[[types.FrameType], object]
_second_arguments: dict[tuple[int, int], tuple[types.CodeType, _Evaluate | None]] = {}


def _second_argument(code: types.CodeType, at: int) -> _Evaluate | None:
    """Return a function that evaluates the second argument of the call at `at`; None if it is not simple."""
    every = [i for i in dis.get_instructions(code) if i.offset <= at]
    *before, call = [i for i in every if i.opname not in _NO_OPERATION]
    n = call.arg if call.opname == "CALL" else 0
    if n not in (2, 3):
        return None
    try:
        if n == 3:
            before = before[: _expression(before, len(before) - 1)[0]]
        begin, evaluate = _expression(before, len(before) - 1)
        # Where branches meet, an expression has a value for each branch.
        is_branched = any(i.is_jump_target and i.offset >= before[begin].offset for i in every)
        return None if is_branched else evaluate
    except (_NotSimple, IndexError):
        return None


def _expression(code: list[dis.Instruction], last: int) -> tuple[int, _Evaluate]:
    """Return the index of the first instruction of the expression that ends at `last`, and its evaluation."""
    if last < 0:
        raise _NotSimple
    operation, value = code[last].opname, code[last].argval
    if operation == "LOAD_CONST":
        return last, lambda frame: value
    if operation in _VARIABLES:
        return last, lambda frame: frame.f_locals[value]
    if operation == "LOAD_GLOBAL":
        return last, lambda frame: frame.f_globals[value]
    if operation == "FORMAT_VALUE" and code[last].arg == 0:
        begin, inner = _expression(code, last - 1)
        return begin, lambda frame: _text(inner(frame))
    if operation == "BUILD_STRING":
        begin, parts = last, []
        for _ in range(code[last].arg or 0):
            begin, part = _expression(code, begin - 1)
            parts.insert(0, part)
        return begin, lambda frame: "".join(_text(part(frame)) for part in parts)
    if operation == "LOAD_ATTR":
        begin, inner = _expression(code, last - 1)
        return begin, lambda frame: _plain_attribute(inner(frame), value)
    is_sum = operation == "BINARY_OP" and code[last].argrepr == "+"
    if is_sum or operation == "BINARY_SUBSCR":
        middle, right = _expression(code, last - 1)
        begin, left = _expression(code, middle - 1)
        if is_sum:
            return begin, lambda frame: _text(left(frame)) + _text(right(frame))
        return begin, lambda frame: _plain_item(left(frame), right(frame))
    raise _NotSimple


def _text(value: object) -> str:
    if type(value) not in (str, int):
        raise _NotSimple
    return str(value)


def _plain_attribute(value: object, name: str) -> object:
    """Return an attribute, unless reading it could run code of the program."""
    kind = type(value)
    if kind.__getattribute__ is not object.__getattribute__:
        raise _NotSimple
    member = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if type(member) is types.MemberDescriptorType:
        return member.__get__(value)
    if member is None and name in (attributes := getattr(value, "__dict__", {})):
        return attributes[name]
    raise _NotSimple


def _plain_item(value: object, key: object) -> object:
    if type(value) not in (list, tuple, dict) or type(key) not in (int, str):
        raise _NotSimple
    return value[key]  # type: ignore[index]


def line_of_store(code: types.CodeType, name: str | None) -> int | None:
    """Return the line that sets or deletes a name: an attribute, a global or a variable.

    Without `name`, an item.
    """
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        line = (positions.lineno if positions else None) or line
        operation = instruction.opname
        if operation in ("STORE_SUBSCR", "DELETE_SUBSCR") and name is None:
            return line
        if operation.startswith(("STORE_", "DELETE_")) and name is not None and instruction.argval == name:
            return line
    return None
