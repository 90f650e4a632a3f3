"""Audits: Python runs a call that would be replayed, and its recording is compared with the graph."""

import torch

from torch_tandem import _core
from torch_tandem._functions import call_backward
from torch_tandem._functions.learning import Learning
from torch_tandem._functions.recorded import Graph, Recorded
from torch_tandem._functions.recordings import Recordings
from torch_tandem._functions.refusals import Refusal

# One call in this many is an audit: for the first audits, and after many that have passed.
FIRST_AUDIT, LAST_AUDIT = 8, 1024

_ops = torch.ops.torch_tandem


class Audits:
    """The audits of a function's graphs.

    `period` is the number of calls of which one is audited. If it is None, it grows with each audit that
    passes.
    """

    def __init__(self, learning: Learning, recordings: Recordings, period: int | None) -> None:
        self._learning, self._recordings, self._period = learning, recordings, period
        # Number of audits.
        self.count = 0

    def compare(self, graph: Graph, recorded: Recorded, refusal: Refusal | None) -> str:
        """Compare an audited call with its graph. Returns the difference in words; empty if none was found.

        A call whose results require grad passes when its backward pass has been compared, too.
        """
        self.count += 1
        self._recordings.keep_last(recorded)
        self._recordings.forget(recorded)
        difference: str | None
        if refusal is None:
            # The state was found equal before the call.
            difference = self._learning.difference(graph.recorded, recorded, compares_state=False)
            if difference is None and recorded.followed and graph.recorded.followed:
                difference = recorded.followed.beyond(graph.recorded.followed)
        elif refusal.may_pass and _core.ops_of(graph.recorded.id):
            # Operators of this call ran outside of the recording and cannot be compared, so the next call is
            # the audit.
            graph.is_in_doubt = True
            return ""
        else:
            difference = refusal.text
        if difference is not None:
            return _failed(graph, difference)
        if recorded.passes:
            graph.audited = recorded.id
        else:
            self._pass(graph)
        return ""

    def compare_backward(self, graph: Graph) -> str:
        """Compare the backward passes that an audited call has had since the audit, as `compare` does."""
        audited, graph.audited = graph.audited, None
        for backward in _ops.take_backwards(audited):
            if backward < 0:
                continue
            alike = [b for b in graph.backwards if not call_backward.is_other_kind(b, backward)]
            texts = [call_backward.difference(known, backward) for known in alike]
            call_backward.drop(backward)
            if alike and None not in texts:
                return _failed(graph, f"in its backward pass, {texts[0]}")
        self._pass(graph)
        return ""

    def _pass(self, graph: Graph) -> None:
        graph.period = self._period or min(2 * graph.period, LAST_AUDIT)
        graph.left, graph.suspect, graph.is_in_doubt = graph.period - 1, 0, False


def _failed(graph: Graph, difference: str) -> str:
    return (
        f"an audit found that a call differs from the one that was replayed: {difference}. The last "
        f"{graph.suspect} replayed calls may have been wrong. The function runs in Python from now on"
    )
