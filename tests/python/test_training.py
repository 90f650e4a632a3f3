"""Training that depends on values, and training whose parameters are frozen, averaged, clipped or scaled on
the way.
"""

import copy
import math
import random
from functools import partial

import pytest
import torch
from helpers import coexecuting, data
from models import STEPS, adam, copies, grads, layers, sgd, train
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

# --- control flow under backward ----------------------------------------------------------------


@coexecuting
def test_branches_that_depend_on_values(device):
    model, other = layers(device, 4, 4, 2), layers(device, 4, 2)

    def loss(x, step):
        y = model(x) if x.sum() > 0 else other(x) * 2
        if y.mean() > 0:
            y = y.sigmoid()
        return y.pow(2).mean()

    yield from train(device, nn.ModuleList([model, other]), loss, steps=2 * STEPS)


@coexecuting
def test_layers_left_out_at_random(device):
    blocks = nn.ModuleList(layers(device, 4, 4) for _ in range(5))
    draw = random.Random(0)

    def loss(x, step):
        for block in blocks[:4]:
            if draw.random() < 0.7:
                x = x + block(x).tanh()
        return blocks[4](x).pow(2).mean()

    yield from train(device, blocks, loss, steps=3 * STEPS)


@coexecuting
def test_a_layer_used_as_often_as_a_value_says(device):
    layer = layers(device, 4, 4)

    def loss(x, step):
        rounds = 0
        while x.norm() > 0.7 and rounds < 8:
            x = layer(x).tanh() * 0.9
            rounds += 1
        return layer(x).pow(2).mean()

    yield from train(device, layer, loss, steps=2 * STEPS)


@coexecuting
def test_trees(device):
    """A recursive network over a tree, whose structure differs in each iteration."""
    leaf, node = layers(device, 4, 4), layers(device, 8, 4)

    def value(numbers, x, depth):
        if depth == 0 or numbers.random() < 0.3:
            return leaf(x[numbers.randrange(3)])
        return node(torch.cat([value(numbers, x, depth - 1), value(numbers, x, depth - 1)])).tanh()

    def loss(x, step):
        return value(random.Random(step), x, 3).pow(2).sum()

    yield from train(device, nn.ModuleList([leaf, node]), loss, steps=3 * STEPS)


@coexecuting
def test_experts_chosen_by_a_router(device):
    """Each expert gets the rows that the router assigns to it. An expert without rows is not called."""
    router, experts = layers(device, 4, 3), nn.ModuleList(layers(device, 4, 4) for _ in range(3))

    def loss(x, step):
        weights = router(x).softmax(1)
        chosen, out = weights.argmax(1), torch.zeros_like(x)
        for k, expert in enumerate(experts):
            (rows,) = torch.where(chosen == k)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, k, None])
        return out.pow(2).mean()

    yield from train(device, nn.ModuleList([router, experts]), loss, steps=2 * STEPS)


@coexecuting
def test_policy_gradients(device):
    """Episodes end at a sampled action, and some iterations copy a target network."""
    policy, value = layers(device, 4, 3), layers(device, 4, 1)
    target = copy.deepcopy(value)
    optimizer = sgd(policy, value)
    for step in range(2 * STEPS):
        state, log, rewards = data(4, seed=step).to(device), [], []
        while len(log) < 5:
            odds = torch.distributions.Categorical(logits=policy(state))
            action = odds.sample()
            log.append(odds.log_prob(action))
            rewards.append(target(state).detach().sin() + action)
            if action.item() == 2:
                break
            state = state.roll(1) + action * 0.1
        optimizer.zero_grad()
        error = sum(rewards) - value(state)
        (error.pow(2).sum() - (torch.stack(log) * error.detach()).sum()).backward()
        optimizer.step()
        if step % 4 == 3:
            target.load_state_dict(value.state_dict())
        yield len(log), error.detach(), copies(policy, value)


@coexecuting
def test_batches_without_rows(device):
    model = layers(device, 4, 3, 1)

    def loss(x, step):
        x = x[: step % 3]
        return model(x).pow(2).sum() + F.cross_entropy(
            x, x.new_zeros(len(x), dtype=torch.long), reduction="sum"
        )

    yield from train(device, model, loss)


# --- in place, detached, frozen -----------------------------------------------------------------


@coexecuting
def test_second_gradients_through_writes_in_place(device):
    w = data(4).to(device).requires_grad_()
    for step in range(STEPS):
        x = w * 2
        x.mul_(w)
        x[1:3].add_(w[:2] ** 2)
        if step % 2:
            x[step % 3] = w.sum()
        x.clamp_(-3, 3).sin_()
        (g,) = torch.autograd.grad(x.sum(), w, create_graph=True)
        g = g.mul(w).square_() if step % 3 else g.exp()
        g.sum().backward()
        yield x.detach(), g.detach(), w.grad.clone()
        w.grad = None


