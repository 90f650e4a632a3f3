"""Modules as functions. A wrapped module stays the same object; its new class replays calls.

The module therefore remains a submodule of other modules, keeps its parameters, hooks and `state_dict()`, and
passes for an instance of its class wherever a library checks. Copies and pickles of it are plain modules.
"""

import copyreg
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

_FUNCTION = "_tandem_function"
# Methods of `Function` that a wrapped module also has.
_METHODS = ("cache_info", "concrete_graph", "explain", "reason")


def wrap_module(module: torch.nn.Module, make: Callable, call: Callable | None = None) -> torch.nn.Module:
    """Make a module replay its calls.

    `make` makes a function of `call`, by default the call of the module's class.
    """
    if _FUNCTION not in module.__dict__:
        plain = type(module)
        kind = module.__class__ = _kind(plain)
        function = make(MethodType(call or kind._tandem_plain, module))
        function.__qualname__ = plain.__qualname__
        module.__dict__[_FUNCTION] = function
    return module


def wrap_class(cls: type[torch.nn.Module], make: Callable) -> type[torch.nn.Module]:
    """Make all modules of a class replay their calls."""
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
    """Return the subclass of `cls` whose instances replay their calls."""

    def __reduce_ex__(self: torch.nn.Module, protocol: int) -> Any:
        reduced = super(kind, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _FUNCTION}
        if make is copyreg.__newobj__ and args == (kind,):
            # `copyreg.__newobj__` makes pickle compare the object's class with the named class, which is the
            # plain one.
            make, args = copyreg._reconstructor, (cls, object, None)
        return make, args, *rest

    def plain(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # While module calls are watched, `Module.__call__` is replaced, so it is looked up at each call.
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
