"""The corners of the grammar: groups of productions, a few of which each program uses.

A group may add productions to the kinds of `core`, and may add kinds, which have names instead of letters.
The first leaf of a kind is its simplest leaf.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """Productions that belong together; the option `--without` excludes a group by its name."""

    statements: list[str]
    leaves: dict[str, list[str]] = field(default_factory=dict)
    expressions: dict[str, list[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    blocks: list[tuple[str, dict[str, list[str]], list[str]]] = field(default_factory=list)


HOST = Group(
    leaves={
        "host": [
            "s.host", "s.wide[::2, ::2]", "s.host.t()", "s.wide[:4, 1::2]", "s.wide.t()[::2, 4:]",
            "s.wide[3:7, 2:6]", "s.wide[0].expand(4, 8)[:, ::2]", "s.wide.as_strided((4, 4), (1, 8), {n})",
            "s.wide.flip(0)[::2, :4]", "torch.arange(32.)[::2].view(4, 4)", "s.wide[::2, ::2].double()",
            "torch.full((1,), {f}).expand(4, 4)", "s.wide[1:5, ::2].contiguous().t()", "s.wide[:, ::2][4:]",
            "torch.rand(8, 8)[1::2, ::2]", "s.wide.view(4, 2, 4, 2)[:, {n} % 2, :, 1]",
        ],
        "hostv": ["s.wide[0, :4]", "s.wide[0, ::2]", "s.wide[::2, 1]", "s.wide.diagonal()[::2]", "s.host[{n}]", "s.wide.view(-1)[{n}::16]"],
        "HOST": ["s.host", "s.wide[::2, ::2]", "s.host.t()", "s.wide[1::2, 4:]", "s.wide.t()[4:, ::2]", "s.wide[2:6, 3:7]"],
        "WIDE": [
            "s.p0[::2, ::2]", "s.p0[1::2, :4]", "s.p0[:4, ::2]", "s.p0.t()[::2, 4:]", "s.p0[2:6, 2:6]", "{M}",
            "{M}.t()", "s.p0.view(4, 2, 4, 2)[:, {n} % 2, :, 0]", "s.p0[4:]. t()[::2]", "s.p0[::2][:, 4:]",
        ],
        "WIDEV": ["s.p0[0, ::2]", "s.p0[::2, {n}]", "s.p0.view(-1)[{n}:8:2][:4]", "s.p0.diagonal()[::2]", "{V}", "s.p0.view(-1)[{n}::16]"],
        "m": ["s.p0[::2, ::2]", "s.p0[:4, 4:]"],
    },
    statements=[
        "{WIDE}.copy_({host})", "{WIDE}.copy_({host})", "{WIDEV}.copy_({hostv})", "{WIDEV}.copy_({hostv})",
        "{WIDE}[:] = {host}", "{WIDE}[{n}] = {hostv}", "s.p0[::2] = s.wide[::2]", "s.p0[:, ::2] = s.wide[:, ::2]",
        "s.p0[1::2].copy_(s.wide[1::2])", "s.p0.view(-1)[::2].copy_(s.wide.view(-1)[::2])",
        "s.p0.view(-1)[::3].copy_(s.wide.view(-1)[::3])", "s.p0.copy_(s.wide.t())", "s.p0.t().copy_(s.wide.t())",
        "{WIDE}.copy_({host}); s.wide.add_(1)", "{HOST}.copy_({m}.detach())", "{HOST}.copy_({WIDE}.detach())",
        "{HOST}[:] = {m}.detach().to('cpu', copy=True)", "{HOST}.copy_({d}.detach())", "s.wide[::2].copy_(s.p0[::2])",
        "s.wide.view(-1)[::2].copy_(s.p0.view(-1)[::2])", "s.see({WIDE}.to('cpu', copy=True))", "s.see({WIDE}.to('cpu', copy=True))",
        "s.see({host}.to(s.device, copy=True))", "s.m0 = {host}.to(s.device, torch.float32, copy=True)", "s.see(s.p0)",
        "s.see({WIDE})", "s.see(s.wide)", "s.see(torch.tensor({hostv}.tolist(), device=s.device))",
        "s.p0 = s.wide.to(s.device, copy=True)", "s.p0 = s.wide.t().to(s.device, copy=True)", "s.wide.mul_({f})",
        "s.wide[{n}].fill_({f})", "s.wide.copy_(s.p0)", "s.p0.add_({f})", "s.p0[::2].mul_({f})",
        "{WIDE}.add_({host}.to(s.device).float())", "{HOST}.add_({m}.detach().to('cpu', copy=True))",
        "s.see(torch.empty_like({host}, device=s.device).copy_({host}))", "{WIDE}.fill_(s.wide[0, {n}])",
        "{WIDE}.mul_(torch.tensor({f}))", "s.see({WIDE} * s.wide[{n}, 0])", "{WIDE}.copy_(s.wide[{n}, 0])",
        "({m} * s.leaf).sum().tanh().backward()", "s.see(s.leaf.grad)", "s.leaf.grad = None",
        "s.see({m} * s.leaf)", "s.leaks(lambda: s.m0.detach() * s.leaf)", "s.leaks(lambda: s.p0[::2].copy_(s.wide[::2]))",
    ],
    errors=["{WIDE}.copy_({hostv}[:3])", "{WIDE}.copy_(s.wide)", "{WIDE} + s.wide", "s.wide.copy_({u})"],
)  # fmt: skip

GENERATORS = Group(
    leaves={
        "gen": ["s.g", "s.g", "s.g1", "s.hg", "s.gens[{n} % len(s.gens)]"],
        "m": ["torch.rand(4, 4, device=s.device, generator={gen})", "torch.randn(4, 4, device=s.device, generator={gen})"],
        "v": ["torch.rand(4, device=s.device, generator={gen})"],
        "i": ["torch.randperm(4, device=s.device, generator={gen})", "torch.randint(0, 4, (4,), device=s.device, generator={gen})"],
    },
    statements=[
        "{gen}.manual_seed({n})", "{gen}.manual_seed({n})", "{gen}.manual_seed(step)", "s.states.append({gen}.get_state())",
        "s.states and {gen}.set_state(s.states[-1])", "s.states and {gen}.set_state(s.states[0])", "s.states.clear()",
        "s.g1 = {gen}.clone_state()", "s.gens.append({gen}.clone_state())", "s.gens[1:] = []",
        "s.see({gen}.initial_seed())", "s.see({gen}.get_state())", "g, k = {gen}, {n}\ng.seed(); g.manual_seed(k)",
        "s.g1 = torch.Generator(s.device)\ns.g1.manual_seed({n})", "s.hg = torch.Generator().manual_seed({n})",
        "s.hg = torch.Generator()", "s.see(torch.rand(3, generator=s.hg))", "s.see(torch.randn(3, generator=s.hg))",
        "{M}.normal_(generator={gen})", "{M}.uniform_(-1, 1, generator={gen})", "{M}.bernoulli_(0.5, generator={gen})",
        "{M}.random_(0, 5, generator={gen})", "{M}.exponential_(generator={gen})", "{V}.normal_({f}, 1, generator={gen})",
        "s.see(torch.rand(3, device=s.device, generator={gen}))", "s.see(torch.bernoulli(safe({m}).sigmoid(), generator={gen}))",
        "s.see(torch.multinomial(safe({m}).softmax(1), 2, generator={gen}))", "s.see(torch.normal({m}, 1.0, generator={gen}))",
        "torch.set_rng_state({gen}.get_state())", "{gen}.set_state(torch.get_rng_state())", "s.see(torch.initial_seed())",
        "torch.default_generator.manual_seed({n})", "s.g1 = pickle.loads(pickle.dumps({gen}))",
        "torch.random.manual_seed({n})", "s.see(torch.rand(2))",
        "nn.init.kaiming_uniform_({M}.detach(), generator={gen})", "nn.init.normal_({M}.detach(), generator={gen})",
        "s.see(torch.randint_like({m}, 5, generator={gen}))", "s.see(torch.randn({n} + 1, device=s.device, generator={gen}).sum())",
        "state = {gen}.get_state()\na = torch.rand(2, device=s.device, generator={gen})\n{gen}.set_state(state)\ns.see(a)",
        "for k in range({n}): s.kept.append(torch.rand(2, device=s.device, generator=s.g.manual_seed(k)))",
    ],
    errors=["{gen}.set_state(torch.zeros(3, dtype=torch.uint8, device='cpu'))", "{gen}.manual_seed('a')", "{gen}.manual_seed(2**70)", "{gen}.set_state({m})"],
    blocks=[("with torch.random.fork_rng(devices=[]):\n    {gen}.manual_seed({n})", {}, [])],
)  # fmt: skip

OUT = Group(
    leaves={
        "OUT": [
            "torch.empty(4, 4, device=s.device)", "({M} if {c} else torch.empty(4, 4, device=s.device))",
            "(s.m0 if {c} else s.m1)", "{M}", "(s.m0 if step % 3 else s.m2).t()", "({M} if {c} else s.p0[::2, ::2])",
            "(s.m0 if {c} else s.m0.clone())", "s.p0[{n}:{n} + 4, :4]", "(s.p0[:4, :4] if {c} else s.p0[4:, 4:])",
        ],
        "A": ["s.m0", "s.m1", "{M}", "s.p0[:4, :4]", "s.p0[::2, ::2]", "{m}"],
    },
    statements=[
        text
        for call in (
            "torch.add({A}, {A}, out=o)", "torch.mul({A}, {f}, out=o)", "torch.sub({A}, {A}, alpha={f}, out=o)",
            "torch.neg({A}, out=o)", "torch.sin({A}, out=o)", "torch.clamp({A}, -1, {f}, out=o)", "torch.maximum({A}, {A}, out=o)",
            "torch.addcmul({A}, {A}, {A}, out=o)", "torch.lerp({A}, {A}, {f}, out=o)", "torch.sum({A}, 0, out=o)",
            "torch.cumsum({A}, {n} % 2, out=o)", "torch.cat([{A}[:2], {A}[2:]], out=o)", "torch.add({d}, {A}, out=o)",
            "torch.index_select({A}, 0, {i}, out=o)", "torch.where({b}, {A}, {A}, out=o)", "torch.div({A}, 3, out=o)",
            "torch.mm({x}, {x}, out=o)",
            "torch.pow(safe({A}), 2, out=o)", "torch.add({V}, {f}, out=o)", "torch.gt({A}, {A}, out=o)",
            "torch.stack([{v}, {v}, {v}, {v}], out=o)", "torch.tril({A}.clone(), out=o)", "torch.sigmoid({A}, out=o)",
        )
        for text in (f"with torch.no_grad():\n    o = {{OUT}}\n    {call}\n    s.see(o)",)
    ]
    + [
        "torch.add({x}, {x}, out={M}[{n}:])", "torch.add(s.i0, s.i0, out=s.i0).remainder_(4)", "torch.mul(s.d0, {f}, out=s.d0)",
        "torch.sum({m}.detach(), 1, out={V})", "torch.randn(4, 4, out={M})", "torch.arange(4., out={V})",
        "torch.add({m}, {m}, out=s.i0.clone())", "torch.all({b}, 1, out=torch.empty(0, dtype=torch.bool, device=s.device))",
        "torch.max({m}.detach(), 1, out=(torch.empty(4, device=s.device), torch.empty(4, dtype=torch.int64, device=s.device)))",
    ],
)  # fmt: skip

OVERLAP = Group(
    leaves={
        "W": [
            "{M}.view(-1).unfold(0, 3, 1)", "{M}.unfold(1, 2, 1)", "{M}.view(-1).as_strided((4, 4), (1, 1))",
            "{M}.as_strided((3, 3), (2, 1))", "{M}[0].expand(4, 4)", "{M}.as_strided((5,), (0,))", "{V}.unfold(0, 2, 1)",
            "{M}[:, :1].expand(4, 3)", "{M}.view(-1).unfold(0, 5, 2)", "{M}.unfold(0, 3, 1)[{n} % 2]", "s.p0.unfold(0, 4, 2).unfold(1, 4, 2)",
            "{M}.as_strided((4, 3), (3, 2))", "{M}.as_strided((2, 2, 2), (1, 1, 1))", "{M}.diagonal().as_strided((3, 2), (5, 5))",
            "s.p0.view(-1).unfold(0, 8, 1)", "s.d0.view(-1).unfold(0, 3, 1)", "s.t0.view(-1).unfold(0, 2, 1)",
        ],
    },
    statements=[
        f"w = {{W}}.detach()\n{call}\ns.see(w)"
        for call in (
            "w.add_({n})", "w.mul_(2)", "w.sub_(w.clone())", "w.add_(torch.ones_like(w))", "w.copy_(w.flip(0))", "w[0].add_(w[1])",
            "w.clamp_(-1, 1)", "torch.add(w, 1, out=w)", "torch._foreach_add_([w], 1)", "w.neg_()", "w.abs_().add_(1)",
            "w.addcmul_(w.clone(), w.clone())", "w.fill_({f})", "w.zero_()", "w.masked_fill_(w > 0, {n})", "w.copy_(torch.arange(float(w.numel())).view(w.shape))",
            "w.mul_(w.clone())", "w.add_(w)", "w[1:].copy_(w[:-1])", "w[1:].add_(w[:-1])", "w[..., 1:] = w[..., :-1].clone()", "w.t_() if w.dim() == 2 else w",
            "w.cumsum_(0)", "w.t().add_({n}) if w.dim() == 2 else w", "w[::2].mul_({n})", "w.random_(0, 5)", "w.copy_(torch.ones(w.shape, device=s.device).cumsum(0))",
            "w.float().sin_()", "w.index_add_(0, torch.tensor([0, 1], device=s.device), w[:2].clone())", "w.sub_(1).mul_(3)", "w.floor_divide_(2)", "w.square_()",
        )
    ]
    + ["s.see({W}.sum(0))", "s.see({W} * 2)", "s.see({W}.contiguous())", "{V}.copy_({W}.sum() * 0.1)", "s.see({W}.clone())", "s.v1 = {W}.float().sum().expand(4)"],
)  # fmt: skip

FOREACH = Group(
    leaves={
        "L": [
            "[{M}, {M}]", "[{M}, {V}, {M}]", "[{M}[:3], {M}[1:]]", "[{V}] * 2", "[{M}.view(-1)[k:k + 4] for k in range(10)]",
            "[{M}[k % 4] for k in range(9)]", "list({M}.unbind(0))", "[s.m0, s.m1, s.m0]", "[s.m0, s.m0.t()]", "[s.m0, s.m1, s.m2, s.v0, s.v1, s.v2, s.p0, s.d0, s.r0, s.u0]",
            "[s.m0, s.m1] * 5", "[s.v0] * 12", "[s.m0, s.d0]", "[{M}, {x}, {y}]", "[s.m0.view(-1)[{n}:8], s.m0.view(-1)[4:12]]", "[{x}, {x}]",
        ],
    },
    statements=[
        f"with torch.no_grad():\n    l = {{L}}\n    {call}\n    s.see(l[0])"
        for call in (
            "torch._foreach_add_(l, {f})", "torch._foreach_mul_(l, 2)", "torch._foreach_add_(l, l)", "torch._foreach_add_(l, [x * 0.5 for x in l])",
            "torch._foreach_add_(l, l[::-1])", "torch._foreach_addcmul_(l, l, l, value=0.5)", "torch._foreach_abs_(l); torch._foreach_sqrt_(l)",
            "torch._foreach_zero_(l)", "torch._foreach_lerp_(l, [x.clone() for x in l], 0.5)", "torch._foreach_neg_(l)", "torch._foreach_clamp_min_(l, 0.25)",
            "torch._foreach_div_(l, [0.5] * len(l))", "torch._foreach_sub_(l, [x.clone() for x in l], alpha=2)", "torch._foreach_copy_(l, l[::-1])",
            "torch._foreach_add_(l, [float(k) for k in range(len(l))])", "torch._foreach_addcdiv_(l, l, [x.abs() + 1 for x in l], value=0.5)", "torch._foreach_sin_(l)",
            "torch._foreach_mul_(l, [x.clone() for x in l])", "torch._foreach_mul_(l, torch.tensor({f}, device=s.device))", "torch._foreach_lerp_(l, l[::-1], 0.25)",
            "torch._foreach_maximum_(l, [x.flip(0) for x in l])", "torch._foreach_pow_(l, 2)", "torch._foreach_add_(l, l, alpha={f})", "torch._foreach_reciprocal_(l)",
        )
    ]
    + [
        "s.see(torch._foreach_norm({L}))", "s.see(torch._foreach_add({L}, {n}))", "l = {L}\ns.see(torch._foreach_mul(l, l))", "s.kept += torch._foreach_neg({L})",
        "s.see(torch._foreach_max({L}))", "s.see(torch.cat([x.reshape(-1) for x in {L}]))", "s.see(torch.nn.utils.clip_grad_norm_([s.w, s.c, s.w], 0.5, foreach=True))",
        "s.see(torch.nn.utils.get_total_norm({L}))", "s.see([x.detach().sum() for x in torch._foreach_exp({L})])",
        "s.w.grad = s.m0.detach(); torch.nn.utils.clip_grad_norm_([s.w, s.w], 0.5, foreach=True); s.see(s.w.grad)",
        "s.see(torch.nn.utils.parameters_to_vector([s.w, s.c]))",
    ],
    errors=[
        "torch._foreach_add_([{x}[1:]], [{x}])", "torch._foreach_add_([], 1)", "torch._foreach_add_([{x}, {x}], [1.0])", "torch._foreach_add_([s.m0[1:]], [s.m0[:-1]])",
        "torch._foreach_add_([s.i0], 0.5)", "torch._foreach_add_([s.w], 1)", "torch._foreach_mul_([{x}], ['a'])", "torch._foreach_copy_([s.v0], [s.m0])", "torch._foreach_mul_([s.v0], [s.d0])",
    ],
)  # fmt: skip

_PASS = "x = {m}.detach().clone().requires_grad_()\ny = x * s.w\nz = (y * {f}).sin()\nloss = {call}(z, y, x, s).sum().tanh() + {s}\n"

HOOKS = Group(
    leaves={
        "fn": [
            "(lambda g: g * {f})", "(lambda g: None)", "(lambda g: s.see(g))", "(lambda g: g.clone().mul_(2))", "(lambda g: g.sin())",
            "(lambda g: len(s.hooks) < 40 and s.hooks.append(s.w.register_hook(lambda g: g * 0.5)) or None)", "(lambda g: fail())", "(lambda g: g[:2])", "(lambda g: g.double())",
            "(lambda g: s.see(torch.is_grad_enabled()))", "(lambda g: (g * s.m1.detach()))",
        ],
        "pre": ["(lambda go: tuple(g * {f} if g is not None else g for g in go))", "(lambda go: s.see(go[0]))", "(lambda go: None)", "(lambda go: fail())"],
        "post": ["(lambda gi, go: tuple(g * {f} if g is not None else g for g in gi))", "(lambda gi, go: s.see(go[0]))", "(lambda gi, go: s.see(gi))", "(lambda gi, go: None)"],
        # Actions of a node during the backward pass.
        "act": [
            "x.register_hook({fn})", "y.register_hook({fn})", "s.w.register_hook({fn}) and None", "y.grad_fn.register_hook({post})", "y.grad_fn.register_prehook({pre})", "y.retain_grad()",
            "z.grad_fn.register_prehook({pre})", "x.register_post_accumulate_grad_hook(halve)", "torch.set_grad_enabled({c})", "s.see(torch.is_grad_enabled())", "s.see(x.grad)",
            "y.detach().mul_({f})", "s.hooks and s.hooks.pop().remove()", "torch.autograd.graph.register_multi_grad_hook((x, y), lambda gs: s.see(gs))", "fail()",
            "(x * 3).sum().backward()", "s.see(torch.autograd.grad(checkpoint(torch.sin, x, use_reentrant=False).sum(), x))", "s.see(y.grad)", "s.see(torch.ones(2, device=s.device) + 1)",
        ],
        "go": [
            "loss.backward()", "loss.backward()", "loss.backward(retain_graph=True); loss.backward()", "loss.backward(create_graph=True)", "loss.backward(inputs=[x])",
            "loss.backward(inputs=[y, s.w])", "s.see(torch.autograd.grad(loss, [x, s.w], allow_unused=True))", "s.see(torch.autograd.grad(loss, y))",
            "s.see(torch.autograd.grad(loss, [x, s.c], allow_unused=True, materialize_grads=True))", "s.see(torch.autograd.grad(loss, x, torch.tensor({f}, device=s.device)))",
            "loss.backward(torch.full_like(loss, {f}))", "with torch.autograd.set_detect_anomaly(True, check_nan=False): loss.backward()",
            "with Functions(s): loss.backward()", "with torch.autograd.set_multithreading_enabled({c}): loss.backward()",
            "(g,) = torch.autograd.grad(loss, x, create_graph=True); (g * g).sum().backward()", "loss.backward(); loss.backward()",
        ],
        "after": ["s.see(x.grad)", "s.see(y.grad)", "s.see(s.w.grad)", "s.see([x.grad, y.grad, z.grad])", "s.w.grad = None"],
        "reg": [
            "h = y.register_hook({fn})", "h = x.register_hook({fn})", "y.grad_fn.register_hook({post})", "y.grad_fn.register_prehook({pre})", "y.retain_grad()", "z.retain_grad()",
            "h = x.register_post_accumulate_grad_hook(halve)", "h = torch.autograd.graph.register_multi_grad_hook((x, y), lambda gs: s.see(gs))",
            "h = torch.autograd.graph.register_multi_grad_hook((y, z), lambda g: s.see(g), mode='any')", "s.hooks.append(s.w.register_hook({fn}))", "loss.grad_fn.register_prehook({pre})",
            "y.mul_({f})", "h = y.register_hook({fn}); h.remove()", "torch.autograd.graph.get_gradient_edge(y).node.register_prehook({pre})", "h = z.grad_fn.register_hook({post})",
        ],
        "mid": ["(lambda: {act})", "(lambda: {act})", "(lambda: [{act}, {act}])"],
    },
    statements=[
        "x = {m}.detach().clone().requires_grad_()\ny = x * s.w\nz = (y * 2).sin()\nloss = During.apply(z, {mid}).sum().tanh()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = During.apply(x * s.w, {mid})\nz = (y * 2).sin()\nloss = During.apply(z * {f}, {mid}).sum().tanh()\n{go}\n{after}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = x * s.w\nz = During.apply(y * {f}, {mid})\n{reg}\nloss = (z.sin() + {m}).sum()\n{reg}\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = x * s.w\nz = y.tanh()\n{reg}\nloss = (z * z).sum() + {s}\n{reg}\n{reg}\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = x.sin()\nz = y @ s.w\n{reg}\nloss = z.sum()\n{reg}\n{go}\n{after}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = checkpoint(lambda q: q.sin() * s.w, x, use_reentrant={c})\nz = y * 2\n{reg}\nloss = z.sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\nwith torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * {f}):\n    y = x * s.w\n    z = y.sin()\nloss = z.sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\nwith torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(s.device)):\n    y = x * s.w\n    z = y.exp()\nloss = z.tanh().sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\nwith torch.autograd.graph.save_on_cpu():\n    y = x * s.w\n    z = y.tanh()\nloss = z.sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\nwith torch.autograd.graph.allow_mutation_on_saved_tensors():\n    y = x * s.w\n    z = y.sin()\n    y.mul_(2)\n    loss = z.sum()\n    loss.backward()\n{after}",
        "s.hooks.append(s.w.register_hook({fn}))", "s.hooks.append(s.c.register_hook({fn}))", "s.hooks and s.hooks.pop().remove()", "for h in s.hooks: h.remove()\ns.hooks.clear()",
        "x = {m}.detach().clone().requires_grad_()\ny = x * 2\nz = F.leaky_relu_(y.clone(), {f})\nloss = z.sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = F.elu_(x * 1, {f})\nz = F.celu_(y.clone(), {f}) if {f} else y\nloss = z.sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = x * 2\nz = y.mul_(s.w)\ny.add_({f})\nloss = z.sin().sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = (x * 2)[1:]\nz = y.mul_(3)\nz[{n} % 3].add_(s.c)\nloss = z.sin().sum()\n{go}\n{after}",
        "x = {m}.detach().clone().requires_grad_()\ny = x * 2\nz = y.sigmoid()\nz.add_({n})\nloss = z.sum()\n{go}\n{after}",
        "h = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * {f} if isinstance(m, nn.Linear) else None)\ntry:\n    s.see(s.net({m}))\nfinally:\n    h.remove()",
        "s.opt.register_step_pre_hook(lambda o, a, k: s.see(s.w.grad is None))", "s.see(s.w.grad)", "s.see(s.w._backward_hooks is None)",
    ],
)  # fmt: skip

FUNCTIONS = Group(
    leaves={
        "apply": [
            "Scale.apply(x, {f})", "Twice.apply(x * 1)", "Mixed.apply(x)[0]", "Mixed.apply(x)[1].float()", "Once.apply(x)", "Bare.apply(x, {c})[0]", "Bare.apply(x, {c})[1]",
            "TwoDirty.apply(x * 1, x * 2)[0]", "TwoDirty.apply(x * 1, x * 2)[1]", "Same.apply(x)", "Same.apply(x.t())", "Wrong.apply(x, 'shape')", "Wrong.apply(x, 'number')", "Wrong.apply(x, 'dtype')",
            "Wrong.apply(x, 'none')", "Wrong.apply(x, 'raise')", "Setup.apply(x, {f})", "Views.apply(x)", "Counted.apply(x, s)", "Twice.apply(x[:2].clone())", "Saves.apply(x)", "Twice.apply(x.t())",
        ],
        "go2": [
            "y.sum().backward()", "y.sin().sum().backward()", "(y * s.w[:y.shape[0]]).sum().backward()", "s.see(torch.autograd.grad(y.sum(), x, allow_unused=True))", "y.sum().backward(); y.sum().backward()",
            "(g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True); g.sum().backward()", "y.sum().backward(retain_graph=True); y.sum().backward()",
            "s.see(torch.func.grad(lambda x: {apply}.sum())(x.detach()))", "s.see(torch.autograd.functional.jacobian(lambda x: {apply}.sum(0), x.detach()))",
        ],
    },
    statements=[
        "x = {m}.detach().clone().requires_grad_()\ny = {apply}\n{go2}\ns.see(x.grad)",
        "x = {m}.detach().clone().requires_grad_({c})\ny = {apply}\ns.see(y)",
        "x = {m}\ny = {apply}\ns.see(y)\n{M} = y.detach().clone() if y.shape == (4, 4) else s.m0",
        "x = {m}.detach().clone().requires_grad_()\ny = {apply}\nx = y + 0\nz = {apply}\nz.sum().backward()\ns.see(z)",
        "x = s.w\ny = {apply}\ns.see(y)\n{go2}\ns.see(s.w.grad)\ns.w.grad = None",
        "with torch.no_grad():\n    x = {m}\n    s.see({apply})",
        "x = {m}.detach().clone().requires_grad_()\nwith Functions(s):\n    y = {apply}\n    y.sum().backward()\ns.see(x.grad)",
        "x = {m}.detach().clone()\ny = {apply}\ns.see([y._version, x._version])",
        "x = {m}.detach().clone().requires_grad_()\nq = x * 1\nv = q[1:3]\nTwice.apply(v)\ns.see(q)\nq.sum().backward()\ns.see(x.grad)",
    ],
)  # fmt: skip

MODES = Group(
    statements=[
        "torch.set_grad_enabled({c})", "torch.set_grad_enabled(True)", "s.enter(torch.inference_mode())", "s.enter(torch.no_grad())", "s.enter(torch.enable_grad())", "s.leave()", "s.leave()", "s.leave()",
        "torch.set_default_dtype(torch.float64 if {c} else torch.float32)", "torch.set_default_dtype(torch.float32)", "s.see(torch.ones(2, device=s.device))", "s.see(torch.tensor([{f}, 1], device=s.device))",
        "s.see(torch.get_default_dtype())", "torch.use_deterministic_algorithms({c})", "torch.use_deterministic_algorithms(False)", "s.see({b} * {f})",
        "s.see(torch.empty(3, device=s.device) if torch.are_deterministic_algorithms_enabled() else 0)", "s.see(torch.empty(3, device=s.device, dtype=torch.int32) if torch.are_deterministic_algorithms_enabled() else 0)",
        "x = {m}\ntorch.use_deterministic_algorithms(True)\ns.see(torch.empty_like(x))\ns.see(torch.empty(2, 2, dtype=torch.int64, device=s.device))\ntorch.use_deterministic_algorithms(False)",
        "x, n = {m}, {n}\ntorch.use_deterministic_algorithms(True)\ns.see(torch.zeros(2, device=s.device).resize_(n + 2))\ns.see(x.new_empty(2))\ns.see(torch.empty_strided((2, 2), (1, 2), device=s.device))\ntorch.use_deterministic_algorithms(False)",
        "torch.use_deterministic_algorithms(True)\n{M}.index_add_(0, {i}, {x})\n{M}.index_put_(({i},), {y}, accumulate=True)\ntorch.use_deterministic_algorithms(False)",
        "s.enter(torch.autocast(s.device, dtype=torch.bfloat16, enabled={c}))", "s.see({m} @ {m})", "s.see({m}.is_inference())", "s.see(s.net({m}))", "s.see(torch.arange({n} + 1., device=s.device))",
        "s.see(torch.full((2,), {f}, device=s.device))", "s.see(torch.is_grad_enabled())", "s.see(torch.is_inference_mode_enabled())", "torch.set_flush_denormal({c}); torch.set_flush_denormal(False)",
        "x = {m}.detach().clone().requires_grad_()\ny = During.apply(x.sin(), lambda: torch.set_grad_enabled({c}))\ny.sum().backward()\ns.see([x.grad, torch.is_grad_enabled()])\ntorch.set_grad_enabled(True)",
        "s.see(torch.linspace(0, 1, 4, device=s.device))", "s.see(torch.rand(2, device=s.device))", "s.see(torch.zeros(2, device=s.device).new_tensor([1.5]))", "s.see(torch.scalar_tensor({f}, device=s.device))",
                "torch.autograd.set_detect_anomaly({c}, check_nan=False)",
        "with torch.inference_mode():\n    s.m0 = {m} + 1", "with torch.inference_mode({c}):\n    {M}.add_(1)", "s.m1 = s.m0.detach()",
    ],
    blocks=[
        ("with torch.inference_mode():", {}, []), ("with torch.autograd.forward_ad.dual_level():", {}, []), ("with torch.autocast(s.device, dtype=torch.bfloat16):", {}, []),
        ("with torch.inference_mode({c}):", {}, []), ("with torch.autograd.grad_mode.inference_mode(False):", {}, []), ("with torch.device(s.device):", {}, []),
        ("with torch.autograd.graph.disable_saved_tensors_hooks('no'):", {}, []), ("with torch.autograd.set_detect_anomaly(True, check_nan=False):", {}, []),
    ],
)  # fmt: skip

DTYPES = Group(
    leaves={
        "any": ["s.t0", "s.t1", "{m}", "{d}", "{h}", "{b}", "s.t2"],
        "T": ["s.t0", "s.t1", "s.t2"],
        "e": [f"torch.{name}" for name in ("float32", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64", "complex64", "bool", "complex128")],
        "big": ["{f}", "1e38", "1e39", "-1e300", "3e9", "300", "-1", "255.7", "torch.nan", "torch.inf", "2**40", "(2**63 - 1)", "2**63", "(2**64 - 1)", "65519.9", "1e-45", "5e-324", "True", "1j", "-0.0", "2**31", "16777217"],
    },
    expressions={
        "any": [
            "{any}.to({e})", "({any} + {any})", "({any} * {big})", "({any} - {big})", "({any} / {any})", "({any} // 3)", "({any} % 3)", "{any}.clone()", "{any}.t()", "-{any}", "({any} + {n})", "({big} * {any})", "{any}.flip(0)",
            "torch.full((4, 4), {big}, dtype={e}, device=s.device)", "torch.where({b}, {any}, {any})", "torch.where({b}, {any}, {big})", "torch.full((4, 4), {big}, device=s.device)", "({any} > {big})", "({any} == {any})",
            "{any}.masked_fill({b}, {big})", "{any}.conj()", "torch.complex({m}, {m})", "{any}.real", "{any}.abs()", "({any} ** 2)", "{any}.round()", "{any}.sign()", "{any}.view({e})", "torch.maximum({any}, {any})", "{any}.clamp({n}, {big})",
            "({any} & {any})", "({any} << {n})", "~{any}", "{any}.sqrt()", "{any}.exp()", "torch.cat([{any}[:2], {any}[2:]])", "torch.stack([{any}[0], {any}[1], {any}[2], {any}[3]])", "{any}.cumsum(0)", "{any}.sum(0).expand(4, 4)",
            "{any}.type(torch.float32).to({e})", "({any}.float() * 1e38).to({e})", "({m} * 300).to({e})", "({d} * 1e10).to({e})", "{any}.float().div(0.0).to({e})", "{any}.amax(0).expand(4, 4)", "{any}.prod(0).expand(4, 4)", "{any}.mean(0, dtype=torch.float32).expand(4, 4)",
            "{any}.nan_to_num()", "torch.addcmul({any}, {any}, {any})", "torch.lerp({any}, {any}, {f})", "{any}.bitwise_not()", "{any}.floor_divide({n} + 1)", "torch.remainder({any}, {any}.clamp(min=1))", "torch.fmod({any}, {n} + 1)", "{any}.imag", "{any}.index_select(0, {i})",
            "torch.sub({any}, {any}, alpha={big})", "torch.add({any}, {any}, alpha={n})", "torch.rsub({any}, {any})", "torch.tensor([[{big}] * 4] * 4, device=s.device)", "torch.pow({any}, {any})", "torch.pow({big}, {any})", "{any}.trunc()", "torch.copysign({any}, {any})",
        ],
    },
    statements=[
        "s.t0 = {any}", "s.t1 = {any}", "s.t2 = {any}", "s.t0 = {any}.to({e})", "{T}.add_({any})", "{T}.mul_({big})", "{T}.fill_({big})", "{T}.copy_({any})", "{T}[{b}] = {big}", "{T}[{n}] = {big}", "{T}.zero_()", "{T}.masked_fill_({b}, {big})",
        "s.see({any})", "s.see({any})", "s.see({any}.to({e}))", "s.see({any}.sum())", "s.see({any}.float().mean())", "s.see({any}.max())", "s.see({any}[0, {n}].item())", "s.see({any}.tolist())", "s.see(text({any}))", "s.see({any}.to('cpu', copy=True).to({e}))",
        "s.see((s.wide[:4, :4] * {f}).to({e}).to(s.device))", "{T}.sub_({any}, alpha={big})", "{T}.div_({n})", "{T}.clamp_(-2, {big})", "{T}.pow_(2)", "{T} += {n}", "{T}.neg_()", "{T}.copy_(s.host)", "s.host.copy_({any})", "{M}.copy_({any})", "{M}.add_({any})", "{M}.add_({x}, alpha={big})",
        "{M}.fill_({big})", "{M}.mul_({big})", "s.h0 = {any}.to(torch.bfloat16)", "s.d0 = {any}.to(torch.float64)", "s.b0 = {any}.bool()", "s.i0 = {any}[0].to(torch.int64).remainder(4)", "s.see(torch.result_type({any}, {big}))", "s.see({any}.dtype)", "s.see(torch.can_cast({any}.dtype, {e}))",
        "s.see(bool({any}.any()))", "s.see(torch.equal({any}, {any}))", "s.see({any}.to(torch.uint8).sum())", "s.see(torch.arange(0, 4, 1, dtype={e}, device=s.device))", "s.see(torch.zeros(2, dtype={e}, device=s.device).fill_({big}))", "s.see(torch.full((2,), {big}, dtype={e}, device=s.device))",
        "s.see(torch.ones(2, dtype={e}, device=s.device).add(1, alpha={big}))", "s.see(torch.ones(2, dtype={e}, device=s.device).clamp(max={big}))", "s.see(int({any}[0, 0]))", "s.see(float({any}[{n}, 1].real))", "{T}.random_(0, 100)", "{T}.bernoulli_(0.5)", "{T}.normal_()",
        "s.see(torch._foreach_add([{any}, {any}], {big}))", "torch._foreach_mul_([{T}, {T}], {big})", "torch.add({any}, {any}, out={T})", "s.see({any}.view(torch.uint8).sum())", "s.see(torch.view_as_real({any}))", "s.t0 = s.t0[:, :].t()",
        "s.see({any}.half().float())", "s.see({any}.unique().sum())", "s.see({any}.argmax())", "s.see({any}.sort(0).values)", "s.see(({any} @ {any}))", "s.see({any}.to(torch.float32).to({e}).to(torch.float64))",
    ],
)  # fmt: skip

REFUSED = Group(
    statements=["s.see({m})", "{M}.add_({f})"],
    errors=[
        "torch.add({m}, {m}, alpha=1j)", "{M}.add_({m}, alpha=1j)", "F.gelu({m}, approximate='x')", "torch.lerp({m}, {d}, 0.5)", "torch.lerp({m}, {m}, {d})", "torch.heaviside({m}, {d})", "torch.abs({b})", "{b}.abs_()", "s.i0.fill_(torch.nan)",
        "torch.full((2,), torch.nan, dtype=torch.int64, device=s.device)", "{M}.fill_(1e39)", "{m}.clamp(max=1e39)", "torch.add({m}, {m}, alpha=1e39)", "F.softshrink({m}, -{n} - 1.0)", "torch.add({b}, {b}, alpha=1.1)", "torch.add({i}, {i}, alpha=0.5)",
        "torch.sub({b}, {b})", "{b} - 1", "-{b}", "{m}.add_(1j)", "s.i0.mul_(0.5)", "s.i0.div_(2)", "{b}.add_(1.5)", "{m} @ {d}", "torch.mm({m}, {i})", "torch.dot({v}, {i})", "{m} << 1", "{m} & {m}", "~{m}", "torch.bitwise_and({m}, 1)", "torch.where({m}, {m}, {m})",
        "{m}[{m}]", "{m}.index_select(0, {m})", "{m}.gather(0, {i})", "{m}.masked_fill({m}, 1)", "{m}.masked_fill({b}, {v})", "{m}.masked_select({i})", "{m}.scatter(0, {i}.expand(4, 4), {d})", "{m}.index_add(0, {i}, {d})", "{m}.index_copy(0, {i}, {d})", "torch.cat([])", "torch.stack([{m}, {v}])",
        "torch.cat([{m}, {m}], 5)", "{m}.sum(5)", "{m}.sum((0, 0))", "{m}.mean(dtype=torch.int64)", "{i}.mean()", "{i}.softmax(0)", "{b}.softmax(0)", "torch.softmax({m}, 3)", "{m}.reshape(5, 5)", "{m}.view(16, 2)", "{m}.t().view(16)", "{m}.permute(0, 0)", "{m}.transpose(0, 4)", "{m}.squeeze(7)",
        "{m}.expand(3, 4)", "{m}.unfold(0, 9, 1)", "{m}.narrow(0, 2, 9)", "{m}.select(0, 9)", "{m}.split([1, 1])", "{m}.chunk(0)", "{m}.as_strided((99, 99), (9, 9))", "{m}.as_strided((2, 2), (-1, 1))", "{m}.diagonal(0, 1, 1)", "{m}.repeat(2)", "{m}.flip(3)", "{m}.roll(1, 7)", "torch.outer({m}, {v})",
        "F.linear({m}, {v}, {m})", "F.linear({m}, {m}[:, :3])", "F.layer_norm({m}, (3,))", "F.embedding({m}, {m})", "F.cross_entropy({m}, {m}[:2])", "F.nll_loss({m}, {v})", "F.conv1d({m}, {m})", "F.conv2d({m}[None, None], {m}[None, None], padding=-1)", "F.dropout({m}, 2.0)", "F.dropout({m}, -1)",
        "late(torch.bernoulli({m} * 100))", "{M}.bernoulli_(2.0)", "{M}.uniform_(2, 1)", "{M}.normal_(0, -1)", "{M}.exponential_(-1)", "{M}.random_(3, 2)", "torch.multinomial({m}[0], 9)", "torch.randperm(-1, device=s.device)", "torch.randint(3, 1, (2,), device=s.device)", "torch.rand(-1, device=s.device)", "torch.arange(1, 0, device=s.device)",
        "torch.linspace(0, 1, -1, device=s.device)", "torch.empty(2, -3, device=s.device)", "torch.zeros(2, dtype='a', device=s.device)", "{m}.topk(9)", "{m}.kthvalue(9)", "{m}.cumsum(3)", "{m}.norm(dim=4)", "{m}.var(3)", "torch.einsum('ij,jk', {m}, {v})", "torch.tensordot({m}, {v}, 2)", "torch.bmm({m}, {m})", "torch.addmm({v}, {m}, {v})",
        "torch.baddbmm({m}, {m}, {m})", "{m}.inverse()[9]", "torch.linalg.cholesky(-{m} @ {m}.t() - torch.eye(4, device=s.device))", "torch.clamp({m})", "{m}.clamp(min='a')", "{M}.copy_({m}[:3])", "{M}.copy_({v}[:3])", "{M}[9] = 1", "{M}[:, 9] = 1", "{M}[0] = {v}[:3]", "{M}[{b}] = {v}", "{M}.set_({d})",
        "{M}.t_(1)", "{m}.requires_grad_().add_(1)", "s.w.zero_()", "s.w[0] = 1", "s.w.t_()", "s.w.detach_().requires_grad_()", "{i}.clone().requires_grad_()", "{m}.backward()", "torch.autograd.grad({s}, {v})", "torch.autograd.grad({m}.detach(), s.w)", "{m}.detach().requires_grad_().sum().backward(torch.ones(3, device=s.device))",
        "{m}.item()", "bool({m})", "int({v})", "float({u})", "len({s})", "{m}.tolist().x", "{m} + 'a'", "{m} + None", "{m} + [1]", "torch.add({m})", "torch.add({m}, {m}, {m}, {m})", "{m}.no_such_thing()", "torch.add({m}, {m}, foo=1)", "{m}.to('nowhere')", "{m}.to(torch.float33)", "{m}.view(torch.int64)[0] + {m}.t().view(torch.int64)",
        "F.relu({m}, inplace='x') + {m}[9]", "F.leaky_relu({m}, 'a')", "F.elu({i})", "F.sigmoid({m}, 1)", "torch.sigmoid_(s.i0)", "s.i0.sin_()", "s.i0.sqrt_()", "torch.exp({i}, out=s.i0.clone())", "torch.add({m}, {m}, out={d}.long())", "torch.sum({m}, 0, out=s.i0.clone())", "torch.complex({m}, {d})", "torch.complex({i}, {i})", "torch.view_as_complex({m}[:, :3])",
        "torch.view_as_real({m})", "{m}.imag", "torch.complex({m}, {m}) > 1", "torch.complex({m}, {m}).clamp(0, 1)", "torch.complex({m}, {m}).max()", "torch.complex({m}, {m}).floor()", "torch.fmod(torch.complex({m}, {m}), 2)", "torch.maximum(torch.complex({m}, {m}), {m})", "{m}.index_put_((torch.tensor([9], device=s.device, dtype=torch.float32),), {s})", "{i}.pow(-1)", "2 ** {b} - ~{i} << {m}",
        "torch.pow({b}, {b})", "F.huber_loss({m}, {m}, delta=-1.0)", "F.smooth_l1_loss({m}, {m}, beta=-1.0)", "F.mse_loss({m}, {m}, reduction='x')", "F.hardtanh({m}, 2.0, 1.0)", "F.threshold_(s.i0, 0.5, 0.5)", "F.rrelu({m}, 0.5, 0.1)", "F.glu({m}[:, :3])", "F.pad({m}, (1,))", "F.pad({m}, (-9, 0))", "late(F.one_hot({i}, 1))", "F.max_pool1d({m}, 9)", "F.avg_pool1d({m}, 2, 0)",
        "F.interpolate({m}[None], scale_factor=-1)", "F.batch_norm({m}[:1], None, None, training=True)", "F.group_norm({m}, 3)", "F.scaled_dot_product_attention({m}, {m}[:, :3], {m})", "torch.bucketize({m}, {m})", "torch.histc({i})", "torch.bincount({m})", "torch.bincount(-{i} - 1)", "torch.searchsorted({v}, {m}, right=True, side='left')", "torch.where({b}, {m}, {r})",
        "torch.rot90({m}, 1, (0, 0))", "torch.tril({v})", "torch.trace({v})", "torch.diag_embed({m}, 0, 1, 1)", "torch.logit({i}.bool())", "torch.nextafter({m}, {i})", "torch.hypot({i}, {i})", "torch.atan2({b}, {b}).x", "torch.copysign({m}, {v}[:3])", "torch.cross({m}, {m})", "torch.cdist({m}, {v})", "torch.gcd({m}, {m})", "torch.ldexp({m}, {r})",
        "copy.deepcopy({m} * s.w)", "pickle.dumps({m} * s.w + (lambda: 0))", "torch.from_numpy({m})", "s.opt.load_state_dict({})" , "s.module.load_state_dict({'x': 1})", "s.module({m}[:, :3])", "s.module('a')", "s.module.first.weight.data.resize_(2).x", "torch.optim.SGD([], 0.1)", "torch.optim.SGD([{m} * s.w], 0.1)", "torch.optim.Adam([s.w], -1)",
    ],
)  # fmt: skip

# The number of the iteration replaces `STEP`.
EXEC = Group(
    statements=[
        f's.made("""{text}""", locals())'
        for text in (
            "s.m0 = s.m0 * {f} + 1", "s.v0 = s.m0.sum({n} % 2)", "def made(x):\\n    return x * STEP + 1\\ns.m1 = made(s.m1)", "s.see({v})",
            "for k in range({n}): s.m0 = s.m0 + k", "x = {m}\\ny = x.sin()\\ns.see(y.sum().item())", "s.m1 = {m} + STEP", "f = lambda x: x + {f}\\ns.m2 = f(s.m2)",
            "{M}.add_({x})", "\\n\\n\\ns.m0 = s.m0 + 1 + STEP % 2", "with torch.no_grad():\\n    s.w.mul_(0.5)", "class A:\\n    def __call__(self, x): return x - {f}\\ns.m1 = A()(s.m1)",
            "raise ValueError", "({s} * s.w.mean()).backward()", "s.see({m}[STEP])", "def made(x):\\n    yield x\\n    yield x * STEP\\ns.kept += list(made({m}))",
        )
    ]
    + [
        's.see(eval("""{m}.sum() * {f}"""))',
        "f = types.FunctionType((lambda x: x * 2 + {f}).__code__.replace(co_name='n' + str(step)), globals())\ns.m0 = f(s.m0)",
        "s.m0 = s.fresh(lambda x: x * {f} + 1)(s.m0)", "s.m1 = s.fresh(lambda x: x.sin())({m})",
    ],
)  # fmt: skip

STORAGES = Group(
    leaves={
        "S": ["{M}.untyped_storage()", "s.p0.untyped_storage()", "s.store", "{V}.untyped_storage()", "{x}.untyped_storage()", "s.r0.untyped_storage()"],
    },
    expressions={"S": ["{S}.clone()"]},
    statements=[
        # The fill is the only write to these bytes, so the values stay valid row indices.
        "s.i0.untyped_storage().fill_(0)",
        "s.see({S}.nbytes())", "s.see(len({S}))", "s.see({S}.size())", "s.see({S}[{n}])", "s.store = {S}", "s.store = {M}.untyped_storage()",
        "s.store = torch.UntypedStorage(64, device=s.device)\ns.store.fill_({n})", "s.store.fill_({n})", "{S}.fill_({n})", "{S}.copy_({S})", "a, b = {M}.untyped_storage(), {x}.untyped_storage()\na.copy_(b)", "s.store.resize_(s.store.nbytes())", "a = torch.zeros(4, device=s.device).untyped_storage()\na.resize_(4 * ({n} + 1))\ns.see(a.nbytes())",
        "t = {M}.untyped_storage()\nx = torch.empty(0, device=s.device)\nif t.nbytes() >= 64:\n    x.set_(t, {n}, (2, 3), (4, 1)).add_(1)\ns.see(x)", "x = torch.empty(0, device=s.device).set_({M}.untyped_storage())\nx.mul_({f})\ns.see(x)", "x = torch.empty(0, device=s.device).set_({S})\ns.see(x.shape)", "{M}.set_({x})", "t = {M}.untyped_storage()\nif t.nbytes() >= 64: {V}.set_(t, {n}, (4,), (3,))",
        "x = torch.zeros(4, device=s.device)\nx.set_({M}.untyped_storage(), 0, (4, 4))\nx.fill_({f})", "s.v0 = torch.zeros(4, device=s.device).set_({M})[0]", "s.see({S}.device.type == s.device)", "s.see({S}.cpu().nbytes())", "s.see({S}.cpu().tolist()[:8])", "s.see({S}.tolist()[:8])", "s.see({S}.element_size())",
        "x = torch.frombuffer(bytearray(64), dtype=torch.float32).to(s.device)\nx.untyped_storage().copy_({M}.untyped_storage())\ns.see(x)", "s.see({M}.untyped_storage()._cdata == {M}.untyped_storage()._cdata)", "s.see({M}.is_set_to({M}))", "s.see({M}.storage_offset())",
        "s.see({M}[1:].storage_offset())", "x = {M}.detach().clone()\nx.untyped_storage().resize_(0)\ns.see(x.shape)\nx.untyped_storage().resize_(64)\nx.fill_(1)\ns.see(x)", "x = torch.ones(4, device=s.device)\nx.resize_({n} + 1)\ns.see(x[:1])", "x = torch.ones(2, 2, device=s.device)\nx.resize_as_({M}).fill_({n})\ns.see(x)",
        "x = {M}.detach()\nx.untyped_storage().fill_(0)\ns.see(x)\ns.see({M})", "s.see({M}.view(torch.int32))", "s.see({M}.view(torch.uint8)[:, :4])", "{M}.view(torch.int32).bitwise_and_(-2)", "a = {M}.untyped_storage()\na[{n}] = {n}", "a = {M}.untyped_storage()\na[4:8] = 0", "s.see(copy.deepcopy({S}).nbytes())", "s.see(pickle.loads(pickle.dumps({x})).untyped_storage().nbytes())",
        "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    s.see({x}.storage()[{n}])\n    s.see({M}.storage().size())\n    s.see({x}.storage().tolist()[:3])", "s.m0, s.m1 = s.m1, s.m0\ns.m0.data = s.m1.data", "{M}.data = {M}.data[:]",
        "s.see({S} is {S})", "s.refs = weakref.ref({M}.untyped_storage())", "del s.store; s.store = {M}.untyped_storage()", "x = torch.as_strided({M}, (2, 2), (1, 1), {n})\ns.see(x)\ns.see(x.untyped_storage().nbytes())",

    ],
    errors=["{S}[9999]", "{S}[0:4:2]", "{S}.copy_({x}[:2].untyped_storage())", "{S}.resize_(-1)", "s.w.set_({x})", "{M}[1:].resize_(12).view(5)", "{M}.untyped_storage().fill_('a')", "torch.empty(0, dtype=torch.float64, device=s.device).set_({M}.untyped_storage(), -1, (2,), (1,))"],
)  # fmt: skip

TRANSFORMS = Group(
    leaves={
        "pure": ["lambda y: (y * {f}).sin().sum()", "lambda y: (y @ y).tanh().sum()", "lambda y: F.layer_norm(y, y.shape[-1:]).square().sum()", "lambda y: y.softmax(-1)[..., 0].sum()", "lambda y: (y * s.m1.detach()).mean()", "lambda y: torch.where(y > 0, y, y * {f}).sum()", "lambda y: y.cumsum(-1).norm()", "lambda y: Setup.apply(y, {f}).sum()"],
        "vec": ["lambda y: y * {f} + y.sum()", "lambda y: y.sin()", "lambda y: y.sort().values", "lambda y: y.softmax(0)", "lambda y: torch.where(y > 0, y, -y)", "lambda y: y @ s.m0.detach()", "lambda y: torch.outer(y, y).sum(0)", "lambda y: y.flip(0).cumsum(0)", "lambda y: F.linear(y, s.m1.detach())", "lambda y: y.clone().add_(1)", "lambda y: y[{i}]", "lambda y: y.item()", "lambda y: y.view(2, 2).t().reshape(4)"],
    },
    statements=[
        "s.see(torch.func.grad({pure})({m}.detach()))", "s.see(torch.func.vmap({vec})({m}.detach()))", "s.see(torch.func.vmap({vec}, in_dims=1, out_dims=1)({m}.detach()))", "s.see(torch.func.vmap(torch.func.grad({pure}))({m}.detach()[:, None].expand(4, 4, 4) * 1))", "s.see(torch.func.grad_and_value({pure})({m}.detach()))",
        "s.see(torch.func.jvp({vec}, ({v}.detach(),), ({v}.detach(),)))", "s.see(torch.func.vjp({vec}, {v}.detach())[1]({v}.detach()))", "s.see(torch.func.jacrev({vec})({v}.detach()))", "s.see(torch.func.jacfwd({vec})({v}.detach()))", "s.see(torch.func.hessian(lambda y: y.sin().prod())({v}.detach()))",
        "s.see(torch.func.functional_call(s.module, dict(s.module.named_parameters()), ({m},)))",
        "s.see(torch.func.vmap(lambda y: torch.rand_like(y) + y, randomness='different')({m}.detach()))", "s.see(torch.func.vmap(lambda y: torch.rand_like(y) + y, randomness='same')({m}.detach()))", "s.see(torch.func.vmap(lambda y: torch.rand_like(y) + y)({m}.detach()))", "s.see(torch.func.functionalize(lambda y: y.clone().add_(1))({m}.detach()))",
        "x = {v}.detach().clone().requires_grad_()\n(g,) = torch.autograd.grad(x.sin(), x, torch.eye(4, device=s.device), is_grads_batched=True)\ns.see(g)", "with torch.autograd.forward_ad.dual_level():\n    d = torch.autograd.forward_ad.make_dual({v}.detach(), {v}.detach())\n    s.see(torch.autograd.forward_ad.unpack_dual(d * {f} + d.sin()))",
        "x = {v}.detach().clone().requires_grad_()\ntorch.func.vmap({vec})(torch.stack([x, x])).sum().backward()\ns.see(x.grad)", "s.see(torch.func.vmap(lambda y, z: y @ z, in_dims=(0, None))({m}.detach(), {m}.detach()))", "s.see(torch.func.vmap({vec}, chunk_size=2)({m}.detach()))",
    ],
)  # fmt: skip

COPIES = Group(
    statements=[
        "s.see(copy.deepcopy({m}.detach()))", "s.w2 = copy.deepcopy(s.w)\ns.see(s.w2)", "s.module = copy.deepcopy(s.module)", "s.module.load_state_dict(copy.deepcopy(s.module.state_dict()))", "s.saved = s.module.state_dict()", "s.saved = copy.deepcopy(s.module.state_dict())", "s.saved and s.module.load_state_dict(s.saved)", "s.saved and s.module.load_state_dict(s.saved, assign=True)",
        "s.opt.load_state_dict(s.opt.state_dict())", "s.opt.load_state_dict(pickle.loads(pickle.dumps(s.opt.state_dict())))", "s.see(pickle.loads(pickle.dumps({m}.detach())))", "s.see(pickle.loads(pickle.dumps(s.w)))", "f = io.BytesIO()\ntorch.save({m}.detach(), f)\nf.seek(0)\ns.see(torch.load(f))", "f = io.BytesIO()\ntorch.save(s.module.state_dict(), f)\nf.seek(0)\ns.module.load_state_dict(torch.load(f))",
        "f = io.BytesIO()\ntorch.save([{M}, {M}[1:], {V}], f)\nf.seek(0)\na, b, c = torch.load(f)\nwith torch.no_grad():\n    a.add_(1)\ns.see([a, b, c])", "f = io.BytesIO()\ntorch.save({any0}, f)\nf.seek(0)\ns.see(torch.load(f, map_location='cpu'))", "a, b = copy.deepcopy([s.p0, s.p0[::2]])\na.add_(1)\ns.see([a, b])", "s.see(copy.copy({m}))",
        "s.see(list(s.module.state_dict().values()))", "s.module.to(torch.float64).to(torch.float32)", "s.module.half().float()", "s.module.requires_grad_({c})", "s.module.zero_grad(set_to_none={c})", "s.see([p.grad is None for p in s.module.parameters()])", "s.opt.state.clear()", "s.see([p.detach().sum() for p in s.module.parameters()])",
        "s.see(len(s.opt.state))", "s.opt.add_param_group(dict(params=[torch.zeros(2, device=s.device, requires_grad=True)]))", "s.see(copy.deepcopy(s.module).cpu().to(s.device)(s.m0))", "s.see(copy.deepcopy(s.p0[1::2, ::2]))", "s.see(pickle.loads(pickle.dumps(s.p0[1::2, ::2])))",
        "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(s.module.parameters()) * 0.5, s.module.parameters())", "s.see(copy.deepcopy(s.module)(s.m0))", "s.module.first.weight = nn.Parameter({m}.detach().clone())", "s.module.register_buffer('extra', {v}.detach())", "s.see(pickle.loads(pickle.dumps(copy.deepcopy(s.module).cpu())).first.weight.detach().clone())",
    ],
    leaves={"any0": ["s.m0.detach()", "s.d0.detach()", "s.h0.detach()", "s.b0", "s.i0", "s.p0[::2]", "s.p0.t()"]},
)  # fmt: skip

NUMPY = Group(
    leaves={"np": ["s.nums", "s.nums[::2, ::2]", "s.nums.T", "s.nums[::-1]", "{m}.detach().to('cpu', copy=True).clone().numpy()", "np.float32({f}) * s.nums", "s.nums[1:5, 2:6]", "np.ones((4, 4), np.float32)"]},
    statements=[
        "s.see(torch.from_numpy({np}.copy()).to(s.device))", "s.p0.copy_(torch.from_numpy(s.nums))", "s.p0[::2].copy_(torch.from_numpy(s.nums)[::2])", "s.p0[::2, ::2] = torch.from_numpy(s.nums[::2, ::2])", "s.nums[::2] += 1", "s.nums *= 0.5", "s.nums[:4, :4] = {m}.detach().to('cpu', copy=True).numpy()", "s.see(s.nums.sum())", "s.m0 = torch.tensor({np}[:4, :4].copy(), device=s.device)",
        "s.see(torch.as_tensor({np}.astype(np.float64), device=s.device))", "s.see({m} * np.float32({f}))", "s.see(np.float64(0.5) * {m}[0, 0].item())", "s.see({m}.detach().to('cpu', copy=True).numpy())", "s.see(s.p0[1::2, ::2].to('cpu', copy=True).numpy())", "s.see(torch.tensor([np.float32(1), np.float32({f})], device=s.device))", "x = {m}.detach().to('cpu', copy=True)\nx.numpy()[:] = {n}\ns.see(x)\ns.see({m})",
        "x = torch.from_numpy(s.nums)\nx.add_(1)\ns.p0.copy_(x)\nx.sub_(1)", "s.see({m}[np.int64({n})])", "s.see({m}[np.array([0, {n}])])", "{M}[np.array([1, 0])] = {f}", "s.see(torch.full((2,), np.float32({f}), device=s.device))", "s.see(torch.zeros(np.int64({n}), 2, device=s.device))", "{M}.fill_(np.float64({f}))", "{M}.mul_(np.float32({f}))", "s.see({m}.sum(axis=np.int64(0)))",
        "s.see(np.asarray({m}.detach().to('cpu', copy=True)))", "s.see(np.stack([x.to('cpu', copy=True).numpy() for x in {m}.detach()]))", "s.see({h}.detach().float().to('cpu', copy=True).numpy())", "s.see({m}.detach().to('cpu', copy=True).numpy() @ s.nums[:4, :4])", "np.copyto(s.nums[4:, 4:], {m}.detach().to('cpu', copy=True).numpy())", "s.host = torch.from_numpy(s.nums[:4, :4].copy())", "s.wide = torch.from_numpy(s.nums)", "s.wide = torch.from_numpy(s.nums.copy())",
        "s.see({m}.reshape(*np.array([2, 8])))", "s.see(torch.tensor(s.nums[0], dtype=torch.int32, device=s.device))", "s.see(bool(np.any({m}.detach().to('cpu', copy=True).numpy() > 0)))", "{M}.copy_(torch.from_numpy(s.nums[::2, ::2]))\ns.nums[0] += 1",
    ],
)  # fmt: skip

THREADS = Group(
    statements=[
        "s.see(in_thread(lambda: {m} + 1))", "s.see(in_thread(lambda: {M}.add_({f})))", "in_thread(lambda: {M}.mul_(0.5))", "s.m0 = in_thread(lambda: {m}.sin())", "s.see(in_thread(lambda: {m}.sum().item()))", "s.see(in_thread(lambda: torch.rand(2, device=s.device)))",
        "s.later = start(lambda x={m}.detach().clone(): (x * {f}).sum())", "s.later and s.see(s.later.result())\ns.later = None", "s.see(in_thread(lambda: torch.is_grad_enabled()))", "in_thread(lambda: ({s} + s.w.sum()).backward())", "s.see(in_thread(lambda: fail()))", "s.see(in_thread(lambda: {m}[9]))",
        "s.later = start(lambda x={m}.detach().clone(): x.add_(1).tolist())", "s.see(in_thread(lambda: next(s.it, None)))", "in_thread(lambda: torch.manual_seed({n}))", "in_thread(mark_step)", "s.kept.append(in_thread(lambda: {m} @ {m}))", "in_thread(s.kept.clear)", "in_thread(gc.collect)", "s.see(in_thread(lambda: s.g.get_state()))",
        "in_thread(lambda: s.see({v}))", "in_thread(lambda: s.opt.step())", "in_thread(lambda: s.host.copy_({m}.detach()))", "in_thread(lambda: {M}.copy_(s.host))", "in_thread(lambda: torch.set_grad_enabled(False))", "s.see(list(s.pool.map(lambda k: (s.m0.detach() * k).sum(), range({n} + 1))))", "a, b = in_thread(lambda: ({m}, {v}))\ns.see(b)",
    ],
)  # fmt: skip

LIFETIMES = Group(
    statements=[
        "s.it = gen({m})\nnext(s.it)", "s.it = (x * {f} for x in {m}.detach())", "s.see(next(s.it, None))", "s.it.close() if hasattr(s.it, 'close') else None", "s.it = iter(())", "g = halfway(s, {m})\nnext(g)", "s.half = halfway(s, {M}.detach())\nnext(s.half)", "s.half and s.half.close()", "s.see(s.half and next(s.half, None))", "s.half = None",
        "s.half and s.half.throw(KeyError)", "s.half and s.see(s.half.send({f}))", "s.ghost = Ghost({M}.detach(), {f})", "s.ghost = None", "Ghost({M}.detach(), 1)", "for k in range(3): Ghost({M}.detach(), k)", "s.ref = weakref.ref({M})", "s.see(s.ref is None or s.ref() is None)", "y = {m}\ns.ref = weakref.ref(y)\ndel y\ns.see(s.ref() is None)",
        "weakref.finalize({x}, s.died, {n})", "y = {x}\nweakref.finalize(y, s.died, {n})\ny = None", "{M}.tag = {n}\ns.see(getattr({M}, 'tag', None))", "y = {M}\ny.me = y\ndel y", "a = [{x}]\na.append(a)", "s.cache = weakref.WeakValueDictionary(); s.cache['a'] = s.m0", "s.see(sorted(s.cache or ()))", "s.wk = torch.utils.weak.WeakTensorKeyDictionary() ; s.wk[{M}] = {n}", "s.see(len(s.wk or ()))",
        "s.see(sys.getrefcount({x}) < 5)", "s.see(s.m0 is {M})", "s.see({M}.view(4, 4)._base is {M})", "y = {M}[:]\ns.see(y._base is None)\ns.see(y._is_view())", "del s.m2; s.m2 = {m}", "s.kept.append(s.m0); s.m0 = None; s.m0 = s.kept.pop()", "s.see(id({M}) == id({M}))", "gc.collect(0)", "s.acc = itertools.accumulate({m}.detach(), torch.add)\nnext(s.acc)", "s.see(list(itertools.islice(s.acc or (), {n})))",
        "s.see(Tagged({m}.detach()) + 1)", "s.see(type({m}.detach().as_subclass(Tagged) * {f}).__name__)", "s.see(({m}.detach().as_subclass(Tagged) * {f}).as_subclass(torch.Tensor))", "s.p = nn.Parameter({m}.detach())\ns.see(s.p)", "s.see(functools.partial(torch.add, alpha=0.5)({m}, {m}))", "s.see(torch.no_grad()(lambda y: y * s.w)({m}))", "with contextlib.suppress(KeyError), Ghostly(s, {M}.detach()):\n    raise KeyError",
        "with contextlib.ExitStack() as stack:\n    stack.callback(lambda: {M}.detach().add_(1))\n    stack.enter_context(torch.no_grad())\n    s.see({m})", "s.see(asyncio_sum([{m}.detach(), {m}.detach()]))", "try:\n    for k in range(5):\n        s.m0 = s.m0 + k\n        if k == {n}: raise KeyError\nexcept KeyError:\n    s.m0 = s.m0 * 2", "for k in range(3):\n    try:\n        if k == {n}: continue\n        s.m1 = s.m1 + {m}\n    finally:\n        s.v0 = s.v0 + k",
        "match {n}:\n    case 0: s.m0 = s.m0 + 1\n    case 1 | 2: s.m0 = s.m0 * 2\n    case _: s.see({v})", "(y := {m}).detach().add_({f}); s.see(y)", "s.see(sorted({v}.detach().tolist(), key=lambda q: -q))", "s.see(max({v}.detach()))", "s.see(sum({v}.detach()))", "s.see([a for a in {m}.detach() if a.sum() > {f}])", "s.see(dict(zip('abcd', {v}.detach())))", "a, b, c, d = {m}\ns.m0 = torch.stack([d, c, b, a])", "if step == {n} * 3: raise ValueError",
    ],
)  # fmt: skip

WINDOWS = Group(
    leaves={
        # Windows that begin at another offset in each call of the line.
        "moved": [
            "s.p0.view(-1)[step % 5:][:16].view(4, 4)", "s.p0[{n}:][:4, :4]", "s.p0[:4, {n}:][:, :4]",
            "s.p0[{n}:, {n}:][:4, :4].t()", "s.p0.as_strided((4, 4), (8, 1), step % 20)",
            "s.p0.as_strided((4, 4), (1, 4), 3 * {n})", "s.p0.t()[step % 3:, {n}:][:4, :4]",
            "s.p0.as_strided((4, 4), (8, 2), step % 3)", "(s.p0 if {c} else s.p0[4:])[:4, :4]",
            "s.p0.view(2, 2, 4, 4)[step % 2, {n} % 2]", "s.p0.unfold(0, 4, 1)[step % 5, :4]", "s.p0[::2, step % 4:][:, :4]",
        ],
        "movedv": [
            "s.p0[{n}, :4]", "s.p0[:4, step % 8]", "s.p0.view(-1)[step:][:4]", "s.p0.diagonal(step % 4)[:4]",
            "s.p0.as_strided((4,), (step % 3 + 1,), {n})", "{moved}[{n}]", "{moved}.diagonal()", "s.m0[{n}]",
        ],
        "m": ["{moved}"],
        "v": ["{movedv}"],
    },
    statements=[
        f"with torch.no_grad():\n    w = {{moved}}\n    o = {call}\n    s.see(o)\n    s.see((o.stride(), o.storage_offset()))"
        for call in (
            "w.select_scatter({y}, {n} % 2, {n})", "w.slice_scatter({x}[:2], 0, 1, 3)", "w.diagonal_scatter({y})",
            "w.detach().as_strided_scatter({y}, (4,), (1,), w.storage_offset())", "torch.select_copy(w, 0, {n})", "w.clone()",
            "torch.as_strided_copy(w, (3,), (1,), {n})", "torch.diagonal_copy(w)", "w.view(torch.int32)", "w + {n}",
            "torch.empty_like(w).copy_(w)", "w.contiguous()", "w.reshape(-1)", "w.as_strided((4,), (1,))", "w.mm({x})",
            "w[1:, 1:]", "w.detach().t()", "w.expand(2, 4, 4)[{n} % 2]", "torch.add(w, {x}, out=w)", "w.sum({n} % 2)",
            "w.copy_({x})", "w.add_({moved}.clone())", "torch.mul({x}, {f}, out={moved})", "w.index_put(({i},), {y})",
            "w.masked_fill({b}, {f})", "w.unfold(0, 2, 1)", "torch.stack([w, w])[1]", "w.view_as_real() if w.is_complex() else w * 2",
            "torch.complex(w, w).imag", "w.clone(memory_format=torch.preserve_format)", "w.to(torch.float64)", "w.sort().values",
            "F.pad(w, (1, 0))", "w.flip(0)", "w.roll({n}, 0)", "w.scatter(0, {i}.expand(4, 4), {x})", "w.split(2)[{n} % 2]",
            "torch.narrow_copy(w, 0, 1, 2)", "torch.where({b}, w, w)", "w.softmax({n} % 2)", "w.cumsum({n} % 2)", "w.tril({n})",
        )
    ]
    + [
        "{moved}.add_({x})", "{moved}.mul_({f})", "{moved}.copy_({x})", "{movedv}.copy_({y})", "{movedv}.fill_({f})",
        "s.see({moved})", "s.see({movedv})", "s.see({moved} @ {movedv})", "s.p0.mul_(0.5)", "s.see(s.p0)", "s.m0 = {moved}",
        "s.v0 = {movedv}", "s.watch({moved})", "s.host.copy_({moved}.detach())", "{moved}.copy_(s.host)",
        "s.see({moved}.to('cpu', copy=True))", "s.kept.append({moved})", "s.see(F.linear({moved}, {m}, {movedv}))",
        "torch._foreach_mul_([{movedv}, {movedv}.clone()], {f})", "({moved} * s.w).sum().tanh().backward()", "s.see(s.w.grad)",
        "s.see(s.net({moved}))", "{moved}.normal_()", "{moved}.bernoulli_(0.5)", "s.see(torch.autograd.grad(({moved} * s.w).sum(), s.w))",
        "x = {moved}.detach()\nx.data = {moved}.detach()\ns.see(x)", "torch.cat([{moved}[:2], {moved}[2:]], out=s.m0.detach())",
    ],
    errors=["{moved}.view(16)", "{moved}.copy_({movedv}[:3])", "s.p0.as_strided((4, 4), (8, 1), 60)", "{moved}.select_scatter({movedv}[:2], 0, 1)"],
)  # fmt: skip

GROUPS = {
    "host": HOST,
    "generators": GENERATORS,
    "out": OUT,
    "overlap": OVERLAP,
    "foreach": FOREACH,
    "hooks": HOOKS,
    "functions": FUNCTIONS,
    "modes": MODES,
    "dtypes": DTYPES,
    "refused": REFUSED,
    "exec": EXEC,
    "storages": STORAGES,
    "transforms": TRANSFORMS,
    "copies": COPIES,
    "numpy": NUMPY,
    "threads": THREADS,
    "lifetimes": LIFETIMES,
    "windows": WINDOWS,
}
