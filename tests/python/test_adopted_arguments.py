"""Adopted scripts raise no exceptions that eager PyTorch does not raise: functions that expect arguments on
the host.
"""

import json
from pathlib import Path

import forked
import pytest

DATABASE = (Path(__file__).parents[1] / "op_db.py").read_text()

SWEEP = (
    DATABASE
    + """
import itertools, json, warnings
import torch

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
)
"""Program that calls the samples of PyTorch's database, made without a device, so that all tensors are
adopted.
"""

MIXED = (
    DATABASE
    + """
import itertools, json, sys, warnings
import torch
from torch.utils import _pytree

warnings.simplefilter("ignore")


def shown(values):
    leaves = [x for x in _pytree.tree_leaves(values) if not torch.is_tensor(x) or x.layout == torch.strided]
    return [str(x.detach().cpu().tolist()) if torch.is_tensor(x) else str(x) for x in leaves]


def run(function, leaves, spec, on_host, copies):
    leaves = list(leaves)
    for i, leaf in enumerate(leaves):
        if torch.is_tensor(leaf) and leaf.layout == torch.strided:
            copy = leaf.detach().cpu() if i in on_host else leaf.detach()
            leaves[i] = copy.clone().requires_grad_(leaf.requires_grad)
    first, args, kwargs = _pytree.tree_unflatten(leaves, spec)
    torch.manual_seed(1)
    result = function(first.clone() if copies else first, *args, **kwargs)
    found = shown(result)
    results = [x for x in _pytree.tree_leaves(result) if torch.is_tensor(x) and x.requires_grad]
    if results := [x for x in results if x.dtype.is_floating_point]:
        sum(x.sum() for x in results).backward()
        found += shown([x.grad for x in leaves if torch.is_tensor(x)])
    return found


wrong, calls = {}, 0
for op in op_db:
    if op.name.startswith(("jiterator", "empty", "new_empty")):
        continue
    known = (torch.float32, torch.int64, torch.complex64, torch.bool)
    dtype = next((d for d in known if d in op.dtypes), torch.float64)
    differentiable = op.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), 40))
    for number, sample in enumerate(made[:: max(1, len(made) // 3)]):
        leaves, spec = _pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.layout == torch.strided]
        moved = [x.to(sys.argv[1]) if i in places else x for i, x in enumerate(leaves)]
        variants = [(op.op, False)] + [(op.inplace_variant, True)] * (op.inplace_variant is not None)
        for function, copies in variants:
            try:
                expected = run(function, leaves, spec, places, copies)
            except Exception:
                continue
            for on_host in [(place,) for place in places[:3]] + [tuple(places[1:])] * (len(places) > 2):
                calls += 1
                try:
                    found = run(function, moved, spec, on_host, copies)
                    same = found == expected
                except Exception as error:
                    same, found = False, str(error)
                if not same:
                    wrong.setdefault(f"{op.name}{' in place' * copies}", [on_host, str(found)[:200]])
print(json.dumps([calls, wrong]))
"""
)
"""Program that calls the samples of PyTorch's database with tensors on both devices, as adopted scripts have
them.
"""

FAKE = (
    DATABASE
    + """
import itertools, json, logging, sys, warnings
import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree

warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
UNKNOWN = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


@torch.no_grad()
def run(function, leaves, spec, copies):
    first, args, kwargs = _pytree.tree_unflatten(leaves, spec)
    result = function(first.clone() if copies else first, *args, **kwargs)
    return [(t.device.type, t.dtype, t.shape) for t in _pytree.tree_leaves(result) if torch.is_tensor(t)]


wrong, calls = {}, 0
for op in op_db:
    if op.name.startswith("jiterator"):
        continue
    known = (torch.float32, torch.int64, torch.complex64, torch.bool)
    dtype = next((d for d in known if d in op.dtypes), torch.float64)
    torch.manual_seed(0)
    made = list(itertools.islice(op.sample_inputs("cpu", dtype), 40))
    for sample in made[:: max(1, len(made) // 2)]:
        leaves, spec = _pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(leaves) if torch.is_tensor(x) and x.layout == torch.strided]
        for function, copies in [(op.op, False), (op.inplace_variant, True)]:
            for on_host in places[:2] if function and len(places) > 1 else ():
                given = list(leaves)
                for i in set(places) - {on_host}:
                    given[i] = leaves[i].detach().to(sys.argv[1])
                try:
                    expected = run(function, given, spec, copies)
                except Exception:
                    continue
                calls += 1
                try:
                    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                        fake = [mode.from_tensor(x) if i in places else x for i, x in enumerate(given)]
                        found = run(function, fake, spec, copies)
                except UNKNOWN:
                    continue
                except Exception as error:
                    found = f"{type(error).__name__}: {str(error)[:150]}"
                if found != expected:
                    wrong.setdefault(f"{op.name}{' in place' * copies}", [on_host, str(found), str(expected)])
print(json.dumps([calls, wrong]))
"""
)
"""Program that compares the results of these calls with those of fake tensors, with which Dynamo computes."""

ARRAYS = """
import numpy as np
import torch

torch.manual_seed(0)
x = torch.zeros(4)
array = x.numpy()
array[1] = 5
x[2] = 7
print(x.tolist(), array)
base = torch.arange(8.0)
view = base[2:6]
array = view.numpy()
array[0] = -1
view += 1
base[3] = 0
print(base.tolist(), view.tolist(), array)
turned = torch.arange(12.0).view(3, 4).t()[1:]
array = np.asarray(turned)
array[0] = 3
print(turned.tolist(), array)
model = torch.nn.Linear(3, 2)
with torch.no_grad():
    array = model(torch.ones(1, 3)).numpy()
array += 1
print(array)
array = np.array(model.weight.detach())
array[0] = 0
print(array, model.weight.detach().numpy().copy())
"""
"""Program in which arrays share memory with tensors, as without Tandem."""

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
"""Program that calls public functions that take a tensor of lengths, sizes, indices or offsets."""


BESIDE = """
import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


def array(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 10


def rounded(x):
    return (x * 1e4).round().tolist()  # fused cells have other bits


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy())) + y

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        return torch.from_numpy(np.cos(x.numpy()) * gradient.numpy()), None, gradient


torch.manual_seed(0)
for kind in (nn.RNN, nn.GRU, nn.LSTM):
    layer = kind(3, 4)
    out, state = layer(torch.from_numpy(array(5, 2, 3)))
    print(rounded(out))
    first = torch.zeros(1, 2, 4)
    out, _ = layer(torch.from_numpy(array(5, 2, 3)), (first, first) if kind is nn.LSTM else first)
    packed = nn.utils.rnn.pack_padded_sequence(torch.from_numpy(array(5, 2, 3)), [5, 3])
    print(rounded(out), rounded(layer(packed)[0].data))
words = nn.Embedding.from_pretrained(torch.from_numpy(array(3, 2)), freeze=False)
model = nn.Sequential(words, nn.Linear(2, 1))
vector = nn.utils.parameters_to_vector(model.parameters())
nn.utils.vector_to_parameters(vector * 2, model.parameters())
print(vector.tolist(), [p.tolist() for p in model.parameters()])
layer, free = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
Sine.apply(layer(torch.ones(2, 3)), 2.0, free).sum().backward()
print(layer.weight.grad.tolist(), free.grad.tolist())
for dtype in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        out = layer(torch.ones(2, 3))
        print(out.dtype, out.float().tolist(), torch.is_autocast_enabled("cpu"))
        with torch.amp.autocast("cpu", enabled=False):
            print(layer(torch.ones(2, 3)).dtype)
print(layer(torch.ones(2, 3)).dtype, torch.is_autocast_enabled("cpu"))
indices, values = torch.tensor([[0, 1], [1, 0]]), torch.from_numpy(array(2))
print(torch.sparse_coo_tensor(indices, values, (2, 2)).to_dense().tolist())
print(torch.sparse_coo_tensor(indices.numpy(), torch.ones(2), size=(2, 2)).to_dense().tolist())
shared = array(3)
tensor = torch.as_tensor(shared)
shared[0] = 7
print(tensor.tolist(), torch.as_tensor(shared, dtype=torch.float64).tolist())
print(torch.as_tensor([1, 2]).tolist())
print(torch.ones(2).type(), torch.ones(2).type(torch.LongTensor))
print(torch.ones(2).int().type("torch.DoubleTensor"))
print(torch.ones(2).type(torch.float16).type(), torch.arange(2).type(torch.FloatTensor) + torch.ones(2))
torch.testing.assert_close(torch.tensor([0.0, 0.1]), torch.from_numpy(array(2)))
spectrum = torch.fft.fft(torch.tensor([1.0, 2.0, 4.0])).conj()
print(spectrum.numpy(force=True))
query = torch.randn(1, 1, 4, 8)
print(rounded(flex_attention(query, query, query)))
learned = query.clone().requires_grad_()
written = learned.exp().add_(1).sum()
attend = lambda: flex_attention(learned, query, query)
for complain in (spectrum.numpy, spectrum.imag.numpy, attend, written.backward):
    try:
        print(complain())
    except RuntimeError as error:
        print(error)
held = torch.empty(0)
held.set_(torch.from_numpy(shared))
shared[1] = 9
print(held.tolist(), torch.from_numpy(shared).set_(torch.ones(2)).tolist(), held.set_(torch.ones(3)) + 1)
print(nn.ParameterList([nn.Parameter(torch.ones(2, 3))]), nn.ParameterDict({"a": torch.ones(2)}))
"""
"""Program with tensors on the host, from NumPy, beside those that it makes."""


def ran(tmp_path, text, *options, args=()):
    script = tmp_path / "script.py"
    script.write_text(text)
    ran = forked.run([*options, script, *args])
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def adopted():
    return ["-m", "torch_tandem", "run", "--quiet", "--adopt=always"]


def test_samples_of_all_operators(tmp_path, adopted):
    calls, ours = json.loads(ran(tmp_path, SWEEP, *adopted))
    eager_calls, eager = json.loads(ran(tmp_path, SWEEP))
    assert not {name: error for name, error in ours.items() if eager.get(name) != error}
    assert min(eager_calls, calls) > 2000


def test_functions_that_take_lengths_and_indices(tmp_path, adopted):
    assert ran(tmp_path, CALLS, *adopted) == ran(tmp_path, CALLS)


def test_tensors_on_both_devices(tmp_path, adopted):
    calls, wrong = json.loads(ran(tmp_path, MIXED, *adopted, args=["tandem"]))
    # These functions fail only in their gradients (of targets, and of sampled products), which autograd
    # expects on the other device.
    assert wrong.keys() == {
        "nn.functional.binary_cross_entropy",
        "nn.functional.binary_cross_entropy_with_logits",
        "nn.functional.linear_cross_entropy",
        "sparse.sampled_addmm",
    }, wrong
    assert calls > 2000


def test_fake_tensors_on_both_devices(tmp_path, adopted):
    calls, wrong = json.loads(ran(tmp_path, FAKE, *adopted, args=["tandem"]))
    # Fake tensors have no values (`tensor_split`), and PyTorch's rule for `addbmm_` does not broadcast.
    assert wrong.keys() <= {
        "addbmm in place",
        "native_dropout_backward",
        "nn.functional.linear_cross_entropy",
        "tensor_split",
    }, wrong
    assert calls > 1000


def test_arrays_share_memory(tmp_path, adopted):
    assert ran(tmp_path, ARRAYS, *adopted) == ran(tmp_path, ARRAYS)


def test_tensors_from_numpy_beside_others(tmp_path, adopted):
    assert ran(tmp_path, BESIDE, *adopted) == ran(tmp_path, BESIDE)
