"""The comparison of recorded calls: three equal calls become a graph, which replays the next one."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tandem import _core
from torch_tandem._functions.arguments import Arguments
from torch_tandem._functions.call_backward import EQUAL
from torch_tandem._functions.recorded import PATIENCE, Attempts, Graph, Recorded, builder
from torch_tandem._functions.recorder import Recorder
from torch_tandem._functions.recordings import LONGEST_REST, Recordings
from torch_tandem._functions.refusals import IF_A_NUMBER, Refusal
from torch_tandem._functions.state import Path
from torch_tandem._functions.varying import DIFFERS, Links

# Maximum number of recordings of which no three are equal, for calls that read values and may take many
# paths.
PATHS = 64
# Number of recorded calls of one key that the next one is compared with, if they read no values.
REMEMBERED = 4
# Number of calls that could not be recorded before a rest, if the reason may pass.
WARM_UP = 64
# Number of calls that could not be recorded before a rest, if the reason is a lasting one. It is more than
# one because the first call may create an optimizer's state.
FIRST_CALLS = 2

_ops = torch.ops.torch_tandem


class Learning:
    """Compares the recorded calls of a function, and makes graphs of them.

    `period` is the number of calls of a new graph of which one is audited.
    """

    def __init__(self, recorder: Recorder, recordings: Recordings, period: int) -> None:
        self._recorder, self._recordings = recorder, recordings
        self._period = sys.maxsize if recorder.is_proven else period

    def learn(
        self, arguments: Arguments, attempts: Attempts, recorded: Recorded, refusal: Refusal | None
    ) -> None:
        """Compare a recorded call with earlier ones of its key."""
        recordings = self._recordings
        recordings.keep_last(recorded)
        attempts.is_refused = False
        if refusal:
            attempts.reason, attempts.is_refused = refusal.text, not refusal.may_pass
            recordings.forget(recorded)
            attempts.new += 1
            if attempts.new > (WARM_UP if refusal.may_pass else FIRST_CALLS):
                self.rest(attempts)
            return
        if recorded.followed and self._widens_a_graph(arguments, recorded):
            return
        if not recorded.followed and self._differs_from_a_graph_in_numbers(arguments, recorded):
            recordings.forget(recorded)
            return
        attempts.tries += 1
        for known in reversed(attempts.recorded):
            difference = self.difference(known, recorded)
            if difference is None:
                self._take_place(attempts, known, recorded)
                break
            if self._has_new_numbers(known, recorded):
                recordings.forget_attempts(attempts)
                recordings.forget(recorded)
                return
            attempts.reason = difference
        attempts.recorded.append(recorded)
        if recorded.equal >= EQUAL:
            if recorded.passes:
                attempts.reason = recorded.passes.reason
            else:
                self._add_graph(arguments, attempts, recorded)
        reads = _core.fetches_of(recorded.id)
        if len(attempts.recorded) > (PATHS if reads else REMEMBERED):
            recordings.forget(attempts.recorded.pop(0))
        if attempts.tries >= (PATHS if reads else PATIENCE):
            self.rest(attempts)

    def take_passes(self, arguments: Arguments, attempts: Attempts) -> bool:
        """Compare the backward passes that have run since the last call.

        Returns whether this call can now be replayed.
        """
        for recorded in list(attempts.recorded):
            if not recorded.passes:
                continue
            recorded.passes.take(recorded.id, self._recordings.drop)
            if recorded.passes.impossible or recorded.equal >= EQUAL:
                attempts.reason = recorded.passes.reason
            if recorded.passes.impossible:
                self.rest(attempts)
                attempts.rest = sys.maxsize
                return False
            if recorded.equal >= EQUAL and (backwards := recorded.passes.proven()):
                self._add_graph(arguments, attempts, recorded, backwards)
                return self._recordings.graph_of(recorded.id) is not None
        return False

    def rest(self, attempts: Attempts) -> None:
        """Record none of the next calls of a key."""
        varying = self._recorder.varying
        if varying and not any(graph.recorded.followed for graph in self._recordings.all_graphs()):
            varying.give_up(attempts.reason)
        self._recordings.forget_attempts(attempts)
        attempts.tries = attempts.new = 0
        attempts.rest = attempts.next_rest
        attempts.next_rest = min(2 * attempts.next_rest, LONGEST_REST)

    def count_error(self, attempts: Attempts, error: Exception) -> None:
        """Count an error of a call that was to be recorded: if calls keep raising, a rest begins."""
        attempts.errors += 1
        if attempts.errors > FIRST_CALLS:
            self.rest(attempts)
            attempts.reason = f"it raises {type(error).__name__}"

    def difference(self, one: Recorded, two: Recorded, compares_state: bool = True) -> str | None:
        """The difference between two recorded calls, in words, or None if they are equal.

        The later one of equal calls gets the links of the numbers that vary.
        """
        free: list[int] = []
        followed = frozenset[Path]()
        links: Links | None = None
        if one.followed and two.followed:
            match one.followed.match(two.followed):
                case str(text):
                    return f"{text}. {IF_A_NUMBER}"
                case Links() as links:
                    free, followed = list(links.moved), two.followed.paths
        elif one.followed or two.followed:
            return DIFFERS
        if text := _core.unequal(one.id, two.id, free) or _ops.unequal(one.id, two.id):
            return text
        if one.spec != two.spec or [*map(_typed, one.constants)] != [*map(_typed, two.constants)]:
            return "it returns another value that is not a tensor; return a tensor instead"
        changed = self._changed(one, two) if compares_state else {}
        if labels := [label for path, label in changed.items() if path not in followed]:
            return f"{min(labels, key=len)} has changed between the calls. {IF_A_NUMBER}"
        if links and two.followed:
            two.followed.links = links
        return None

    def _changed(self, one: Recorded, two: Recorded) -> dict[Path, str]:
        """The values of the state that differ between two calls, without effects that are skipped."""
        written = one.written.keys() | two.written.keys() if self._recorder.skips_effects else set()
        changed = one.state.differences(two.state)
        return {path: label for path, label in changed.items() if path not in written}

    def _has_new_numbers(self, known: Recorded, recorded: Recorded) -> bool:
        """Whether calls differ in numbers of the state that were not known to vary, and in nothing else."""
        changed = self._changed(known, recorded)
        return self._recorder.varying.add_state(known.state, recorded.state, changed)

    def _differs_from_a_graph_in_numbers(self, arguments: Arguments, recorded: Recorded) -> bool:
        """Whether the state of a call differs from that of the latest graph in numbers alone.

        A learning rate that changes after each epoch does: the calls of an epoch are equal, and become a
        graph.
        """
        graphs = self._recordings.graphs.get(arguments.key, ())
        latest = next((graph for graph in graphs if not graph.recorded.followed), None)
        return latest is not None and self._has_new_numbers(latest.recorded, recorded)

    def _take_place(self, attempts: Attempts, known: Recorded, recorded: Recorded) -> None:
        """Let a recorded call take the place of an equal one."""
        recorded.equal = known.equal + 1
        recorded.written |= known.written
        attempts.recorded.remove(known)
        if known.passes:
            # The backward pass of the earlier call may still run.
            recorded.passes = known.passes
            recorded.passes.take(known.id, self._recordings.drop)
        else:
            self._recordings.forget(known)

    def _widens_a_graph(self, arguments: Arguments, recorded: Recorded) -> bool:
        """Let a graph be replayed with other numbers, if this call differs from the graph in numbers alone.

        Two equal calls with other numbers show at which places the numbers are fed. Returns whether there was
        a graph.
        """
        for graph in self._recordings.graphs.get(arguments.key, ()):
            if graph.recorded.followed and self.difference(graph.recorded, recorded) is None:
                graph.recorded.followed.links = recorded.followed.links
                self._recordings.forget(recorded)
                return True
        return False

    def _add_graph(
        self, arguments: Arguments, attempts: Attempts, recorded: Recorded, backwards: Sequence[int] = ()
    ) -> None:
        attempts.recorded.remove(recorded)
        attempts.tries = attempts.new = 0
        attempts.next_rest = PATIENCE
        if not all(map(_core.make_template, (recorded.id, *backwards))):
            self._recordings.forget(recorded)
            return
        if recorded.passes:
            # From now on the recorded call's replays hold these passes.
            recorded.passes.recorded = [p for p in recorded.passes.recorded if p.id not in backwards]
            recorded.passes.waiting.remove(recorded.id)
            for backward in backwards:
                _ops.add_backward(recorded.id, backward)
        check = self._check_of(recorded)
        if not backwards and (changed := check(arguments.objects)) >= 0:
            # The state was listed just now. A check that already fails would fail before every call.
            attempts.vain += 1
            if attempts.vain >= EQUAL:
                attempts.reason = f"{recorded.state.label(changed)} cannot be compared"
                self._recordings.forget(recorded)
                self.rest(attempts)
                return
        id, period = recorded.id, self._period
        ends, reads = _core.ends_of(id), _core.fetches_of(id)
        graph = Graph(recorded, arguments.key, check, builder(recorded), ends, reads, period - 1, period)
        graph.backwards, graph.changes = list(backwards), _core.changes(id)
        self._recordings.add(graph)

    def _check_of(self, recorded: Recorded) -> Callable[[list], int]:
        """The check before a replay. It returns the number of a value that has changed, or -1."""
        if self._recorder.is_proven:
            return lambda objects: -1
        without = set(recorded.written) | (recorded.followed.paths if recorded.followed else set())
        return recorded.state.check(without)


def _typed(value: Any) -> tuple:
    return type(value), value
