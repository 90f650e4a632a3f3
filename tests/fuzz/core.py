"""The core of the grammar: productions that every program may use.

Each kind of expression is a letter:
- m, v, s: 4x4 matrices, vectors of 4 elements and scalars of float32
- d, h: matrices of float64 and of bfloat16
- b: matrices of bool
- i: vectors of indices
- r, u: matrices of any number of rows, vectors of any length
- x, y: matrices and vectors that share no memory with other tensors
- f, n, c: Python's floats, small integers and conditions
- M, V, R: matrices and vectors that a statement may write
"""

SIMPLEST = {
    "m": "s.m0", "v": "s.v0", "s": "s.m0.sum()", "d": "s.d0", "h": "s.h0", "b": "s.b0", "i": "s.i0",
    "r": "s.r0", "u": "s.u0", "x": "s.m0.clone()", "y": "s.v0.clone()", "f": "0.5", "n": "1",
    "c": "step % 2 == 1", "M": "s.m0", "V": "s.v0", "R": "s.r0",
}  # fmt: skip

LEAVES = {
    "m": ["s.m0", "s.m1", "s.m2", "s.m0", "s.m1", "s.w"],
    "v": ["s.v0", "s.v1", "s.v2", "s.c"],
    "s": ["s.m0.sum()", "s.v1.mean()", "s.u0.sum()", "s.w.sum()", "s.m1[1, 2]"],
    "d": ["s.d0"],
    "h": ["s.h0"],
    "b": ["s.b0"],
    "i": ["s.i0"],
    "x": ["({m} + 0)", "{m}.clone()", "s.m0.tanh()", "torch.randn(4, 4, device=s.device)"],
    "y": ["({v} + 0)", "s.v1.clone()", "s.m0.sum(1)", "s.m0[{n}].cos()"],
    "r": ["s.r0"],
    "u": ["s.u0"],
    "f": ["0.5", "1.25", "-0.75", "2", "step * 0.125", "s.rng.random()", "torch.inf", "-1", "True"],
    "n": ["0", "1", "2", "3", "step % 4", "s.rng.randrange(4)", "(3 - step) % 4", "1", "2"],
    "c": ["step % 2 == 1", "step % 5 == 3", "step < 6", "step > 10", "s.rng.random() < 0.3", "step == 7"],
    "M": ["s.m0", "s.m1", "s.m2"],
    "V": ["s.v0", "s.v1", "s.v2", "s.m0[{n}]", "s.m1[:, {n}]", "s.m2.diagonal()"],
    "R": ["s.r0", "s.m0[{n}:]", "s.m1.t()[:{n}]"],
}  # fmt: skip

