"""Differences of divergences in PyTorch's words: names of arguments, and dtypes."""

import re

import torch

from torch_tandem._report.types import Divergence

_ARGUMENT = re.compile(r"(?P<before>.*)\bargument (?P<number>\d+) = (?P<value>.*)", re.DOTALL)
# In the order of `c10::ScalarType`.
_DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
)  # fmt: skip


def readable(divergence: Divergence) -> Divergence:
    """Return a divergence whose texts name the argument that differs, and its dtypes if it is one."""
    match = _ARGUMENT.fullmatch(divergence["expected"])
    name = match and _argument(divergence["op"], int(match["number"]))
    if not match or not name:
        return divergence
    value, got = match["value"], divergence["got"]
    if name == "dtype":
        value, got = _dtype(value), _dtype(got)
    expected = f"{match['before']}{name} = {value}"
    old = f"{divergence['expected']}, got {divergence['got']}"
    reason = divergence["reason"].replace(old, f"{expected}, got {got}")
    return {**divergence, "expected": expected, "got": got, "reason": reason}


def _argument(op: str, number: int) -> str:
    """The name of an operator's argument, or "" if PyTorch does not know it."""
    name, _, overload = op.partition(".")
    try:
        arguments = torch._C._get_schema(name, overload).arguments
    except RuntimeError:
        return ""
    return arguments[number].name if number < len(arguments) else ""


def _dtype(text: str) -> str:
    return f"torch.{_DTYPES[int(text)]}" if text.isdecimal() and int(text) < len(_DTYPES) else text
