"""Types of `torch_tandem.function` for type checkers: a wrapped function keeps its signature."""

from collections.abc import Callable, Sequence
from typing import Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, overload

import torch

from torch_tandem._functions.concrete import ConcreteGraph

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Self = TypeVar("Self")
Module = TypeVar("Module", bound=torch.nn.Module)


class Options(TypedDict, total=False):
    """The options of `torch_tandem.function`."""

    input_signature: Sequence[tuple[Sequence[int | None], torch.dtype]] | None
    audit: int | None
    max_graphs: int
    on_mismatch: Literal["warn", "raise"]
    effects: Literal["refuse", "skip"]


class CacheInfo(NamedTuple):
    """Counters of a function, named as in `functools.lru_cache`: `hits` are the calls that were replayed."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    audits: int


class Replayed(Protocol[P, R_co]):
    """A function whose equal calls are replayed."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type) -> "Replayed[P, R_co]": ...
    @overload
    def __get__(
        self: "Replayed[Concatenate[Self, Q], R]", instance: Self, owner: type
    ) -> "Replayed[Q, R]": ...

    def cache_info(self) -> CacheInfo: ...
    def concrete_graph(self, *args: P.args, **kwargs: P.kwargs) -> ConcreteGraph: ...
    def explain(self) -> str: ...
    def reason(self) -> str | None: ...


class Decorator(Protocol):
    """The decorator that `torch_tandem.function` returns if it is called with options alone."""

    @overload
    def __call__(self, function: type[Module]) -> type[Module]: ...
    @overload
    def __call__(self, function: Module) -> Module: ...
    @overload
    def __call__(self, function: "staticmethod[P, R]") -> "staticmethod[P, R]": ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Replayed[P, R]: ...