@coexecuting
def test_blocks_without_gradients(device):
    model, teacher = layers(device, 4, 4, 2), layers(device, 4, 2)

    @torch.no_grad()
    def soft(x):
        return teacher(x).softmax(1)

    def loss(x, step):
        with torch.inference_mode(step % 3 == 2):
            scores = teacher(x).sum()
        with torch.set_grad_enabled(step % 2 == 0):
            h = model[:2](x)
            with torch.enable_grad():
                out = model[2](h)
        with torch.no_grad():
            out.data.clamp_(-1, 1)
        return F.kl_div(out.log_softmax(1), soft(x), reduction="batchmean") * (1 if scores > 0 else 2)

    yield from train(device, model, loss, steps=2 * STEPS)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.by * g, None


@coexecuting
def test_detached_on_the_way(device):
    """Straight-through estimators, reversed gradients, and stop-gradients on either side."""
    model, head = layers(device, 4, 4), layers(device, 4, 2)

    def loss(x, step):
        h = model(x)
        match step % 4:
            case 0:
                h = h + (h.round() - h).detach()
            case 1:
                h = Reversed.apply(h, step / 10)
            case 2:
                h = F.gumbel_softmax(h, hard=True)
            case 3:
                h = h.detach_()
        a, b = head(h), head(model(-x).tanh())
        return F.mse_loss(a, b.detach()) + F.mse_loss(a.detach(), b)

    yield from train(device, nn.ModuleList([model, head]), loss, steps=2 * STEPS)


@coexecuting
def test_layers_frozen_and_thawed(device):
    model = layers(device, 4, 4, 4, 1)
    optimizer = adam(model)
    for step in range(3 * STEPS):
        for k, layer in enumerate(model):
            layer.requires_grad_(k >= 2 * (step % 3))
        optimizer.zero_grad(set_to_none=step % 4 < 2)
        loss = model(data(3, 4, seed=step).to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.detach(), grads(model), copies(model)


@coexecuting
def test_parameters_shared(device):
    """One weight is an embedding, a head and, transposed, a layer. The number of its uses changes."""
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    embed.weight = head.weight
    embed.weight.data.copy_(data(7, 4))
    model = nn.ModuleDict({"embed": embed, "head": head}).to(device)
    assert model["embed"].weight is model["head"].weight

    def loss(x, step):
        tokens = x.abs().long() + torch.arange(4, device=device)
        h = embed(tokens)
        for _ in range(step % 3):
            h = (h @ embed.weight.t() @ head.weight).tanh()
        return F.cross_entropy(head(h).flatten(0, 1), tokens.flatten())

    yield from train(device, model, loss)


@coexecuting
def test_parametrizations(device):
    model = layers(device, 4, 4, 4, 2)
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).t()

        def right_inverse(self, w):
            return w.triu()

    for step in range(2 * STEPS):
        if step % 4 == 1:
            parametrize.register_parametrization(model[2], "weight", Symmetric())
        elif step % 4 == 3:
            parametrize.remove_parametrizations(model[2], "weight")
        elif step % 4 == 0 and step:
            parametrizations.spectral_norm(model[2])
        model.zero_grad()
        x = data(3, 4, seed=step).to(device)
        with parametrize.cached():
            loss = (model(x) + model(-x)).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)
        yield loss.detach(), copies(model)


@coexecuting
def test_parameters_as_one_vector(device):
    model = layers(device, 4, 3, 1)
    for step in range(STEPS):
        vector = nn.utils.parameters_to_vector(model.parameters())
        loss = model(data(3, 4, seed=step).to(device)).pow(2).mean() + 0.01 * vector.norm()
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        vector = vector.detach() - 0.1 * nn.utils.parameters_to_vector(slopes)
        if step % 3 == 2:
            vector = vector / max(vector.norm().item(), 1)
        nn.utils.vector_to_parameters(vector, model.parameters())
        yield loss.detach(), vector


# --- edited gradients ---------------------------------------------------------------------------


@coexecuting
def test_clipping_where_it_is_needed(device):
    model = layers(device, 4, 4, 1)
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        (model(data(3, 4, seed=step).to(device)) * (1 + step % 4)).pow(2).mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=False)
        if norm > 2:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0, foreach=False, error_if_nonfinite=True)
        elif norm > 1:
            nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=False)
        optimizer.step()
        yield norm, grads(model), copies(model)


@coexecuting
def test_gradients_edited(device):
    """Noise, centered gradients, sums over several iterations, and gradients that are dropped or inserted."""
    model = layers(device, 4, 4, 1)
    optimizer = sgd(model, momentum=0.9, nesterov=True)
    window = []

    def loss(x, step):
        out = model(x).pow(2).mean()
        out.backward()
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
        window.append([p.grad.clone() for p in model.parameters()])
        del window[: -1 - step % 3]
        for p, *gs in zip(model.parameters(), *window, strict=True):
            p.grad = torch.stack(gs).mean(0)
        if step % 4 == 1:
            model[0].bias.grad = None
        return model(x).abs().mean()

    yield from train(device, model, loss, optimizer, steps=2 * STEPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_losses_under_autocast(dtype):
    @coexecuting
    def program(device):
        model = layers(device, 4, 8, 1)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=3)
        for step in range(3 * STEPS):
            optimizer.zero_grad()
            x = data(3, 4, seed=step).to(device) * (1e30 if step % 5 == 4 else 1)
            with torch.autocast(device, dtype, enabled=step % 3 < 2):
                out = model(x)
                loss = (out.float() * (1e30 if step % 5 == 4 else 1)).pow(2).mean()
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            yield loss.detach(), scaler.get_scale(), copies(model)

    program()


