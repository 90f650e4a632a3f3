"""Backward passes on tandem tensors. PyTorch's engine still runs the passes that Tandem cannot run."""

import re
import sys
from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.variable import Variable

from torch_tandem._device.untraced import untraced
from torch_tandem._program.tracebacks import hide_frames


class Engine:
    """A wrapper of PyTorch's autograd engine that runs backward passes with `torch_tandem::backward`."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run_backward(
        self,
        tensors,
        grad_tensors,
        keep_graph,
        create_graph,
        inputs=(),
        allow_unreachable=False,
        accumulate_grad=False,
    ):
        """Run a backward pass. The interface is `run_backward` of PyTorch's engine."""
        try:
            for look in observers_of_inputs if inputs else ():
                look(inputs)
            # PyTorch's engine runs some rare kinds of passes: those that accumulate into some inputs only,
            # those that accumulate with `create_graph`, and those that Dynamo compiles.
            ours = bool(inputs) != accumulate_grad and not (create_graph and accumulate_grad)
            if ours and _plain(tensors) and _plain(inputs) and not _watched() and not _is_compiled():
                overrides = _overrides()
                with torch._C.DisableTorchFunction():
                    done, found = _backward(
                        tensors, grad_tensors, inputs, keep_graph, create_graph, overrides
                    )
                if done:
                    if not allow_unreachable:
                        _refuse_unused(found)
                    return tuple(found)
            return self._engine.run_backward(
                tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )
        except BaseException as error:
            _name_types(error)
            hide_frames(error)
            raise


# Module of the tensor types that errors name, `torch` or `torch.cuda`, if the program does not say "tandem".
module_of_types = ""
# Functions that see the tensors whose gradients a pass asks for.
observers_of_inputs: list[Callable[[Sequence], None]] = []

_backward = torch.ops.torch_tandem.backward.default
_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def _plain(tensors) -> bool:
    """Whether no tensor is on the host, or of a subclass other than `Parameter`."""
    for t in tensors:  # noqa: SIM110 (a generator expression takes twice the time)
        if type(t) not in _TYPES or t.is_cpu:
            return False
    return True


def _refuse_unused(found) -> None:
    # `None in found` would call `Tensor.__eq__`, which raises internally and takes microseconds per tensor.
    for i, grad in enumerate(found):
        if grad is None:
            raise RuntimeError(
                f"The differentiated Tensor at index {i} appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )


def _name_types(error: BaseException) -> None:
    """Let an error about a tensor that was modified name the type that it has on the program's device."""
    if not error.args or not isinstance(error.args[0], str) or "[tandem" not in error.args[0]:
        return
    if module_of_types:
        named = re.sub(r"\[tandem(\w+)Type", rf"[{module_of_types}.\1Tensor", error.args[0])
        error.args = (named, *error.args[1:])


def _watched() -> bool:
    """Whether a `TorchDispatchMode` or a transform of torch.func is active."""
    return torch._C._len_torch_dispatch_stack() > 0 or peek_interpreter_stack() is not None


def _is_compiled() -> bool:
    """Whether Dynamo compiles backward passes (`torch._dynamo.config.compiled_autograd`)."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.compiled_autograd_enabled


def _overrides() -> int:
    """The state of `__torch_function__`: 0 enabled, 1 disabled for subclasses, 2 disabled for modes too."""
    if torch._C._is_torch_function_enabled():
        return 0
    return 2 if torch._C._is_torch_function_all_disabled() else 1


def install() -> None:
    """Replace autograd's engine with `Engine`."""
    untraced(Engine.run_backward, _plain, _watched, _is_compiled, _overrides, _refuse_unused)
    Variable._execution_engine = Engine(Variable._execution_engine)
