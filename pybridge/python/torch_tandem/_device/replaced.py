"""Functions in Python that take the place of PyTorch's."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from torch_tandem._device.untraced import untraced


def replace(owner: Any, name: str, new: Callable) -> None:
    """Let `new` take the place of a function of a module, or of a method of `torch.Tensor`.

    Pickles name the function as before, TorchScript compiles calls of it as before, and overrides
    (`__torch_function__`, modes) see calls of the method instead of what it calls. As with PyTorch's files,
    Dynamo compiles no frame of the function.
    """
    original = getattr(owner, name)
    is_method = isinstance(owner, type)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(self):
            return handle_torch_function(method, (self,), self, *args, **kwargs)
        return new(self, *args, **kwargs)

    function = method if is_method else functools.wraps(original)(new)
    function.__name__ = name
    function.__module__ = owner.__module__ if is_method else owner.__name__
    function.__qualname__ = f"{owner.__qualname__}.{name}" if is_method else name
    if not is_method and not isinstance(original, types.FunctionType):
        # TorchScript knows functions in C by their identity.
        operator = torch.jit._builtins._find_builtin(original)
        if operator is not None:
            torch.jit._builtins._register_builtin(function, operator)
    untraced(function)
    setattr(owner, name, function)
