"""Observation of a call: the code objects that start, and the C functions that are called.

Calls that are recorded or audited run in Python, under the interpreter's profiling hook. The code that the
calls of a function have run is the function's world. The function's state is all that this code reads
(`walk.py`).
"""

import builtins
import contextlib
import gc
import importlib
import inspect
import os
import sys
import sysconfig
import threading
import types
import typing
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torch_tandem import _core
from torch_tandem._functions import bytecode, callables, settings
from torch_tandem._functions.callables import Finding
from torch_tandem._program.tracebacks import PACKAGE

# Files whose code need not be observed: the import system, `typing`, and this package.
_KNOWN_FILES = ("<frozen importlib", sys.modules["typing"].__file__, PACKAGE)
# The code of `isinstance` for protocols, which asks for attributes by their names.
_PROTOCOL = type(typing.Protocol).__instancecheck__.__code__
_TORCH = os.path.dirname(sys.modules["torch"].__file__) + os.sep
# The file of `inspect.signature`, which reads attributes of functions and classes by names in its code.
_INSPECT = inspect.__file__
# The file of functions that read how much memory is in use, which depends on what the executor has done.
_MEMORY = os.path.join(PACKAGE, "memory.py")
# The file whose functions only wrap functions of PyTorch, so that the program is their caller.
_WRAPPERS = os.path.join(PACKAGE, "_device", "settings.py")
# Attributes of tensors that operators change and that are not compared.
_UNSEEN = frozenset({"_version", "_cdata", "output_nr", "grad_fn", "_base", "retains_grad"})
# Names through which code reads variables of other code, annotations, context variables and weak references.
_REFUSED = frozenset(
    {"tb_frame", "f_back", "get_type_hints", "copy_context", "__globals__", "getweakrefcount", "getweakrefs"}
)
# Attributes of an exception that depend on the one which the caller handles.
_OF_EXCEPTIONS = frozenset({"__context__", "__traceback__"})
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# Without a virtual environment, this folder is within the standard library's.
_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_LIBRARIES = ("<", PACKAGE, *_STANDARD, *_PACKAGES)
# Code whose file begins with another "<" may be the program's: of `python -c`, standard input and `exec`.
_INSTALLED = ("<frozen ", *_LIBRARIES[1:])
# Callbacks by which the standard library's weak containers remove dead entries. They run at any time and are
# no part of a call.
_REMOVALS = frozenset(
    weak._remove.__code__  # type: ignore[attr-defined]
    for weak in (weakref.WeakKeyDictionary(), weakref.WeakValueDictionary(), weakref.WeakSet())
)
# The code that gives tensors their hashes, which are addresses.
_HASH = torch.Tensor.__hash__.__code__
# Methods of PyTorch that reach attributes by `__dict__`, but only those that their callers name.
_NAMED = frozenset(
    {
        "__getattr__", "__setattr__", "__delattr__", "__init__", "register_parameter", "register_buffer",
        "expand",
    }
)  # fmt: skip
# Functions that reach an attribute by a name, which the program may compute.
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


