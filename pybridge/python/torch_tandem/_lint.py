"""Effects in a function's bytecode that a replayed call does not have."""

import dis
import types
from collections.abc import Iterator

_STORES = {"STORE_ATTR": "sets the attribute", "STORE_GLOBAL": "sets the global", "STORE_DEREF": "sets"}
_METHODS = {"append": "appends to", "extend": "extends", "write": "writes to", "update": "updates"}
_OUTER = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR")


def effects(code: types.CodeType) -> list[str]:
    """Describe what a function does besides computing: prints, and writes to what exists outside of it."""
    return list(dict.fromkeys(_effects(code)))


def _effects(code: types.CodeType) -> Iterator[str]:
    line, before = code.co_firstlineno, None
    for instruction in dis.get_instructions(code):
        position = instruction.positions
        line = (position.lineno if position else None) or line
        operation, name = instruction.opname, instruction.argval
        if operation in _STORES:
            # A cell of this function is not outside of the call.
            if operation != "STORE_DEREF" or name not in code.co_cellvars:
                yield f"line {line} {_STORES[operation]} {name}"
        elif operation == "LOAD_GLOBAL" and name == "print":
            yield f"line {line} prints"
        elif (
            operation in ("LOAD_METHOD", "LOAD_ATTR")
            and name in _METHODS
            and before
            and before.opname in _OUTER
        ):
            yield f"line {line} {_METHODS[name]} {before.argval}"
        before = instruction
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _effects(constant)
