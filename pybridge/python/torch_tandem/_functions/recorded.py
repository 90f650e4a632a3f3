"""The data of functions: recorded calls, the graphs that replay them, and the attempts to make one."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree

from torch_tandem._functions.call_backward import Call, Hole, Passes
from torch_tandem._functions.concrete import Spec
from torch_tandem._functions.state import Path, State
from torch_tandem._functions.varying import Followed

# Number of recorded calls, none of which reads a value or equals two others, after which a function rests.
PATIENCE = 16


@dataclass
class Recorded:
    """A call that was recorded, with what it returned."""

    id: int
    state: State
    spec: Any
    constants: list
    # The values that the call itself has changed, with their labels.
    written: dict[Path, str]
    inputs: list[Spec]
    outputs: list[Spec]
    # Its backward passes and how to make the call again, if a result requires grad.
    passes: Passes | None = None
    call: Call | None = None
    # Its numbers, if some of them vary.
    followed: Followed | None = None
    equal: int = 1


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
    # Replays until the next audit, or -1 for no more; and their number between the last two audits.
    left: int
    period: int
    # Replays since the last audit that passed, and all.
    suspect: int = 0
    replayed: int = 0
    # For the recordings of other graphs that do the same up to a value: the number of this value.
    partings: dict[int, int] = field(default_factory=dict)
    # The backward passes that are replayed, if a result requires grad.
    backwards: list[int] = field(default_factory=list)
    # The audited call whose backward pass has not been compared.
    audited: int | None = None
    # Whether the call changes tensors that existed before, or draws random numbers.
    changes: bool = True


@dataclass
class Attempts:
    """The calls of one key so far."""

    recorded: list[Recorded] = field(default_factory=list)
    # Calls that were compared since the last rest, and calls that could not be recorded.
    tries: int = 0
    new: int = 0
    # Calls that are not recorded before the next attempt, and those of the next rest.
    rest: int = 0
    next_rest: int = PATIENCE
    reason: str = "it has not been called three times"
    # Graphs whose state was not found again at once.
    vain: int = 0


def builder(recorded: Recorded) -> Callable[[list], Any]:
    """A function that makes the result of a call from its tensors."""
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
