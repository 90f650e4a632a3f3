"""The types that type checkers see in `torch_tandem.function` are the types at run time."""

from typing import Unpack, get_overloads, get_type_hints

import pytest
import torch
import torch_tandem
from torch_tandem._functions.function import Function
from torch_tandem._functions.types import Decorator, Options, P, R, Replayed

# The annotations as written. `staticmethod` has no parameters at run time.
OVERLOADS = [overload.__annotations__ for overload in get_overloads(torch_tandem.function)]


def test_overloads_have_all_options():
    for overload in OVERLOADS:
        assert overload["options"] == Unpack[Options]
    assert get_type_hints(Options).keys() == torch_tandem.function.__kwdefaults__.keys()


def test_what_is_wrapped_keeps_its_type_or_its_signature():
    *same, function, without = [(types["function"], types["return"]) for types in OVERLOADS]
    assert all(taken == returned for taken, returned in same) and len(same) == 3
    assert function[0].__args__ == (P, R) and function[1] == Replayed[P, R]
    assert without == (None, Decorator)


def test_functions_have_the_methods_of_their_type():
    public = {name for name in vars(Function) if not name.startswith("_")} - {"of_graph"}
    declared = {name for name in vars(Replayed) if not name.startswith("_")}
    assert declared == public
    for name in declared:
        assert (
            get_type_hints(getattr(Replayed, name))["return"]
            == get_type_hints(getattr(Function, name))["return"]
        )


@pytest.mark.parametrize("options", [{}, {"audit": 2}])
def test_values_are_of_the_types(options):
    function = torch_tandem.function(**options) if options else torch_tandem.function
    module = torch.nn.Linear(2, 2)
    assert function(module) is module
    assert isinstance(function(staticmethod(len)), staticmethod)
    assert isinstance(function(type("Net", (torch.nn.Module,), {})), type)
    assert isinstance(function(len), Function)