@coexecuting
def test_averages_of_a_model(device):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
    fixed = AveragedModel(model, avg_fn=lambda a, p, n: a + (p - a) / (n + 1))
    moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema = copy.deepcopy(model).requires_grad_(False)
    for step, out in enumerate(train(device, model, lambda x, step: model(x).pow(2).mean(), steps=2 * STEPS)):
        with torch.no_grad():
            for p, q in zip(model.parameters(), ema.parameters(), strict=True):
                q.lerp_(p, min(0.5, 1 / (1 + step)))
        moving.update_parameters(model)
        if step % 3 == 2:
            fixed.update_parameters(model)
        if step % 6 == 5:
            update_bn([data(3, 4, seed=k).to(device) for k in range(2)], fixed)
        yield *out, copies(fixed, moving, ema)


@coexecuting
def test_closures_evaluated_as_often_as_needed(device):
    """The number of evaluations in a line search depends on values."""
    model = layers(device, 4, 1).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), 0.5, max_iter=3, history_size=3, line_search_fn="strong_wolfe"
    )
    for step in range(3 * STEPS):
        x = data(6, 4, seed=step % 4).double().to(device)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x).sin() - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            return loss

        yield optimizer.step(closure).detach(), copies(model)


@coexecuting
def test_two_gradients_a_step(device):
    """Some steps use sharpness-aware minimization, and some update slow weights."""
    model = layers(device, 4, 4, 1)
    optimizer, slow = adam(model), copies(model)
    for step in range(2 * STEPS):
        x = data(3, 4, seed=step).to(device)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        if step % 3:
            offsets = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), offsets)
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), offsets)
        optimizer.step()
        if step % 4 == 3:
            with torch.no_grad():
                for p, s in zip(model.parameters(), slow, strict=True):
                    p.copy_(s.lerp_(p, 0.5))
        yield copies(model)


@coexecuting
def test_parameter_groups_and_schedules(device):
    model, late = layers(device, 4, 4, 1), layers(device, 1, 1)
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, 0.05, weight_decay=0.1, foreach=False)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4])
    plateau = None
    for step in range(2 * STEPS):
        if step == 6:
            optimizer.add_param_group({"params": late.parameters(), "weight_decay": 0.0})
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        out = model(data(3, 4, seed=step).to(device))
        loss = (late(out) if step >= 6 else out).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plateau.step(loss) if plateau else schedule.step()
        yield loss.detach(), copies(model, late), [g["lr"] for g in optimizer.param_groups]


@coexecuting
def test_optimizers_saved_loaded_and_exchanged(device):
    model = layers(device, 4, 4, 1)
    kinds = [adam, partial(sgd, momentum=0.9), lambda m: torch.optim.RMSprop(m.parameters(), foreach=False)]
    optimizer = adam(model)
    for step in range(3 * STEPS):
        if step % 6 == 3:
            saved, state = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        if step % 6 == 5:
            optimizer.load_state_dict(saved)
            model.load_state_dict(state)
        if step % 6 == 0:
            optimizer = kinds[step // 6 % 3](model)
        optimizer.zero_grad()
        model(data(3, 4, seed=step).to(device)).pow(2).mean().backward()
        optimizer.step()
        yield copies(model)


# --- other --------------------------------------------------------------------------------------


@coexecuting
def test_anomaly_mode_now_and_then(device):
    model = layers(device, 4, 4, 1)

    def loss(x, step):
        with torch.autograd.set_detect_anomaly(step % 2 == 1):
            out = model(x).abs().sqrt().sum()
            out.backward(retain_graph=True)
        return out

    yield from train(device, model, loss)


@coexecuting
def test_dtypes_mixed(device):
    model, wide = layers(device, 4, 4), layers(device, 4, 2).double()
    turn = nn.Parameter(torch.complex(data(4), data(4, seed=1)).to(device))
    both = nn.ModuleList([model, wide, nn.ParameterList([turn])])

    def loss(x, step):
        h = model(x) if step % 2 else model.to(torch.bfloat16)(x.bfloat16())
        model.float()
        h = (torch.fft.fft(h.float()) * turn).abs()
        return wide(h.double()).pow(2).mean().float() * (1 + math.sin(step))

    yield from train(device, both, loss, steps=2 * STEPS)


@coexecuting
def test_gradients_read_during_backward(device):
    """A hook reads a value of a gradient, and changes the gradient depending on it."""
    w = data(4).to(device).requires_grad_()
    for step in range(2 * STEPS):
        x = w * data(4, seed=step % 6).to(device)
        x.register_hook(lambda g: g / g.norm() if g.sum().item() > 0 else g * 0.5)
        loss = (x.sin() * (1 if step % 2 else -1)).sum()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
        yield loss.detach(), w.detach().clone(), w.grad.clone()
