"""Gradients of every kind and what is done with them, while what is done changes between iterations."""

import copy
import math
import random
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import coexecuting, data
from torch import nn
from torch.autograd import forward_ad, graph
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

STEPS = 12


def copies(*modules):
    return [t.detach().clone() for m in modules for t in m.state_dict().values()]


def grads(*modules):
    return [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]


def layers(device, *sizes, act=nn.Tanh):
    """Linear layers with activations between them, the same on each device."""
    torch.manual_seed(1)
    pairs = [(nn.Linear(a, b), act()) for a, b in pairwise(sizes)]
    return nn.Sequential(*[m for pair in pairs for m in pair][:-1]).to(device)


def sgd(*modules, lr=0.05, **options):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr, foreach=False, **options)


def adam(*modules, lr=0.01, **options):
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr, foreach=False, **options)


def train(device, model, loss_of, optimizer=None, steps=STEPS):
    """Plain training: `loss_of(x, step)`, `x` being a batch that is another one in each step."""
    optimizer = optimizer or sgd(model, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(data(3, 4, seed=step).to(device), step)
        loss.backward()
        optimizer.step()
        yield loss.detach(), copies(model), grads(model)


# --- calls of backward --------------------------------------------------------------------------


@coexecuting
def test_graphs_retained_for_a_changing_number_of_calls(device):
    model = layers(device, 4, 3, 2)
    for step in range(2 * STEPS):
        y = model(data(3, 4, seed=step).to(device))
        for k in range(step % 3):
            y[:, k % 2].sum().backward(retain_graph=True)
        y.pow(2).sum().backward()
        yield grads(model)
        if step % 4 == 3:
            model.zero_grad(set_to_none=step % 3 == 0)


@coexecuting
def test_a_changing_number_of_micro_batches(device):
    model = layers(device, 4, 6, 1)
    optimizer = adam(model)
    for step in range(2 * STEPS):
        count = 1 + step % 5 if step < STEPS else step
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for k in range(count):
            (model(data(2, 4, seed=step + k).to(device)).pow(2).mean() / count).backward()
        optimizer.step()
        yield copies(model)


@coexecuting
def test_backward_in_a_later_iteration(device):
    """A loss is held and differentiated two iterations after it was computed."""
    w = data(4).to(device).requires_grad_()
    held = []
    for step in range(STEPS):
        held.append((w.detach() * w).sin().sum() * (1 + step % 3))
        if len(held) > 2:
            held.pop(0).backward()
        yield held[-1].detach(), None if w.grad is None else w.grad.clone()


@coexecuting
def test_several_roots(device):
    model, other = layers(device, 4, 3, 2), layers(device, 4, 2)
    for step in range(STEPS):
        x = data(3, 4, seed=step).to(device).requires_grad_()
        a, b = model(x), other(x)
        seed = torch.ones_like(a) * (1 + step % 2)
        if step % 3:
            torch.autograd.backward([a, b], [seed, b.detach()], inputs=[x, *model.parameters()])
        else:
            torch.autograd.backward([a.sum(), b.sum(), a.pow(2).mean()])
        yield x.grad, grads(model, other)
        model.zero_grad()
        other.zero_grad(set_to_none=False)


@coexecuting
def test_options_of_grad(device):
    model = layers(device, 4, 3)
    spare = torch.ones(2, device=device, requires_grad=True)
    for step in range(STEPS):
        x = data(3, 4, seed=step).to(device).requires_grad_()
        y = model(x).sin()
        if step % 2:
            out = torch.autograd.grad(y.sum(), [x, spare], allow_unused=True)
        else:
            out = torch.autograd.grad(y.sum(), [x, spare], materialize_grads=True, retain_graph=True)
            rows = torch.eye(9, device=device).view(9, 3, 3)
            out = *out, *torch.autograd.grad(y, x, rows, is_grads_batched=True)
        yield out


@coexecuting
def test_losses_with_their_own_optimizers(device):
    """A GAN with gradient penalty: several critic steps to one of the generator."""
    generator, critic = layers(device, 2, 6, 4), layers(device, 4, 6, 1)
    g_optimizer, c_optimizer = adam(generator), adam(critic, betas=(0.5, 0.9))
    for step in range(2 * STEPS):
        for k in range(1 + step % 3):
            real = data(3, 4, seed=step + k).to(device)
            fake = generator(torch.randn(3, 2, device=device)).detach()
            alpha = torch.rand(3, 1, device=device)
            between = (alpha * real + (1 - alpha) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(2, 1) - 1).pow(2).mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            c_optimizer.zero_grad()
            loss.backward()
            c_optimizer.step()
        if step % 2:
            g_optimizer.zero_grad()
            (-critic(generator(torch.randn(3, 2, device=device))).mean()).backward()
            g_optimizer.step()
        yield loss.detach(), copies(generator, critic)


@coexecuting
def test_conflicting_gradients_are_projected(device):
    """Two tasks share a trunk; what is done with their gradients depends on their values."""
    trunk, heads = layers(device, 4, 5)[0], [layers(device, 5, 1), layers(device, 5, 1)]
    optimizer = sgd(trunk, *heads)
    for step in range(2 * STEPS):
        h = trunk(data(3, 4, seed=step % 4).to(device)).tanh()
        losses = [heads[0](h).pow(2).mean(), (heads[1](h) - 1).abs().mean()]
        a, b = (torch.autograd.grad(loss, trunk.weight, retain_graph=True)[0] for loss in losses)
        if (a * b).sum() < 0:
            a = a - (a * b).sum() / b.pow(2).sum() * b
        optimizer.zero_grad()
        sum(losses).backward()
        trunk.weight.grad = a + b
        optimizer.step()
        yield copies(trunk, *heads)


@coexecuting
def test_inner_loops_of_changing_length(device):
    model = layers(device, 1, 6, 1)
    optimizer = adam(model)
    for step in range(2 * STEPS):
        x = data(5, 1, seed=step).to(device)
        fast = dict(model.named_parameters())
        first_order = step % 4 == 1
        for _ in range(1 + step % 3):
            loss = F.mse_loss(functional_call(model, fast, x), x.sin())
            slopes = torch.autograd.grad(loss, fast.values(), create_graph=not first_order)
            fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), slopes, strict=True)}
        loss = F.mse_loss(functional_call(model, fast, -x), -x.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach(), copies(model)


@coexecuting
def test_truncated_backpropagation_through_time(device):
    cell, head = layers(device, 7, 3), layers(device, 3, 1)
    optimizer = sgd(cell, head)
    state = torch.zeros(3, 3, device=device)
    for step in range(2 * STEPS):
        loss = 0
        for t in range(2 + step % 4):
            state = cell(torch.cat([data(3, 4, seed=t).to(device), state], 1)).tanh()
            loss = loss + head(state).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach() if step % 5 else torch.zeros_like(state)
        yield loss.detach(), state, copies(cell)


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
    """A recursive network over a tree that is another one in each iteration."""
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
    """Each expert gets the rows that chose it: as many as there are, and none is left out where none did."""
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
    """Episodes end when a sampled action says so; a target network is copied now and then."""
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


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_checkpoints_with_dropout(reentrant, preserve):
    @coexecuting
    def program(device):
        model = nn.ModuleList(nn.Sequential(layers(device, 4, 4), nn.Dropout(0.5)) for _ in range(3))

        def loss(x, step):
            x.requires_grad_()
            for k, block in enumerate(model):
                options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
                x = block(x) if step % 4 == k else checkpoint(block, x, **options)
            return x.pow(2).mean()

        yield from train(device, model, loss)

    program()


@coexecuting
def test_nested_checkpoints(device):
    model = layers(device, 4, 4, 4, 4)

    def inner(x, step):
        x = checkpoint(model[:3], x, use_reentrant=False)
        return x.sin() if step % 3 else x

    def loss(x, step):
        x = checkpoint(inner, x, step, use_reentrant=False, early_stop=step % 2 == 0)
        return model[3:](x).pow(2).mean()

    yield from train(device, model, loss, steps=2 * STEPS)


# --- autograd.Function --------------------------------------------------------------------------


class Power(torch.autograd.Function):
    """Numbers, strings and `None` among its arguments; twice differentiable."""

    @staticmethod
    def forward(ctx, x, y, exponent, kind, scale=None):
        ctx.save_for_backward(x, y)
        ctx.options = exponent, kind, scale
        ctx.set_materialize_grads(False)
        out = x**exponent * y
        return (out if scale is None else out * scale), y.sum()

    @staticmethod
    def backward(ctx, g, total):
        x, y = ctx.saved_tensors
        exponent, kind, scale = ctx.options
        gx = gy = None
        if g is not None:
            g = g if scale is None else g * scale
            gx = g * y * exponent * x ** (exponent - 1)
            if ctx.needs_input_grad[1]:
                gy = g * x**exponent if kind == "plain" else g.sign()
        if total is not None:
            gy = total.expand_as(y) if gy is None else gy + total
        return gx, gy, None, None, None


@coexecuting
def test_functions_with_arguments_of_all_kinds(device):
    model = layers(device, 4, 4)
    for step in range(2 * STEPS):
        x = data(3, 4, seed=step).to(device).requires_grad_()
        y = model(x) if step % 3 else model(x).detach()
        out, total = Power.apply(x, y, 2 + step % 2, "plain" if step % 4 else "sign", [None, 0.5][step % 2])
        loss = [out.sum(), total + 0 * out.sum(), out.sum() * total][step % 3]
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        g.pow(2).sum().backward()
        yield loss.detach(), x.grad, grads(model)
        model.zero_grad()


class Doubling(torch.autograd.Function):
    """In the newer form, with a forward derivative, and in place where it is told to."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), x * 2

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return a * x.cos() + b * 2

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * x.cos(), t * 2


@coexecuting
def test_functions_under_transforms(device):
    def f(x):
        a, b = Doubling.apply(x)
        return (a * b).sum()

    for step in range(STEPS):
        x = data(3, 4, seed=step).to(device)
        out = [vmap(grad(f))(x), jvp(f, (x,), (x.cos(),)), grad(lambda x: grad(f)(x).sum())(x)]
        yield out[step % 3], vmap(Doubling.apply)(x)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        if not y.isfinite().all():
            return g.zero_()
        return g * y


@coexecuting
def test_functions_differentiable_once(device):
    for step in range(STEPS):
        x = data(4, seed=step % 6).to(device).requires_grad_()
        y = Once.apply(x * (1000 if step % 3 == 2 else 1))
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        said = ""
        try:
            g.sum().backward()
        except RuntimeError as error:
            said = str(error)
        yield y.detach(), g.detach(), said


class Solved(torch.autograd.Function):
    """Finds its output by gradient steps of its own: backward within forward, and within backward."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.save_for_backward(x)
        ctx.depth = depth
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner = Solved.apply(y, depth - 1) if depth else y.sin()
            (g,) = torch.autograd.grad(inner.sum(), y)
        return x - 0.1 * g

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            out = Solved.apply(y, ctx.depth - 1) if ctx.depth else y.cos()
            out.backward(g)
        return g + y.grad, None


@coexecuting
def test_backward_within_backward(device):
    model = layers(device, 4, 4)
    yield from train(
        device, model, lambda x, step: Solved.apply(model(x), step % 3).pow(2).sum(), steps=2 * STEPS
    )


# --- hooks --------------------------------------------------------------------------------------


@coexecuting
def test_tensor_hooks_that_come_and_go(device):
    model = layers(device, 4, 4, 1)
    scale, handles, seen = 1.0, [], []

    def clipped(g):
        return g.clamp(-0.1, 0.1) if g.abs().max() > 0.1 else None

    def loss(x, step):
        nonlocal scale
        scale = 1 + step % 5
        h = model[0](x)
        h.register_hook(lambda g: g * scale)
        h.register_hook(lambda g: seen.append(g.sum().item()))
        if step % 2:
            h.retain_grad()
        if step % 4 == 2:
            handles.append(model[0].weight.register_hook(clipped))
        elif handles:
            handles.pop().remove()
        return model[1:](h).pow(2).mean()

    for out in train(device, model, loss, steps=2 * STEPS):
        yield *out, seen[-1]


@coexecuting
def test_hooks_on_nodes_and_on_several_gradients(device):
    w, v = (data(4, seed=k).to(device).requires_grad_() for k in range(2))
    for step in range(STEPS):
        seen = []
        y = (w * v).sin() * w
        node = y.grad_fn.next_functions[0][0]
        node.register_prehook(lambda gs, step=step: (gs[0] * (1 + step % 3),))
        y.grad_fn.register_hook(lambda gi, go, seen=seen: seen.append(go[0] + 1))
        mode = "any" if step % 2 else "all"
        handle = graph.register_multi_grad_hook(
            [w, v] if step % 4 else [v], lambda *gs, seen=seen: seen.append(gs), mode=mode
        )
        y.sum().backward()
        handle.remove()
        edge = graph.get_gradient_edge(w)
        (g,) = torch.autograd.grad((w**3).sum(), edge)
        yield w.grad.clone(), v.grad.clone(), g, len(seen), seen[0]


@coexecuting
def test_module_hooks_that_come_and_go(device):
    model = layers(device, 4, 4, 1)
    scale, seen = 1.0, []
    watch_all = nn.modules.module.register_module_forward_hook
    hooks = [
        lambda: model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].abs().max())),
        lambda: model[1].register_full_backward_pre_hook(lambda m, go: (go[0] * scale,)),
        lambda: model[1].register_forward_hook(lambda m, args, out: out + 0.1),
        lambda: model[2].register_forward_pre_hook(lambda m, args: (args[0] * 2,), prepend=True),
        lambda: watch_all(lambda m, args, out: seen.append(out.mean())),
    ]

    def loss(x, step):
        nonlocal scale
        scale = 1 + step % 4
        handles = [hook() for k, hook in enumerate(hooks) if (step + k) % 3]
        x.requires_grad_()
        out = model(x).pow(2).mean()
        out.backward(retain_graph=True)
        for h in handles:
            h.remove()
        return out

    for out in train(device, model, loss, steps=2 * STEPS):
        yield *out, list(seen)
        seen.clear()


