"""Features that use autograd: transforms, hooks, checkpoints, recurrent and attention layers, optimizers."""

from functools import partial

import pytest
import torch
from helpers import check
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

STEPS = 14


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def copies(tensors):
    return [t.detach().clone() for t in tensors]


def train(device, model, loss_of, steps=STEPS, optimizer=None):
    """Plain training with `loss_of(model, step)`."""
    model.to(device)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        grads = copies(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        yield loss.detach(), grads
    yield copies(model.state_dict().values())


# --- torch.func ---------------------------------------------------------------------------------


def test_func_grad():
    def loss(x, w):
        return (x @ w).tanh().pow(2).sum()

    def penalty(f, w):
        return grad(f)(w).sum()

    def program(device):
        w = data(4, 3).to(device)
        for step in range(STEPS):
            x = data(5, 4, seed=step).to(device)
            f = partial(loss, x)
            g, value = grad_and_value(f)(w)
            w = w - 0.1 * g
            yield w, value, grad(partial(penalty, f))(w)

    check(program)


def test_func_vmap_of_grad():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss(params, x, y):
            return F.cross_entropy(functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

        per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
        for step in range(STEPS):
            x = data(6, 4, seed=step).to(device)
            y = (torch.arange(6) % 2).to(device)
            grads = per_sample(params, x, y)
            params = {k: p - 0.1 * grads[k].mean(0) for k, p in params.items()}
            yield grads, dict(params)

    check(program)


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian])
def test_func_jacobians(transform):
    def program(device):
        x = data(4).to(device)
        for _ in range(STEPS):
            j = transform(lambda x: (x.sin() * x.flip(0)).cumsum(0))(x)
            x = x + 0.01 * j.sum(tuple(range(1, j.dim())))
            yield j, x

    check(program)


def test_func_products():
    def program(device):
        x = data(4).to(device)
        for _ in range(STEPS):
            out, pull = vjp(torch.sin, x)
            (g,) = pull(torch.ones_like(out))
            value, tangent = jvp(torch.exp, (x,), (g,))
            x = x + 0.01 * tangent
            yield g, value, x

    check(program)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_randomness(randomness):
    def program(device):
        x = data(4, 5).to(device)
        for _ in range(STEPS):
            yield vmap(lambda row: F.dropout(row, 0.5) + torch.rand(5, device=device), randomness=randomness)(
                x
            )

    check(program)


def test_forward_mode():
    def program(device):
        x, t = data(4).to(device), data(4, seed=1).to(device)
        for _ in range(STEPS):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, t)
                out = torch.autograd.forward_ad.unpack_dual(dual.sin() * dual)
                primal, tangent = out.primal.clone(), out.tangent.clone()
            x = x + 0.1 * tangent
            yield primal, tangent

    check(program)


def test_zero_tangents_leave_signs_alone():
    def program(device):
        x, t = data(4).to(device), torch.zeros(4).to(device)
        for step in range(STEPS):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, t)
                # The constant's tangent is a zero tensor without memory. PyTorch does not add it.
                out = torch.autograd.forward_ad.unpack_dual(dual * -float(step + 1) + x * x)
                yield out.primal.clone(), out.tangent.signbit(), out.tangent.clone()
            x = x + 1

    check(program)


def test_functional_api():
    def program(device):
        x = data(3).to(device)
        for _ in range(STEPS):
            h = torch.autograd.functional.hessian(lambda x: (x.pow(3) * x.flip(0)).sum(), x)
            j = torch.autograd.functional.jacobian(lambda x: x.exp() * x.sum(), x)
            x = x - 0.01 * h.sum(0)
            yield h, j

    check(program)


# --- checkpoints --------------------------------------------------------------------------------


def blocks():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5)) for _ in range(3)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    def loss(model, step):
        x = data(4, 6, seed=step).to(model[0][0].weight.device).requires_grad_()
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x.pow(2).mean()

    check(lambda device: train(device, blocks(), loss))


