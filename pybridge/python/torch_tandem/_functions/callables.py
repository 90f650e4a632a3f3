"""The C functions that a call may run, with their effects besides computing.

A call is replayed only if this table has all C functions that ran in the call. A listed function may do three
things: read Python's objects, which are compared (`walk.py`); write to them, which the comparison after the
call shows; and run operators on tensors, which are recorded. A function that reads or changes anything else
is not listed.
"""

import types
from typing import Any

import torch

from torch_tandem._functions import kinds, settings, torch_callables

# fmt: off
# Types whose methods read and write the object and their arguments only.
_PURE_TYPES = {
    "builtins": [
        "NoneType", "bool", "bytearray", "bytes", "classmethod", "complex", "dict", "dict_items",
        "dict_keys", "dict_values", "ellipsis", "enumerate", "filter", "float", "frozenset", "function",
        "generator", "getset_descriptor", "int", "list", "list_iterator", "list_reverseiterator", "map",
        "mappingproxy", "member_descriptor", "memoryview", "method", "method_descriptor", "object",
        "property", "range", "range_iterator", "reversed", "set", "set_iterator", "slice", "staticmethod",
        "str", "str_iterator", "super", "tuple", "tuple_iterator", "type", "wrapper_descriptor", "zip",
        "dict_itemiterator", "dict_keyiterator", "dict_valueiterator", "weakref", "ReferenceType", "code",
        "method-wrapper",
    ],
    "collections": ["OrderedDict", "defaultdict", "deque"],
    "_collections": ["_deque_iterator", "_tuplegetter"],
    "_weakref": ["ReferenceType"],
    "weakref": ["ReferenceType", "ProxyType"],
    "functools": ["partial", "KeyWrapper"],
    "itertools": ["chain", "count", "islice", "product", "repeat", "zip_longest"],
    "types": ["GenericAlias", "SimpleNamespace"],
    "_thread": ["RLock", "lock"],
    "datetime": ["timedelta", "timezone"],
    "decimal": ["Decimal"],
    "re": ["Pattern", "Match"],
    "array": ["array"],
    "numpy": ["dtype", "ndarray", "generic", "ufunc", "broadcast", "flagsobj"],
    "_contextvars": ["ContextVar"],
}
_PURE_TYPE_NAMES = {f"{module}.{name}" for module, names in _PURE_TYPES.items() for name in names}

# Functions without effects, by module. None stands for all functions of a module but those of `_IMPURE`,
# which read a file, or whether arrays share memory.
_PURE_FUNCTIONS = {
    "builtins": frozenset(
        [
            "abs", "aiter", "all", "anext", "any", "ascii", "bin", "callable", "chr", "delattr", "divmod",
            "format", "getattr", "hasattr", "hash", "hex", "id", "isinstance", "issubclass", "iter", "len",
            "locals", "max", "min", "next", "oct", "ord", "pow", "repr", "round", "setattr", "sorted", "sum",
            "__build_class__",
        ]
    ),
    "math": None,
    "cmath": None,
    "_operator": None,
    "_bisect": None,
    "_heapq": None,
    "_struct": None,
    "_functools": None,
    "itertools": None,
    "_collections": None,
    "_weakref": None,
    "_abc": None,
    "_sre": None,
    "_typing": None,
    "_json": None,
    "_statistics": None,
    "_stat": None,
    "_thread": frozenset({"get_ident", "get_native_id", "allocate_lock", "RLock"}),
    "_warnings": frozenset({"_filters_mutated"}),
    "_contextvars": frozenset({"copy_context"}),
    "_imp": frozenset({"acquire_lock", "release_lock", "lock_held"}),
    "copyreg": None,
    "posix": frozenset({"fspath"}),
    "sys": frozenset(
        [
            "exc_info", "exception", "getrecursionlimit",
            "intern", "is_finalizing", "getdefaultencoding", "audit",
        ]
    ),
    "numpy": None,
    "numpy.core._multiarray_umath": None,
    "numpy._core._multiarray_umath": None,
    "numpy.linalg._umath_linalg": None,
}
_IMPURE = frozenset({"fromfile", "shares_memory", "may_share_memory", "getweakrefcount", "getweakrefs"})
# Functions with an effect outside of the program's objects that no operator depends on.
_EFFECTS = {("builtins", "print"), ("_warnings", "warn"), ("_warnings", "warn_explicit")}
_WRITERS = frozenset({"TextIOWrapper", "BufferedWriter", "StringIO", "BytesIO"})
# Methods that read all attributes of an object.
_DYNAMIC = frozenset(
    {"__reduce_ex__", "__reduce__", "__getstate__", "__getattribute__", "__dir__", "__sizeof__"}
)
# Methods of tensors on the host that read elements without an operator.
_HOST_READERS = frozenset(
    [
        "numpy", "tolist", "data_ptr", "mutable_data_ptr", "const_data_ptr", "__array__", "untyped_storage",
        "_typed_storage", "storage", "__reduce_ex__", "map_", "map2_", "apply_", "is_pinned", "__dlpack__",
        "_make_subclass", "__setstate__", "share_memory_",
    ]
)
# Methods of tensors whose results depend on more than what a replay compares of an argument: its address, its
# storage and its offset there, and whether it is a view.
_UNCOMPARED = frozenset(
    [
        "data_ptr", "mutable_data_ptr", "const_data_ptr", "untyped_storage", "_typed_storage", "storage",
        "storage_offset", "sym_storage_offset", "is_set_to", "_is_view", "_is_alias_of", "__hash__",
        "_use_count", "_storage",
    ]
)
# Methods of tensors whose calls the observer has to see. C code that is given one calls it unobserved.
UNOBSERVED_IF_PASSED = (_HOST_READERS | _UNCOMPARED) - {"storage", "_storage", "__hash__"}
# Modules whose C types make objects from the arguments of the constructor alone.
_MODULES_OF_TYPES = frozenset(
    [
        "builtins", "collections", "_collections", "itertools", "functools", "_functools", "torch", "numpy",
        "datetime", "decimal", "fractions", "enum", "types", "typing", "abc", "_thread", "weakref",
        "_weakref", "re", "array", "_struct", "operator", "_operator", "_io", "contextlib", "contextvars",
        "_contextvars", "dataclasses", "warnings", "_abc", "_random", "_warnings",
    ]
)
# fmt: on


