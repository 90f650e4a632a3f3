"""Host tensors that calls of a function only increment, such as the step counts of optimizers.

The numbers in these tensors vary. A recorded call gets a `Number` from `item()`, and a replay increments the
tensors.
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torch_tandem._functions.numbers import Number

# From this number on, a float32 number stays the same when it is incremented by one.
_END = 2.0**24

_counted = torch.ops.torch_tandem.counted.default._op


def _is_count(number: float) -> bool:
    return number.is_integer() and 0 <= number < _END and math.copysign(1, number) > 0


class HostCounters:
    """The counters of a recorded call. Those that had equal numbers before the call are a group.

    A replay needs the same groups, so a group is one number of the call's tape.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        numbers = _counted(tensors)
        # The groups' numbers before the call.
        self.given = list(dict.fromkeys(numbers))
        # The group of each tensor, and how often the call has incremented it.
        self._groups = [self.given.index(number) for number in numbers]
        self.increments: list[int] = []
        # Whether all numbers can be counted with.
        self.is_complete = all(map(_is_count, numbers))

    def include(self, addresses: list[int]) -> bool:
        """Whether the tensors with these `_cdata` are counters."""
        alive = (tensor() for tensor in self._tensors)
        return {tensor._cdata for tensor in alive if tensor is not None}.issuperset(addresses)

    def tensors(self) -> list[torch.Tensor]:
        """The counters. The comparison of the state has shown that they still exist."""
        return [tensor() for tensor in self._tensors]  # type: ignore[misc]

    def counts_as(self, other: "HostCounters") -> bool:
        """Whether two calls have the same counters in the same groups, and increment them as often."""
        return (
            self._tensors == other._tensors
            and self._groups == other._groups
            and self.increments == other.increments
        )

    def now(self) -> list[float] | None:
        """The groups' numbers for a replay; None if the groups are others now, or a number is too large."""
        found: dict[int, float] = {}
        for group, number, more in zip(self._groups, _counted(self.tensors()), self.increments, strict=True):
            if found.setdefault(group, number) != number:
                return None
            if not _is_count(number) or number + more >= _END:
                return None
        # Groups whose numbers have become equal would be one number of the tape.
        return list(found.values()) if len(set(found.values())) == len(found) else None

    @contextlib.contextmanager
    def followed(self, numbers: list[Number]) -> Iterator[None]:
        """Let `item()` of the counters return numbers that are followed, for the time of a call.

        `numbers` are the groups' numbers before the call.
        """
        tensors = self.tensors()
        of_groups = zip(tensors, self._groups, strict=True)
        # `id` would be observed as a call of the program.
        given = {tensor._cdata: numbers[group] for tensor, group in of_groups}
        item = torch.Tensor.item

        thread = threading.get_ident()

        def followed_item(self: torch.Tensor, *args: Any) -> Any:
            is_counter = type(self) is torch.Tensor and not args and self._cdata in given
            if not is_counter or threading.get_ident() != thread:
                return item(self, *args)
            number = given[self._cdata]
            (now,) = _counted([self])
            more = now - float.__pos__(number)
            return number._tape.computed("add", (number, more), now) if more else number

        is_patched = "item" in vars(torch.Tensor)
        torch.Tensor.item = followed_item  # type: ignore[method-assign]
        try:
            yield
        finally:
            if is_patched:
                torch.Tensor.item = item  # type: ignore[method-assign]
            else:
                del torch.Tensor.item
            before = map(self.given.__getitem__, self._groups)
            more = [x - y for x, y in zip(_counted(tensors), before, strict=True)]
            # A call that has written something else is refused.
            self.increments = [int(x) if x.is_integer() else 0 for x in more]