def test_checkpoint_sequential():
    def loss(model, step):
        x = data(4, 6, seed=step).to(model[0][0].weight.device).requires_grad_()
        return checkpoint_sequential(model, 2, x, use_reentrant=False).pow(2).mean()

    check(lambda device: train(device, blocks(), loss))


# --- hooks --------------------------------------------------------------------------------------


def test_module_hooks():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        seen = []
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[1].register_forward_hook(lambda m, args, out: out + 0.1)
        model[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
        model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].abs().max()))
        x = data(3, 4).to(device).requires_grad_()
        yield from train(device, model, lambda model, step: model(x).pow(2).sum())
        yield seen

    check(program)


def test_parameter_hooks():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 2).to(device)
        seen = []
        model.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
        x = data(3, 4).to(device)
        yield from train(device, model, lambda model, step: model(x).pow(2).sum())
        yield seen

    check(program)


def test_optimizer_in_the_backward():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
        optimizers = {p: torch.optim.Adam([p], 0.01, foreach=False) for p in model.parameters()}

        def step_now(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_now)
        for step in range(STEPS):
            loss = model(data(3, 4, seed=step).to(device)).pow(2).mean()
            loss.backward()
            yield loss.detach(), copies(model.parameters())

    check(program)


def test_saved_tensor_hooks():
    def loss(model, step):
        x = data(3, 6, seed=step).to(model[0][0].weight.device)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            h = model[0](x)
        with torch.autograd.graph.save_on_cpu():
            h = model[1](h)
        return model[2](h).sin().sum()

    check(lambda device: train(device, blocks(), loss))


def test_saved_tensor_that_was_modified():
    def program(device):
        x = data(4).to(device).requires_grad_()
        for _ in range(STEPS):
            y = x.exp()
            y.add_(1)
            caught = None
            try:
                y.sum().backward()
            except RuntimeError as e:
                caught = "modified by an inplace operation" in str(e)
            yield y.detach(), caught, x.grad

    check(program)


def test_anomaly_mode():
    def program(device):
        x = data(4).abs().to(device).requires_grad_()
        for step in range(STEPS):
            caught = None
            try:
                with torch.autograd.detect_anomaly(check_nan=True):
                    (x * (0 if step % 5 == 4 else 1)).sqrt().mul(0 if step % 5 == 4 else 2).sum().backward()
            except RuntimeError as e:
                caught = "nan" in str(e)
            yield caught, x.grad.clone()

    check(program)


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        ("encoder", True),
        ("decoder", True),
        ("transformer", True),
        ("encoder", False),
        ("decoder", False),
        ("transformer", False),
    ],
)
def test_transformers(kind, training):
    def program(device):
        torch.manual_seed(1)
        if kind == "encoder":
            model = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        elif kind == "decoder":
            model = nn.TransformerDecoderLayer(8, 2, 16, 0.1, batch_first=True)
        else:
            model = nn.Transformer(8, 2, 1, 1, 16, 0.1, batch_first=True)
        model.train(training).to(device)
        for step in range(STEPS):
            x = data(2, 5, 8, seed=step).to(device)
            y = data(2, 3, 8, seed=step + 1).to(device)
            args = (x,) if kind == "encoder" else (x, y)
            if training:
                out = model(*args)
                out.pow(2).mean().backward()
                yield out.detach(), copies(p.grad for p in model.parameters())
            else:
                with torch.no_grad():
                    yield model(*args), None

    check(program)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_multihead_attention(need_weights, masked):
    def program(device):
        torch.manual_seed(1)
        model = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        mask = torch.zeros(2, 5, dtype=torch.bool)
        mask[0, 3:] = True

        def loss(model, step):
            x = data(2, 5, 8, seed=step).to(device)
            padding = mask.to(device) if masked else None
            out, weights = model(x, x, x, key_padding_mask=padding, need_weights=need_weights)
            return out.pow(2).mean() + (weights.square().mean() if need_weights else 0)

        yield from train(device, model, loss)

    check(program)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers(kind, packed):
    def program(device):
        torch.manual_seed(1)
        model = getattr(nn, kind)(4, 5, 2, batch_first=True, bidirectional=True, dropout=0.2)

        def loss(model, step):
            x = data(3, 6, 4, seed=step).to(device)
            if packed:
                lengths = torch.tensor([6, 4 - step % 2, 2])
                out, _ = model(rnn.pack_padded_sequence(x, lengths, batch_first=True))
                out, lengths = rnn.pad_packed_sequence(out, batch_first=True)
                out = out.sum(1) / lengths.to(device).unsqueeze(1)
            else:
                out, _ = model(x)
            return out.pow(2).mean()

        yield from train(device, model, loss)

    check(program, like_eager=kind == "LSTM" and not packed)


