"""Host tensors beside adopted ones, in PyTorch's Python code.

An adopted program has tensors on the host that it did not ask for: those that share memory with NumPy's
arrays, and those from files. PyTorch's operators are fed with them. The functions here are no operators, or
check devices before they call some.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.testing
from torch._functorch import eager_transforms, pyfunctorch
from torch.nn.utils import convert_parameters
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._device import sharing
from torch_tandem._device.replaced import replace
from torch_tandem._program import imports
from torch_tandem._report import notes

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions of `torch._VF` that refuse an input on another device than the weights."""

SPARSE = ("sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_compressed_tensor")
"""Functions of `torch` that refuse indices and values on two devices."""


def install() -> None:
    """From now on, let host tensors take part where PyTorch expects all tensors on one device."""
    for name in RECURRENT:
        # The lengths of packed sequences are integers, and stay on the host.
        replace(torch._VF, name, _on_one_device(getattr(torch._VF, name), torch.Tensor.is_floating_point))
    for name in SPARSE:
        replace(torch, name, _on_one_device(getattr(torch, name), lambda tensor: True))
    torch.nn.Parameter.__new__ = staticmethod(_new_parameter)  # type: ignore[method-assign]
    kind = torch.autograd.function.BackwardCFunction
    for name in ("apply", "apply_boxed"):
        setattr(kind, name, _with_gradients_moved(getattr(kind, name)))
    torch.autocast.__enter__ = _enter_autocast  # type: ignore[method-assign]
    torch.autocast.__exit__ = _leave_autocast  # type: ignore[method-assign]
    torch.autograd._make_grads = _make_gradients
    convert_parameters._check_param_device = _check_param_device  # type: ignore[assignment]
    eager_transforms._wrap_tensor_for_grad = _wrap_tensor_for_grad
    _core.prepare_gradients(torch._C.TensorBase.grad, _prepare_gradient)
    replace(torch, "as_tensor", _as_tensor)
    replace(torch.testing, "assert_close", _assert_close)
    replace(torch.Tensor, "type", _type)
    replace(torch.Tensor, "register_hook", _register_hook)
    replace(torch.Tensor, "set_", _set)
    imports.watch({"torch._subclasses.fake_tensor": _mix_fake_tensors})


