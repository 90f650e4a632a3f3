"""Small programs of many kinds, each one step of a loop: eager, traced and co-executed, bit for bit."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from helpers import check
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS = 5
CASES = {}
# Programs that PyTorch computes differently on other devices: docs/differs.md.
UNLIKE_EAGER = set()


def case(function=None, like_eager=True):
    """Registers a case: a function of the device and of `rand`, which draws normal numbers on the device."""
    if function is None:
        return lambda f: case(f, like_eager)
    CASES[function.__name__] = function
    if not like_eager:
        UNLIKE_EAGER.add(function.__name__)
    return function


def seeded(device):
    """Returns a source of normal numbers, the same on every device and in every iteration."""
    numbers = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=numbers).to(device)


def grads(loss, *of):
    """Returns a loss and the gradients of modules and leaf tensors."""
    loss.backward()
    leaves = [p for x in of for p in (x.parameters() if isinstance(x, nn.Module) else [x])]
    return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in leaves)]


def made(module, d, **to):
    torch.manual_seed(1)
    return module().to(d, **to)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_case(name):
    def program(device):
        torch.manual_seed(0)
        for _ in range(STEPS):
            yield CASES[name](device, seeded(device))

    check(program, coexecuted=0.4, like_eager=name not in UNLIKE_EAGER)


# --- recurrent layers, attention ----------------------------------------------------------------


@case(like_eager=False)
def lstm(d, rand):
    m = made(lambda: nn.LSTM(4, 5, 2, batch_first=True), d)
    out, (h, c) = m(rand(2, 3, 4))
    return grads(out.sum() + (h * c).sum(), m), out.detach()


@case(like_eager=False)
def packed_lstm(d, rand):
    m = made(lambda: nn.LSTM(4, 5), d)
    out, _ = m(nn.utils.rnn.pack_padded_sequence(rand(3, 2, 4), [3, 2]))
    return grads(out.data.sum(), m), out.data.detach(), out.batch_sizes


@case(like_eager=False)
def gru(d, rand):
    m = made(lambda: nn.GRU(4, 5), d)
    return grads(m(rand(3, 2, 4))[0].sum(), m)


@case(like_eager=False)
def lstm_cell(d, rand):
    m = made(lambda: nn.LSTMCell(4, 5), d)
    h, c = m(rand(3, 4))
    return grads(h.sum() + c.sum(), m)


@case(like_eager=False)
def gru_cell(d, rand):
    m = made(lambda: nn.GRUCell(4, 5), d)
    return grads(m(rand(3, 4)).sum(), m)


@case
def multihead_attention(d, rand):
    m = made(lambda: nn.MultiheadAttention(8, 2, batch_first=True), d)
    x = rand(2, 3, 8)
    out, weights = m(x, x, x)
    return grads(out.sum(), m), weights.detach()


@case
def multihead_attention_without_weights(d, rand):
    m = made(lambda: nn.MultiheadAttention(8, 2, batch_first=True), d)
    x = rand(2, 3, 8)
    return grads(m(x, x, x, need_weights=False)[0].sum(), m)


@case
def encoder_layer_in_eval(d, rand):
    m = made(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), d).eval()
    with torch.no_grad():
        return m(rand(2, 3, 8))


@case
def attention(d, rand):
    q = rand(2, 2, 4, 8).requires_grad_()
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    masked = F.scaled_dot_product_attention(q, q, q, rand(4, 4))
    return grads(out.sum() + masked.sum(), q), out.detach()


@case
def attention_with_dropout(d, rand):
    q = rand(2, 2, 4, 8).requires_grad_()
    return grads(F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum(), q)


# --- convolutions, normalization, embeddings, losses ---------------------------------------------


@case
def convolution(d, rand):
    m, x = made(lambda: nn.Conv2d(3, 4, 3, padding=1), d), rand(2, 3, 8, 8).requires_grad_()
    return grads(m(x).sum(), m, x)


@case
def convolution_channels_last(d, rand):
    last = torch.channels_last
    m = made(lambda: nn.Conv2d(3, 4, 3, padding=1), d, memory_format=last)
    out = m(rand(2, 3, 8, 8).to(memory_format=last))
    return grads(out.sum(), m), out.stride(), m.weight.grad.stride()


@case
def transposed_convolution(d, rand):
    m = made(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), d)
    return grads(m(rand(2, 3, 8, 8)).sum(), m)


@case
def convolution_twice_differentiated(d, rand):
    m, x = made(lambda: nn.Conv2d(3, 4, 3), d), rand(2, 3, 8, 8).requires_grad_()
    (g,) = torch.autograd.grad(m(x).pow(2).sum(), x, create_graph=True)
    return grads(g.pow(2).sum(), m, x)


@case
def batch_norm(d, rand):
    m = made(lambda: nn.BatchNorm2d(3), d)
    out = grads(m(rand(2, 3, 4, 4)).pow(2).sum(), m)
    return out, m.eval()(rand(2, 3, 4, 4)).detach(), m.running_var.clone()


@case
def embedding(d, rand):
    m = made(lambda: nn.Embedding(10, 4), d)
    return grads(m(torch.tensor([1, 2, 1], device=d)).sum(), m)


@case
def embedding_bag(d, rand):
    m = made(lambda: nn.EmbeddingBag(10, 4), d)
    return grads(m(torch.tensor([[1, 2, 3]], device=d)).sum(), m)


@case
def dropout(d, rand):
    x = rand(5, 5).requires_grad_()
    return grads(F.dropout(x, 0.5).sum(), x)


@case
def cross_entropy(d, rand):
    x = rand(5, 5).requires_grad_()
    return grads(F.cross_entropy(x, torch.tensor([1, 2, 3, 4, 0], device=d), label_smoothing=0.1), x)


@case
def ctc_loss(d, rand):
    x = rand(5, 2, 4).requires_grad_()
    targets = torch.tensor([[1, 2], [2, 3]], device=d)
    return grads(F.ctc_loss(x.log_softmax(-1), targets, (5, 5), (2, 2)), x)


@case
def pooling(d, rand):
    x = rand(1, 2, 8, 8).requires_grad_()
    total = F.max_pool2d(x, 2).sum() + F.avg_pool2d(x, 2).sum()
    return grads(total + F.adaptive_avg_pool2d(x, 3).sum() + F.adaptive_max_pool2d(x, 3).sum(), x)


@case
def interpolation(d, rand):
    x = rand(1, 2, 8, 8).requires_grad_()
    total = F.interpolate(x, scale_factor=2.0).sum() + F.interpolate(x, size=(5, 5), mode="bilinear").sum()
    return grads(total + F.grid_sample(x, rand(1, 4, 4, 2)).sum(), x)


@case
def weight_norm(d, rand):
    p = nn.utils.parametrizations
    m = made(lambda: nn.Sequential(p.weight_norm(nn.Linear(3, 3)), p.spectral_norm(nn.Linear(3, 3))), d)
    return grads(m(rand(1, 3)).sum(), m)


@case
def weight_norm_with_hooks(d, rand):
    m = made(lambda: nn.utils.weight_norm(nn.Linear(3, 3)), d)
    return grads(m(rand(1, 3)).sum(), m)


# --- indices, sizes that depend on data, linear algebra -------------------------------------------


@case
def index_put(d, rand):
    x = rand(5, 5)
    x[torch.tensor([0, 1], device=d), torch.tensor([1, 2])] = 3.0
    x[x > 0] = 0
    return x, x[[0, 2]]


@case
def sizes_that_depend_on_data(d, rand):
    x = rand(5, 5)
    whole = (x * 2).round()
    return (x > 0).nonzero(), x[x > 0], whole.unique(return_counts=True), whole[0].unique_consecutive()


@case
def sorting(d, rand):
    x = rand(5, 5)
    return tuple(x.sort()), tuple(x.topk(2)), x.argsort(), tuple(x.kthvalue(2)), x.msort()


@case
def solve(d, rand):
    a = rand(4, 4).requires_grad_()
    return grads(torch.linalg.solve(a, rand(4)).sum(), a)


@case
def decompositions(d, rand):
    a = rand(4, 4)
    spd = a @ a.T + torch.eye(4, device=d)
    return (
        *torch.linalg.svd(a), *torch.linalg.qr(a), *torch.linalg.eigh(spd), torch.linalg.inv(a),
        torch.linalg.cholesky(spd), *torch.linalg.eig(a), torch.linalg.lstsq(a, rand(4, 2)).solution,
    )  # fmt: skip


@case
def fourier(d, rand):
    x = rand(8).requires_grad_()
    spectrum = torch.stft(rand(64), 16, return_complex=True, window=torch.hann_window(16, device=d))
    return grads(torch.fft.rfft(x).abs().sum(), x), spectrum


@case
def histograms(d, rand):
    x = rand(10)
    edges = rand(5).sort()[0]
    return (
        torch.histc(x), torch.bincount(torch.tensor([1, 2, 2], device=d)), x.cumsum(0), x.nan_to_num(),
        torch.searchsorted(edges, x), torch.bucketize(x, edges), torch.histogram(x.cpu(), 4).hist,
    )  # fmt: skip


@case
def joining(d, rand):
    a, b = rand(2), rand(2)
    empty = torch.empty(0, device=d)
    return (
        torch.cat([a, b]), torch.stack([a, b]), torch.cat([a, empty]), torch.meshgrid(a, b, indexing="ij"),
        torch.einsum("ij,jk->ik", rand(2, 3), rand(3, 2)), torch.cdist(rand(2, 3), rand(2, 3)),
        torch.block_diag(rand(2, 2), rand(2, 2)),
    )  # fmt: skip


@case
def products_and_statistics(d, rand):
    x = rand(3).requires_grad_()
    total = x.cumprod(0).sum() + x.prod() + x.std() + x.median() + torch.lerp(x, rand(3), 0.3).sum()
    return grads(total, x), tuple(x.detach().mode())


# --- autograd --------------------------------------------------------------------------------------


@case
def transforms(d, rand):
    def f(w, x):
        return (x @ w).sin().sum()

    model = made(lambda: nn.Linear(3, 2), d)
    out = functional_call(model, {"weight": rand(2, 3)}, (rand(2, 3),))
    per_sample = vmap(grad(f), (None, 0))(rand(3), rand(4, 2, 3))
    return grad(f)(rand(3), rand(2, 3)), per_sample, jacrev(torch.sin)(rand(3)), out.detach()


@case
def vmap_with_random_numbers(d, rand):
    return vmap(lambda x: F.dropout(x, 0.5), randomness="different")(rand(4, 3))


@case
def checkpoints(d, rand):
    m, out = made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), d), []
    for reentrant in (False, True):
        x = rand(2, 4).requires_grad_()
        out += grads(checkpoint(m, x, use_reentrant=reentrant).sum(), m, x)
    return out


@case
def hooks(d, rand):
    x = rand(3).requires_grad_()
    y = x * 2
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    (y * y).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        z = (x * x).sum()
    z.backward()
    return x.grad, y.grad


# --- optimizers and mixed precision ----------------------------------------------------------------

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def optimized(name):
    def steps(d, rand):
        m = made(lambda: nn.Linear(4, 4), d)
        optimizer = OPTIMIZERS[name](m.parameters())
        m(rand(2, 4)).sum().backward()
        optimizer.step()
        norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=False)
        optimizer.step()
        return norm, [p.detach().clone() for p in m.parameters()]

    steps.__name__ = name
    return steps


for optimizer in OPTIMIZERS:
    case(optimized(optimizer))


@case
def lbfgs(d, rand):
    m = made(lambda: nn.Linear(2, 1), d)
    optimizer = torch.optim.LBFGS(m.parameters())

    def closure():
        optimizer.zero_grad()
        loss = m(torch.ones(2, 2, device=d)).pow(2).sum()
        loss.backward()
        return loss

    return optimizer.step(closure).detach(), [p.detach().clone() for p in m.parameters()]


@case
def grad_scaler(d, rand):
    scaler = torch.amp.GradScaler(d)
    m = made(lambda: nn.Linear(4, 4), d)
    optimizer = torch.optim.SGD(m.parameters(), 0.1, foreach=False)
    scaler.scale(m(rand(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), [p.detach().clone() for p in m.parameters()]


@case
def autocast(d, rand):
    m = made(lambda: nn.Linear(4, 4), d)
    with torch.autocast(d, torch.bfloat16):
        out = m(rand(2, 4))
    return out.dtype, grads(out.sum(), m)


# --- tensors and storages --------------------------------------------------------------------------


@case
def set_and_resize(d, rand):
    a, b = rand(4), rand(6)
    a.set_(b.untyped_storage(), 0, (2, 3), (3, 1))
    c = rand(2)
    c.resize_(10)
    c.data = rand(3, 3)
    before = a.clone()
    other = rand(6)
    other.untyped_storage().resize_(0)
    return before, c, other.untyped_storage().nbytes(), torch.empty(0, device=d).resize_(3).shape


@case
def out_arguments(d, rand):
    out = torch.empty(0, device=d)
    torch.add(rand(3), rand(3), out=out)
    return out, torch.mm(rand(2, 3), rand(3, 2), out=torch.empty(2, 2, device=d))


@case
def views(d, rand):
    a = rand(4, 6)
    a[1:, ::2].mul_(2)
    a.select(0, 1).fill_(1)
    return [
        t.clone()
        for t in (a.view(2, 12), a.t(), a.unfold(1, 2, 2), *a.chunk(2), *a.split(2), a.expand(3, 4, 6),
                  a.diagonal(), *a.unbind(), a.view(torch.int32), a.flatten(), a.reshape(3, 8), a.squeeze(),
                  a.movedim(0, 1), torch.as_strided(a, (2, 2), (1, 2)), a.T.view_as(a.T))
    ]  # fmt: skip


@case
def complex_numbers(d, rand):
    a = torch.complex(rand(3), rand(3))
    return torch.view_as_real(a).clone(), a.imag.clone(), torch.polar(rand(2).abs(), rand(2)), a.conj() @ a


@case
def host_values(d, rand):
    x = rand(1)
    same = torch.equal(x, x), torch.allclose(x, x), x.is_nonzero(), bool(x > 0)
    return x.item(), float(x), same, rand(3).tolist(), repr(rand(3)).split(", device")[0].rstrip(")")


@case
def copies(d, rand):
    m = made(lambda: nn.Linear(2, 2), d)
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    loaded = [(file.seek(0), torch.load(file, map_location=where))[1] for where in (None, "cpu")]
    return copy.deepcopy(m)(rand(1, 2)).detach(), loaded, pickle.loads(pickle.dumps(rand(2)))


@case
def random_numbers(d, rand):
    g = torch.Generator(d)
    g.manual_seed(1)
    return (
        torch.rand(3, device=d), torch.randn(3, device=d), torch.randint(3, (3,), device=d),
        torch.randperm(5, device=d), torch.multinomial(rand(5).abs(), 2), rand(3).bernoulli_(0.5),
        rand(3).normal_(), rand(3).uniform_(), torch.normal(rand(3), rand(3).abs()),
        torch.rand(3, device=d, generator=g),
    )  # fmt: skip


@case
def constructors(d, rand):
    return (
        torch.tensor([1.0, 2.0], device=d), torch.as_tensor([1], device=d), torch.arange(3, device=d),
        torch.linspace(0, 1, 3, device=d), torch.full((2,), 1.0, device=d), torch.zeros(2, device=d),
        torch.eye(2, device=d), torch.tril_indices(2, 2, device=d), torch.from_numpy(np.ones(2)).to(d),
    )  # fmt: skip


@case
def host_tensors_among_others(d, rand):
    x, two = rand(3), torch.tensor(2.0)
    sums = x + two, two * x, torch.where(x > 0, x, torch.tensor(0.0)), x + 2, x[torch.tensor([0, 1])]
    host = torch.zeros(3)
    host += x
    numbers = torch.Generator().manual_seed(5)
    full = x + torch.randn(3, generator=numbers)
    return (
        sums,
        full,
        F.linear(torch.randn(2, 3, generator=numbers), x.expand(4, 3)),
        host,
        x.cpu().numpy().sum(),
    )


@case
def subclasses(d, rand):
    class Named(torch.Tensor):
        pass

    x = rand(3).as_subclass(Named)
    p = nn.Parameter(x)
    return (
        type(x + 1).__name__,
        (x + 1).as_subclass(torch.Tensor),
        grads((p * 2).sum(), p)[0].as_subclass(torch.Tensor),
    )


@case
def nested_tensors(d, rand):
    nested = torch.nested.nested_tensor([rand(2, 3), rand(3, 3)], layout=torch.jagged)
    return (nested * 2).values(), nested.offsets(), nested.sum(1)


@case
def compiled_without_a_backend(d, rand):
    return torch.compile(lambda x: x.sin() + 1, backend="eager")(rand(3))


@case
def storages(d, rand):
    storage = rand(3).untyped_storage()
    copied = storage.clone()
    copied.copy_(storage)
    return storage.nbytes(), bytes(copied.cpu().tolist()), rand(3).cpu().numpy().tolist()


@case
def pinned(d, rand):
    return torch.ones(3).pin_memory().to(d, non_blocking=True) + rand(3)


def test_dropout_of_complex_numbers():
    def program(device):
        for _ in range(STEPS):
            rand = seeded(device)
            yield F.dropout(torch.complex(rand(6), rand(6)), 0.5)

    check(program)


# --- other ways to read values ---------------------------------------------------------------------


def test_host_memory_that_is_not_there():
    x = torch.ones(2, 3, device="tandem")
    with pytest.raises(TypeError):
        x.numpy()
    assert np.array_equal(np.asarray(x), np.ones((2, 3)))
    assert x.sum().item() == 6


def test_data_parallel_on_one_device():
    x = torch.ones(2, 3, device="tandem")
    layer = nn.Linear(3, 2).to("tandem")
    assert torch.equal(nn.DataParallel(layer)(x).cpu(), layer(x).cpu())
