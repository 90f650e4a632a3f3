"""docs/differs.md: operations that PyTorch computes differently by device, each row of the second table.

The operation of each row issues other operators than on the CPU. No other such operations are known. Results
agree between the phases bit for bit, and with eager up to rounding.
"""

import copy
import pathlib
import re
from collections import Counter

import pytest
import torch
from helpers import OWN, check
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DIFFERS = pathlib.Path(__file__).parents[2] / "docs" / "differs.md"
FOREACH = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]
ROUNDED_OTHERWISE = {"NAdam", "RAdam", "ASGD"}
STEPS = 8
A = torch.ops.aten
MOVES_MODULES = A._has_compatible_shallow_copy_type.default


def rows():
    section = DIFFERS.read_text().split("\n## ")[2]
    return [row for row in re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[2:]]


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Issued(TorchDispatchMode):
    """Counts operators by name and types of results. Moves of a module or tensor do not count."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        if not (operator is A._to_copy.default and "device" in kwargs) and operator is not MOVES_MODULES:
            self.seen[str(operator), *(t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor))] += 1
        return out


def issued(program, device):
    torch.manual_seed(0)
    with Issued() as mode:
        list(program(device))
    return mode.seen


def optimized(make):
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = make(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            model(data(8, 6, seed=step).to(device)).pow(2).mean().backward()
            optimizer.step()
            yield [p.detach().clone() for p in model.parameters()]

    return program


def averaged(device):
    torch.manual_seed(1)
    model = nn.Linear(4, 4).to(device)
    average = AveragedModel(model)
    for step in range(STEPS):
        with torch.no_grad():
            model.weight.add_(data(4, 4, seed=step).to(device))
        average.update_parameters(model)
        yield [p.detach().clone() for p in average.parameters()]


def layer(kind, *shape, **options):
    def program(device):
        torch.manual_seed(1)
        model = kind(4, 5, **options).to(device)
        for step in range(STEPS):
            model.zero_grad()
            out = model(data(*shape, seed=step).to(device))
            out = out[0] if isinstance(out, tuple) else out
            out.sum().backward()
            yield out.detach(), [p.grad.clone() for p in model.parameters()]

    return program


def packed_lstm(device):
    torch.manual_seed(1)
    model = nn.LSTM(4, 5).to(device)
    for step in range(STEPS):
        x = nn.utils.rnn.pack_padded_sequence(data(6, 3, 4, seed=step).to(device), torch.tensor([6, 4, 2]))
        yield model(x)[0].data.detach()


def under_autocast(device):
    for step in range(STEPS):
        x = data(8, 8, seed=step).to(device)
        with torch.autocast(device, torch.bfloat16):
            yield (x @ x).softmax(-1)


def interpolated(device):
    for step in range(STEPS):
        x = data(1, 2, 6, 6, seed=step).to(device)
        torch.use_deterministic_algorithms(True)
        try:
            out = F.interpolate(x, size=(9, 9), mode="bilinear")
        finally:
            torch.use_deterministic_algorithms(False)
        yield out


def masked_encoder(device):
    torch.manual_seed(1)
    encoder = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to(device).eval()
    )
    padding = torch.arange(5) >= torch.tensor([[3], [5]])
    for step in range(STEPS):
        with torch.no_grad():
            out = encoder(data(2, 5, 8, seed=step).to(device), src_key_padding_mask=padding.to(device))
        yield out.cpu()[~padding]


CHOICES = {
    "`torch.optim` with neither `foreach` nor `fused`": [optimized(torch.optim.Adam)],
    "`AveragedModel` without a function": [averaged],
    "`nn.LSTM`, packed or with projections": [packed_lstm, layer(nn.LSTM, 6, 3, 4, proj_size=2)],
    "`nn.GRU`": [layer(nn.GRU, 6, 3, 4)],
    "`nn.RNN`": [layer(nn.RNN, 6, 3, 4)],
    "`nn.LSTMCell` and `nn.GRUCell`": [layer(nn.LSTMCell, 3, 4), layer(nn.GRUCell, 3, 4)],
    "`nn.TransformerEncoder` in evaluation, with a padding mask": [masked_encoder],
    "`torch.autocast`": [under_autocast],
    "`F.interpolate` under deterministic algorithms": [interpolated],
}
# Rows that compute in bfloat16 on the CPU and in float32 on Tandem, so that no tolerance fits both.
OTHER_PRECISION = {"`torch.autocast`"}


def test_each_row_has_its_programs():
    assert rows() == list(CHOICES)


@pytest.mark.parametrize("row", CHOICES)
def test_other_operators_are_issued(row):
    for program in CHOICES[row]:
        assert issued(program, "cpu") != issued(program, "tandem")
        if row not in OTHER_PRECISION:
            check(program, like_eager=False)


@pytest.mark.parametrize("name", FOREACH)
def test_optimizers_differ_in_the_last_bit_where_they_are_said_to(name):
    make = lambda p: getattr(torch.optim, name)(p, 0.01)  # noqa: E731
    program = optimized(make)
    assert issued(program, "cpu") != issued(program, "tandem")
    if name not in ROUNDED_OTHERWISE:
        check(program)
        return
    check(program, like_eager=False)
    with pytest.raises(AssertionError):
        check(program)
    check(optimized(lambda p: getattr(torch.optim, name)(p, 0.01, foreach=True)))


def test_adafactor_is_the_same_everywhere():
    program = optimized(lambda p: torch.optim.Adafactor(p, 0.01))
    assert issued(program, "cpu") == issued(program, "tandem")
    check(program)


def test_integer_buffers_of_an_averaged_model_raise():
    model = nn.BatchNorm1d(3).to("tandem")
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    with pytest.raises(RuntimeError, match="Integer division"):
        average.update_parameters(model)


def test_the_lists_of_autocast():
    """The page must list exactly the operators that only one of autocast's two lists has."""
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]

    def casts(key):
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return {name.removeprefix("aten::").split(".")[0] for name in registered if has(name, key)}

    ours, cpu = casts("AutocastPrivateUse1"), casts("AutocastCPU")
    section = DIFFERS.read_text().split("\n## The lists of `torch.autocast`\n")[1].split("\n## ")[0]
    _, *on_tandem, on_cpu, _ = section.split("\n\n")
    named = lambda text: set(re.findall(r"`(\w+)`", text))  # noqa: E731
    assert set().union(*map(named, on_tandem)) == ours - cpu
    assert named(on_cpu) == cpu - ours


@pytest.mark.parametrize("operator", ["layer_norm", "softmax", "cross_entropy"])
def test_an_operator_of_one_list_is_the_first_that_differs(operator):
    """Under autocast, all results before the operator must have the same bits."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(8, 8), data(4, 8), torch.tensor([1, 0, 3, 2])
    run = {
        "layer_norm": lambda h: F.layer_norm(h, (8,)),
        "softmax": lambda h: h.softmax(-1),
        "cross_entropy": lambda h: F.cross_entropy(h, y.to(h.device)),
    }[operator]

    def program(device):
        moved = copy.deepcopy(layer).to(device)
        with torch.autocast(device, torch.bfloat16):
            h = moved(x.to(device))
            return h.detach().cpu(), run(h).detach().cpu()

    (before, eager), (same, other) = program("cpu"), program("tandem")
    assert before.dtype == same.dtype and (OWN or torch.equal(before, same))
    assert eager.dtype != other.dtype or not torch.equal(eager, other)
