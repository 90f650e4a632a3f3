"""`torch.compile` in a script passes through: Tandem runs what the program would run without it."""

from collections.abc import Callable
from typing import Any

import torch

from torch_tandem import _notes

NOTE = "torch.compile was passed through: the program runs uncompiled, on Tandem"


def install() -> None:
    """Make `torch.compile` and `Module.compile` return what they are given."""
    torch.compile = _compile
    torch.nn.Module.compile = _compile_module


def _compile(model: Callable | None = None, **options: Any) -> Callable:
    """Return `model`, or a decorator that returns what it decorates."""
    _notes.add(NOTE)
    return (lambda decorated: decorated) if model is None else model


def _compile_module(self: torch.nn.Module, *args: Any, **options: Any) -> None:
    _notes.add(NOTE)
