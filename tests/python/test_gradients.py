"""Gradients of every kind: calls of backward, checkpoints, functions, hooks, saved tensors, transforms."""

from functools import partial

import pytest
import torch
from helpers import coexecuting, data
from models import STEPS, adam, copies, grads, layers, sgd, train
from torch import nn
from torch.autograd import forward_ad, graph
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
    """The program keeps a loss, and differentiates it two iterations after it was computed."""
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
    """A GAN with gradient penalty: several steps of the critic for each step of the generator."""
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
    """Two tasks share a layer. Whether their gradients are projected depends on the gradients' values."""
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


def kept(context, operator, *args, **kwargs):
    products = torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if operator is products else CheckpointPolicy.PREFER_RECOMPUTE


@coexecuting
def test_selective_checkpoints(device):
    model = layers(device, 4, 4, 4, 4)
    contexts = partial(create_selective_checkpoint_contexts, kept)

    def loss(x, step):
        if step % 3 == 2:
            return model(x).pow(2).mean()
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts).pow(2).mean()

    yield from train(device, model, loss, steps=2 * STEPS)


# --- autograd.Function --------------------------------------------------------------------------


class Power(torch.autograd.Function):
    """Has numbers, strings and `None` among its arguments, and can be differentiated twice."""

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
    """Uses the newer form with `setup_context`, a forward derivative, and a generated vmap rule."""

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
    """Computes its output by gradient steps, so that backward passes run within its forward and
    its backward.
    """

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
