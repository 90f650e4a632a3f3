"""The data of functions: recorded calls, the graphs that replay them, and the attempts to make a graph."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

from torch_tandem import _core
from torch_tandem._functions.call_backward import Call, Hole, Passes
from torch_tandem._functions.concrete import Spec
from torch_tandem._functions.state import Path, State
from torch_tandem._functions.varying import Followed

# Number of recorded calls of a key before a rest, if none of them reads a value and no three are equal.
PATIENCE = 16


@dataclass
class Recorded:
    """A call that was recorded, with what it returned."""

    id: int
    state: State
    spec: Any
    constants: list
    # Values of the state that the call itself has changed, with their labels.
    written: dict[Path, str]
    inputs: list[Spec]
    outputs: list[Spec]
    # Whether the code that was known when the call began may depend on which tensors have gradients.
    may_read_gradients: bool
    # The call's backward passes, and its arguments for making it again; None if no result requires grad.
    passes: Passes | None = None
    call: Call | None = None
    # The call's numbers that vary and are followed, if there are any.
    followed: Followed | None = None
    equal: int = 1

    def is_comparable(self, other: "Recorded") -> bool:
        """Whether an audit can compare the calls. They have the same settings, the code that was known when
        they began reaches the same tensors, and both end an iteration or neither does: the outermost call
        of a module ends one.
        """
        return (
            bool(self.followed) == bool(other.followed)
            and self.may_read_gradients == other.may_read_gradients
            and torch.ops.torch_tandem.reach_the_same(self.id, other.id)
            and _core.ends_of(self.id) == _core.ends_of(other.id)
        )


@dataclass
class Graph:
    """A recorded call that is replayed."""

    recorded: Recorded
    key: Hashable
    check: Callable[[list], int]
    result: Callable[[list], Any]
    # Whether iterations end within the call.
    steps: bool
    # Number of values that the call reads.
    reads: int
    # Number of replays until the next audit, or -1 if there will be none; and the number between the last two
    # audits.
    left: int
    period: int
    # Number of replays since the last audit that passed, and of all replays.
    suspect: int = 0
    replayed: int = 0
    # Graphs that issue the same operators up to a value which they read differently: the number of this
    # value, by the id of the other recording.
    partings: dict[int, int] = field(default_factory=dict)
    # The backward passes that are replayed; empty if no result requires grad.
    backwards: list[int] = field(default_factory=list)
    # Whether the latest audited call has run code that no call before had run, so that it was not compared.
    is_in_doubt: bool = False
    # The latest audited call, if its backward pass has not been compared.
    audited: int | None = None
    # Whether the call changes tensors that existed before, or draws random numbers.
    changes: bool = True


@dataclass
class Attempts:
    """The calls of one key so far."""

    recorded: list[Recorded] = field(default_factory=list)
    # Number of calls that were compared, and of calls that could not be recorded, since the last rest or
    # graph.
    tries: int = 0
    new: int = 0
    # Number of consecutive calls that raised an error while they were recorded or audited.
    errors: int = 0
    # Number of calls left in the current rest, in which none is recorded, and the length of the next rest.
    rest: int = 0
    next_rest: int = PATIENCE
    reason: str = "it has not been called three times"
    # Whether the latest recorded call was refused for a reason that no later call may lack.
    is_refused: bool = False
    # Number of graphs whose state had already changed when they were made.
    vain: int = 0


def builder(recorded: Recorded) -> Callable[[list], Any]:
    """Return a function that makes the result of a replayed call from its tensors."""
    spec, constants = recorded.spec, recorded.constants
    if len(constants) == 1 and spec.is_leaf():
        if type(constants[0]) is Hole:
            return lambda results: results[0]
        return lambda results, constant=constants[0]: constant
    in_order = [Hole(i) for i in range(len(constants))]
    if spec.type is tuple and constants == in_order and all(c.is_leaf() for c in spec.children()):
        return tuple

    def build(results: list) -> Any:
        leaves = [results[leaf.number] if type(leaf) is Hole else leaf for leaf in constants]
        return _pytree.tree_unflatten(leaves, spec)

    return build