@coexecuting
def test_updates_in_post_accumulate_hooks(device):
    model = layers(device, 4, 4, 1)
    step = 0

    def update(p):
        if step % 3 == 2 and p.dim() == 1:
            return
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        loss = model(data(3, 4, seed=step).to(device)).pow(2).mean()
        loss.backward()
        yield loss.detach(), copies(model), grads(model)


@coexecuting
def test_an_exception_in_a_hook_skips_the_step(device):
    model = layers(device, 4, 4, 1)
    optimizer = sgd(model)

    def refuse(g):
        raise OverflowError

    for step in range(STEPS):
        h = model[0](data(3, 4, seed=step).to(device))
        if step % 3 == 2:
            h.register_hook(refuse)
        optimizer.zero_grad()
        try:
            model[1:](h).pow(2).mean().backward()
            optimizer.step()
        except OverflowError:
            h = h * 2
        yield h.detach(), grads(model), copies(model)


# --- saved tensors ------------------------------------------------------------------------------


def to_numbers(t):
    return t.tolist(), t.dtype, t.device


def from_numbers(packed):
    numbers, dtype, device = packed
    return torch.tensor(numbers, dtype=dtype, device=device)


def halved(t):
    return t.to(torch.bfloat16), t.dtype


PACKS = {
    "host": (lambda t: (t.device, t.cpu()), lambda packed: packed[1].to(packed[0])),
    "numbers": (to_numbers, from_numbers),
    "half": (halved, lambda packed: packed[0].to(packed[1])),
    "same": (lambda t: t, lambda t: t * 1),
}