@pytest.mark.parametrize(
    "options",
    [{"bias": False}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.5}, {"batch_first": True}],
    ids=str,
)
def test_lstm_layers_have_eagers_bits(options):
    """oneDNN's layer saves values for the backward pass in grad mode alone, on whatever thread it runs."""

    def program(device):
        torch.manual_seed(1)
        model = nn.LSTM(4, 5, **options).to(device)
        for step in range(12):
            x = data(6, 3, 4, seed=step).to(device).requires_grad_()
            out, (h, c) = model(x)
            model.zero_grad()
            (out.pow(2).sum() + h.sum() + c.mean()).backward()
            yield out.detach(), x.grad, [p.grad.clone() for p in model.parameters()]
            with torch.no_grad():
                yield model(x)
            with torch.inference_mode():
                yield model(data(6, 3, 4, seed=step).to(device))[0].clone()

    check(program)


def test_gradients_of_an_lstm_layers_gradients():
    def program(device):
        torch.manual_seed(1)
        model = nn.LSTM(4, 5).to(device)
        for step in range(6):
            x = data(6, 3, 4, seed=step).to(device).requires_grad_()
            [grad] = torch.autograd.grad(model(x)[0].pow(2).sum(), x, create_graph=True)
            grad.pow(2).sum().backward()
            yield x.grad

    check(program)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cells(kind):
    def program(device):
        torch.manual_seed(1)
        model = getattr(nn, kind)(4, 5)

        def loss(model, step):
            h = torch.zeros(3, 5, device=device)
            state = (h, h) if kind == "LSTMCell" else h
            for t in range(3 + step % 3):
                state = model(data(3, 4, seed=step + t).to(device), state)
            return (state[0] if kind == "LSTMCell" else state).pow(2).mean()

        yield from train(device, model, loss)

    check(program, like_eager=kind == "RNNCell")


# --- autograd itself ----------------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        ctx.mark_non_differentiable(outside := (x < low) | (x > high))
        return x.clamp(low, high), outside

    @staticmethod
    def backward(ctx, g, _):
        (x,) = ctx.saved_tensors
        low, high = ctx.bounds
        return torch.where((x >= low) & (x <= high), g, g * 0.1), None, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_custom_functions():
    def loss(model, step):
        x = data(4, 6, seed=step).to(model[0][0].weight.device)
        y, outside = Clipped.apply(model(x), -0.1 * step, 0.5)
        return Doubled.apply(y.sin()).sum() + outside.sum()

    check(lambda device: train(device, blocks(), loss))


def test_retained_graph():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 3).to(device)
        x = data(2, 4).to(device).requires_grad_()
        for step in range(STEPS):
            y = model(x).tanh()
            y.sum().backward(retain_graph=True)
            y.pow(2).sum().backward(retain_graph=step % 2 == 0)
            yield x.grad.clone(), model.weight.grad.clone()

    check(program)


def test_graph_retained_over_steps():
    def program(device):
        w = data(4).to(device).requires_grad_()
        loss = w.exp().sin().sum()
        for _ in range(STEPS):
            loss.backward(retain_graph=True)
            yield w.grad.clone()

    check(program)


