"""Adopted scripts raise no exception that eager does not: functions that want arguments on the host."""

import json
import subprocess
import sys

import pytest

SWEEP = """
import itertools, json, warnings
import torch
from torch.testing._internal.common_methods_invocations import op_db

warnings.simplefilter("ignore")
raised, calls = {}, 0
for op in op_db:
    if op.name.startswith("jiterator"):
        continue
    known = (torch.float32, torch.int64, torch.complex64, torch.bool)
    dtype = next((d for d in known if d in op.dtypes), torch.float64)
    torch.manual_seed(0)
    try:
        made = list(itertools.islice(op.sample_inputs(None, dtype), 60))
    except Exception as error:
        raised[op.name] = type(error).__name__
        continue
    for number, sample in enumerate(made[:: max(1, len(made) // 6)]):
        calls += 1
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:
            raised[f"{op.name} {op.variant_test_name} {number}"] = type(error).__name__
print(json.dumps([calls, raised]))
"""
"""Calls the samples of PyTorch's database, made without a device: all tensors are adopted."""

CALLS = """
import torch
from torch import nn
from torch.nn.utils import rnn

def shown(x):
    return [shown(y) for y in x] if isinstance(x, (list, tuple)) else x.tolist()

torch.manual_seed(0)
x, lengths = torch.randn(4, 12, 8), torch.tensor([12, 10, 7, 3])
packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
print(shown(packed.data), shown(packed.batch_sizes))
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    out, _ = kind(8, 8, batch_first=True)(packed)
    print([t.shape for t in rnn.pad_packed_sequence(out, batch_first=True)])
unsorted = rnn.pack_padded_sequence(x, lengths[[3, 0, 2, 1]], batch_first=True, enforce_sorted=False)
print(shown(unsorted.sorted_indices), shown(unsorted.unsorted_indices), shown(unsorted.data))
print(shown(rnn.pack_sequence([torch.ones(3), torch.ones(2)]).data))
print(shown(rnn.unpad_sequence(x, lengths, batch_first=True)), shown(rnn.unpack_sequence(packed)))
print(shown(torch.arange(10).tensor_split(torch.tensor([2, 5]))))
print(shown(torch.tensor_split(torch.arange(10), tensor_indices_or_sections=torch.tensor(3))))
print(shown(torch.segment_reduce(torch.arange(6.0), "sum", lengths=torch.tensor([2, 4]))))
print(shown(nn.functional.embedding_bag(torch.tensor([0, 1, 2, 1]), torch.ones(3, 2), torch.tensor([0, 2]))))
log = torch.zeros(5, 2, 4).log_softmax(-1)
print(nn.CTCLoss()(log, torch.tensor([[1, 2], [1, 1]]), torch.tensor([5, 5]), torch.tensor([2, 1])).shape)
print(shown(torch.randint_like(torch.zeros(3), torch.tensor(1))))
print(shown(torch.repeat_interleave(torch.arange(2), torch.tensor([1, 2]))))
print(nn.AdaptiveLogSoftmaxWithLoss(4, 10, [2, 5])(torch.randn(3, 4), torch.tensor([0, 3, 7])).output.shape)
pool, places = nn.MaxPool2d(2, return_indices=True)(torch.arange(16.0).view(1, 1, 4, 4))
print(shown(nn.MaxUnpool2d(2)(pool, places)))
ones = [torch.ones(2)]
for name in ("addcmul", "addcdiv"):
    print(shown(getattr(torch, f"_foreach_{name}")(ones, ones, ones, torch.tensor([2.0]))))
    getattr(torch, f"_foreach_{name}_")(ones, ones, ones, scalars=torch.tensor([2.0]))
print(shown(ones))
"""
"""Public functions that take a tensor of lengths, sizes, indices or offsets."""


def ran(tmp_path, text, *options):
    script = tmp_path / "script.py"
    script.write_text(text)
    ran = subprocess.run([sys.executable, *options, script], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def adopted():
    return ["-m", "torch_tandem", "run", "--quiet", "--adopt=always"]


def test_samples_of_all_operators(tmp_path, adopted):
    calls, ours = json.loads(ran(tmp_path, SWEEP, *adopted))
    eager_calls, eager = json.loads(ran(tmp_path, SWEEP))
    # Sparse tensors are refused, with what to do.
    assert {name.split()[0] for name, error in ours.items() if eager.get(name) != error} == {
        "sparse.mm", "sparse.sampled_addmm", "to_sparse",
    }  # fmt: skip
    assert eager_calls >= calls > 2000


def test_functions_that_take_lengths_and_indices(tmp_path, adopted):
    assert ran(tmp_path, CALLS, *adopted) == ran(tmp_path, CALLS)