class World:
    """The code and the C functions that a function's calls have run so far.

    The first call, and a call that imports a module, run code that later calls do not. The code of these
    calls is not kept.
    """

    def __init__(self) -> None:
        # Code objects that ran, by id, with their globals.
        self.codes: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        # Functions that ran although the walk over the state has not met them.
        self.functions: dict[int, types.FunctionType | types.MethodType] = {}
        # Names of attributes that were reached by computed names.
        self.names: set[str] = set()
        # Whether code may reach any attribute, because it uses means other than the names in its bytecode.
        self.is_dynamic = False
        # Classes whose methods may reach any attribute of their own objects in this way.
        self.dynamic_classes: frozenset[type] = frozenset()
        # Reasons against a replay of the latest call, and effects that a replay would skip, each with its
        # line.
        self.refusals: dict[str, None] = {}
        self.effects: dict[str, None] = {}
        # Something that the code reads and that cannot be compared, in words; empty if there is nothing.
        self.unseen = ""
        # A C function that the latest call has called and that may read a float without calling a method of
        # the float.
        self.reader = ""
        # Whether the current call is the first one or imports a module, so that its code is not kept.
        self.is_first = True
        # PyTorch's settings that the code reads or changes by C functions, by name.
        self.settings: dict[str, settings.Setting] = {}
        # C functions without effects: those that cannot read a float, and those that may.
        self._pure: set[Any] = set()
        self._readers: set[Any] = set()
        # The ids of code objects whose functions the walk has met, or `find_functions` has searched for.
        self._sought: set[int] = set()
        # Number of changes to this object, and whether the latest call has made none.
        self.version = 0
        self.is_settled = False

    def has(self, code: types.CodeType) -> bool:
        return id(code) in self.codes

    def attributes(self) -> set[str]:
        """The names of attributes that the code may reach, except those that it reads from globals."""
        names = set(self.names)
        for code, _ in self.codes.values():
            read = bytecode.reads(code)
            names |= read.attributes | read.strings
        return names

    def may_read(self, name: str) -> bool:
        """Whether the code may read an attribute with this name."""
        if self.is_dynamic or name in self.names:
            return True
        every = (bytecode.reads(code) for code, _ in self.codes.values())
        return any(
            name in read.attributes or name in read.strings or any(name in chain for chain in read.globals)
            for read in every
        )

    def lines_of_store(self, name: str | None) -> Iterator[str]:
        """The places where the program's code sets an attribute or a variable `name`; with None, an item."""
        for code, _ in self.codes.values():
            if not code.co_filename.startswith(_LIBRARIES) and (line := bytecode.line_of_store(code, name)):
                yield f"{code.co_filename}:{line}"

    def reaches_all(self, kind: type) -> bool:
        """Whether code may read any attribute of a type's objects."""
        return self.is_dynamic or not self.dynamic_classes.isdisjoint(kind.__mro__)

    def add_code(self, code: types.CodeType, frame: types.FrameType) -> None:
        self.codes[id(code)] = code, frame.f_globals
        self.is_first |= code.co_name == "<module>"
        self.version += 1
        read = bytecode.reads(code)
        if code.co_filename.startswith(_TORCH):
            if read.of and code.co_name not in _NAMED:
                owner = _owner_of(code, frame.f_locals.get(read.of))
                self.dynamic_classes |= {owner} if owner else set()
        elif not code.co_filename.startswith(_INSPECT):
            self.is_dynamic |= read.is_dynamic
            if read.of:
                owner = _owner_of(code, frame.f_locals.get(read.of))
                self.is_dynamic |= owner is None
                self.dynamic_classes |= {owner} if owner else set()
            named = read.attributes.union(*read.globals)
            for name in sorted((_UNSEEN | _REFUSED) & named | _UNSEEN & read.texts):
                self._refuse_code(code, f"reads {name}")
            for name in sorted(callables.UNOBSERVED_IF_PASSED & read.values):
                self._refuse_code(code, f"reads {name} without calling it")
            if read.raises_again or _OF_EXCEPTIONS & named:
                self._add_setting(settings.EXCEPTION)
            is_installed = code.co_filename.startswith(_INSTALLED)
            if any(chain[:2] == ("sys", "modules") for chain in read.globals) and not is_installed:
                self._refuse_code(code, "reads sys.modules")
            if code is importlib.import_module.__code__:
                self._refuse_code(code, "imports a module by its name")

    def _refuse_code(self, code: types.CodeType, what: str) -> None:
        self.unseen = (
            f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) {what}, which is not compared"
        )

    def add_call(self, function: Any, frame: types.FrameType) -> None:
        """Note a call of a C function."""
        if function.__name__ in _BY_NAME and function.__self__ is builtins:
            return self._add_name(frame)
        if function is id:
            return self._add_identity(frame)
        key = _key(function)
        if key in self._pure:
            return
        if key not in self._readers:
            self._add_settings(function)
            found = callables.finding(function)
            if found == Finding.PURE:
                (self._readers if callables.reads_floats(function) else self._pure).add(key)
        if key in self._readers and not self.reader and not frame.f_code.co_filename.startswith(PACKAGE):
            self.reader = f"{callables.name_of(function)} at {_place(frame)}"
        if key in self._pure or key in self._readers:
            return
        file = frame.f_code.co_filename
        if file.startswith(_KNOWN_FILES) and file != _WRAPPERS:
            return
        at = f"{callables.name_of(function)} at {_place(frame)}"
        if found == Finding.EFFECT:
            self.effects[f"it calls {at}, which a replay would skip"] = None
        elif found == Finding.UNKNOWN:
            self.refusals[
                f"it calls {at}, which may depend on or change what Tandem cannot see. Call it outside of "
                "the function, and pass its result"
            ] = None
        elif not file.startswith(_TORCH) and file != _INSPECT:
            self.reach_all()

    def _add_identity(self, frame: types.FrameType) -> None:
        """Note that a frame asks for an object's address. The addresses of arguments are not compared."""
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD) and not file.startswith(_PACKAGES)
        if not (is_standard or file.startswith(_TORCH)):
            self.refusals[
                f"it calls id at {_place(frame)}, and addresses are not compared. Compare objects by `is`"
            ] = None

    def add_hash(self, frame: types.FrameType) -> None:
        self.refusals[
            f"it calls hash at {_place(frame)} on a tensor, whose hash is its address, and addresses are "
            "not compared. Compare tensors by `is`"
        ] = None

    def add_protocol(self, frame: types.FrameType) -> None:
        self.refusals[
            f"it calls isinstance at {_place(frame)} with a protocol, which asks for attributes that are not "
            "compared. Check a class"
        ] = None

    def add_use_of_memory(self, frame: types.FrameType) -> None:
        self.refusals[
            f"it calls {frame.f_code.co_name} at {_place(frame)}, which depends on how much memory is in "
            "use. Call it outside of the function"
        ] = None

    def _add_settings(self, function: Any) -> None:
        """Note the settings that a C function reads or changes."""
        for setting in settings.of_call(callables.module_of(function) or "", function):
            self._add_setting(setting)

    def _add_setting(self, setting: settings.Setting) -> None:
        if setting.name not in self.settings:
            self.settings[setting.name] = setting
            self.version += 1

    def reach_all(self) -> None:
        """Note that code may reach any attribute by a name that is not in its bytecode."""
        if not self.is_dynamic:
            self.is_dynamic = True
            self.version += 1

    def add_name(self, name: str) -> None:
        if name in _UNSEEN:
            self.unseen = f"code that it runs reads {name} by a name, which is not compared"
        if name not in self.names:
            self.names.add(name)
            self.version += 1

    def _add_name(self, frame: types.FrameType) -> None:
        """Note the name of the attribute that a frame is about to reach by a function in `_BY_NAME`."""
        name = bytecode.second_argument(frame)
        if type(name) is str:
            self.add_name(name)
        elif not frame.f_code.co_filename.startswith((_TORCH, _INSPECT)):
            self.reach_all()

    def find_functions(self, explained: set[int]) -> None:
        """Find the functions that the walk over the state has not met although their code ran.

        PyTorch's C++ code holds some of them. `explained` are the ids of the code objects whose functions the
        walk has met.
        """
        nested = {
            id(constant)
            for code, _ in self.codes.values()
            for constant in code.co_consts
            if isinstance(constant, types.CodeType)
        }
        # A function that the walk has met before and no longer meets was removed from what the code reaches.
        self._sought |= explained
        lost = [code for key, (code, _) in self.codes.items() if key not in nested | self._sought]
        if not lost:
            return
        self._sought.update(map(id, lost))
        found = [
            owner
            for owner in gc.get_referrers(*lost)
            if type(owner) is types.FunctionType and id(owner.__code__) in self._sought
        ]
        held = {id(owner.__code__) for owner in found}
        for code in lost:
            if id(code) not in held and not code.co_filename.startswith((_TORCH, *_STANDARD)):
                self._refuse_code(code, "is held where Tandem cannot see it")
        methods = [owner for owner in gc.get_referrers(*found) if type(owner) is types.MethodType]
        for owner in (*found, *methods):
            self.functions[id(owner)] = owner
            self.version += 1