def test_create_graph():
    def program(device):
        w = data(4).to(device).requires_grad_()
        optimizer = torch.optim.SGD([w], 0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (g,) = torch.autograd.grad(w.pow(3).sum(), w, create_graph=True)
            (h,) = torch.autograd.grad(g.sum(), w, create_graph=True)
            (g * h).sum().backward()
            optimizer.step()
            yield g.detach(), h.detach(), w.detach().clone()

    check(program)


def test_inner_loop_of_meta_learning():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            total = 0
            for task in range(2):
                x = data(5, 1, seed=10 * step + task).to(device)
                fast = dict(model.named_parameters())
                for _ in range(1 + step % 2):
                    loss = F.mse_loss(functional_call(model, fast, (x,)), x.sin())
                    grads = torch.autograd.grad(loss, fast.values(), create_graph=True)
                    fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
                total = total + F.mse_loss(functional_call(model, fast, (-x,)), -x.sin())
            total.backward()
            optimizer.step()
            yield total.detach(), copies(model.parameters())

    check(program)


def test_gan():
    def program(device):
        torch.manual_seed(1)
        g = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
        d = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1)).to(device)
        g_opt = torch.optim.Adam(g.parameters(), 0.01, betas=(0.5, 0.999), foreach=False)
        d_opt = torch.optim.Adam(d.parameters(), 0.01, betas=(0.5, 0.999), foreach=False)
        ones, zeros = torch.ones(4, 1, device=device), torch.zeros(4, 1, device=device)
        for step in range(2 * STEPS):
            real = data(4, 2, seed=step).to(device)
            fake = g(torch.randn(4, 3, device=device))
            d_opt.zero_grad()
            d_loss = F.binary_cross_entropy_with_logits(d(real), ones)
            d_loss = d_loss + F.binary_cross_entropy_with_logits(d(fake.detach()), zeros)
            d_loss.backward()
            d_opt.step()
            g_opt.zero_grad()
            g_loss = F.binary_cross_entropy_with_logits(d(fake), ones)
            g_loss.backward()
            g_opt.step()
            yield d_loss.detach(), g_loss.detach()
        yield copies(g.parameters()), copies(d.parameters())

    check(program)


def test_accumulated_gradients():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2 * STEPS):
            model(data(3, 4, seed=step).to(device)).pow(2).mean().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            yield None if model.weight.grad is None else model.weight.grad.clone()

    check(program)


def test_lbfgs():
    def program(device):
        torch.manual_seed(1)
        model = nn.Linear(3, 1).double().to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")
        x = data(6, 3).double().to(device)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(STEPS):
            loss = optimizer.step(closure)
            yield loss.detach(), copies(model.parameters())

    check(program, coexecuted=0.3)


def test_averaged_and_shared_parameters():
    def program(device):
        torch.manual_seed(1)
        embed = nn.Embedding(7, 4).to(device)
        head = nn.Linear(4, 7, bias=False).to(device)
        head.weight = embed.weight
        average = torch.optim.swa_utils.AveragedModel(embed)
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for step in range(STEPS):
            tokens = torch.tensor([step % 7, (step + 3) % 7], device=device)
            optimizer.zero_grad()
            loss = F.cross_entropy(head(embed(tokens)), tokens)
            loss.backward()
            optimizer.step()
            average.update_parameters(embed)
            yield loss.detach(), embed.weight.detach().clone(), copies(average.parameters())

    check(program, like_eager=False)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_parametrizations(norm):
    def program(device):
        torch.manual_seed(1)
        model = getattr(nn.utils.parametrizations, norm)(nn.Linear(4, 3))
        yield from train(device, model, lambda m, step: m(data(2, 4, seed=step).to(device)).pow(2).sum())

    check(program)


def test_inference_mode():
    def program(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
        for step in range(STEPS):
            with torch.inference_mode():
                out = model(data(3, 4, seed=step).to(device))
                out.add_(1)
            yield out, out.is_inference(), copies(model.buffers())

    check(program)


def test_gradcheck():
    x = data(3, 4).double().to("tandem").requires_grad_()
    w = data(4, 2).double().to("tandem").requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: (x @ w).tanh().pow(2), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: (x @ w).sin(), (x, w))
