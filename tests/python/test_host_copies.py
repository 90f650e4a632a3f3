"""Tandem tensors in NumPy, DLPack, queues and DataLoader's workers, which get copies on the host."""

import forked
import numpy as np
import pytest
import torch
import torch_tandem
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset


def numbers(device="tandem"):
    return torch.arange(6.0, device=device).view(2, 3) + 1


NUMPY = {
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x),
    "dtype": lambda x: np.asarray(x, dtype=np.float64),
    "copied": lambda x: np.array(x, copy=True),
    "ufunc": lambda x: np.add(np.asarray(x), 1),
    "mean": lambda x: np.mean(np.asarray(x), axis=0),
    "list": lambda x: np.stack([np.asarray(row) for row in x]),
    "view": lambda x: np.asarray(x.t()),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "forced": lambda x: x.numpy(force=True),
    "iterated": lambda x: np.array([value.item() for value in x.flatten()]),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_gets_a_copy(name):
    for _ in range(3):
        there, here = NUMPY[name](numbers()), NUMPY[name](numbers("cpu"))
        assert there.dtype == here.dtype and np.array_equal(there, here)
        torch_tandem.mark_step()


def test_a_write_that_would_not_reach_the_tensor_is_refused():
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(numbers())[0] = 7
    np.array(numbers())[0] = 7


def test_what_numpy_refuses():
    with pytest.raises(TypeError, match="can't convert tandem:0 device type tensor to numpy"):
        numbers().numpy()
    with pytest.raises(RuntimeError, match="requires grad"):
        np.asarray(numbers().requires_grad_())
    with pytest.raises(TypeError, match="BFloat16"):
        np.asarray(numbers().bfloat16())
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(numbers(), copy=False)


def test_no_library_gets_an_address():
    assert not hasattr(numbers(), "__cuda_array_interface__")
    assert not hasattr(numbers("cpu"), "__cuda_array_interface__")


def test_dlpack_in_both_directions():
    x = numbers()
    assert x.__dlpack_device__() == (1, 0)
    assert torch.equal(torch.from_dlpack(x.__dlpack__()), numbers("cpu"))
    from_numpy = torch.from_dlpack(np.arange(3.0)).to("tandem")
    assert from_numpy.device.type == "tandem" and from_numpy.tolist() == [0, 1, 2]
    assert torch.equal(torch.utils.dlpack.from_dlpack(x), numbers("cpu"))
    copy = torch.from_dlpack(x)
    copy.zero_()
    assert x.sum().item() == 21


class Rows(Dataset):
    """Items on the device, which either the process that asks for them makes, or the process that made the
    dataset.
    """

    def __init__(self, ready=None):
        self.ready = ready

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.ready is not None:
            return self.ready[index]
        return torch.full((2,), float(index), device="tandem")


def worker_context(name):
    return {"num_workers": 2, "multiprocessing_context": name, "batch_size": 2}


@pytest.mark.parametrize("ready", [False, True], ids=["made in workers", "made before"])
def test_workers_that_are_spawned_send_tandem_tensors(ready):
    rows = Rows(torch.arange(6.0, device="tandem").view(6, 1).expand(6, 2).contiguous() if ready else None)
    batches = list(DataLoader(rows, **worker_context("spawn")))
    assert [batch.device.type for batch in batches] == ["tandem"] * 3
    assert torch.cat(batches)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ready", [False, True], ids=["made in workers", "made before"])
def test_workers_that_are_forked_say_what_to_do(ready):
    rows = Rows(torch.ones(6, 2, device="tandem") if ready else None)
    torch.ones(2, device="tandem").sum().item()
    with pytest.raises(RuntimeError, match="'spawn' start method"):
        list(DataLoader(rows, **worker_context("fork")))


def echo(received, sent, taken):
    for _ in range(3):
        x = received.get()
        sent.put({"twice": x["x"] * 2, "kind": type(x["x"]).__name__})
    taken.wait(120)


def test_queues_of_nested_values():
    context = multiprocessing.get_context("spawn")
    there, back, taken = context.Queue(), context.SimpleQueue(), context.Event()
    process = context.Process(target=echo, args=(there, back, taken))
    process.start()
    for value in (numbers(), numbers()[:, 1:], numbers().bfloat16()):
        there.put({"x": value})
        answer = back.get()
        assert answer["kind"] == "Tensor" and answer["twice"].device.type == "tandem"
        assert torch.equal(answer["twice"].cpu(), value.cpu() * 2)
    taken.set()
    process.join()
    assert process.exitcode == 0


FORKED_BEFORE = """
import os, sys, torch, torch_tandem
from torch import multiprocessing

def work(queue, seen):
    x = torch.arange(4.0, device="tandem")
    total = 0.0
    for _ in range(6):
        total += (x * 2 + 1).sum().item()
        torch_tandem.mark_step()
    queue.put((x * 2, total, torch.tandem.is_available()))
    seen.wait(60)

context = multiprocessing.get_context("fork")
queue, seen = context.Queue(), context.Event()
children = [context.Process(target=work, args=(queue, seen)) for _ in range(2)]
[child.start() for child in children]
for _ in children:
    tensor, total, available = queue.get(timeout=100)
    assert tensor.tolist() == [0, 2, 4, 6] and total == 96 and available
    assert tensor.device.type == "tandem"
seen.set()
[child.join() for child in children]
assert [child.exitcode for child in children] == [0, 0]
assert (torch.ones(3, device="tandem") + 1).tolist() == [2, 2, 2]
print("done")
"""


def test_a_child_that_is_forked_before_anything_ran(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FORKED_BEFORE)
    ran = forked.run([script])
    assert "done" in ran.stdout, ran.stderr
