"""Modules as functions. A wrapped module stays the same object, of the same class.

PyTorch calls `Module._compiled_call_impl` instead of the module if it is set, as `Module.compile` does.
Copies and pickles of the module do not have it: they are plain modules.
"""

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

_ENTRY = "_compiled_call_impl"
# Methods of `Function` that a wrapped module also has.
_METHODS = ("cache_info", "concrete_graph", "explain", "reason")


class _Plain(threading.local):
    """The module whose next call is not replayed."""

    module: torch.nn.Module | None = None


_plain = _Plain()


_state_of = torch.nn.Module.__getstate__


def _state_without_methods(self: torch.nn.Module) -> dict:
    return {name: value for name, value in _state_of(self).items() if type(value) is not _Method}


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
    """The call of a wrapped module: a replay, or the module's own call if the replay needs it.

    `call` is the call that is replayed, by default the one of the module's class.
    """

    def __init__(self, module: torch.nn.Module, make: Callable, call: Callable | None) -> None:
        self._own = module.__dict__.get(_ENTRY) or module._call_impl
        self.function = make(MethodType(call or _call, module))
        self.function.__qualname__ = type(module).__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_plain():
            _plain.module = None
            return self._own(*args, **kwargs)
        return self.function(*args, **kwargs)

    def is_plain(self) -> bool:
        """Whether the function has begun the module's own call."""
        module = _plain.module
        return module is not None and module.__dict__.get(_ENTRY) is self


def entry_of(module: torch.nn.Module) -> Entry | None:
    """Return the entry of a wrapped module; None for another module."""
    found = module.__dict__.get(_ENTRY)
    return found if type(found) is Entry else None


def wrap_module(module: torch.nn.Module, make: Callable, call: Callable | None = None) -> torch.nn.Module:
    """Make a module replay its calls.

    `make` makes a function of `call`, by default the call of the module's class.
    """
    if entry_of(module) is None:
        if torch.nn.Module.__getstate__ is not _state_without_methods:
            torch.nn.Module.__getstate__ = _state_without_methods
        entry = module.__dict__[_ENTRY] = Entry(module, make, call)
        for name in _METHODS:
            if not hasattr(module, name):
                module.__dict__[name] = _Method(getattr(entry.function, name))
    return module


def wrap_class(cls: type[torch.nn.Module], make: Callable) -> type[torch.nn.Module]:
    """Make all modules of a class replay their calls."""
    own = vars(cls).get("__call__")

    def plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        _plain.module = self
        return (own.__get__(self) if own else super(cls, self).__call__)(*args, **kwargs)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        entry = entry_of(wrap_module(self, make, plain))
        assert entry is not None
        return entry.function(*args, **kwargs)

    cls.__call__ = call
    return cls


def _call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    _plain.module = self
    return torch.nn.Module.__call__(self, *args, **kwargs)