EXPRESSIONS = {
    "m": [
        "({m} + {m})", "({m} * {f})", "({m} @ {m})", "({m} - {v})", "({f} - {m})", "({m} * {s})", "({m} / 3)",
        "({m} + {n})", "{m}.tanh()", "{m}.sin()", "{m}.relu()", "{m}.t()", "{m}.flip({n} % 2)", "{m}[{i}]",
        "{m}.abs()", "({m} ** 2)", "{m}.clamp(-1, {f})", "torch.where({b}, {m}, {m})", "{m}.clone()",
        "{v}.expand(4, 4)", "({v}.unsqueeze({n} % 2).expand(4, 4) * 1)", "{m}.detach()", "{m}.contiguous()",
        "{m}.roll({n}, 0)", "{m}.softmax({n} % 2)", "{m}.cumsum({n} % 2)", "{m}.masked_fill({b}, {f})",
        "torch.cat([{m}[1:], {m}[:1]])", "torch.stack([{v}, {v}, {v}, {v}], {n} % 2)",
        "torch.outer({v}, {v})", "F.linear({m}, {m}, {v})", "F.layer_norm({m}, (4,))", "F.dropout({m}, 0.5)",
        "F.gelu({m}.clamp(-9, 9))", "torch.randn(4, 4, device=s.device)",
        "torch.rand(4, 4, device=s.device, generator=s.g)",
        "torch.full((4, 4), {f}, device=s.device, dtype=torch.float32)", "torch.rand_like({m})",
        "torch.bernoulli(safe({m}).sigmoid())", "s.host.to(s.device, copy=True)",
        "torch.rand(4, 4).to(s.device)", "{m}.gather({n} % 2, {i}.expand(4, 4))", "{d}.float()",
        "{h}.float()", "{b}.float()", "({b} * {m})",
        "torch.tensor([[{f}] * 4] * 4, device=s.device, dtype=torch.float32)", "({m} * torch.tensor(0.25))",
        "torch.ones(4, 4, device=s.device)", "Scale.apply({m}, {f})", "s.net({m})", "f0({m}, {n})",
        "f1({m}, {n})", "checkpoint(s.net, {m}, use_reentrant=False)",
        "checkpoint(lambda y: (y * {f}).sin(), {m}, use_reentrant={c})", "{m}.sort({n} % 2).values",
        "{m}.view(2, 8).reshape(4, 4)", "{m}.permute(1, 0)", "{m}.tril({n})", "torch.addmm({m}, {m}, {m})",
        "torch.einsum('ij,kj->ik', {m}, {m})", "copy.deepcopy({m}.detach())", "{m}.index_select(0, {i})",
        "({m} if {c} else {m})", "{m}.unfold(0, 4, 1)[0]", "torch.lerp({m}, {m}, {f})",
        "{m}.as_strided((4, 4), ({n}, 1)).clone()", "{m}.to(torch.float64).to(torch.float32)", "{m}.neg()",
        "functools.reduce(torch.add, [{m} for _ in range({n} + 1)])", "{m}.mT", "{m}.flatten().view(4, 4)",
        "{m}.movedim(0, 1)", "({m}.triu_indices if False else {m})", "Scale.apply({m}.clone(), {f}).sin()",
        "F.embedding({i}, {m})", "F.conv1d({m}.unsqueeze(0), {m}.unsqueeze(2))[0]",
        "F.one_hot({i}, 4).float()", "{m}.logsumexp(1).expand(4, 4)",
        "F.scaled_dot_product_attention({m}[None], {m}[None], {m}[None])[0]",
        "F.batch_norm({m}, None, None, training=True)", "{m}.index_put(({i},), {v})",
        "F.batch_norm({m}[None], {V}.detach(), {V}.detach(), {v}, training=True)[0]",
        "{m}.scatter_add(0, {i}.expand(4, 4), {m})", "torch.where({b}, {m}, {f})",
        "torch.complex({m}, {m}).abs()", "(torch.complex({m}, {m}).conj().imag + 0)", "{m}.half().float()",
        "{m}.log_softmax(1)", "F.pad({m}, (0, {n}))[:, :4]", "{m}.repeat(1, 2).narrow(1, {n}, 4)",
        "torch.empty_like({m}).fill_({f})", "torch.zeros(4, 4, device=s.device).index_add({n} % 2, {i}, {m})",
        "{m}.rot90({n})", "{m}.diag_embed()[0]",
        "torch.utils.checkpoint.checkpoint(f0, {m}, {n}, use_reentrant=False)", "{m}.renorm(2, 0, 1.5)",
        "{m}.flipud()",
    ],
    "v": [
        "({v} + {v})", "({v} * {f})", "{m}[{n}]", "{m}[:, {n}]", "{m}.diagonal()", "{m}.sum({n} % 2)",
        "{v}.flip(0)", "({m} @ {v})", "{v}.sigmoid()", "{m}.amax({n} % 2)", "{v}[{i}]", "{i}.float()",
        "{v}[torch.randperm(4)]", "{v}[torch.randperm(4, device=s.device)]", "{m}.mean({n} % 2)",
        "torch.arange(4., device=s.device)", "{m}.unbind({n} % 2)[{n}]", "{m}.norm(dim=1)",
        "{u}.sum().expand(4)", "{r}.sum(0)", "{m}.select(1, {n})",
        "torch.linspace(0, {f} if {c} else 1., 4, device=s.device)", "{m}.argmax({n} % 2) * 0.5",
        "torch.rand(4, generator=s.g, device=s.device)", "{v}.detach()", "{d}.sum(0).float()",
    ],
    "s": [
        "{m}.sum()", "{m}.mean()", "{v}.max()", "{m}[{n}, {n}]", "({s} + {s})", "({s} * {f})", "{s}.tanh()",
        "{v}.dot({v})", "{r}.mean()", "{u}.sum()", "F.mse_loss({m}, {m})", "F.cross_entropy({m}, {i})",
        "{m}.norm()", "{m}.var()", "torch.tensor({f}, device=s.device)", "{h}.float().mean()",
        "{d}.sum().float()", "{m}.median()",
    ],
    "x": [
        "({m} + {m})", "({m} * {f})", "({m} @ {m})", "{m}.flip(0)", "{m}.clone()",
        "torch.where({b}, {m}, {m})",
    ],
    "y": ["({v} + {v})", "({v} * {f})", "({m} @ {v})", "{v}.clone()", "{m}.sum({n} % 2)", "{v}.flip(0)"],
    "d": [
        "({d} + {m})", "({d} * {f})", "{m}.double()", "({d} @ {d})", "{d}.exp()", "{d}.t()", "({d} * {i})",
        "{d}.cos()",
    ],
    "h": ["({h} + {f})", "({h} * {h})", "{m}.to(torch.bfloat16)", "{m}.half().bfloat16()", "{h}.t()"],
    "b": [
        "({m} > {f})", "({m} < {m})", "~{b}", "({b} & {b})", "({i} == {n}).expand(4, 4)", "({m} >= {v})",
        "{b}.t()",
    ],
    "i": [
        "(({i} + {n}) % 4)", "{i}.flip(0)", "{m}.argmax({n} % 2)", "{v}.argsort()",
        "torch.randperm(4, device=s.device)", "torch.randint(0, 4, (4,), device=s.device)",
        "torch.tensor([{n}, 1, {n}, {n}], device=s.device)",
        "torch.multinomial(safe({m}).softmax(1), 1).view(4)", "torch.arange(4, device=s.device)",
        "{b}.sum(0).clamp(0, 3)",
    ],
    "r": [
        "{m}[{n}:]", "{m}[:{n}]", "{m}[{b}.any(1)]", "torch.cat([{r}, {m}])[:7]", "({r} * {f})",
        "({r} @ {m})", "{r}[::2]", "{r}.tanh()", "torch.randn({n} + 1, 4, device=s.device)", "{m}[1:3]",
        "{m}[:, 1:3].t()", "s.host[:{n} + 1].to(s.device, copy=True)", "{r}.flip(0)", "{m}.chunk(2)[{n} % 2]",
        "s.net({r})",
    ],
    "u": [
        "{m}[{b}]", "{m}.masked_select({b})", "{m}.round().unique()", "{b}.nonzero()[:, 0].float()",
        "({u} * {f})", "torch.cat([{u}, {v}])[:9]", "{i}.unique().float()", "{u}[:{n}]",
        "{m}.flatten().narrow(0, {n}, 5)", "{u}.flip(0)", "torch.arange({n} * 2., device=s.device)",
        "{u}.cumsum(0)", "{v}.repeat({n})", "{v}.repeat_interleave({i})",
    ],
    "f": [
        "({f} * 0.5)", "{s}.item()", "float({s} > {f})", "(1 + {n}) / 2", "{v}.detach().tolist()[{n}]",
        "s.host[0, {n}].item()",
    ],
    "n": [
        "(({n} + {n}) % 4)", "int({i}[{n}])", "min(len({u}), 3)", "{b}.sum().item() % 4", "{r}.shape[0] % 4",
    ],
    "c": [
        "bool({s} > {f})", "{s}.item() < {s}.item()", "bool({b}.any())", "bool({b}[{n}, 1])", "len({u}) > 3",
        "not ({c})", "({c}) and ({c})", "torch.equal({m}, {m})", "bool({i}[0] == {n})", "{m}.requires_grad",
        "torch.allclose({v}, {v})",
    ],
}  # fmt: skip

