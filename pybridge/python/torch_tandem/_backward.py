"""Backward passes over Tandem's tensors: PyTorch's engine is asked only for what ours leaves to it."""

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.variable import Variable


class Engine:
    """Stands where autograd finds its engine."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run_backward(
        self,
        tensors,
        grads,
        keep_graph,
        create_graph,
        inputs=(),
        allow_unreachable=False,
        accumulate_grad=False,
    ):
        """As PyTorch's."""
        # What accumulates gradients does so for all leaves, or is rare.
        ours = bool(inputs) != accumulate_grad and not (create_graph and accumulate_grad)
        if ours and _plain(tensors) and _plain(inputs) and not _watched():
            overrides = _overrides()
            with torch._C.DisableTorchFunction():
                done, found = torch.ops.torch_tandem.backward.default(
                    tensors, grads, inputs, keep_graph, create_graph, overrides
                )
            if done:
                if None in found and not allow_unreachable:
                    raise RuntimeError(
                        f"The differentiated Tensor at index {found.index(None)} appears to not have been "
                        "used in the graph. Set allow_unused=True if this is the desired behavior."
                    )
                return tuple(found)
        return self._engine.run_backward(
            tensors, grads, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
        )


def _plain(tensors) -> bool:
    """Whether these are tensors of ours without classes of their own."""
    return all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "tandem" for t in tensors)


def _watched() -> bool:
    """Whether operators are seen by a mode or a transform of torch.func."""
    return torch._C._len_torch_dispatch_stack() > 0 or peek_interpreter_stack() is not None


def _overrides() -> int:
    """How much of `__torch_function__` is off: nothing, that of classes, or modes too."""
    if torch._C._is_torch_function_enabled():
        return 0
    return 2 if torch._C._is_torch_function_all_disabled() else 1


def install() -> None:
    """Have backward passes go through here."""
    Variable._execution_engine = Engine(Variable._execution_engine)
