"""The device as PyTorch programs use it: they create, move, save, view and free tensors."""

import copy
import gc
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch_tandem
from helpers import assert_same, check, same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 12
DEV = torch.device("tandem")


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- creating -----------------------------------------------------------------------------------

FACTORIES = {
    "tensor": lambda d: torch.tensor([[1.5, 2], [3, 4]], device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "from numpy": lambda d: torch.as_tensor(np.arange(4.0), device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d, dtype=torch.float16),
    "ones": lambda d: torch.ones((), device=d),
    "full": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(1, 9, 3, device=d),
    "arange float": lambda d: torch.arange(0, 1, 0.3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 7, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 7, device=d),
    "eye": lambda d: torch.eye(2, 3, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "rand": lambda d: torch.rand(3, device=d),
    "randn complex": lambda d: torch.randn(3, dtype=torch.cfloat, device=d),
    "randint": lambda d: torch.randint(9, (3,), device=d),
    "randperm": lambda d: torch.randperm(9, device=d),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "like": lambda d: torch.zeros_like(torch.ones(2, 3, device=d).t()),
    "rand_like": lambda d: torch.rand_like(torch.ones(2, 3, device=d)),
    "new": lambda d: torch.ones(2, device=d).new_full((2, 2), 3),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
    "empty": lambda d: torch.empty(0, 3, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
    "channels last": lambda d: torch.ones(1, 2, 3, 3, device=d).to(memory_format=torch.channels_last),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "cartesian": lambda d: torch.cartesian_prod(torch.arange(2, device=d), torch.arange(3, device=d)),
    "scalar": lambda d: torch.scalar_tensor(3, device=d),
    "default device": lambda d: default_device(d),
}


def default_device(device):
    with torch.device(device):
        return torch.cat([torch.ones(2), torch.arange(3.0)])


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name):
    torch.manual_seed(0)
    expected = FACTORIES[name]("cpu")
    for _ in range(3):
        torch.manual_seed(0)
        out = FACTORIES[name]("tandem")
        assert out.device == torch.device("tandem:0")
        assert out.stride() == expected.stride()
        assert same_bits(expected, out.cpu())
        torch_tandem.mark_step()


def test_uninitialized_deterministic_fill():
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEV).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_meta_and_fake_stay_apart():
    x = torch.ones(2, device="meta")
    assert torch.empty_like(x, device=DEV).device.type == "tandem"
    assert torch.ones(2, device=DEV).to("meta").device.type == "meta"


# --- moving -------------------------------------------------------------------------------------


def test_moves():
    x = data(2, 3)
    for move in (lambda t: t.to("tandem"), lambda t: t.tandem(), lambda t: t.to(DEV, torch.float64),
                 lambda t: t.to(torch.ones(1, device=DEV)), lambda t: t.to("tandem:0", non_blocking=True),
                 lambda t: torch.empty_like(t, device=DEV).copy_(t, non_blocking=True)):  # fmt: skip
        y = move(x)
        assert y.is_tandem and y.device.index == 0
        assert same_bits(y.cpu().float(), x)
        back = torch.empty_like(x)
        assert back.copy_(y) is back
        assert same_bits(back, x)
    assert x.to("tandem").to("cpu", torch.int32).dtype == torch.int32
    assert x.tandem().type() == "torch.tandem.FloatTensor"


@pytest.mark.parametrize("source", ["cpu", "tandem"])
@pytest.mark.parametrize("target", ["cpu", "tandem"])
def test_copies_between_layouts_and_types(source, target):
    for number in range(3):
        x = data(4, 6, seed=number)
        y = torch.zeros(6, 4, dtype=torch.float64)
        y.t()[:, ::2].copy_(x[:, 1::2])
        out = torch.zeros(6, 4, dtype=torch.float64).to(target)
        out.t()[:, ::2].copy_(x.to(source)[:, 1::2])
        assert same_bits(out.cpu(), y)
        torch_tandem.mark_step()


def test_parameters_keep_their_identity():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = list(model.parameters())
    model.to("tandem")
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    assert all(p.is_tandem and p.is_leaf and p.requires_grad for p in before)
    model.double().cpu()
    assert all(p is q and p.dtype == torch.float64 for p, q in zip(before, model.parameters(), strict=True))


def test_gradients_move_with_parameters():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    expected = model.weight.grad.clone()
    model.to("tandem")
    assert model.weight.grad.is_tandem
    assert same_bits(model.weight.grad.cpu(), expected)


def test_data_is_replaced():
    def program(device):
        p = nn.Parameter(data(3).to(device))
        for step in range(STEPS):
            p.data = data(3 + step % 2, seed=step).to(device)
            p.data.add_(1)
            p.grad = None
            (p * p).sum().backward()
            p.data = p.data - 0.1 * p.grad
            yield p.detach().clone(), p.grad

    check(program)


def test_data_across_devices():
    p = nn.Parameter(torch.ones(2))
    p.data = torch.full((2,), 2.0, device=DEV)
    assert p.is_tandem
    assert p.add(1).tolist() == [3, 3]


def test_batches_of_a_data_loader():
    def program(device):
        loader = DataLoader(
            TensorDataset(data(30, 2), torch.arange(30)), batch_size=4, pin_memory=device != "cpu"
        )
        total = torch.zeros(2, device=device)
        for x, y in loader:
            total = total + (
                x.to(device, non_blocking=True) * y.to(device, non_blocking=True).unsqueeze(1)
            ).sum(0)
            yield total

    check(program)


def test_pinned_memory():
    x = torch.ones(3)
    assert x.pin_memory().is_pinned()
    assert not x.is_pinned()
    assert same_bits(x.pin_memory().to("tandem", non_blocking=True).cpu(), x)
    assert torch.empty(2, pin_memory=True).is_pinned()


# --- host tensors among tandem ones -------------------------------------------------------------


def test_host_operands():
    def program(device):
        x = data(3, 3).to(device)
        for step in range(STEPS):
            y = x + torch.tensor(float(step))
            y = torch.tensor(2.0) * y - torch.tensor(step)
            y = torch.where(y > 0, y, torch.tensor(0.5, dtype=torch.float64))
            yield y, x[torch.tensor([0, 2])], x[[step % 3, 1]], torch.pow(torch.tensor(2.0), x)

    check(program)


def test_the_fed_buffer_is_overwritten_at_once():
    def program(device):
        x = torch.zeros(4, 4).to(device)
        buffer = torch.zeros(4, 4)
        array = np.zeros((4, 4), dtype=np.float32)
        scalar = torch.tensor(0.0)
        for step in range(3 * STEPS):
            buffer.fill_(step)
            array[:] = step
            scalar.fill_(step)
            x = x + buffer.to(device)
            x = x * 0.5 + torch.from_numpy(array).to(device)
            x = x + scalar
            x[1].copy_(buffer[0])
            buffer.fill_(-1000)
            array[:] = -1000
            scalar.fill_(-1000)
            yield x.clone()

    check(program)


def test_writes_into_a_host_tensor():
    def program(device):
        host = torch.zeros(4)
        x = data(4).to(device)
        for _ in range(STEPS):
            x = x * 1.5
            host.copy_(x)
            host[1:3].copy_(x[:2])
            x = x - host.to(device) * 0.1
            yield host.clone(), x

    check(program)


def test_in_place_on_a_host_tensor_with_tandem_operands():
    host = torch.zeros(4)
    x = torch.ones(4, device=DEV)
    for step in range(STEPS):
        host += x
        assert host.tolist() == [step + 1.0] * 4
        out = torch.empty(4)
        torch.mul(x, 2, out=out)
        assert out.tolist() == [2.0] * 4
        torch_tandem.mark_step()


def test_numpy_and_lists():
    x = data(2, 2)
    y = x.to("tandem")
    assert y.tolist() == x.tolist()
    assert np.array_equal(y.cpu().numpy(), x.numpy())
    assert np.array_equal(torch.from_numpy(x.numpy()).to("tandem").cpu().numpy(), x.numpy())
    assert y[0, 0].item() == x[0, 0].item()
    assert [float(v) for v in y[0]] == x[0].tolist()
    with pytest.raises(TypeError, match="cpu"):
        y.numpy()


# --- printing, copying, saving ------------------------------------------------------------------


def test_printing():
    for _ in range(4):
        x = torch.arange(4.0).view(2, 2)
        y = x.to("tandem").requires_grad_()
        assert repr(y.detach()) == repr(x)[:-1] + ", device='tandem:0')"
        assert "requires_grad=True" in repr(y) and "MulBackward0" in repr(y * 2)
        assert f"{y[1, 1].detach():.2f}" == "3.00"
        assert "tandem" in repr(nn.Parameter(y))
        torch_tandem.mark_step()
    assert repr(torch.ones(2000, device=DEV)).count("1.") == 6
    assert repr(torch.zeros(0, device=DEV)) == "tensor([], device='tandem:0')"


def stateful(device="tandem"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, foreach=False)
    for step in range(4):
        optimizer.zero_grad()
        model(data(4, 3, seed=step).to(device)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def test_deepcopy_and_pickle():
    model, _ = stateful()
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(host(model), host(clone), "clone")
        assert next(clone.parameters()).is_tandem
        clone[0].weight.data.zero_()
    assert model[0].weight.abs().sum() > 0
    x = torch.arange(6.0, device=DEV).view(2, 3)
    pair = copy.deepcopy((x, x[0]))
    pair[0].zero_()
    assert pair[1].tolist() == [0, 0, 0]
    assert x[0].tolist() == [0, 1, 2]
    assert copy.copy(x).tolist() == x.tolist()


def host(model):
    return {k: v.detach().cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("saved", ["cpu", "tandem"])
@pytest.mark.parametrize("loaded", ["cpu", "tandem", None])
def test_save_and_load(saved, loaded):
    model, optimizer = stateful(saved)
    file = io.BytesIO()
    x = torch.arange(6.0, device=saved)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "views": (x, x[2:4])}, file)
    file.seek(0)
    out = torch.load(file, map_location=loaded)
    assert out["model"]["0.weight"].device.type == (loaded or saved)
    fresh, other = stateful(loaded or saved)
    fresh.load_state_dict(out["model"])
    other.load_state_dict(out["optimizer"])
    assert_same(host(model), host(fresh), "model")
    out["views"][0].fill_(7)
    assert out["views"][1].tolist() == [7, 7]
    fresh(data(4, 3).to(loaded or saved)).sum().backward()
    other.step()
    model(data(4, 3).to(saved)).sum().backward()
    model.zero_grad()
    fresh.zero_grad()


def test_state_dict_round_trip_between_devices():
    eager, _ = stateful("cpu")
    model, _ = stateful("tandem")
    assert_same(host(eager), host(model), "trained")
    model.load_state_dict({k: v * 2 for k, v in eager.state_dict().items()})
    eager.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    assert same_bits(eager[0].weight.detach(), model[0].weight.detach().cpu() * 2)


# --- views and storages -------------------------------------------------------------------------

VIEWS = {
    "view": lambda t: t.view(3, 8), "reshape": lambda t: t.reshape(2, 12), "t": lambda t: t.t(),
    "slice": lambda t: t[1:, ::2], "select": lambda t: t.select(1, 2), "narrow": lambda t: t.narrow(0, 1, 2),
    "diagonal": lambda t: t.diagonal(1), "unfold": lambda t: t.unfold(1, 2, 2),
    "chunk": lambda t: t.chunk(2)[1], "split": lambda t: t.split([1, 3])[1],
    "unbind": lambda t: t.unbind(1)[2],
    "squeeze": lambda t: t[:1].squeeze(0), "unsqueeze": lambda t: t.unsqueeze(1),
    "permute": lambda t: t.view(2, 2, 6).permute(2, 0, 1), "movedim": lambda t: t.movedim(0, 1),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 3), 5), "detach": lambda t: t.detach(),
    "flatten": lambda t: t.flatten(), "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "dtype": lambda t: t.view(torch.int32), "mT": lambda t: t.mT, "swapaxes": lambda t: t.swapaxes(0, 1),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 3, 2)), "alias": lambda t: t[:],
    "index": lambda t: t[2], "tensor_split": lambda t: t.tensor_split(3)[1],
    "hsplit": lambda t: t.hsplit(3)[1], "data": lambda t: t.data,
    "view_as_real": lambda t: torch.view_as_real(torch.view_as_complex(t.view(4, 3, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(name):
    def program(device):
        x = data(4, 6).to(device)
        for _ in range(STEPS):
            view = VIEWS[name](x)
            before = view.clone()
            view.add_(1)
            x.mul_(0.5)
            yield x.clone(), before, view.clone(), view.stride(), view.storage_offset(), view._is_view()

    check(program)


def test_resize_and_set():
    def program(device):
        for step in range(STEPS):
            x = data(4, seed=step).to(device)
            x.resize_(2)
            y = x.clone()
            x.resize_(4)
            z = torch.empty(0, device=device)
            z.set_(x.untyped_storage(), 1, (2,), (1,))
            z.fill_(3)
            w = torch.empty(0, device=device).set_(x)
            w.add_(1)
            grown = torch.ones(2, device=device).resize_(2 + step % 3)
            grown[2:] = 0
            yield x.clone(), y, z, grown, x.untyped_storage().nbytes()

    check(program)


def test_out_arguments():
    def program(device):
        x, y = data(3, 3).to(device), data(3, 3, seed=1).to(device)
        out = torch.zeros(3, 3).to(device)
        for _ in range(STEPS):
            assert torch.mm(x, y, out=out) is out
            torch.add(out, x, alpha=0.5, out=out)
            row = torch.empty(0, device=device)
            torch.sum(out, 0, out=row)
            torch.cumsum(out, 1, out=out)
            values, indices = torch.empty(3, device=device), torch.empty(3, dtype=torch.long, device=device)
            torch.max(out, 1, out=(values, indices))
            torch.cat([x, y], out=(both := torch.empty(6, 3, device=device)))
            x = out / out.abs().max()
            yield out.clone(), row, values, indices, both

    check(program)


def test_storages():
    x = torch.arange(4.0, device=DEV)
    storage = x.untyped_storage()
    assert storage.nbytes() == 16
    assert storage.device.type == "tandem"
    assert x.data_ptr() == x.view(2, 2).data_ptr() != 0
    assert x[1:].data_ptr() == x.data_ptr() + 4
    assert bytes(storage.cpu().tolist()) == x.cpu().numpy().tobytes()
    clone = storage.clone()
    x.zero_()
    assert torch.empty(0, device=DEV).set_(clone, 0, (4,)).tolist() == [0, 1, 2, 3]
    storage.copy_(clone)
    assert x.tolist() == [0, 1, 2, 3]
    storage.resize_(0)
    assert storage.nbytes() == 0


def test_memory_is_freed():
    gc.collect()
    torch_tandem.synchronize()
    before = torch.tandem.memory_allocated()
    for _ in range(STEPS):
        x = torch.zeros(1000, 1000, device=DEV)
        y = x + 1
        del x
        assert y[0, 0].item() == 1
        assert torch.tandem.memory_allocated() >= before + 3_900_000
        del y
        torch.ones(1, device=DEV).item()
        assert torch.tandem.memory_allocated() < before + 100_000
        torch_tandem.mark_step()
    assert torch.tandem.max_memory_allocated() >= before + 7_900_000


def test_a_long_loop_does_not_pile_up():
    x = torch.zeros(100_000, device=DEV)
    for _ in range(30):
        x = x + 1
        torch_tandem.mark_step()
    torch_tandem.synchronize()
    torch.tandem.reset_peak_memory_stats()
    before = torch.tandem.memory_allocated()
    for _ in range(1000):
        x = x + 1
        torch_tandem.mark_step()
    assert x[0].item() == 1030
    assert torch.tandem.memory_allocated() <= before + 1_000_000
    assert torch.tandem.max_memory_allocated() <= before + 100 * 400_000


# --- autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_cast_lists(dtype):
    x, m = torch.ones(2, 4, 8, device=DEV), torch.ones(2, 8, 4, device=DEV)
    layer = nn.Linear(8, 3).to(DEV)
    image = torch.ones(1, 2, 5, 5, device=DEV)
    for _ in range(3):
        with torch.autocast("tandem", dtype):
            lower = [x @ m, torch.bmm(x, m), layer(x), F.conv2d(image, torch.ones(1, 2, 3, 3, device=DEV)),
                     F.scaled_dot_product_attention(x, x, x), torch.einsum("bij,bjk->bik", x, m)]  # fmt: skip
            h = lower[0]
            full = [h.softmax(-1), h.log(), h.exp(), h.pow(2), F.layer_norm(h, (4,)), h.sum(), h.cumsum(0)]
            full += [F.mse_loss(h, h), F.cross_entropy(h[0], torch.arange(4, device=DEV)), h.norm()]
            widest = [h + x[..., :4], torch.cat([h, x[..., :4]]), torch.where(h > 0, h, x[..., :4])]
            with torch.autocast("tandem", enabled=False):
                assert (x @ m).dtype == torch.float32
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(h.sigmoid(), torch.ones_like(h))
        assert [t.dtype for t in lower] == [dtype] * len(lower)
        assert [t.dtype for t in full] == [torch.float32] * len(full)
        assert [t.dtype for t in widest] == [torch.float32] * len(widest)
        torch_tandem.mark_step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_to_wider_dtypes_as_on_cuda(dtype):
    x = torch.ones(2, 2, device=DEV, dtype=torch.bfloat16)
    with warnings.catch_warnings(action="error"), torch.autocast("tandem", dtype):
        assert torch.is_autocast_enabled("tandem")
        assert (x @ x).dtype == F.linear(x, x).dtype == dtype


def test_training_under_autocast():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                out = model(data(4, 4, seed=step).to(device))
            loss = F.cross_entropy(out.float(), torch.tensor([0, 1, 0, 1], device=device))
            loss.backward()
            optimizer.step()
            yield out.detach(), loss.detach(), [p.detach().clone() for p in model.parameters()]

    check(program)


def test_grad_scaler():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            loss = model(data(3, 4, seed=step).to(device)).pow(2).mean()
            if step in (6, 7):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            yield loss.detach(), norm, scaler.get_scale(), model.weight.detach().clone()

    check(program)


# --- random numbers -----------------------------------------------------------------------------


def test_generators():
    def program(device):
        g = torch.Generator(device).manual_seed(3)
        other = torch.Generator(device)
        other.set_state(g.get_state())
        for step in range(STEPS):
            a = torch.rand(3, device=device, generator=g)
            b = torch.randn(3, device=device)
            c = torch.empty(3, device=device).normal_(generator=other)
            d = torch.randperm(5, device=device, generator=g)
            if step == 6:
                g.manual_seed(3)
            yield a, b, c, d, g.initial_seed(), g.get_state()

    check(program)


def test_generator_devices():
    g = torch.Generator("tandem")
    assert g.device.type == "tandem"
    assert torch.Generator(device=DEV).manual_seed(5).initial_seed() == 5
    with pytest.raises(RuntimeError):
        torch.rand(2, generator=g)


def test_seeds_and_states():
    for _ in range(4):
        torch.manual_seed(7)
        a = torch.rand(3, device=DEV)
        state = torch.tandem.get_rng_state()
        b = torch.rand(3, device=DEV)
        torch.tandem.set_rng_state(state)
        assert torch.equal(b.cpu(), torch.rand(3, device=DEV).cpu())
        torch.tandem.manual_seed(7)
        assert torch.equal(a.cpu(), torch.rand(3, device=DEV).cpu())
        assert torch.tandem.initial_seed() == 7
        with torch.random.fork_rng(device_type="tandem"):
            torch.rand(3, device=DEV)
        assert torch.equal(b.cpu(), torch.rand(3, device=DEV).cpu())
        torch_tandem.mark_step()


# --- the device module --------------------------------------------------------------------------


def test_device_module():
    assert torch.tandem.is_available() and torch.tandem.device_count() == 1
    assert torch.get_device_module("tandem") is torch.tandem
    with torch.tandem.device(0), torch.tandem.stream(torch.tandem.current_stream()):
        torch.tandem.synchronize()
    start, end = torch.tandem.Event(enable_timing=True), torch.tandem.Event(enable_timing=True)
    start.record()
    torch.ones(3, device=DEV).sum()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert str(torch.ones(1, device=DEV).device) == "tandem:0"
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(1, device="tandem:1")


# --- unsupported features -----------------------------------------------------------------------

REFUSED = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "quantized move": lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to(DEV),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_layouts(name):
    x = torch.ones(3, 3, device=DEV)
    with pytest.raises(NotImplementedError, match="tandem"):
        REFUSED[name](x)
    assert (x + 1).sum().item() == 18


def test_a_negative_size_changes_nothing():
    x = torch.ones(4, 4, device="tandem")
    with pytest.raises(RuntimeError, match="negative dimension -1"):
        x.resize_(-1)
    assert x.shape == (4, 4)
    assert x.add(1).sum().item() == 32
