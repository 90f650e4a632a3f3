"""The reasons for which a recorded call is not replayed, in the words that users are told."""

from typing import NamedTuple

import torch

from torch_tandem import _core
from torch_tandem._functions import call_backward
from torch_tandem._functions.arguments import TENSORS, TOO_DEEP, VALUES, Arguments
from torch_tandem._functions.call_backward import Hole
from torch_tandem._functions.callers import is_compiled
from torch_tandem._functions.observe import World, is_observable
from torch_tandem._functions.recorded import Recorded
from torch_tandem._functions.state import Path, State
from torch_tandem._functions.varying import DIFFERS, Varying

IF_A_NUMBER = (
    "If it is a number, keep it in a tensor on the device (a learning rate: lr=torch.tensor(...), fused=True)"
)

_ops = torch.ops.torch_tandem


class Refusal(NamedTuple):
    """A reason against a replay. `may_pass` says whether a later call may lack it."""

    text: str
    may_pass: bool = False


def before(arguments: Arguments, is_proven: bool) -> str:
    """The reason for which a call is not even recorded; empty if there is none."""
    if arguments.key is TOO_DEEP:
        return "its arguments are nested too deeply"
    for tensor in arguments.tensors:
        if type(tensor) not in TENSORS and not is_proven:
            return f"an argument is a {type(tensor).__name__}"
        if tensor.layout != torch.strided:
            return f"an argument is a {type(tensor).__name__} of layout {tensor.layout}"
        if is_proven:
            continue
        if _core.attributes_of(tensor):
            return "a tensor among the arguments has attributes of its own"
    if is_proven:
        return ""
    if not is_observable():
        return "a profiler is active, so what it runs cannot be observed"
    return "it is called by code that torch.compile has compiled" if is_compiled() else ""


def of_recording(recorded: Recorded, unknown: Refusal | None) -> Refusal | None:
    """A reason in the operators of a call, or in what autograd has recorded of them.

    `unknown` is the reason in the call's code, which says more than that the results keep autograd's graph.
    """
    if found := _core.refusal(recorded.id):
        return Refusal(*found)
    if text := _ops.refusal(recorded.id):
        return unknown if unknown and text.startswith(call_backward.NOT_ATTACHED) else Refusal(text)
    return None


def of_result(recorded: Recorded) -> Refusal | None:
    """A reason in what a call returns."""
    for constant in recorded.constants:
        if type(constant) not in VALUES and type(constant) is not Hole:
            kind = type(constant).__name__
            return Refusal(f"it returns a {kind}; return tensors, numbers and strings only")
    return None


def of_numbers(recorded: Recorded, varying: Varying, world: World) -> Refusal | None:
    """A reason in the numbers of a call that vary."""
    if not recorded.followed:
        return Refusal(f"{DIFFERS}, and it was not followed yet", may_pass=True)
    reads, passes = _core.fetches_of(recorded.id), recorded.passes is not None
    if text := recorded.followed.refusal(recorded.id, reads, passes, world.reader):
        varying.give_up(text)
        return Refusal(f"{DIFFERS}, and {text}. {IF_A_NUMBER}", may_pass=True)
    return None


def unknown(
    world: World,
    state: State,
    after: State,
    written: dict[Path, str],
    changes_arguments: bool,
    skips_effects: bool,
) -> Refusal | None:
    """An effect or a dependence of a recorded call that is unknown or would be skipped, if there is one.

    `state` and `after` are the states before and after the call, and `written` what the call has changed.
    """
    for text in world.refusals:
        return Refusal(text)
    if world.unseen:
        return Refusal(world.unseen)
    if state.version != world.version or after.version != world.version:
        return Refusal("it has run code that no call before had run", may_pass=True)
    if text := state.refusal or after.refusal:
        return Refusal(text)
    if skips_effects:
        return None
    for text in world.effects:
        return Refusal(f"{text}. If that is right: function(..., effects='skip')")
    if changes_arguments:
        return Refusal(
            "the call itself changes a container among its arguments, which a replay would not do. "
            "Return what it adds; if it may stay as it is: function(..., effects='skip')"
        )
    for path, label in written.items():
        return Refusal(
            f"the call itself changes {label}{_line_of(path, world)}, which a replay would not do. Keep it "
            "in a tensor on the device, or change it outside of the function; if it may stay as it is: "
            "function(..., effects='skip')"
        )
    return None


def _line_of(path: Path, world: World) -> str:
    """The program's line that sets the value at the end of a path, in parentheses; empty if not found."""
    kind, last = path[-1][0], path[-1][-1]
    is_name = kind in ("k", "a", "value") and isinstance(last, str) and last != "cell_contents"
    name = last if is_name else None
    places = [*world.lines_of_store(name), *(world.lines_of_store(None) if name else ())]
    return f" ({places[0]})" if places else ""
