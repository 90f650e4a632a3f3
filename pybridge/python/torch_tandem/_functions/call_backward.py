"""Backward passes of a function's calls whose results require grad: docs/design/functions.md."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions.arguments import TENSORS, VALUES
from torch_tandem._functions.observe import World

# Number of consecutive equal backward passes before the first one that is replayed.
EQUAL = 3
# Number of kinds of passes that the next pass is compared with.
REMEMBERED = 16
# Number of latest passes to look at before a pass is replayed: each of their kinds must have been equal
# `EQUAL` times.
LATEST = 32
# Maximum number of recorded calls whose backward passes have not run.
WAITING = 16

# What the shim notes in place of a recorded pass: reasons for which no pass of the call is replayed.
IMPOSSIBLE = {
    -1: "its backward pass creates a graph of its own (create_graph=True)",
    -2: "the gradient of one of its results is asked for (a hook, retain_grad(), autograd.grad)",
}

# The first words of the shim's message that a result keeps the graph which autograd has recorded.
NOT_ATTACHED = "a result requires grad, and"

_ops = torch.ops.torch_tandem
_HOOKS = torch.autograd.graph.saved_tensors_hooks.__init__.__code__


class Hole(NamedTuple):
    """Placeholder for a tensor among the leaves of a structure: the number of the tensor."""

    number: int

    def __repr__(self) -> str:
        return "a tensor"


@dataclass
class _Pass:
    id: int
    # Number of passes before this one.
    at: int
    equal: int = 1


@dataclass
class Passes:
    """The recorded backward passes of equal calls."""

    reason: str = "the backward pass of its calls has not run three times"
    # Whether there was a pass of a kind that is never replayed.
    impossible: bool = False
    recorded: list[_Pass] = field(default_factory=list)
    # Recorded calls whose backward passes may still run, oldest first, and the number of passes so far.
    waiting: list[int] = field(default_factory=list)
    count: int = 0

    def take(self, recording: int, forget: Callable[[int], None]) -> None:
        """Compare the passes that have run since the last call of this method with earlier ones.

        `recording` is the latest recorded call. `forget` drops recorded calls whose passes need not be waited
        for.
        """
        if recording not in self.waiting:
            self.waiting.append(recording)
        for call in list(self.waiting):
            passes = _ops.take_backwards(call)
            for id in passes:
                self._take(id)
            if call != recording and (passes or len(self.waiting) > WAITING):
                self.waiting.remove(call)
                forget(call)

    def _take(self, id: int) -> None:
        if id in IMPOSSIBLE:
            self.impossible = True
            self.reason = IMPOSSIBLE[id]
            return
        if why := refusal(id):
            self.reason = f"in its backward pass, {why}"
            drop(id)
            return
        new = _Pass(id, self.count)
        self.count += 1
        for known in reversed(self.recorded):
            text = difference(known.id, id)
            if text is None:
                new.equal = known.equal + 1
                self.recorded.remove(known)
                drop(known.id)
                break
            self.reason = f"in its backward pass, {text}"
        self.recorded.append(new)
        if len(self.recorded) > REMEMBERED:
            drop(self.recorded.pop(0).id)

    def proven(self) -> list[int]:
        """The passes to replay: one of each kind among the latest ones, or none before all kinds repeat."""
        latest = [p for p in self.recorded if p.at >= self.count - LATEST]
        return [p.id for p in latest] if all(p.equal >= EQUAL for p in latest) else []

    def forget(self, forget: Callable[[int], None]) -> None:
        for known in self.recorded:
            drop(known.id)
        for call in self.waiting:
            forget(call)
        self.recorded.clear()
        self.waiting.clear()


def drop(recording: int) -> None:
    _core.drop_recording(recording)
    _ops.drop_recording(recording)


def refusal(id: int) -> str:
    """The reason for which a recorded pass cannot be replayed; empty if there is none."""
    if found := _core.refusal(id):
        return found[0]
    if _core.fetches_of(id) or _core.ends_of(id):
        return "a value is read"
    return _ops.refusal(id)


def difference(one: int, two: int) -> str | None:
    return _core.unequal(one, two) or _ops.unequal(one, two) or None


def is_other_kind(one: int, two: int) -> bool:
    """Whether two passes have other gradients or other settings of PyTorch, which lead to other operators."""
    return bool(_ops.differs_in_inputs(one, two))


def may_attach(arguments: list[torch.Tensor], results: list[Any], world: World) -> bool:
    """Whether results of a replayed call may be tensors of an autograd node of the call."""
    plain = all(not _core.attributes_of(t) if type(t) in TENSORS else type(t) in VALUES for t in results)
    return plain and not any(map(_core.attributes_of, arguments)) and not world.has(_HOOKS)


class Call:
    """The arguments and autocast state of a call, for making the call again on other tensors."""

    def __init__(self, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> None:
        numbers = {id(tensor): Hole(i) for i, tensor in reversed(list(enumerate(tensors)))}
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self._leaves = [numbers.get(id(leaf), leaf) for leaf in leaves]
        # Whether all tensors can be replaced. Those in objects of the program cannot.
        self.is_complete = {id(tensor) for tensor in tensors} <= set(map(id, leaves))
        self._autocast = torch.get_autocast_dtype("tandem"), torch.is_autocast_enabled("tandem")

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[tuple, dict]:
        """Return the arguments of the call, with `tensors` in place of its tensors."""
        leaves = [tensors[leaf.number] if type(leaf) is Hole else leaf for leaf in self._leaves]
        return _pytree.tree_unflatten(leaves, self._spec)

    def again(self, function: Callable, tensors: list[torch.Tensor]) -> Any:
        args, kwargs = self.arguments(tensors)
        dtype, enabled = self._autocast
        with torch.enable_grad(), torch.autocast("tandem", dtype=dtype, enabled=enabled):
            return function(*args, **kwargs)
