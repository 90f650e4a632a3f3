"""`torch_tandem.function`: makes a function, a method, a module or a class of modules replay its calls."""

import functools
from collections.abc import Callable
from typing import Any, Unpack, overload

import torch

from torch_tandem import _core
from torch_tandem._functions.function import Function
from torch_tandem._functions.modules import wrap_class, wrap_module
from torch_tandem._functions.types import Decorator, Module, Options, P, R, Replayed


@overload
def function(function: type[Module], **options: Unpack[Options]) -> type[Module]: ...
@overload
def function(function: Module, **options: Unpack[Options]) -> Module: ...
@overload
def function(function: "staticmethod[P, R]", **options: Unpack[Options]) -> "staticmethod[P, R]": ...
@overload
def function(function: Callable[P, R], **options: Unpack[Options]) -> Replayed[P, R]: ...
@overload
def function(function: None = None, **options: Unpack[Options]) -> Decorator: ...
def function(
    function: Callable | None = None,
    *,
    input_signature: list | None = None,
    audit: int | None = None,
    max_graphs: int = 32,
    on_mismatch: str = "warn",
    effects: str = "refuse",
) -> Any:
    """Wrap a function, a method or a module so that equal calls are replayed without running Python.

    A call is replayed after three calls with equal arguments (tensors may have other values) and equal state
    have issued the same operators on the same tensors. See docs/functions.md.

    - `input_signature`: a shape and a dtype for each tensor argument, such as `[((None, 3), torch.float32)]`.
      A call with other tensors raises a `TypeError`.
    - `audit`: one call in this many runs Python and is compared with the replayed ones. By default, what
      TANDEM_AUDIT says, or one in 8 at first and one in 1,024 later.
    - `max_graphs`: the maximum number of kinds of calls that are kept.
    - `on_mismatch`: whether an audited call that differs leads to a warning (`"warn"`) or an error
      (`"raise"`).
    - `effects`: with `"refuse"`, a call with effects other than on tensors, such as prints, is not replayed.
      With `"skip"` it is, and its effects happen only in calls that run Python.
    """
    make = functools.partial(
        Function,
        input_signature=input_signature,
        audit=_core.audit_period() if audit is None else audit,
        max_graphs=max_graphs,
        on_mismatch=on_mismatch,
        effects=effects,
    )
    return functools.partial(wrap, make=make) if function is None else wrap(function, make)


def wrap(function: Any, make: Callable[[Callable], Function]) -> Any:
    """Wrap a function, a method, a module or a class of modules. `make` makes a `Function` of a callable."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(make(function.__func__))
    if isinstance(function, torch.nn.Module) and not isinstance(function, torch.jit.ScriptModule):
        return wrap_module(function, make)
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        return wrap_class(function, make)
    if isinstance(function, type):
        raise TypeError(
            "torch_tandem.function takes functions, methods, modules and classes of modules, not "
            f"{function!r}"
        )
    return make(function)
