"""Backward passes over Tandem's tensors: PyTorch's engine is asked only for what ours leaves to it."""

import contextlib
import threading

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.variable import Variable


class Engine:
    """Stands where autograd finds its engine."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self._running = threading.local()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def queue_callback(self, callback) -> None:
        """Have something called when the running pass ends: functions ask for that in their `backward`."""
        callbacks = getattr(self._running, "callbacks", None)
        if callbacks is None:
            self._engine.queue_callback(callback)
        else:
            callbacks.append(callback)

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
        if ours and not _saved_hooks.active and _plain(tensors) and _plain(inputs) and not _watched():
            done, found = self._run(tensors, grads, inputs, keep_graph, create_graph)
            if done:
                if None in found and not allow_unreachable:
                    raise RuntimeError(
                        f"The differentiated Tensor at index {found.index(None)} appears to not have been "
                        "used in the graph. Set allow_unused=True if this is the desired behavior."
                    )
                return tuple(found)
        with self._queueing(None):
            return self._engine.run_backward(
                tensors, grads, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            )

    def _run(self, *args):
        with self._queueing([]) as callbacks:
            with torch._C.DisableTorchFunction():
                done, found = torch.ops.torch_tandem.backward.default(*args, _saved_hooks.before)
            for callback in callbacks:  # which may add more
                callback()
        return done, found

    @contextlib.contextmanager
    def _queueing(self, callbacks):
        """Callbacks of this thread go to a list, or to PyTorch's engine: passes may be inside one another."""
        outer = getattr(self._running, "callbacks", None)
        self._running.callbacks = callbacks
        try:
            yield callbacks
        finally:
            self._running.callbacks = outer


def _plain(tensors) -> bool:
    """Whether these are tensors of ours without classes of their own."""
    return all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "tandem" for t in tensors)


def _watched() -> bool:
    """Whether operators are seen by a mode or a transform of torch.func."""
    return torch._C._len_torch_dispatch_stack() > 0 or peek_interpreter_stack() is not None


class _SavedHooks:
    """Which nodes' saved tensors may have hooks. Checkpoints' ask PyTorch's engine which pass runs."""

    def __init__(self) -> None:
        self.active = 0
        self.before = 0
        """No node from this sequence number on has them, once none are active."""

    def install(self) -> None:
        """Follow how hooks come and go."""
        autograd = torch._C._autograd
        push, pop = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks

        def noted_push(*args):
            self.active += 1
            return push(*args)

        def noted_pop(*args):
            self.active -= 1
            self.before = max(self.before, autograd._get_sequence_nr())
            return pop(*args)

        autograd._push_saved_tensors_default_hooks = noted_push
        autograd._pop_saved_tensors_default_hooks = noted_pop


_saved_hooks = _SavedHooks()


def install() -> None:
    """Have backward passes go through here."""
    Variable._execution_engine = Engine(Variable._execution_engine)
    _saved_hooks.install()