def _mix_fake_tensors(module: ModuleType) -> None:
    """Let operators mix the fake tensors with which Dynamo and AOTAutograd compute metadata, too."""
    dispatch = module.FakeTensorMode.dispatch

    def mixed(self: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        device = _device_of_result(func, args, kwargs)
        if device is None:
            return dispatch(self, func, types, args, kwargs)

        def moved(value: Any, least: int) -> Any:
            """The value on the device of the result, if it has at least so many dimensions."""
            is_kept = not isinstance(value, torch.Tensor) or value.device.type == device.type
            if is_kept or (value.dim() < least and value.device.type == "cpu"):
                return value
            given = {"dtype": value.dtype, "device": device}
            of_strides = torch.ops.aten.empty_strided.default
            return dispatch(self, of_strides, (), (value.size(), value.stride()), given)

        # A number on the host may be beside any tensor, but not in all operators.
        for least in (1, 0):
            try:
                alike = _pytree.tree_map(functools.partial(moved, least=least), (args, kwargs))
                return dispatch(self, func, types, *alike)
            except Exception:
                continue
        # Some operators expect a tensor on the host, such as one of lengths.
        return dispatch(self, func, types, args, kwargs)

    module.FakeTensorMode.dispatch = mixed


def _device_of_result(func: Any, args: tuple, kwargs: dict | None) -> torch.device | None:
    """Return the device of what an operator returns if its arguments are on Tandem and on the host."""
    tensors = [t for t in _pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if {t.device.type for t in tensors} != {"cpu", "tandem"}:
        return None
    # An operator returns what it writes, on whatever device that is.
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments[:1])
    return next(t.device for t in tensors if written or t.device.type == "tandem")


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _on_one_device(function: Callable, moves: Callable[[torch.Tensor], bool]) -> Callable:
    """Let a function accept tensors on two devices: those on the host are moved if `moves` says so."""

    def each(value: Any, act: Callable) -> Any:
        if isinstance(value, torch.Tensor):
            return act(value)
        return type(value)([each(item, act) for item in value]) if type(value) in (tuple, list) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        devices = []
        values = [*args, *kwargs.values()]
        each(values, lambda tensor: devices.append(tensor.device))
        adopted = next((device for device in devices if device.type == "tandem"), None)
        if adopted is not None and any(device.type == "cpu" for device in devices):
            values = each(values, lambda t: t.to(adopted) if _is_on_host(t) and moves(t) else t)
            args, kwargs = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        return function(*args, **kwargs)

    return call


_original_new = torch.nn.Parameter.__new__


def _new_parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
    """`Parameter`, which adopts the elements of a tensor on the host, such as embeddings from a file.

    A model's parameters are on one device, as its code expects.
    """
    is_given = type(data) is torch.Tensor and _is_on_host(data) and not data.requires_grad
    # Children that load data make tensors on the host.
    if is_given and data.is_floating_point() and torch._C._get_default_device() == "tandem":
        data = data.to("tandem")
    return _original_new(cls, data, requires_grad)


def _with_gradients_moved(apply: Callable) -> Callable:
    """Move gradients that a `torch.autograd.Function` returns on the host to the devices of their tensors."""

    @functools.wraps(apply)
    def call(self: Any, *args: Any) -> Any:
        gradients = apply(self, *args)
        several = gradients if isinstance(gradients, tuple) else (gradients,)
        if not any(map(_is_on_host, several)):
            return gradients
        edges = iter([edge for edge in self.next_functions if edge[0] is not None])
        moved = []
        for needed, gradient in zip(self.needs_input_grad, several, strict=False):
            if needed and (edge := next(edges, None)) and _is_on_host(gradient):
                gradient = gradient.to(edge[0]._input_metadata[edge[1]].device)
            moved.append(gradient)
        return (*moved, *several[len(moved) :])

    return call


def _moved(gradient: Any, device: torch.device) -> Any:
    """A gradient, moved to a device if one of the two is the host, and the other Tandem."""
    if isinstance(gradient, torch.Tensor) and {gradient.device.type, device.type} == {"cpu", "tandem"}:
        return gradient.to(device)
    return gradient


_original_make_gradients = torch.autograd._make_grads


def _make_gradients(outputs: Any, grads: Any, is_grads_batched: bool) -> Any:
    """`torch.autograd._make_grads`, which takes gradients of outputs that are on another device."""
    pairs = zip(outputs, grads, strict=False)
    moved = [
        _moved(grad, output.device) if isinstance(output, torch.Tensor) else grad for output, grad in pairs
    ]
    return _original_make_gradients(outputs, (*moved, *grads[len(moved) :]), is_grads_batched)


_original_register_hook = torch.Tensor.register_hook


def _register_hook(self: torch.Tensor, hook: Any) -> Any:
    """`Tensor.register_hook` for hooks that may return a gradient on another device."""
    if not callable(hook):
        return _original_register_hook(self, hook)

    @functools.wraps(hook)
    def call(grad: torch.Tensor) -> Any:
        device = grad.device
        result = hook(grad)
        if grad.device != device:  # `grad.numpy()` has moved the gradient
            grad.data = grad.detach().to(device)
        return _moved(result, device)

    return _original_register_hook(self, call)


def _prepare_gradient(tensor: torch.Tensor, gradient: Any) -> bool:
    """Let `tensor.grad` be a gradient on another device: the gradient moves there, or else the tensor does.

    Both remain the objects that the program has. What other tensors or NumPy's arrays have the memory of
    cannot move, since the program may write new elements there.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(gradient, torch.Tensor):
        return False
    if {tensor.device.type, gradient.device.type} != {"cpu", "tandem"}:
        return False
    if not gradient.requires_grad and _can_move(gradient):
        _move(gradient, tensor.device)
    elif tensor.is_leaf and _can_move(tensor):
        _move(tensor, gradient.device)
        notes.add("parameters were moved to the device of the gradients that the program gives them")
    else:
        return False
    return True


def _can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor alone has its memory, which PyTorch has allocated."""
    return (
        tensor.layout == torch.strided
        and not tensor._is_view()
        and (tensor.device.type == "tandem" or tensor.untyped_storage().resizable())
        and not sharing.has_aliases(tensor)
    )


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        sharing.move_to_host(tensor)
    else:
        tensor.data = tensor.detach().to(device)


def _check_param_device(param: torch.Tensor, old_param_device: int | None) -> int:
    """Accept parameters on the host beside those on Tandem: `torch.cat` does, too."""
    return 0


_original_wrap = eager_transforms._wrap_tensor_for_grad


def _wrap_tensor_for_grad(maybe_tensor: Any, level: int) -> Any:
    """Move what `torch.func.grad`, `vjp` and `jacrev` differentiate, whose gradients would be on Tandem."""
    if _is_on_host(maybe_tensor) and (maybe_tensor.is_floating_point() or maybe_tensor.is_complex()):
        # The move itself is not differentiated.
        with pyfunctorch.temporarily_pop_interpreter_stack():
            maybe_tensor = maybe_tensor.to("tandem")
    return _original_wrap(maybe_tensor, level)


_original_enter, _original_exit = torch.autocast.__enter__, torch.autocast.__exit__


def _enter_autocast(self: torch.autocast) -> Any:
    """`torch.autocast("cpu")`, which casts in operators on adopted tensors, too."""
    if self.device == "cpu" and not torch.jit.is_scripting():
        adopted = torch.autocast("tandem", self.fast_dtype, self._enabled, self._cache_enabled)
        _original_enter(adopted)
        self._adopted = adopted  # type: ignore[attr-defined]
    return _original_enter(self)


def _leave_autocast(self: torch.autocast, *error: Any) -> Any:
    result = _original_exit(self, *error)
    if (adopted := self.__dict__.pop("_adopted", None)) is not None:
        _original_exit(adopted, *error)
    return result


_original_as_tensor = torch.as_tensor


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """`torch.as_tensor`, whose result shares the memory of an array, as that of `torch.from_numpy`."""
    if device is None and type(data).__module__ == "numpy" and type(data).__name__ == "ndarray":
        tensor = torch.from_numpy(data) if data.flags.writeable else None
        if tensor is not None and dtype in (None, tensor.dtype):
            return tensor
    return _original_as_tensor(data, dtype=dtype, device=device)


_original_type = torch.Tensor.type


def _type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`, which gives adopted tensors the types of those on the host (`torch.FloatTensor`)."""
    if self.device.type != "tandem":
        return _original_type(self, dtype, *args, **kwargs)
    if dtype is None:
        return _original_type(self).replace("torch.tandem.", "torch.")
    kind = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if type(kind) is type(torch.FloatTensor) and not kind.is_cuda:
        return self.to(kind.dtype)
    return _original_type(self, dtype, *args, **kwargs)


_original_set = torch.Tensor.set_


def _set(self: torch.Tensor, source: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.set_`, which first moves the tensor to the device of the memory that it is given."""
    device = getattr(source, "device", self.device)
    if {self.device.type, device.type} == {"cpu", "tandem"}:
        # The tensor gives up its elements.
        self.data = torch.empty(0, dtype=self.dtype, device=device)
    return _original_set(self, *([] if source is None else [source]), *args, **kwargs)


_original_assert_close = torch.testing.assert_close


def _assert_close(actual: Any, expected: Any, **options: Any) -> None:
    def on_host(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) and value.device.type == "tandem" else value

    actual, expected = _pytree.tree_map(on_host, (actual, expected))
    _original_assert_close(actual, expected, **options)
