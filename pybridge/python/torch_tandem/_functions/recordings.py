"""The recordings that a function keeps: the calls that are compared, and the graphs that replay calls."""

import weakref
from collections.abc import Hashable, Iterable, Iterator

import torch

from torch_tandem import _core
from torch_tandem._functions import call_backward
from torch_tandem._functions.arguments import varying
from torch_tandem._functions.callers import Warner
from torch_tandem._functions.recorded import Attempts, Graph, Recorded

# Maximum number of kinds of calls that are remembered.
MAX_KEYS = 512
# Number of consecutive calls of new kinds after which new kinds are not recorded, the number of calls in the
# first such rest, and the maximum number.
NEW_KINDS, FIRST_REST, LONGEST_REST = 8, 512, 4096
# Maximum number of new kinds of calls whose hashes are remembered in such a rest.
MAX_HASHES = 4096

_ops = torch.ops.torch_tandem


class Recordings:
    """The graphs of a function, and the calls that may become graphs, by the keys of calls."""

    def __init__(self, max_graphs: int, warner: Warner) -> None:
        self.graphs: dict[Hashable, list[Graph]] = {}
        self.attempts: dict[Hashable, Attempts] = {}
        self._max_graphs, self._warner = max_graphs, warner
        # The latest recording, from which the next one learns the tensors whose gradients matter; -1 if there
        # is none.
        self.last = -1
        # All recordings. They are dropped when the function is freed, but not at the interpreter's end.
        self._kept: set[int] = set()
        weakref.finalize(self, _drop_all, self._kept).atexit = False
        # Number of consecutive calls of new kinds; calls left in the current rest of new kinds; calls in the
        # next rest; hashes of the kinds that came in the rest.
        self._new_kinds, self._rest, self._next_rest = 0, 0, FIRST_REST
        self._hashes: set[int] = set()
        # The reason for which new kinds of calls are not recorded now; empty if they are.
        self.varies = ""

    # --- Kinds of calls ------------------------------------------------------------------------------------

    def admits(self, key: Hashable) -> bool:
        """Whether a call with this key may be recorded. New keys may not while nearly every call has one."""
        if key in self.attempts:
            self._new_kinds, self.varies = 0, ""
            return True
        if self._rest > 0:
            self._rest -= 1
            if hash(key) in self._hashes:
                return True
            if len(self._hashes) < MAX_HASHES:
                self._hashes.add(hash(key))
            return False
        self._new_kinds += 1
        if self._new_kinds > NEW_KINDS:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self.varies = (
                "each call is of another kind, so none is replayed. "
                f"{varying(next(reversed(self.attempts)), key)}"
            )
            self._warner.warn(self.varies)
            return False
        return True

    def attempts_of(self, key: Hashable) -> Attempts:
        """The calls of a key so far."""
        if known := self.attempts.get(key):
            return known
        if len(self.attempts) >= MAX_KEYS:
            oldest = next(iter(self.attempts))
            for recorded in self.attempts.pop(oldest).recorded:
                self.forget(recorded)
        return self.attempts.setdefault(key, Attempts())

    # --- Graphs --------------------------------------------------------------------------------------------

    def all_graphs(self) -> Iterator[Graph]:
        for graphs in self.graphs.values():
            yield from graphs

    def graph_of(self, recording: int) -> Graph | None:
        return next((graph for graph in self.all_graphs() if graph.recorded.id == recording), None)

    def count(self) -> int:
        """The number of graphs."""
        return sum(map(len, self.graphs.values()))

    def add(self, graph: Graph) -> None:
        """Add a graph that will be tried first. The oldest one is dropped if there are too many."""
        if self.count() >= self._max_graphs:
            self._drop_oldest(graph)
        graphs = self.graphs.setdefault(graph.key, [])
        for other in graphs if graph.reads else ():
            if (number := _core.parting(other.recorded.id, graph.recorded.id)) is not None:
                graph.partings[other.recorded.id] = other.partings[graph.recorded.id] = number
        graphs.insert(0, graph)

    def _drop_oldest(self, new: Graph) -> None:
        key = next(iter(self.graphs))
        graphs = self.graphs[key]
        oldest = graphs.pop()
        changed = oldest.recorded.state.differences(new.recorded.state) if key == new.key else {}
        what = f"{min(changed.values(), key=len)} varies" if changed else varying(key, new.key)
        self.forget(oldest.recorded)
        if not graphs:
            del self.graphs[key]
            self.attempts.pop(key, None)
        self._warner.warn(f"it has more than {self._max_graphs} graphs, so the oldest is dropped. {what}")

    def drop_dead(self, key: Hashable) -> None:
        """Drop graphs of a key that are no longer replayed, or that use a tensor which no longer exists."""
        for graph in list(self.graphs.get(key, ())):
            if graph.left < 0 or _ops.dead(graph.recorded.id) >= 0:
                self.remove(graph)

    def remove(self, graph: Graph) -> None:
        graphs = self.graphs[graph.key]
        graphs.remove(graph)
        if not graphs:
            del self.graphs[graph.key]
        self.forget(graph.recorded)

    # --- Recordings ----------------------------------------------------------------------------------------

    def keep(self, recording: int) -> None:
        """Own a new recording."""
        self._kept.add(recording)

    def keep_last(self, recorded: Recorded) -> None:
        """Keep the latest recording until the next one."""
        last, self.last = self.last, recorded.id
        if last >= 0 and last not in self._in_use():
            self.drop(last)

    def forget(self, *every: Recorded) -> None:
        """Drop recorded calls with their backward passes."""
        for recorded in every:
            if recorded.passes:
                recorded.passes.forget(self.drop)
            if recorded.id != self.last:
                self.drop(recorded.id)

    def forget_attempts(self, attempts: Attempts) -> None:
        self.forget(*attempts.recorded)
        attempts.recorded.clear()

    def forget_all(self) -> None:
        """Drop all graphs and recordings."""
        for graph in list(self.all_graphs()):
            self.remove(graph)
        for attempts in self.attempts.values():
            self.forget_attempts(attempts)
        if self.last >= 0:
            self.drop(self.last)
            self.last = -1

    def drop(self, recording: int) -> None:
        self._kept.discard(recording)
        _drop_all([recording])

    def _in_use(self) -> set[int]:
        graphs = {graph.recorded.id for graph in self.all_graphs()}
        return graphs | {r.id for attempts in self.attempts.values() for r in attempts.recorded}


def _drop_all(recordings: Iterable[int]) -> None:
    for recording in recordings:
        _ops.drop_backwards(recording)
        call_backward.drop(recording)
