"""Modules as functions. A wrapped module stays the same object, of the same class.

PyTorch calls `_compiled_call_impl` of a module instead of its own call if it is set, as `Module.compile`
does. For the classes of wrapped modules it is a property that returns the module's entry. The entry is no
part of copies and pickles, which are plain modules.
"""

import threading
from collections.abc import Callable
from inspect import getattr_static
from types import MethodType
from typing import Any

import torch

_ENTRY = "_tandem_entry"
_COMPILED = "_compiled_call_impl"
# Methods of `Function` that a wrapped module also has.
_METHODS = ("cache_info", "concrete_graph", "explain", "reason")


class _Running(threading.local):
    """The modules whose own calls run on a thread, called by their functions."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


_running = _Running()


class _Attribute:
    """An attribute of a wrapped module. It is None in copies that a class makes in its own way."""

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return type(None), ()


class _Method(_Attribute):
    """A method of `Function` that a wrapped module has."""

    def __init__(self, method: Callable) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


class Entry(_Attribute):
    """The call of a wrapped module: of its function, or the module's own one if the function has begun it.

    The function's body is `call`.
    """

    def __init__(self, module: torch.nn.Module, make: Callable, call: Callable) -> None:
        self.module, self.call = module, call
        self.function = make(MethodType(call, module))
        self.function.__qualname__ = type(module).__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.is_running():
            own = self.module.__dict__.get(_COMPILED) or self.module._call_impl
            return own(*args, **kwargs)
        return self.function(*args, **kwargs)

    def is_running(self) -> bool:
        """Whether the function has begun the module's own call."""
        return any(module is self.module for module in _running.modules)


class _Compiled:
    """The property `_compiled_call_impl` of a class that has wrapped modules."""

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Any:
        return None if module is None else entry_of(module) or module.__dict__.get(_COMPILED)

    def __set__(self, module: torch.nn.Module, call: Any) -> None:
        module.__dict__[_COMPILED] = call

    def __delete__(self, module: torch.nn.Module) -> None:
        module.__dict__.pop(_COMPILED, None)


def entry_of(module: torch.nn.Module) -> Entry | None:
    """Return the entry of a wrapped module; None for another module, such as a copy of a wrapped one."""
    entry = module.__dict__.get(_ENTRY)
    return entry if entry is not None and entry.module is module else None


def wrap_module(module: torch.nn.Module, make: Callable, call: Callable | None = None) -> torch.nn.Module:
    """Make a module replay its calls.

    `make` makes a function of `call`, by default the call that all modules have.
    """
    if entry_of(module) is None:
        if torch.nn.Module.__getstate__ is not _state_without_entry:
            torch.nn.Module.__getstate__ = _state_without_entry
        kind = type(module)
        if not isinstance(getattr_static(kind, _COMPILED), _Compiled):
            setattr(kind, _COMPILED, _Compiled())
        entry = module.__dict__[_ENTRY] = Entry(module, make, call or _call)
        for name in _METHODS:
            known = getattr_static(module, name, None)
            if isinstance(known, _Method) or (known is None and name not in module._modules):
                module.__dict__[name] = _Method(getattr(entry.function, name))
    return module


def wrap_class(cls: type[torch.nn.Module], make: Callable) -> type[torch.nn.Module]:
    """Make all modules of a class replay their calls."""
    own = vars(cls).get("__call__")

    def body(self: torch.nn.Module) -> Callable:
        return own.__get__(self) if own else super(cls, self).__call__

    def plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, body(self), args, kwargs)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return body(self)(*args, **kwargs)
        entry = entry_of(wrap_module(self, make, plain))
        assert entry is not None
        # The module may have been wrapped by itself, or by a class derived from this one.
        if entry.call is not plain or entry.is_running():
            return body(self)(*args, **kwargs)
        return entry.function(*args, **kwargs)

    cls.__call__ = call
    return cls


def _call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run(self, MethodType(torch.nn.Module.__call__, self), args, kwargs)


def _run(module: torch.nn.Module, call: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a module's own call."""
    _running.modules.append(module)
    try:
        return call(*args, **kwargs)
    finally:
        _running.modules.pop()


_state_of = torch.nn.Module.__getstate__


def _state_without_entry(self: torch.nn.Module) -> dict:
    return {name: value for name, value in _state_of(self).items() if not isinstance(value, _Attribute)}