def _key(function: Any) -> Any:
    owner, module = function.__self__, callables.module_of(function)
    if module is not None:
        return module, function.__name__
    # The table treats methods of tensors on the host differently, because some of them read elements.
    where = getattr(owner, "is_cpu", None) if type(owner).__module__.startswith("torch") else None
    return owner if isinstance(owner, type) else type(owner), function.__name__, where


def _owner_of(code: types.CodeType, instance: Any) -> type | None:
    """The class of `instance` that defines the method with this code; None if there is none."""
    name = code.co_qualname.partition(".<locals>.")[0]
    for base in type(instance).__mro__:
        for member in vars(base).values():
            if type(member) is types.FunctionType and (
                member.__code__ is code or (name != code.co_qualname and member.__code__.co_qualname == name)
            ):
                return base
    return None


def _place(frame: types.FrameType) -> str:
    """The innermost line on a frame's stack that is the program's and not a library's."""
    at: types.FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_LIBRARIES):
        at = at.f_back
    at = at or frame
    return f"{at.f_code.co_filename}:{at.f_lineno}"


observing = 0
"""The id of the thread whose call is observed, or 0.

Functions that this call calls are observed as parts of it.
"""


class Observed:
    """A context that notes the code and the C functions which the calling thread runs, in a world."""

    def __init__(self, world: World) -> None:
        self._world, self._version = world, world.version
        self._is_active = False
        # Whether the garbage collector is running on the observed thread.
        self._is_collecting = False
        # Whether `hash` is running on an object.
        self._is_hashing = False
        self._before = (
            dict(world.codes), set(world.names), world.is_dynamic, world.dynamic_classes, world.unseen
        )  # fmt: skip

    def __enter__(self) -> None:
        world = self._world
        world.refusals, world.effects, world.reader = {}, {}, ""
        codes, add_code, add_call = world.codes, world.add_code, world.add_call

        def profile(frame: types.FrameType, event: str, function: Any) -> None:
            if self._is_collecting:
                return
            if event == "call":
                code = frame.f_code
                if code.co_filename == _MEMORY:
                    world.add_use_of_memory(frame)
                if code is _HASH and self._is_hashing:
                    world.add_hash(frame)
                if code is _PROTOCOL and vars(frame.f_locals["cls"]).get("_is_protocol"):
                    world.add_protocol(frame)
                if (
                    id(code) not in codes
                    and not code.co_filename.startswith(_KNOWN_FILES)
                    and code not in _REMOVALS
                ):
                    add_code(code, frame)
            elif event == "c_call":
                self._is_hashing = function is hash
                add_call(function, frame)
            elif function is hash:
                self._is_hashing = False

        global observing
        self._is_active = True
        observing = threading.get_ident()
        # Callbacks of other libraries that run between these two are no part of the call.
        gc.callbacks.insert(0, self._note_start)
        gc.callbacks.append(self._note_stop)
        sys.setprofile(profile)

    def _note_start(self, phase: str, info: dict[str, Any]) -> None:
        """Note that the garbage collector starts. Finalizers that run meanwhile are not the call's code."""
        if phase == "start" and threading.get_ident() == observing:
            self._is_collecting = True

    def _note_stop(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and threading.get_ident() == observing:
            self._is_collecting = False

    def end(self) -> None:
        """End the observation, if that has not happened: an interrupt may arrive within `__exit__`."""
        global observing
        if not self._is_active:
            return
        sys.setprofile(None)
        for callback in (self._note_start, self._note_stop):
            with contextlib.suppress(ValueError):  # the call has removed the callback
                gc.callbacks.remove(callback)
        observing = 0
        self._is_active = False

    def __exit__(self, *exception: object) -> None:
        self.end()
        world = self._world
        world.is_settled = not world.is_first and world.version == self._version
        if world.is_first:
            (
                world.codes, world.names, world.is_dynamic, world.dynamic_classes, world.unseen
            ) = self._before  # fmt: skip
            world.is_first = False


def is_programs(module: types.ModuleType) -> bool:
    """Whether a module is the program's, and not part of Python or of an installed package."""
    file = _core.attributes_of(module).get("__file__")
    if isinstance(file, str):
        return not file.startswith(_INSTALLED)
    return module.__name__ not in sys.stdlib_module_names


def is_librarys(code: types.CodeType) -> bool:
    """Whether code belongs to an installed package or to the standard library."""
    return code.co_filename.startswith(_LIBRARIES)


def is_torchs(code: types.CodeType) -> bool:
    """Whether code belongs to PyTorch."""
    return code.co_filename.startswith(_TORCH)


def is_observable() -> bool:
    """Whether no other profiler is active. Observing a call would replace the other profiler's hook."""
    return sys.getprofile() is None