@pytest.mark.parametrize("kind", PACKS)
def test_packed(kind):
    @coexecuting
    def program(device):
        model = layers(device, 4, 4, 1)

        def loss(x, step):
            x = x[: 1 + step % 3]
            if step % 4 == 3:
                return model(x).pow(2).mean()
            with graph.saved_tensors_hooks(*PACKS[kind]):
                return model(x).pow(2).mean()

        yield from train(device, model, loss, steps=2 * STEPS)

    program()


@coexecuting
def test_saved_on_the_host_and_mutated(device):
    model = layers(device, 4, 4, 1)
    for step in range(STEPS):
        x = data(3, 4, seed=step).to(device)
        with graph.save_on_cpu():
            h = model[:2](x)
        with graph.allow_mutation_on_saved_tensors():
            y = h.exp()
            z = y.sin() * h
            y.mul_(1 + step % 3)
            (z.sum() + model[2](y).sum()).backward()
        yield grads(model), y.detach()
        model.zero_grad()


# --- torch.func and the functional forms --------------------------------------------------------


@coexecuting
def test_per_sample_gradients_of_an_ensemble(device):
    models = [layers(device, 4, 3, 2) for _ in range(2)]
    models[1][0].bias.data.fill_(0.1)
    params, buffers = stack_module_state(models)
    params = {k: p.detach() for k, p in params.items()}

    def loss(params, buffers, x, y):
        out = functional_call(models[0], (params, buffers), (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    per_sample = vmap(vmap(grad(loss), (None, None, 0, 0)), (0, 0, None, None))
    for step in range(STEPS):
        x = data(1 + step % 4, 4, seed=step).to(device)
        found = per_sample(params, buffers, x, x.argmax(1) % 2)
        norms = torch.stack([g.flatten(2).norm(dim=2) for g in found.values()]).norm(dim=0)
        factor = (0.5 / norms).clamp(max=1)
        params = {
            k: p - 0.1 * torch.einsum("en,en...->e...", factor, g)
            for (k, p), g in zip(params.items(), found.values(), strict=True)
        }
        yield norms, dict(params)


@coexecuting
def test_transforms_within_transforms(device):
    model = layers(device, 3, 4, 2)
    params = dict(model.named_parameters())
    f = partial(functional_call, model, params)
    for step in range(STEPS):
        x, v = data(2, 3, seed=step).to(device)
        match step % 3:
            case 0:
                out = jacrev(f)(x), jacfwd(jacrev(f))(x)
            case 1:
                out = jvp(grad(lambda x: f(x).pow(2).sum()), (x,), (v,))
            case 2:
                y, pull = vjp(f, x)
                out = y, vmap(pull)(torch.eye(2, device=device))
        out = torch.utils._pytree.tree_map(lambda t: t.detach(), out)
        jacobian = jacrev(partial(functional_call, model))(params, x)
        yield out, [t.detach() for t in jacobian.values()]


@coexecuting
def test_functional_forms(device):
    api = torch.autograd.functional

    def f(x):
        return (x.exp() * x.flip(0)).sum()

    forms = [
        lambda x, v: api.hessian(f, x),
        lambda x, v: api.jvp(torch.sin, x, v),
        lambda x, v: api.vjp(lambda x: x.cumprod(0), x, v),
        lambda x, v: (api.hvp(f, x, v), api.vhp(f, x, v), api.hessian(f, x, vectorize=True)),
        lambda x, v: api.jacobian(torch.tanh, x, vectorize=True, strategy="forward-mode"),
    ]
    for step in range(STEPS):
        x, v = data(2, 3, seed=step).to(device)
        yield [form(x, v) for form in forms[: 2 + step % 4]]


@coexecuting
def test_forward_mode_through_a_model(device):
    model = layers(device, 4, 4, 1)
    for step in range(STEPS):
        x = data(3, 4, seed=step).to(device)
        tangents = [data(*p.shape, seed=step).to(device) for p in model.parameters()]
        with forward_ad.dual_level():
            names = dict(model.named_parameters())
            duals = {k: forward_ad.make_dual(p, t) for (k, p), t in zip(names.items(), tangents, strict=True)}
            out = functional_call(model, duals, x).pow(2).mean()
            if step % 3 == 2:
                out = out.exp()
            primal, slope = forward_ad.unpack_dual(out)
        primal.backward()
        with torch.no_grad():
            for p, t in zip(model.parameters(), tangents, strict=True):
                p.sub_(slope * t, alpha=0.01)
        yield primal.detach(), slope.detach(), grads(model), copies(model)
        model.zero_grad()


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
    """Straight-through estimators, reversed gradients, stop-gradients on either side."""
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
    """One weight is an embedding, a head and, transposed, a layer; how often it is used changes."""
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


# --- what is done with gradients ----------------------------------------------------------------


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
    """Noise, centering, sums over a window of iterations, gradients dropped and put in."""
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
    @coexecuting(like_eager=False)
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
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    """Line searches: how many evaluations a step takes depends on values."""
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
    """Sharpness-aware minimization, on some steps only; and slow weights now and then."""
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


# --- the rest -----------------------------------------------------------------------------------


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
    """A hook reads a value and decides by it what becomes of the gradient."""
    w = data(4).to(device).requires_grad_()
    for step in range(2 * STEPS):
        x = w * data(4, seed=step % 6).to(device)
        x.register_hook(lambda g: g / g.norm() if g.sum().item() > 0 else g * 0.5)
        loss = (x.sin() * (1 if step % 2 else -1)).sum()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
        yield loss.detach(), w.detach().clone(), w.grad.clone()


def test_sparse_gradients_are_refused():
    embed = nn.Embedding(5, 3, sparse=True).to("tandem")
    loss = embed(torch.tensor([1, 2], device="tandem")).sum()
    with pytest.raises(NotImplementedError):
        loss.backward()
    assert embed.weight.grad is None
