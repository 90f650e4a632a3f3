"""Tandem tensors in other libraries and in other processes, and their storages."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch_tandem
from torch import multiprocessing


def storage(device):
    return torch.arange(4, device=device).add(1).untyped_storage()


def numbers(device):
    return torch.arange(4.0, device=device) + 1


def changed(change):
    def of(device):
        s = storage(device)
        change(s)
        return s.tolist()

    return of


STORAGES = {
    "item": lambda d: storage(d)[8],
    "list": lambda d: storage(d).tolist(),
    "item set": changed(lambda s: s.__setitem__(0, 7)),
    "slice set": changed(lambda s: s.__setitem__(slice(0, 3), 7)),
    "fill": changed(lambda s: s.fill_(3)),
    "swapped bytes": changed(lambda s: s.byteswap(torch.int64)),
    "resized": changed(lambda s: s.resize_(16)),
    "copied": lambda d: torch.UntypedStorage(32, device=d).copy_(storage(d)).tolist(),
    "clone": lambda d: storage(d).clone().tolist(),
    "deepcopy": lambda d: copy.deepcopy(storage(d)).tolist(),
    "for a process": lambda d: pickle.loads(ForkingPickler.dumps(storage(d))).tolist(),
    "bytes": lambda d: (storage(d).nbytes(), len(storage(d))),
    "typed": lambda d: (numbers(d).storage().tolist(), numbers(d).storage()[2]),
    "set": lambda d: torch.empty(0, dtype=torch.int64, device=d).set_(storage(d), 1, (2,), (1,)).tolist(),
    "lazy clone": lambda d: torch._lazy_clone(numbers(d)).add_(1).tolist(),
    "unsigned": lambda d: torch.full((2,), 2**63 - 1, dtype=torch.uint64, device=d).cpu().tolist(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STORAGES)
def test_storages_as_on_the_cpu(name):
    for _ in range(3):
        assert STORAGES[name]("tandem") == STORAGES[name]("cpu")
        torch_tandem.mark_step()


def test_a_part_of_a_storage_is_refused_in_words():
    part = storage("tandem")[8:24]
    for use in (part.tolist, part.cpu, lambda: torch.empty(0, device="tandem").set_(part).sum().item()):
        with pytest.raises(NotImplementedError, match="part of an untyped storage"):
            use()


BEYOND = {
    "full": lambda d, n: torch.full((2,), n, dtype=torch.uint64, device=d),
    "fill": lambda d, n: torch.zeros(3, dtype=torch.uint64, device=d).fill_(n),
    "item": lambda d, n: torch.full((1,), torch.full((1,), n, dtype=torch.uint64, device=d).item(), device=d),
    "float": lambda d, n: torch.ones(3, device=d) * n + torch.arange(3, device=d),
    "compare": lambda d, n: torch.full((2,), 2**62, dtype=torch.uint64, device=d) == n,
    "int": lambda d, n: torch.ones(3, dtype=torch.int64, device=d).add_(n),
    "list": lambda d, n: torch._foreach_add([torch.ones(2, device=d)], [n])[0],
    "clamp": lambda d, n: torch.arange(3, device=d).clamp(max=n),
}


def outcome(of):
    try:
        return of().cpu().tolist()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", BEYOND)
def test_numbers_beyond_signed_ones_are_as_on_the_cpu(name):
    for n in [2**63, 3, 2**64 - 1, 2**63 + 5] * 3:
        assert outcome(lambda n=n: BEYOND[name]("tandem", n)) == outcome(lambda n=n: BEYOND[name]("cpu", n))
        torch_tandem.mark_step()


def test_dlpack_goes_through_the_host():
    for _ in range(3):
        x = numbers("tandem")
        assert torch.equal(torch.from_dlpack(x), numbers("cpu"))
        assert np.array_equal(np.from_dlpack(x), numbers("cpu").numpy())
        assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), numbers("cpu"))
        torch_tandem.mark_step()
    with pytest.raises(BufferError, match="copy"):
        torch.from_dlpack(numbers("tandem"), copy=False)
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(numbers("tandem").requires_grad_())


def double(received, sent, taken):
    x = received.get()
    sent.put((x * 2).detach())
    # Queues share the memory of the sending process, which must live until the tensor is received.
    taken.wait(120)


def test_queues_between_processes():
    context = multiprocessing.get_context("spawn")
    there, back, taken = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=double, args=(there, back, taken))
    process.start()
    there.put(torch.nn.Parameter(numbers("tandem")))
    result = back.get(timeout=120)
    taken.set()
    process.join()
    assert result.device.type == "tandem"
    assert torch.equal(result.cpu(), numbers("cpu") * 2)


NESTED = {
    "tensors": lambda x: torch.nested.nested_tensor([x, x[:2]]),
    "tensors with gradients": lambda x: torch.nested.as_nested_tensor([x.requires_grad_(), x[:2]]),
    "numbers": lambda x: torch.nested.nested_tensor([[1.0, 2.0], [3.0]], device=x.device).sum(),
    "moved": lambda x: torch.nested.nested_tensor([x.cpu(), x[:2].cpu()]).to("tandem").sum(),
    "mask": lambda x: torch._nested_tensor_from_mask(
        x.view(1, 2, 2), torch.ones(1, 2, device="tandem").bool()
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NESTED)
def test_strided_nested_tensors_are_refused_in_words(name):
    with pytest.raises(NotImplementedError, match="jagged"):
        NESTED[name](numbers("tandem"))


def test_jagged_nested_tensors():
    x = numbers("tandem").view(2, 2).requires_grad_()
    nested = torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged)
    (nested * 2).unbind()[0].sum().backward()
    assert x.grad.tolist() == [[2, 2], [2, 2]]
