"""Tensors of the program's classes: a function asks them nothing that plain Python does not ask them."""

from typing import ClassVar

import torch
import torch_tandem


class Strict(torch.Tensor):
    """A tensor that can only be multiplied."""

    asked: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(function)
        if function is not torch.mul:
            raise NotImplementedError(function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def strict():
    Strict.asked.clear()
    return torch.ones(3, device="tandem").as_subclass(Strict)


def test_an_argument_is_not_asked():
    w = strict()
    function = torch_tandem.function(lambda x: torch.mul(x, 2), audit=10**6)
    for _ in range(12):
        assert function(w).as_subclass(torch.Tensor).tolist() == [2.0] * 3
    assert Strict.asked == [torch.mul] * 12
    assert function.reason() == "an argument is a Strict"


def test_a_captured_tensor_is_not_asked():
    w = strict()
    function = torch_tandem.function(lambda x: torch.mul(x, w), audit=10**6)
    for _ in range(12):
        function(torch.ones(3, device="tandem"))
    assert set(Strict.asked) == {torch.mul}


def test_nested_tensors_within_a_call():
    offsets = torch.tensor([0, 2, 5], device="tandem")
    function = torch_tandem.function(
        lambda x: (torch.nested.nested_tensor_from_jagged(x, offsets) * 2).values(), audit=10**6
    )
    for _ in range(8):
        assert function(torch.ones(5, device="tandem")).tolist() == [2.0] * 5
    assert "it returns a view of a tensor from within the call" in function.reason()