# Modules whose C functions read the value of a float without calling a method of it.
_READERS = frozenset(
    {"array", "cmath", "datetime", "decimal", "math", "numpy", "_decimal", "_json", "_statistics", "_struct"}
)


class Finding:
    """The entry of a C function in the table: its effect."""

    PURE, DYNAMIC, EFFECT, UNKNOWN = range(4)


def module_of(function: Any) -> str | None:
    """Return the module that a C function belongs to; None for a method."""
    owner = function.__self__
    # pybind11 binds a function to a record of its own instead of to the module.
    if owner is None or isinstance(owner, types.ModuleType) or "pybind11_detail" in type(owner).__name__:
        return getattr(function, "__module__", None) or getattr(owner, "__name__", None) or ""
    return None


def name_of(function: Any) -> str:
    """Return the name of a C function as users write it."""
    owner, module = function.__self__, module_of(function)
    if module is not None:
        return f"{module}.{function.__name__}" if module and module != "builtins" else function.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    module = kind.__module__
    return f"{'' if module == 'builtins' else module + '.'}{kind.__qualname__}.{function.__name__}"


def finding(function: Any) -> int:
    """Return the `Finding` of a C function, a `types.BuiltinFunctionType` or a bound method of a C type."""
    owner, name = function.__self__, function.__name__
    if (module := module_of(function)) is not None:
        return _of_module(module, function)
    if isinstance(owner, torch.Tensor):
        if name in _UNCOMPARED or (owner.device.type == "cpu" and name in _HOST_READERS):
            return Finding.UNKNOWN
        return _known(torch_callables.is_known_of_tensor(name))
    kind = owner if isinstance(owner, type) else type(owner)
    if name in _DYNAMIC or (kind is str and name in ("format", "format_map")):
        return Finding.DYNAMIC
    for base in kind.__mro__:
        # The function is C code, so a method in Python that overrides it is not the one that was called.
        member = vars(base).get(name)
        if member is not None and not isinstance(getattr(member, "__func__", member), types.FunctionType):
            kind = base
            break
    module = kind.__module__
    if _is_torchs(module):
        return _known(torch_callables.is_known_method(kind, name))
    if module == "_io" and kind.__name__ in _WRITERS:
        return Finding.EFFECT if name in ("write", "writelines", "flush", "isatty") else Finding.UNKNOWN
    if f"{module}.{kind.__name__}" in _PURE_TYPE_NAMES:
        # Constructors that read a clock or a file, such as `datetime.now`, are methods of the class itself.
        return Finding.PURE
    if isinstance(owner, type) and name in ("__new__", "__init_subclass__", "__subclasshook__", "mro"):
        return Finding.PURE
    return Finding.UNKNOWN


def is_known_of_type(kind: type, name: str) -> bool:
    """Whether a method of a C type may be called without being observed."""
    if issubclass(kind, torch._C.TensorBase):
        return name not in UNOBSERVED_IF_PASSED and torch_callables.is_known_of_tensor(name)
    return not _is_torchs(kind.__module__) or torch_callables.is_known_method(kind, name)


def reads_floats(function: Any) -> bool:
    """Whether a C function may read the value of a float without calling a method of the float."""
    module = module_of(function)
    if module is None:
        owner = function.__self__
        kind = owner if isinstance(owner, type) else type(owner)
        return issubclass(kind, (float, complex, bytearray)) or kinds.package_of(kind) in _READERS
    return module.partition(".")[0] in _READERS


def _known(known: bool) -> int:
    return Finding.PURE if known else Finding.UNKNOWN


def _is_torchs(module: str) -> bool:
    """Whether a module is PyTorch's, Tandem's, or one that PyTorch makes for a library's operators."""
    return module.partition(".")[0] in ("torch", "torch_tandem")


def _of_module(module: str, function: Any) -> int:
    name = function.__name__
    if (module, name) in _EFFECTS:
        return Finding.EFFECT
    if module == "builtins" and name in ("vars", "dir"):
        return Finding.DYNAMIC
    if _is_torchs(module):
        return _known(torch_callables.is_known_function(module, name) or settings.is_known(module, function))
    known = _PURE_FUNCTIONS.get(module, frozenset())
    is_pure = name not in _IMPURE if known is None else name in known
    return _known(is_pure)


def is_known_type(kind: type) -> bool:
    """Whether calling a C type does nothing but make an object from the arguments."""
    module = kinds.package_of(kind)
    # `datetime64("now")` reads the clock.
    return module in _MODULES_OF_TYPES and f"{module}.{kind.__name__}" != "numpy.datetime64"