# Statements with `out=` use clones: a CPU tensor that owns its memory cannot grow after its `numpy()` was
# called, but `out=` of PyTorch 2.15 writes as if the tensor had grown.
STATEMENTS = [
    "{M} = {m}", "{M} = {m}", "{M} = {m}", "s.v0 = {v}", "s.v1 = {v}", "s.v2 = {v}", "s.d0 = {d}",
    "s.h0 = {h}", "s.b0 = {b}", "s.i0 = {i}", "s.r0 = {r}", "s.u0 = {u}", "s.m0, s.m1 = s.m1, s.m0",
    "{M} = {M}.view(4, 4)", "{M}.add_({x}, alpha=0.5)", "{M}.mul_({f})", "{M}[{n}] = {y}",
    "{M}[:, {n}] = {f}", "{V}.add_({y})", "{V}.mul_({f})", "{M}[{n}:].sub_({y})",
    "{M}[1:].add_({M}[:-1].clone())", "{M}[1:].copy_({x}[:-1])", "{M}[{b}] = {f}", "{M}[{i}] = {x}",
    "{M}.t().copy_({x})", "{M}.diagonal().copy_({y})", "{M}.view(-1).narrow(0, 2 * {n}, 4).add_({y})",
    "{M}.reshape(-1)[{n}:].mul_({f})", "torch.as_strided({M}, (3, 3), (1, 4)).mul_({f})",
    "{M}.index_add_(0, {i}, {x})", "{M}.masked_fill_({b}, {f})", "{M}.normal_()",
    "{M}.uniform_(-1, 1, generator=s.g)", "{M}.bernoulli_(0.5)", "{M}.zero_()", "{M}.fill_({s})",
    "{M}.copy_(s.host)", "{M}.copy_({d})", "{M}.transpose(0, 1)[{n}].fill_({f})", "{M} += {x}", "{M} *= {f}",
    "if not {M}.is_inference(): {M}.data = {m}.detach().clone()", "{M}.clamp_(-1, 1)", "{M}.scatter_(0, {i}.expand(4, 4), {x})",
    "{R}.mul_({f})", "{R}.add_({f})", "s.u0.add_({f})", "s.i0.add_({n}).remainder_(4)",
    "s.b0.logical_xor_({b})", "s.d0.add_({m})", "s.h0.mul_({f})", "torch.add({x}, {x}, out={M})",
    "torch.mul({x}, {f}, out={M}.t())", "torch._foreach_mul([{m}, {v}], {f})", "torch._foreach_mul_([{M}], {f})",
    "F.dropout({M}, 0.25, inplace=True)", "{M}.fill_diagonal_({f})", "{M}.copy_({b})", "{M}.swapaxes_(0, 1)",
    "{M}.exponential_()", "F.relu({M}, inplace=True)", "{M}.index_fill_(0, {i}, {f})", "{M}.addmm_({x}, {x})",
    "{M}.tril_({n} - 1)", "{M}.lerp_({x}, 0.5)", "{M}.random_({n} + 1)",
    "{M}.index_copy_(0, torch.randperm(4, device=s.device), {x})", "{M}.where({b}, {m})", "{M}.real.neg_()",
    "{M}.unfold(0, 2, 2).add_({f})", "{M}[..., None].squeeze(-1).mul_({f})", "{M}[::2, 1::2] = {f}",
    "{M}[{b}] *= {f}", "{M}[{n}, {n}] += {s}", "a, b = {M}[:3], {M}[1:]\na.mul_(0.5)\nb.add_({f})\ns.see(a)",
    "s.r0 = s.r0[{n} % 2:]", "s.m0 = {M}[:]", "s.m1 = {M}.detach()", "s.m2 = s.m1.t()", "s.v0 = {M}[{n}]",
    "s.u0 = {M}.view(-1)[2 * {n}:]", "{M}.t_()", "{M} = Twice.apply({m}.clone())",
    "{M} = {m} if torch.is_inference_mode_enabled() or {c} else {m}.requires_grad_()", "s.r0.resize_({n} + 1, 4).zero_()", "s.host.fill_({f})",
    "s.host.add_(1)", "s.host.copy_({m}.detach())", "s.host[{n}] = torch.rand(4)", "s.host = s.host * 0.5",
    "s.host.copy_({m}.detach().cpu())", "s.host = torch.from_numpy({m}.detach().cpu().clone().numpy().copy())",
    "s.see({m})", "s.see({v})", "s.see({s})", "s.see({d})", "s.see({h})", "s.see({b})", "s.see({i})",
    "s.see({r})", "s.see({u})", "s.see({f})", "s.see({n})", "s.watch({m})", "s.see({s}.item())",
    "s.see({v}.detach().tolist())", "s.see({r}.detach().to('cpu', copy=True))",
    "s.see({m}.detach().cpu().clone().numpy().sum())",
    "s.see(text({v}))", "s.see(format({v}.detach()[0], '.3f'))", "s.see(bool({c}))", "s.see(s.m0 is s.m1)",
    "s.see(s.m0.requires_grad)", "s.see(s.m0.data_ptr() == s.m1.data_ptr())", "s.kept.append({m})",
    "s.kept.append({r})", "s.kept.append([{M}, {v}])", "s.kept = s.kept[-{n}:]", "s.kept.clear()",
    "s.see([x.sum() for x in s.kept if isinstance(x, torch.Tensor)])", "gc.collect()", "del s.kept[:{n}]",
    "s.ref = weakref.ref({M})", "s.see(s.ref is None or s.ref() is None)", "s.ghost = Ghost({M}, {f})",
    "s.ghost = None", "s.ghost = Ghost({M}, 1); s.ghost.me = s.ghost; s.ghost = None",
    "torch.manual_seed({n})", "s.g.manual_seed({n})", "s.see(torch.rand(2))",
    "torch.set_rng_state(torch.get_rng_state())", "mark_step()", "s.it = gen({m})", "s.see(next(s.it, None))",
    "s.kept += list(gen({m}))", "s.see([y.sum() for y in gen({m})])", "s.module.rounds = {n}",
    "s.module.train({c})", "s.module = copy.deepcopy(s.module)", "s.module.drop.p = 0.125 * {n}",
    "s.opt.zero_grad(set_to_none={c})", "({s} + s.w.mean()).backward()",
    "({s} * s.c.mean()).tanh().backward()", "s.opt.step()", "s.see(s.w.grad)", "s.see(s.c.grad is None)",
    "s.w.grad = None", "s.w.requires_grad_({c})", "s.opt.param_groups[0]['lr'] = 0.1 / (1 + {n})",
    "torch.nn.utils.clip_grad_norm_([s.w, s.c], 1.0, foreach=False)",
    "s.opt.load_state_dict(copy.deepcopy(s.opt.state_dict()))",
    "s.see(torch.autograd.grad({s} + s.c.sum(), s.w, allow_unused=True))",
    "y = ({s} + s.w.sum()).tanh()\ny.backward(retain_graph=True)\n(y * 2).backward()\ns.see(s.w.grad)",
    "s.hooks.append(s.w.register_hook(lambda g: g * {f}))", "s.hooks and s.hooks.pop().remove()",
    "s.hooks.append(s.w.register_hook(lambda g: s.see(g.sum())))",
    "s.hooks.append(s.w.register_post_accumulate_grad_hook(halve))",
    "s.hooks.append(s.module.first.register_forward_hook(lambda m, x, y: y * {f}))",
    "s.hooks.append(s.module.norm.register_full_backward_hook(lambda m, gi, go: (gi[0] * {f},)))",
    "s.hooks.append(s.module.register_forward_pre_hook(lambda m, x: (x[0] + {f},)))",
    "x = {m}.detach().clone().requires_grad_()\ny = (x.sin() * {m}.detach()).sum()\n"
    "(g,) = torch.autograd.grad(y, x, create_graph=True)\n(g * g).sum().tanh().backward()\ns.see(x.grad)",
    "x = {m} * s.w\nx.retain_grad()\nx.register_hook(lambda g: g * {f})\n({s} + x.sum()).tanh().backward()\n"
    "s.see(x.grad)",
    "s.opt.zero_grad()\nloss = F.mse_loss(s.net({r}), {r}.detach().sum().expand(1))\n"
    "loss.tanh().backward()\ns.opt.step()\ns.see(loss)",
    "s.opt.zero_grad()\nloss = (s.net({m}) * s.w).mean().tanh()\nloss.backward()\ns.opt.step()\n"
    "s.see(loss.item())",
    "s.opt.zero_grad()\n(s.w * {m}).sum().tanh().backward()\ns.opt.step()",
    "s.see([float(z) for z in {u}[:3]])", "s.see({m}.sum(0).sort())", "s.see(dict(a={v}, b={n}))",
    "s.see(torch.topk({m}.flatten(), {n} + 1))", "a, *b = {m}.detach().split({n} + 1)\na.add_(1)\ns.see(b)",
    "s.see(torch.autograd.functional.vjp(torch.sin, {m}.detach(), {m}.detach())[1])",
    "s.see(torch.func.grad(lambda y: (y * {f}).sin().sum())({m}.detach()))",
    "s.see(torch.func.vmap(lambda y: y * {f} + y.sum())({m}.detach()))",
]  # fmt: skip

