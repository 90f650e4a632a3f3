"""Every module of PyTorch's database: forward to double backward, strides, channels last, pickling, `to`."""

import copy
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

from .agree import agree
from .cases import Case, NotACase
from .samples import moved, some
from .transforms import direction

DTYPES = (torch.float32, torch.float64)


def cases() -> Iterator[Case]:
    """Yields a case for each module, check and dtype."""
    for info in module_db:
        for dtype in DTYPES:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            for name, way in WAYS.items():
                for training in (True, False):
                    mode = "training" if training else "inference"
                    kind = str(dtype).removeprefix("torch.")
                    check = functools.partial(module, info, dtype, way, training)
                    yield Case(f"modules/{name}/{info.name}.{mode}/{kind}", check)


def module(info: Any, dtype: torch.dtype, way: Callable[..., Any], training: bool) -> None:
    """Runs one check on the inputs of a module."""
    torch.manual_seed(0)
    grad = way is not to_and_back
    made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=grad, training=training)
    made = [m for m in made if m.forward_input is not None]
    if not made:
        raise NotACase("it has no inputs")
    for number, given in enumerate(some(made)):

        def program(device: str, given: Any = given, to: torch.dtype = dtype) -> Any:
            torch.manual_seed(1)
            args, kwargs = on("cpu", to, given.constructor_input)
            instance = info.module_cls(*args, **kwargs).to(to).train(training)
            args, kwargs = on("cpu", to, given.forward_input)
            if info.is_lazy:
                with torch.no_grad():
                    instance(*args, **kwargs)
            instance = instance.to(device)
            args, kwargs = on(device, to, given.forward_input)
            torch.manual_seed(2)
            return way(instance, device, args, kwargs)

        agree(program, f"input {number}", exact=functools.partial(program, to=torch.float64))


def on(device: str, dtype: torch.dtype, given: Any) -> tuple[Any, Any]:
    """Returns a copy of a function input on a device, with floating-point values in a dtype."""

    def convert(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            x = moved(x, device)
            if x.is_floating_point() and x.dtype != dtype:
                x = x.detach().to(dtype).requires_grad_(x.requires_grad)
        elif isinstance(x, torch.dtype):
            x = dtype
        elif isinstance(x, torch.nn.Module):
            x = copy.deepcopy(x).to(device)
        return x

    return tree_map(convert, list(given.args)), tree_map(convert, dict(given.kwargs))


def floats(x: Any) -> list[torch.Tensor]:
    """Returns the differentiable tensors of a nested structure."""
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor) and t.requires_grad]


def forward_backward(instance: torch.nn.Module, device: str, args: Any, kwargs: Any) -> Any:
    """Returns outputs, gradients of parameters and inputs, and buffers."""
    out = instance(*args, **kwargs)
    leaves = [*instance.parameters(), *floats((args, kwargs))]
    roots = floats(out)
    grads = []
    if roots and leaves:
        torch.autograd.backward(roots, [direction(t) for t in roots])
        grads = [t.grad for t in leaves]
    return out, grads, dict(instance.named_buffers())


def double_backward(instance: torch.nn.Module, device: str, args: Any, kwargs: Any) -> Any:
    """Returns gradients of gradients."""
    leaves = [*instance.parameters(), *floats((args, kwargs))]
    roots = floats(instance(*args, **kwargs))
    if not roots or not leaves:
        return []
    weights = [direction(t) for t in roots]
    first = torch.autograd.grad(roots, leaves, weights, create_graph=True, allow_unused=True)
    again = floats(first)
    if not again:
        return first
    return first, torch.autograd.grad(again, leaves, [direction(t) for t in again], allow_unused=True)


def noncontiguous(instance: torch.nn.Module, device: str, args: Any, kwargs: Any) -> Any:
    """Returns the results for non-contiguous inputs and output gradients."""
    from torch.testing._internal.common_utils import noncontiguous_like

    def gaps(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.numel() < 2:
            return t
        return noncontiguous_like(t.detach()).requires_grad_(t.requires_grad)

    args, kwargs = tree_map(gaps, (args, kwargs))
    out = instance(*args, **kwargs)
    roots = floats(out)
    leaves = [*instance.parameters(), *floats((args, kwargs))]
    if not roots or not leaves:
        return out
    return out, torch.autograd.grad(roots, leaves, [gaps(direction(t)) for t in roots], allow_unused=True)


def channels_last(instance: torch.nn.Module, device: str, args: Any, kwargs: Any) -> Any:
    """Returns the results for parameters and inputs in channels-last format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def last(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.dim() not in formats:
            return t
        return t.detach().contiguous(memory_format=formats[t.dim()]).requires_grad_(t.requires_grad)

    args, kwargs = tree_map(last, (args, kwargs))
    for parameter in instance.parameters():
        parameter.data = last(parameter.data)
    return forward_backward(instance, device, args, kwargs)


def pickled(instance: torch.nn.Module, device: str, args: Any, kwargs: Any) -> Any:
    """Saves, loads and calls a module, and loads the module's state into another module."""
    file = io.BytesIO()
    torch.save(instance, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    state = io.BytesIO()
    torch.save(instance.state_dict(), state)
    state.seek(0)
    instance.load_state_dict(torch.load(state))
    torch.manual_seed(2)
    first = again(*args, **kwargs)
    torch.manual_seed(2)
    return first, instance(*args, **kwargs), instance.state_dict()


def to_and_back(instance: torch.nn.Module, device: str, args: Any, kwargs: Any) -> Any:
    """Moves a module between devices and dtypes, with and without `swap`, and copies the module deeply."""
    parameters = list(instance.parameters())
    seen = []
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            for to in ("cpu", device, torch.float64, torch.float16, torch.float32):
                instance.to(to)
                seen.append([p is q for p, q in zip(parameters, instance.parameters(), strict=True)])
                seen.append([p.dtype for p in instance.parameters()])
                seen.append(
                    all(p.device.type == torch.device(device).type for p in instance.parameters())
                    or to == "cpu"
                )
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    other = copy.deepcopy(instance)
    instance.to_empty(device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = tree_map(
            lambda t: t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t,
            (args, kwargs),
        )
        torch.manual_seed(2)
        return seen, other(*args, **kwargs), other.state_dict()


WAYS = {
    "backward": forward_backward,
    "double_backward": double_backward,
    "noncontiguous": noncontiguous,
    "channels_last": channels_last,
    "pickled": pickled,
    "to": to_and_back,
}
