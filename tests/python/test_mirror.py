"""`pybridge/cpp/boundary/shim.h` and `pybridge/src` declare the same structs, constants and functions."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BRIDGE = Path(__file__).parents[2] / "pybridge"
TYPES = {
    "bool": ctypes.c_bool, "c_char": ctypes.c_char, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "i32": ctypes.c_int32, "u64": ctypes.c_uint64, "i64": ctypes.c_int64,
    "usize": ctypes.c_size_t, "f64": ctypes.c_double,
}  # fmt: skip
# C's names for Rust's types.
NAMES = {
    "uint8_t": "u8", "uint16_t": "u16", "uint32_t": "u32", "int32_t": "i32", "uint64_t": "u64",
    "int64_t": "i64", "size_t": "usize", "double": "f64", "char": "c_char", "void": "",
}  # fmt: skip


def text_of(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


def split(listed: str) -> list[str]:
    """The items of a list. An item may have lists in parentheses."""
    items, depth = [""], 0
    for char in listed.replace("->", " "):
        depth += (char in "(<[") - (char in ")>]")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items if item.strip()]


# --- Rust -------------------------------------------------------


def structs_of_rust(text: str) -> dict[str, type]:
    """ctypes classes of the structs and unions with C's layout."""
    found: dict[str, type] = {}
    declared = {
        name: (kind, [field.removeprefix("pub ").split(": ", 1) for field in split(fields)])
        for kind, name, fields in re.findall(
            r"#\[repr\(C\)\]\s(?:#\[derive.*\]\s)?pub (struct|union) (\w+) \{([^}]*)\}", text
        )
    }

    def type_of(rust: str):
        if rust.startswith("*"):
            return ctypes.c_void_p
        if array := re.fullmatch(r"\[(\w+); (\d+)\]", rust):
            return type_of(array[1]) * int(array[2])
        return TYPES.get(rust) or struct(rust)

    def struct(name: str) -> type:
        if name not in found:
            kind, fields = declared[name]
            base = ctypes.Structure if kind == "struct" else ctypes.Union
            found[name] = type(name, (base,), {"_fields_": [(f, type_of(t)) for f, t in fields]})
        return found[name]

    for name in declared:
        struct(name)
    return found


def kind_of_rust(rust: str) -> str:
    """The part of a parameter's or result's type in which both languages can agree."""
    if pointee := re.fullmatch(r"(?:\*mut|\*const|&) (?:\*mut |\*const )?(.*)|&(.*)", rust):
        name = pointee[1] or pointee[2]
        return f"pointer to {name}" if name.startswith("Tt") else "pointer"
    return "pointer" if "fn(" in rust else rust


def functions_of_rust() -> dict[str, tuple[list[str], str]]:
    """Parameters and results of the functions that cross the boundary, by name."""
    found = {}
    for path in (BRIDGE / "src").glob("*.rs"):
        for name, rest in re.findall(r'(?:extern "C"|pub) fn (ttc?_\w+)\((.*?)\s*[{;]', text_of(path), re.S):
            listed, _, result = rest.rpartition(")")
            parameters = [kind_of_rust(item.split(": ", 1)[1]) for item in split(" ".join(listed.split()))]
            found[name] = parameters, kind_of_rust(result.strip().removeprefix("->").strip())
    return found


# --- C++ --------------------------------------------------------


def kind_of_c(declared: str) -> str:
    if "(*" in declared:
        return "pointer"
    words = declared.replace("*", " * ").split()
    words = [word for word in words if word != "const"]
    name, is_pointer = words[0], "*" in words
    if is_pointer:
        return f"pointer to {name}" if name.startswith("Tt") else "pointer"
    return NAMES.get(name, name)


def functions_of_c(text: str) -> dict[str, tuple[list[str], str]]:
    found = {}
    for declared in re.findall(r"(?m)^TT\((.*?)\);", text, re.S):
        result, name, *parameters = split(" ".join(declared.split()))
        found[name] = [kind_of_c(x) for x in parameters], kind_of_c(result)
    for result, name, listed in re.findall(r"TT_EXPORT (.*?)\b(ttc_\w+)\((.*?)\);", text, re.S):
        found[name] = [kind_of_c(x) for x in split(" ".join(listed.split()))], kind_of_c(result)
    return found


HEADER = BRIDGE / "cpp" / "boundary" / "shim.h"
MIRROR = text_of(BRIDGE / "src" / "ffi.rs")


def compiled(asserts: list[str]) -> str:
    """The compiler's output for assertions about the header."""
    source = f'#include <cstddef>\n#include "{HEADER}"\n' + "\n".join(asserts)
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True).stderr


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


@needs_compiler
def test_structs_have_one_layout():
    structs = structs_of_rust(MIRROR)
    in_c = set(re.findall(r"(?m)^struct (\w+) \{", text_of(HEADER)))
    # The union has no name in C++. The size of the struct that contains it covers its size.
    assert in_c == set(structs) - {"TtPayload"}
    asserts = []
    for name in sorted(in_c):
        struct = structs[name]
        fields = [(f, getattr(struct, f).offset) for f, _ in struct._fields_ if f != "payload"]
        asserts += [
            f'static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");\n'
            f'static_assert(sizeof({name}::{field}) == {getattr(struct, field).size}, "{name}.{field}");'
            for field, offset in fields
        ]
        asserts.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");')
    payload = structs["TtArg"].payload.offset
    asserts += [
        f"static_assert(offsetof(TtArg, {f}) == {payload});" for f, _ in structs["TtPayload"]._fields_
    ]
    assert compiled(asserts) == ""


@needs_compiler
def test_constants_are_equal():
    constants = re.findall(r"pub const (\w+): \w+ = (\d+);", MIRROR)
    names = set(re.findall(r"\b(TT_\w+)\b", text_of(HEADER)))
    assert len(constants) > 20
    # Only `ttc_set_pending_message` names Python's exceptions.
    here = [(name, value) for name, value in constants if not name.endswith("_ERROR")]
    assert {f"TT_{name}" for name, _ in here} <= names
    assert compiled([f'static_assert(TT_{name} == {value}, "{name}");' for name, value in here]) == ""


def test_functions_have_one_signature():
    rust, c = functions_of_rust(), functions_of_c(text_of(HEADER))
    assert len(c) >= 80
    assert sorted(rust) == sorted(c)
    assert rust == c


@needs_compiler
def test_fields_in_another_order_are_found():
    swapped = MIRROR.replace("pub place: u8,\n    pub flags: u16,", "pub flags: u16,\n    pub place: u8,")
    tensor = structs_of_rust(swapped)["TtTensor"]
    said = compiled([f'static_assert(offsetof(TtTensor, place) == {tensor.place.offset}, "TtTensor.place");'])
    assert "TtTensor.place" in said