# Compound statements: the header, the leaves that are in scope in the body, and the lines that follow the
# body.
BLOCKS = [
    ("if {c}:", {}, []),
    ("if {c}:", {}, []),
    ("if {c}:", {}, ["else:", "    s.m0 = s.m0 * 0.5 + 1"]),
    ("for k in range({n} + 1):", {"n": ["k", "k"], "c": ["k % 2 == 0", "k > 1"], "f": ["k * 0.5"]}, []),
    ("for j in range({n}):", {"n": ["j"], "f": ["j + 0.5"]}, []),
    ("for x in {m}.detach().unbind({n} % 2):", {"v": ["x", "x"], "V": ["x"]}, []),
    ("for x in {r}.detach():", {"v": ["x"], "V": ["x"]}, []),
    ("for q in itertools.takewhile(lambda _: {s} < 3, range(4)):", {"n": ["q"]}, []),
    ("for q in itertools.takewhile(lambda _: {c}, range(3)):", {"n": ["q"]}, []),
    ("with torch.no_grad():", {"M": ["s.w"], "V": ["s.c"]}, []),
    ("with torch.no_grad():", {"M": ["s.w"], "V": ["s.c"]}, []),
    ("with torch.enable_grad():", {}, []),
    ("with torch.inference_mode():", {}, []),
    ("with torch.set_grad_enabled({c}):", {}, []),
    ("with torch.random.fork_rng(devices=[]):", {}, []),
    ("try:", {}, ["except Exception as e:", "    s.failed(e)"]),
    ("try:", {}, ["except RuntimeError as e:", "    s.m0 = s.m0 + 1"]),
    ("try:", {}, ["finally:", "    s.m1 = s.m1 * 0.75"]),
    ("y = {m}\nif y.sum() > 0:", {"m": ["y"], "M": ["y"]}, []),
]

# Productions that raise. An index out of range is detected only when a value is read, so these productions
# read a value.
ERRORS = [
    "{m} @ {m}[{n}:]", "{m}.view(3, -1)", "{m}[7]", "{m} + {m}[:, :3]", "torch.cat([{m}, {v}])", "{v}[4]",
    "raise KeyError", "{m}.sum().detach().backward()", "late({m}.index_select(0, {i} + {n}))",
    "late({m}[{i} + 2])", "late({m}.gather(0, {i}.expand(4, 4) + {n}))", "{u}[5]", "{r}.view(4, 4)",
    "{b} - {b}", "{M}.add_({d}.long() if {c} else {d})", "s.i0.add_(0.5)", "{m}.sum(3)",
    "torch.ones(2, device=s.device).item()", "{v}.expand(4, 4).add_(1)", "{m}.detach().sum().backward()",
    "s.w.add_(1)", "1 / 0", "{u}.max()", "F.linear({m}, {r}[:, :{n}])",
]  # fmt: skip
