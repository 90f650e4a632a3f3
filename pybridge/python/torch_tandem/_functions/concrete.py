"""The graph that replays a kind of call of a `torch_tandem.function`, in a form for users."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torch_tandem import _core

_ops = torch.ops.torch_tandem


class Spec(NamedTuple):
    """Shape and dtype of a tensor, as in an `input_signature`."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Owner(NamedTuple):
    """The owner of a storage that existed before a call: an argument, a captured tensor, or its gradient."""

    name: str
    # Number of the captured tensor; None for an argument or a gradient.
    captured: int | None


@dataclass(frozen=True)
class ConcreteGraph:
    """A recorded call that is replayed.

    The object is valid until the function drops the recorded call, or all traces are forgotten
    (`torch_tandem.reset()`).
    """

    recording: int
    owners: list[Owner]
    inputs: list[Spec]
    outputs: list[Spec]

    @property
    def text(self) -> str:
        """The operators in order, with their tensors and source lines."""
        return _core.text_of(self.recording, [owner.name for owner in self.owners])

    @property
    def captured(self) -> list[torch.Tensor]:
        """The tensors that the function uses and that are not arguments, in order of first use.

        Raises a `ReferenceError` if a captured tensor no longer exists.
        """
        tensors = _ops.watched(self.recording)
        found = {}
        for number, (name, captured) in enumerate(self.owners):
            if captured is None or captured in found:
                continue
            if tensors[captured] is None:
                use = _core.first_use(self.recording, number)
                raise ReferenceError(f"the tensor {name} no longer exists, which the function uses: {use}")
            found[captured] = tensors[captured]
        return list(found.values())

    def __str__(self) -> str:
        return self.text


def specs(tensors: Iterable[torch.Tensor]) -> list[Spec]:
    """Return the shapes and dtypes of tensors."""
    return [Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def owners(recording: int, names: dict[int, str]) -> list[Owner]:
    """Return the owners of the storages that existed before a recorded call.

    `names` has names of tensors, by id.
    """
    given, tensors = _ops.given(recording), _ops.watched(recording)
    found = []
    for kind, number in zip(given[::2], given[1::2], strict=True):
        if kind == 1:
            found.append(Owner(f"argument {number}", None))
            continue
        name = names.get(id(tensors[number]), f"captured {number}")
        found.append(Owner(name, number) if kind == 0 else Owner(f"{name}.grad", None))
    return found
