"""Modules as functions. A module stays the object that it is; its class becomes a subclass that is replayed.

So it is a submodule of other modules, has its parameters, hooks and `state_dict()`, and passes for its class
wherever a library looks. Copies and pickles of it are plain modules.
"""

import copyreg
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

_FUNCTION = "_tandem_function"
# Methods of functions that modules get.
_METHODS = ("cache_info", "concrete_graph", "explain", "reason")


def wrap_module(module: torch.nn.Module, make: Callable, call: Callable | None = None) -> torch.nn.Module:
    """Replay a module's calls. `make` makes a function; `call` is the plain call, if not the class's own."""
    if _FUNCTION not in module.__dict__:
        plain = type(module)
        kind = module.__class__ = _kind(plain)
        function = make(MethodType(call or kind._tandem_plain, module))
        function.__qualname__ = plain.__qualname__
        module.__dict__[_FUNCTION] = function
    return module


def wrap_class(cls: type[torch.nn.Module], make: Callable) -> type[torch.nn.Module]:
    """Replay the calls of all modules of a class."""
    own = vars(cls).get("__call__")

    def plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own.__get__(self) if own else super(cls, self).__call__)(*args, **kwargs)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrap_module(self, make, plain)(*args, **kwargs)

    cls.__call__ = call
    return cls


def _call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self.__dict__[_FUNCTION](*args, **kwargs)


@functools.cache
def _kind(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The subclass of a class whose instances are functions."""

    def __reduce_ex__(self: torch.nn.Module, protocol: int) -> Any:
        reduced = super(kind, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _FUNCTION}
        if make is copyreg.__newobj__ and args == (kind,):
            # Pickle wants objects that it makes by `__newobj__` to be of the class that they say.
            make, args = copyreg._reconstructor, (cls, object, None)
        return make, args, *rest

    def plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's `__call__` is another one while calls are watched.
        return super(kind, self).__call__(*args, **kwargs)

    members: dict[str, Any] = {"__call__": _call, "__reduce_ex__": __reduce_ex__, "_tandem_plain": plain}
    members |= {name: _forwarding(name) for name in _METHODS if not hasattr(cls, name)}
    members |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind = type(cls.__name__, (cls,), members)
    return kind


def _forwarding(name: str) -> Callable:
    def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__dict__[_FUNCTION], name)(*args, **kwargs)

    method.__name__ = name
    return method
