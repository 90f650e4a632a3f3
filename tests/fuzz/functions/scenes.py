"""Scenes: statements on tensors, modules, optimizers and host objects, with changes that may happen around
them.

The function has a tensor `y`, and its argument `x`. `{n}` stands for a number that makes a scene's names
unique.
"""

from tests.fuzz.functions.pieces import Scene

_MODULE_CHANGES = (
    "m{n}.eval()", "m{n}.train()", "m{n}.requires_grad_(False)", "m{n}.requires_grad_(True)", "halve(m{n})",
    "for p in m{n}.parameters(): p.data = p.data * 2", "m{n}.load_state_dict({{k: w * 0.5 for k, w in m{n}.state_dict().items()}})",
    "m{n}.forward = functools.partial(tripled, type(m{n}).forward, m{n})", "vars(m{n}).pop('forward', None)",
    "m{n}.register_forward_hook(lambda m, i, o: o * 3)", "m{n}.register_forward_pre_hook(lambda m, i: (i[0] + 1,))",
    "m{n}._forward_hooks.clear()", "m{n}._forward_pre_hooks.clear()", "m{n}.apply(reset)", "m{n}.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))",
    "swapped(m{n})", "m{n}.double().float()", "m{n}.zero_grad()", "grads_of(m{n}, base)", "m{n}.half().float()", "m{n}.to('cpu').to(device)",
)  # fmt: skip
_FORWARD = (
    "y = m{n}(y)",
    "y = m{n}(y).detach()",
    "with torch.no_grad(): y = m{n}(y)",
    "y = m{n}.forward(y)",
    "y = b{n}(y)",
)
_PARAMETERS = ("list(m{n}.parameters())", "list(m{n}.buffers())", "[p.grad for p in m{n}.parameters()]")


def _module(name: str, make: str, *changes: str, rate: int = 1) -> Scene:
    setup = f"torch.manual_seed(3); m{{n}} = {make}.to(device); b{{n}} = m{{n}}.forward"
    return Scene(name, setup, _FORWARD, (*_MODULE_CHANGES, *changes), _PARAMETERS, rate=rate)


# Assignments of tensors, gradients and arguments that share memory.
_TARGETS = ("t{n}", "u{n}", "c{n}", "p{n}.grad", "q{n}.grad", "a{n}", "p{n}.data", "t{n}.data")
_SHARED = (
    "base[0:3]", "base[3:6]", "table[2]", "t{n}", "u{n}", "t{n}[:]", "u{n}.clone()", "base[6:9].detach()", "full(3.0)",
    "full(4.0).requires_grad_()", "nn.Parameter(full(5.0))", "(p{n} * 1).detach()", "p{n} * 1", "p{n}", "p{n}.grad",
    "table[k{n}]", "base[::4]", "full(6.0)[:1].expand(3)", "base.flip(0)[:3]", "None", "base[1:4]",
    "torch.zeros(6, device=device)[3:]",
)  # fmt: skip
_SHARING = (
    *(f"{target} = {value}" for target in _TARGETS for value in _SHARED),
    *("k{n} = 1", "k{n} = 2", "p{n}.grad = None", "base.zero_()", "base.add_(1)", "t{n}.fill_(7)") * 4,
    "p{n}.requires_grad_(False)", "base = base.clone(); table = base.view(4, 3)", "p{n}.grad = u{n}",
    *("p{n}.grad, q{n}.grad = base[:3], base[3:6]",) * 4,
)  # fmt: skip

# Uses of a float that varies in each call. Some of them a replay follows, some only compare the float, and
# some pass it to code that Python does not see.
VARYING = (
    "y = y * a{n}", "y = y + (1 - a{n}) ** 2", "y = y / a{n}", "y = y.add(y, alpha=-a{n})", "y = y * max(a{n}, 1.5)", "y = y * min(1.0, a{n})",
    "y = y * 2 if a{n} > 1.2 else y + a{n}", "y = y * int(a{n} * 3)", "y = y * round(a{n})", "y = y + math.floor(a{n})", "y = y * math.sqrt(abs(a{n}))",
    "y = y * math.cos(a{n})", "y = y + math.isclose(a{n}, 1.03, rel_tol=0.3)", "y = y * np.minimum(a{n}, 1.4)", "y = y + np.float64(2.5) * a{n}",
    "y = y * torch.tensor(a{n}).item()", "y = y * torch.tensor(a{n}).clamp(max=1.3).to(device)", "y = torch.where(torch.tensor(a{n}) > 1.3, y, -y)",
    "y = y.clamp(-a{n}, a{n})", "y = F.leaky_relu(y, a{n})", "y = F.dropout(y, min(a{n}, 1.0))", "y = F.interpolate(y[None, None], scale_factor=1 + a{n})[0, 0, :2, :3]",
    "y = y + torch.arange(0, a{n}, 0.5, device=device).sum()", "y = y * float(f'{{a{n}:.1f}}')", "y = y * float('%.0f' % a{n})", "y = y * (a{n} if type(a{n}) is float else 7.0)",
    "y = y * {{0.5: 1.0}}.get(round(a{n}, 1), 2.0)", "y = y.abs().pow(a{n})", "y = y * sum([a{n}, 1, a{n}])", "y = y + y.new_full((3,), a{n})", "y = y + struct.unpack('f', struct.pack('f', a{n}))[0]",
    "y = y * Decimal(a{n}).__round__()", "y = y * float(Fraction(a{n}).limit_denominator(4))", "y = y * (a{n} // 0.5)", "y = y * (a{n} % 0.6)", "y = torch.lerp(y, y * 2, a{n})",
    "y = y * complex(a{n}).real", "y = y * sorted([a{n}, 1.1, 1.6])[1]", "y = y * json.loads(json.dumps(a{n}))", "y = y * copy.deepcopy([a{n}])[0]", "y = y * bool(a{n} - 1.03)", "y = y + (a{n} in (1.03, 1.14, 1.25))",
    "y = y * operator.mul(a{n}, 2)", "y = F.smooth_l1_loss(y, y * 2, beta=a{n}, reduction='none')", "y = F.layer_norm(y, (3,), eps=a{n})", "y = y * float.__add__(a{n}, 1.0)", "y = y * a{n}.is_integer() + y", "y = y * functools.reduce(max, [a{n}, 1.3])",
    "y = y * statistics.fmean([a{n}, 1.0])", "y = y + torch.linspace(0, a{n}, 3, device=device)", "y = y * torch.full((), a{n}).item()", "y = y * (2.0 if isinstance(a{n}, float) else 3.0)", "y = y * getattr(a{n}, 'real')",
)  # fmt: skip

# Settings of PyTorch and of Python's libraries that C functions hold: how they are read and set, and two values.
SETTINGS = (
    ("torch.backends.cudnn.benchmark", "torch.backends.cudnn.benchmark = {}", ("False", "True")),
    ("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cuda.matmul.allow_tf32 = {}", ("False", "True")),
    ("torch.get_float32_matmul_precision()", "torch.set_float32_matmul_precision({})", ("'highest'", "'high'")),
    ("torch.is_warn_always_enabled()", "torch.set_warn_always({})", ("False", "True")),
    ("torch.is_autocast_cache_enabled()", "torch.set_autocast_cache_enabled({})", ("True", "False")),
    ("torch.get_autocast_dtype('cpu')", "torch.set_autocast_dtype('cpu', {})", ("torch.bfloat16", "torch.float16")),
    ("len(np.array2string(np.float32([1 / 3]))) - 4", "np.set_printoptions(precision={})", ("8", "3")),
    ("np.geterr()['divide']", "np.seterr(divide={})", ("'warn'", "'ignore'")),
    ("len(str(Decimal(1) / Decimal(3))) - 2", "decimal.getcontext().prec = {}", ("28", "5")),
)  # fmt: skip

SCENES = [
    _module("Linear", "nn.Linear(3, 3)", "m{n}.bias = None", "m{n}.weight = nn.Parameter(m{n}.weight.detach() * 2)", "torch.nn.utils.parametrizations.weight_norm(m{n})", "__import__('torch.nn.utils.prune').nn.utils.prune.random_unstructured(m{n}, 'weight', 1)", "del m{n}.bias; m{n}.bias = None", rate=2),
    _module("BatchNorm1d", "nn.BatchNorm1d(3)", "m{n}.momentum = 0.5", "m{n}.eps = 0.5", "m{n}.reset_running_stats()", "m{n}.track_running_stats = False", "m{n}.running_mean = m{n}.running_mean * 1 + 1", rate=2),
    _module("Dropout", "nn.Dropout(0.5)", "m{n}.p = 0.9"),
    _module("Sequential", "nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.25), nn.Linear(3, 3))", "m{n}[2].eval()", "m{n}[1] = nn.ReLU()", "m{n}.append(nn.Tanh())", "del m{n}[1]", "m{n}[0], m{n}[3] = m{n}[3], m{n}[0]", "m{n}[0].register_forward_hook(lambda m, i, o: o + 1)", "m{n}[3].weight = m{n}[0].weight"),
    _module("LayerNorm", "nn.LayerNorm(3)", "m{n}.eps = 0.5", "m{n}.weight = None"),
    _module("spectral norm", "nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))"),
    _module("embedding", "Embedded()", "m{n}.e.max_norm = 0.5", "m{n}.e.weight.data.mul_(2)"),
    Scene("ModuleDict", "torch.manual_seed(3); m{n} = nn.ModuleDict({{'a': nn.Linear(3, 3), 'b': nn.Linear(3, 3)}}).requires_grad_(False).to(device)", ("for l in m{n}.values(): y = l(y)", "for k in m{n}: y = m{n}[k](y)"), ("m{n}.update({{'a': m{n}.pop('a')}})", "m{n}['c'] = nn.Tanh()", "m{n}._modules.move_to_end('a')")),
    Scene("ParameterList", "m{n} = nn.ParameterList([full(1.0), full(2.0)])", ("for p in m{n}: y = y * 2 + p.detach()",), ("m{n}[0], m{n}[1] = m{n}[1], m{n}[0]", "m{n}.append(full(3.0))")),
    Scene("dict of functions", "d{n} = {{'a': torch.sin, 'b': torch.exp}}", ("for f in d{n}.values(): y = f(y)", "for k in d{n}: y = d{n}[k](y)"), ("d{n}['a'] = d{n}.pop('a')", "d{n}['c'] = torch.tanh", "d{n}.update(a=torch.cos)", "del d{n}['a']", "d{n} = dict(reversed(d{n}.items()))")),
    Scene("class with methods", "class C{n}:\n    def m(self, y):\n        return y + 1\nclass D{n}(C{n}):\n    pass\no{n} = D{n}()", ("y = o{n}.m(y)", "y = D{n}.m(o{n}, y)"), ("C{n}.m = tripling", "D{n}.m = tripling", "o{n}.m = tripled_y", "C{n}.m.__code__ = tripling.__code__", "o{n}.__class__ = Tripling", "D{n}.__bases__ = (Tripling,)")),
    Scene("function replaced", "def g{n}(y):\n    return y + 1", ("y = g{n}(y)",), ("g{n}.__code__ = tripled_y.__code__", "g{n} = tripled_y")),
    # Captured tensors, gradients and arguments on shared storages.
    *[
        Scene(
            "sharing",
            "t{n} = data(50 + {n}, 3); u{n} = base[3:6]; k{n} = 0; p{n} = nn.Parameter(data(60 + {n}, 3)); q{n} = nn.Parameter(data(70 + {n}, 3)); c{n} = full(2.0); a{n} = full(1.0)",
            (
                "y = y + t{n} + a{n} * 10", "y = y + table.sum(0) + a{n} * 100", "y = y + u{n} * a{n}", "t{n}.add_(1); y = y + a{n}",
                "table.add_(1); y = y + a{n}", "base.mul_(0.5); y = y + a{n}", "a{n}.add_(1); y = y + t{n}", "u{n}.copy_(y[0].detach() * 0.5); y = y + a{n} + base[3]",
                "(p{n} * a{n}.detach()).sum().backward()", "(p{n} * 2 + q{n} * a{n}.detach()).sum().backward()", "(p{n} * 2 + q{n}).sum().backward(); y = y + a{n}",
                "y = y + (p{n}.grad if p{n}.grad is not None else 1) + a{n} * 10", "p{n}.grad = None; (p{n} * q{n}).sum().backward()",
                "y = y + a{n} * 2 if a{n}.requires_grad else y - a{n}", "y = y + p{n}.detach() * 2 + t{n} + a{n} * 3", "a{n}.mul_(0.5); base.add_(1); y = y + u{n}",
                "if p{n}.grad is not None: p{n}.grad.mul_(0.5)\ny = y + a{n} * 2", "y = y + torch.autograd.grad((a{n} * p{n}).sum(), p{n})[0]",
                "y = y + t{n} * 1 + u{n} * 10 + c{n} * 100 + a{n} * 1000", "table[1].add_(a{n}); y = y + table[2]", "y = y + table[1] * a{n} + base[0]",
            ),
            _SHARING,
            ("base", "t{n}", "u{n}", "c{n}", "p{n}", "q{n}", "p{n}.grad", "q{n}.grad"),
            argument,
            rate=rate,
        )
        for argument, rate in (
            ("a{n}", 4), ("table[k{n}]", 2), ("t{n}", 2), ("t{n}[:]", 1), ("u{n}", 1), ("p{n}.grad", 1), ("p{n}", 1), ("p{n} * 1", 1), ("t{n}.clone() if i % 9 > 6 else t{n}", 1),
            ("[t{n}, u{n}, c{n}, full(9.0)][k{n}]", 2), ("base[k{n}:k{n} + 3]", 1), ("full(1.0 + i)", 1), ("x[0]", 1), ("data(i, 3).requires_grad_()", 1), ("base[3 * k{n}:][:3]", 1),
        )
    ],
    # Training.
    *[
        Scene(
            "optimizer",
            "p{n} = nn.Parameter(data(60 + {n}, 3)); q{n} = nn.Parameter(data(70 + {n}, 3)); o{n} = torch.optim." + optimizer + "; s{n} = copy.deepcopy(o{n}.state_dict()); r{n} = o{n}.state_dict()",
            ("o{n}.zero_grad()\nl{n} = (p{n} * y.detach() - q{n}).square().mean()\nl{n}.backward()\no{n}.step()", "o{n}.zero_grad(set_to_none=False)\n(p{n} * q{n} + y.detach()).square().sum().backward()\no{n}.step()",
             "(p{n} * y.detach() + q{n}).sum().backward()\ntorch.nn.utils.clip_grad_norm_([p{n}, q{n}], 1.0)\no{n}.step()\no{n}.zero_grad()"),
            ("o{n}.param_groups[0]['lr'] = 0.5", "o{n}.param_groups[0]['lr'] = np.float64(0.01)", "o{n}.param_groups[0]['weight_decay'] = 0.1", "r{n} = o{n}.state_dict()", "s{n} = copy.deepcopy(o{n}.state_dict())",
             "r{n} = o{n}.state_dict(); o{n}.load_state_dict(s{n})", "o{n}.load_state_dict(s{n})", "o{n}.state.clear()", "o{n}.state[p{n}].clear()", "o{n}.add_param_group({{'params': [nn.Parameter(full(1.0))]}})", "p{n}.requires_grad_(False)", "p{n}.data = p{n}.data * 2",
             "o{n}.param_groups[0]['params'].reverse()", "o{n}.param_groups[0]['params'].pop()", "o{n}.register_step_post_hook(lambda o, a, k: p{n}.data.mul_(0.5))", "p{n}.grad = base[3:6]", "p{n}.grad, q{n}.grad = base[:3], base[3:6]", "q{n}.grad = torch.ones(3, device=device)", "q{n}.grad = None", "p{n}.grad = None",
             "p{n}.register_hook(lambda g: g * 2)", "for s in o{n}.state.values(): s.update({{k: t * 0.5 for k, t in s.items() if torch.is_tensor(t)}})", "for s in o{n}.state.values(): s['step'].fill_(9)", "for s in [*o{n}.state.values()][:1]: s['step'].add_(2)", "for s in o{n}.state.values(): s.update({{'step': s['step'].clone()}})", "z = torch.tensor(20.0)\nfor s in o{n}.state.values(): s.update({{'step': z}})", "o{n}.param_groups[0]['foreach'] = False", "p{n}.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])"),
            ("p{n}", "q{n}", "p{n}.grad", "q{n}.grad", "base", "[{{k: t for k, t in s.items()}} for s in o{n}.state.values()]", "o{n}.param_groups[0]['lr']"),
            rate=2,
        )
        for optimizer in ("SGD([p{n}, q{n}], lr=0.1)", "SGD([p{n}, q{n}], lr=0.1, momentum=0.9)", "Adam([p{n}, q{n}], lr=0.1, fused=True)", "AdamW([p{n}, q{n}], lr=0.1, capturable=True)", "RMSprop([p{n}, q{n}], lr=0.1, capturable=True)", "Adam([p{n}, q{n}], lr=0.1)", "AdamW([p{n}, q{n}], lr=0.1, foreach=False)", "RAdam([p{n}, q{n}], lr=0.1)", "Adagrad([p{n}, q{n}], lr=0.1, lr_decay=0.1)")
    ],
    Scene("hooks of a tensor", "p{n} = nn.Parameter(full(2.0)); k{n} = 2.0; h{n} = p{n}.register_hook(lambda g: g * k{n})", ("p{n}.grad = None; (p{n} * y.detach()).sum().backward(); y = y + p{n}.grad",), ("h{n}.remove()", "k{n} = 3.0", "p{n}.register_hook(lambda g: g + 1)", "h{n}.remove(); h{n} = p{n}.register_hook(lambda g: g * 5)", "p{n}.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(3), None)[1])"), ("p{n}.grad",)),
    Scene("hooks that a function makes", "p{n} = nn.Parameter(full(2.0))\ndef mk{n}(k):\n    return lambda g: g * k\nf{n} = mk{n}(2.0); h{n} = p{n}.register_hook(f{n})", ("p{n}.grad = None; (p{n} * y.detach()).sum().backward(); y = y + p{n}.grad",), ("h{n}.remove(); h{n} = p{n}.register_hook(mk{n}(3.0))", "f{n}.__closure__[0].cell_contents = 5.0"), ("p{n}.grad",)),
    # Changes of tensors that no operator makes.
    Scene("requires_grad_ inside", "t{n} = full(2.0)", ("t{n}.requires_grad_(True); y = y + torch.autograd.grad((t{n} ** 2).sum(), t{n})[0]", "t{n}.requires_grad_(False); y = y + t{n}", "t{n}.requires_grad_(not t{n}.requires_grad); y = y * 2"), ("t{n}.requires_grad_(True)", "t{n}.requires_grad_(False)", "t{n} = full(3.0)"), ("t{n}", "t{n}.requires_grad"), rate=2),
    Scene("requires_grad_ of the argument", "", ("a{n}.requires_grad_(True); y = y + torch.autograd.grad((a{n} ** 2).sum(), a{n})[0]", "a{n}.unsqueeze_(0); y = y * 2", "a{n}.t_() if a{n}.dim() == 2 else a{n}.unsqueeze_(0); y = y + 1", "a{n}.k = 3; y = y + 1", "a{n}.data = full(5.0); y = y + 1", "a{n}.resize_(2); y = y + 1", "a{n}.grad = full(2.0); y = y * 2", "a{n}.detach_(); y = y + a{n}", "a{n}.squeeze_(); y = y + 1", "a{n}.set_(full(4.0)); y = y + 1", "a{n}.retain_grad() if a{n}.requires_grad else None; y = y + 1"), ("z{n} = 1",), (), "full(1.0 + i)", rate=2),
    Scene("freeze inside", "d{n} = nn.Linear(3, 3).to(device)", ("for p in d{n}.parameters(): p.requires_grad_(False)\ny = y * 2", "d{n}.eval(); y = y * 2", "d{n}.zero_grad(); y = y + 1"), ("d{n}.requires_grad_(True)", "d{n}.train()", "grads_of(d{n}, base)"), ("[p.requires_grad for p in d{n}.parameters()]", "d{n}.training", "[p.grad for p in d{n}.parameters()]")),
    Scene("ping-pong", "a{n}, b{n} = full(1.0), full(8.0)", ("b{n}.copy_(a{n} * 0.5 + y[0].detach()); a{n}.data, b{n}.data = b{n}.data, a{n}.data", "b{n}.add_(1); a{n}.data = b{n}.data * 1; y = y + a{n}", "a{n}.set_(b{n}); y = y + 1", "torch.utils.swap_tensors(a{n}, b{n}); y = y + a{n}"), (), ("a{n}", "b{n}")),
    Scene("kept tensors", "l{n} = []", ("l{n}.append(y.detach() * 2)", "l{n}[:] = [y.detach() + 1]", "l{n}.append(x)"), (), ("l{n}[-1:]", "len(l{n})")),
    Scene("state on the device", "t{n} = full(1.0)", ("t{n}.add_(1); y = y + t{n}", "t{n}.mul_(0.5).add_(y[0].detach()); y = y * 2", "with torch.no_grad(): t{n}.copy_(y[0] * 0.5)"), ("t{n}.zero_()", "t{n} = full(2.0)", "t{n}.data = full(3.0)"), ("t{n}",), rate=2),
    # Effects on the host.
    Scene("learning rate schedule", "p{n} = nn.Parameter(full(1.0)); o{n} = torch.optim.SGD([p{n}], lr=0.1); s{n} = torch.optim.lr_scheduler.StepLR(o{n}, 10, 0.1)", ("o{n}.zero_grad(); (p{n} * y.detach()).sum().backward(); o{n}.step(); s{n}.step()",), ("s{n}.step()",), ("p{n}", "o{n}.param_groups[0]['lr']", "s{n}.last_epoch"), rate=2),
    Scene("module that counts", "m{n} = nn.Sequential(Counting())", ("y = m{n}(y)",), ("m{n}[0].calls = 0",), ("m{n}[0].calls",)),
    Scene("iterator", "i{n} = iter([2.0] * 12 + [3.0] * 400)", ("y = y * next(i{n})", "y = y * next(i{n}, 1.0)"), ("i{n} = iter([5.0] * 400)", "next(i{n})")),
    Scene("generator", "def gen{n}():\n    for k in range(1000):\n        yield 1.0 + k // 10\ni{n} = gen{n}()", ("y = y * next(i{n})",), ("next(i{n})",)),
    Scene("cycle", "i{n} = itertools.cycle([2.0] * 5 + [3.0])", ("y = y * next(i{n})",), ("next(i{n})",)),
    Scene("random.Random", "r{n} = random.Random(0)", ("y = y * 100 if r{n}.random() < 0.1 else y", "y = y * r{n}.choice([1.0, 1.0, 1.0, 1.0, 2.0])", "r{n}.random(); y = y + 1"), ("r{n}.seed(1)", "r{n}.random()"), ("r{n}.getstate()[1][-1]",)),
    Scene("default_rng", "r{n} = np.random.default_rng(0)", ("y = y * 100 if r{n}.random() < 0.1 else y", "y = y * float(r{n}.integers(1, 3))"), ("r{n}.random()",), ("str(r{n}.bit_generator.state)",)),
    Scene("global random", "random.seed(0); np.random.seed(0)", ("y = y * 100 if random.random() < 0.1 else y", "y = y * float(np.random.rand() > 0.1)", "y = y * torch.rand(()).item()", "y = y + torch.rand(3).to(device)"), ("random.seed(1)", "np.random.seed(1)", "torch.manual_seed(1)"), ("random.random()",)),
    Scene("host generator", "g{n} = torch.Generator().manual_seed(0)", ("y = y + torch.rand(3, generator=g{n}).to(device)", "y = y * torch.randint(1, 3, (), generator=g{n}).item()"), ("g{n}.manual_seed(1)",)),
    Scene("device random", "", ("y = y + torch.rand(3, device=device)", "y = F.dropout(y, 0.5)", "y = y + torch.randn_like(y)"), ("torch.manual_seed(1)",)),
    Scene("print", "", ("print('called')", "sys.stdout.write('x')"), ()),
    Scene("file", "f{n} = file(0)", ("f{n}.write_text(f{n}.read_text() + 'x')",), (), ("f{n}.read_text()",)),
    Scene("environment inside", "os.environ['FUZZ'] = '1'", ("os.environ['FUZZ'] = str(int(os.environ['FUZZ']) + 1)",), (), ("os.environ['FUZZ']",)),
    Scene("NumPy inside", "a{n} = np.zeros(3)", ("a{n}[...] += 1; y = y + 1", "a{n}[1] = 5; y = y + 1", "np.add(a{n}, 1, out=a{n}); y = y * 2"), ("a{n}[:] = 0",), ("a{n}",)),
    Scene("host tensor inside", "h{n} = torch.zeros(3)", ("h{n}.add_(1); y = y + 1", "h{n}.copy_(y[0].detach()); y = y + 1", "h{n}[0] = 4; y = y + h{n}.to(device)", "h{n}.add_(1); y = y * h{n}.to(device)"), ("h{n}.zero_()",), ("h{n}",)),
    Scene(
        "counter",
        "k{n} = torch.tensor(0.0); v{n} = k{n}.view(1); w{n} = torch.tensor([20.0, 30.0]); j{n} = torch.tensor(1.0)",
        ("k{n} += 1\ny = y * (1 - 0.9 ** k{n}.item())", "k{n}.add_(1); y = y / k{n}.item(); k{n}.add_(1); y = y + math.sqrt(k{n}.item())", "y = y + k{n}.item(); k{n} += 1", "k{n}.add_(j{n}); y = y * k{n}.item()", "k{n}.add_(1, alpha=2); y = y * k{n}.item()", "k{n} += 2; y = y + k{n}.item()",
         "torch._foreach_add_([k{n}, j{n}], 1); y = y * (k{n}.item() + j{n}.item())", "torch._foreach_add_([k{n}, j{n}], [1, 2]); y = y * k{n}.item()", "w{n}[0] += 1; y = y * w{n}[0].item()", "k{n} += 1; y = y * k{n}.to(device)", "k{n} += 1; y = y * k{n}", "y = y * k{n}; k{n} += 1", "k{n} += 1; y = y * (k{n} + 1).item()",
         "k{n} += 1; y = y * float(k{n})", "k{n} += 1; y = y + v{n}.item()", "v{n}.add_(1); y = y + k{n}.item()", "k{n} += 1; y = y * 2 if k{n}.item() > 20 else y", "k{n} += 1; y = y * 2 if k{n} > 20 else y", "k{n} += 1; y = y * 2 if k{n}.item() % 7 == 3 else y", "k{n} += 1; k{n} += k{n}.item() % 2; y = y + k{n}.item()",
         "k{n} += 1; w{n}.fill_(k{n}.item()); y = y + 1", "k{n} += 1\nif k{n}.item() > 15: k{n}.zero_()\ny = y + k{n}.item()", "k{n} += 1; y = y * torch.tensor(k{n}.item()).to(device)", "k{n} += torch.tensor(1.0); y = y + full(k{n}.item())", "k{n} += 1; k{n}.sub_(1); y = y + 1", "k{n}.add_(1); y = y + x[0] * k{n}.item() ** 0.5"),
        ("k{n}.fill_(5.0)", "k{n} = torch.tensor(9.0)", "k{n}.add_(0.5)", "k{n}.data = torch.tensor(3.0)", "k{n}.numpy()[...] = 4", "v{n}.fill_(7.0)", "v{n} = k{n}.view(1)", "j{n}.fill_(3.0)", "j{n} = k{n}", "k{n}.fill_(2.0 ** 24 - 2)", "k{n} = torch.tensor(9.0, dtype=torch.float64)", "k{n} = torch.tensor(9)", "k{n} = w{n}[0]", "k{n}.neg_()", "k{n} = k{n}.to(device)", "k{n}.fill_(float('nan'))"),
        ("k{n}", "w{n}", "j{n}"),
        rate=4,
    ),
    Scene("hook inside", "m{n} = nn.Identity()", ("m{n}.register_forward_hook(lambda m, i, o: o + 1); y = m{n}(y)", "h = m{n}.register_forward_hook(lambda m, i, o: o + 1); y = m{n}(y); h.remove()", "m{n}.k = 1; y = m{n}(y)"), ("m{n}._forward_hooks.clear()",), ("len(m{n}._forward_hooks)",)),
    Scene("warning inside", "", ("warnings.warn('seen')", "logging.getLogger('fuzz').warning('seen')"), (), ("len(logged)",)),
    Scene("raises", "k{n} = 0", ("if k{n}: raise LookupError", "assert k{n} == 0, 'failed'", "y = y + torch.ones(3 + k{n}, device=device)", "y = y[k{n} * 5]"), ("k{n} = 1", "k{n} = 0")),
    Scene("lazy attribute", "class L{n}:\n    scale = None\no{n} = L{n}()", ("if o{n}.scale is None: o{n}.scale = 2.0\ny = y * o{n}.scale", "o{n}.scale = o{n}.scale or 2.0; y = y * o{n}.scale"), ("o{n}.scale = 5.0", "o{n}.scale = None", "del o{n}.scale"), ("o{n}.scale",), rate=2),
    Scene("cache", "d{n} = {{}}; k{n} = 2.0", ("if 'a' not in d{n}: d{n}['a'] = k{n}\ny = y * d{n}['a']", "y = y * d{n}.setdefault('a', k{n})", "if 'a' not in d{n}: d{n}['a'] = full(k{n})\ny = y * d{n}['a']"), ("d{n}['a'] = 3.0", "d{n}.clear(); k{n} = 4.0", "d{n} = {{}}"), ("d{n}",)),
    Scene("flip", "s{n} = {{'a': 1.0}}", ("y = y * s{n}['a']; s{n}['a'] = -s{n}['a']",), ("s{n}['a'] = 2.0",), ("s{n}",)),
    Scene("replaced object", "o{n} = Data(1.0); z{n} = Plain(o{n})", ("z{n}.v = dataclasses.replace(z{n}.v); y = y * z{n}.v.v", "z{n}.v = Data(z{n}.v.v); y = y * z{n}.v.v", "z{n}.v = {{'n': 1, 'v': 2.0}}; y = y + 1"), ("z{n}.v.v = 3.0", "z{n}.v = Data(2.0)"), ("z{n}.v",)),
    Scene("warm-up", "w{n} = {{'seen': 0, 'v': 1.0}}", ("if w{n}['seen'] < 4:\n    w{n}['seen'] += 1\n    w{n}['v'] = 1.0\ny = y * w{n}['v']",), ("w{n}['v'] = 2.0", "w{n}['seen'] = 0"), ("w{n}",)),
    Scene("deep counter", "o{n} = Plain(Plain(Plain({{'k': 0}})))", ("o{n}.v.v.v['k'] += 1", "o{n}.v.v.v['k'] += 1; y = y * 2 if o{n}.v.v.v['k'] % 11 == 0 else y"), (), ("o{n}.v.v.v",)),
    # Values of tensors.
    Scene("branch on a value", "", ("y = y * 2 if y.sum() > 0 else y + 1", "y = y * 2 if y[0, 0].item() > 0 else y - 1", "if y.isnan().any(): y = torch.zeros_like(y)", "y = y * y.argmax().item()"), ()),
    Scene("values of results", "w{n} = nn.Parameter(full(1.0))", ("y = y * 2", "y = y[:, :]", "y = y.detach()"), (), ("w{n}.grad",), after=("l = (r * w{n}).sum(); r.add_(100.0); l.backward()", "l = (r.detach() * w{n}).sum(); l.backward()"), rate=2),
    Scene("list as argument", "g{n} = []", ("a{n}.append(1); y = y * 2", "a{n}.append(y); y = y + 1", "a{n}[:] = [y * 2]; y = y + 1"), ("g{n} = [1, 2]",), ("len(g{n})", "g{n}[-1]"), argument="(g{n}.clear() or g{n})"),
    Scene("tensors of the graph", "p{n} = nn.Parameter(full(1.0)); o{n} = SimpleNamespace(h=0.0); h{n} = []", ("y = y * p{n}; o{n}.h = y.sum(); y = y.tanh()", "y = y * p{n}; h{n}[:] = [y.sin()]; y = y * 2", "y = (y * p{n}).exp(); y = y * p{n}"), ("p{n}.requires_grad_(False)", "p{n}.grad = None", "with torch.no_grad(): p{n}.mul_(0.5)"), ("p{n}.grad", "o{n}.h", "len(h{n})"), rate=2),
    Scene("gradients of graphs", "p{n} = nn.Parameter(full(1.0)); q{n} = nn.Parameter(full(0.5))", ("y = (y * p{n}).tanh() * q{n} + p{n}", "y = torch.addcmul(y, p{n}, q{n}).sigmoid() * p{n}", "y = F.dropout(y * p{n}, 0.3) + q{n}", "y = (y @ torch.outer(p{n}, q{n})).relu()"), ("p{n}.requires_grad_(False)", "p{n}.grad = None", "q{n}.grad = None; p{n}.grad = None", "with torch.no_grad(): p{n}.mul_(0.5)", "p{n} = q{n}", "p{n}.register_hook(lambda g: g * 2)", "p{n}.register_hook(tripled_y)", "q{n}.register_hook(tripled_y)", "p{n}.grad = None; p{n}.grad_dtype = torch.bfloat16", "q{n} = nn.Parameter(full(2.0))"), ("p{n}.grad", "q{n}.grad"), rate=4),
    Scene("branches that write", "s{n}, z{n} = full(0.0), full(0.0)", ("w = s{n} if y.sum() > 0 else z{n}; w.add_(y[0].detach()); y = y * 2 if w[0] > 2 else y + w", "w = z{n} if y[0, 0] > 0 else s{n}; w.mul_(0.5).add_(1); y = F.dropout(y) if w[1] > 1.5 else y - w"), ("s{n}.zero_()", "z{n}.fill_(3)", "s{n} = z{n}", "z{n} = full(-2.0)"), ("s{n}", "z{n}"), rate=3),
    Scene("saved gradient", "p{n} = nn.Parameter(full(1.0)); p{n}.grad = full(0.0); w{n} = nn.Parameter(full(1.0)); l{n} = None", ("(p{n} * y.detach()).sum().backward()",), ("p{n}.grad = full(1.0)",), ("p{n}.grad", "w{n}.grad", "p{n}.grad._version"), after=("l{n} = saved_until_next(l{n}, (p{n}.grad * w{n}).sum())",)),
    # Settings.
    Scene("settings", "", ("y = y + torch.ones(3, device=device).to(torch.get_default_dtype()).sum().float()", "y = y + torch.tensor(1.5).to(device).float()", "y = (y + torch.tensor([0.1]).to(device)).float()", "y = y * 2 if torch.is_grad_enabled() else y", "y = y @ torch.ones(3, 3, device=device)", "y = y + torch.zeros(3).to(device)"),
          ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)", "torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)", "torch.use_deterministic_algorithms(True)", "torch.set_num_threads(2)", "torch.set_default_device(device)", "torch.set_default_device(None)",
           "restored(mode_on(lambda y: y * 3))", "torch.set_float32_matmul_precision('medium')", "torch.autograd.set_detect_anomaly(True)", "torch.set_autocast_enabled('cpu', True)", "torch.utils.deterministic.fill_uninitialized_memory = False", "restored(torch.overrides.BaseTorchFunctionMode().__enter__ and (lambda: None))"), ("torch.get_default_dtype()",), rate=2),
    # What C functions answer: settings, and properties of an argument.
    *[
        Scene("setting", "", (f"y = y * (2 if {getter} == {values[0]} else 3)", f"y = y * 2; {setter.format(values[1])}", f"y = y * (2 if {getter} == {values[1]} else 3); {setter.format(values[0])}"), tuple(setter.format(value) for value in values), (getter,))
        for getter, setter, values in SETTINGS
    ],
    *[
        Scene(
            "question", "c{n} = data(40 + {n}, 3); d{n} = {{id(c{n}): 3.0}}; e{n} = {{c{n}: 3.0}}; k{n} = 0; s{n} = 2.0",
            (
                "y = y * (3 if a{n} is c{n} else 2)", "y = y * (3 if any(a{n} is z for z in [c{n}]) else 2)", "y = y * d{n}.get(id(a{n}), 2.0)", "y = y * e{n}.get(a{n}, 2.0)", "y = y * (3 if a{n} is x else 2)",
                "y = y * (3 if hash(a{n}) == hash(c{n}) else 2)", "y = y * (3 if a{n}.data_ptr() == c{n}.data_ptr() else 2)", "y = y * (2 + a{n}.storage_offset())", "y = y * a{n}.untyped_storage().nbytes()", "y = y * (3 if a{n}._is_view() else 2)", "y = y * (3 if a{n}._base is None else 2)",
                "y = y * getattr(a{n}, 'scale', 2.0)", "y = y * (3 if a{n}.is_leaf else 2)", "y = y * (3 if a{n}.grad is None else 2)", "y = y * (3 if a{n}.is_set_to(c{n}) else 2)", "y = y * (2 + a{n}._version)", "y = y * (3 if a{n}.is_contiguous() else 2)",
            ),
            ("k{n} = 1", "k{n} = 0", "c{n} = full(1.0)", "d{n}.clear()", "c{n}.scale = 3.0"), ("c{n}",), argument,
        )
        for argument in ("[full(1.0), c{n}][k{n}]", "(c{n} if i % 9 == 8 else full(1.0))", "(c{n} if i % 9 == 8 else c{n}[:])", "data(i, 2, 3)[(i % 9 == 8) * 1]", "(full(1.0) if i % 9 < 7 else with_scale(full(1.0)))", "(x if i % 9 == 8 else full(1.0))", "[full(1.0), full(1.0).requires_grad_() * 1][k{n}].detach()")
    ],
    Scene("attention", "", ("y = F.scaled_dot_product_attention(y[None, None], y[None, None] * 2, y[None, None])[0, 0]",), ("torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.enable_flash_sdp(True)", "torch.backends.cuda.enable_math_sdp(False)", "torch.backends.cuda.enable_math_sdp(True)"), ("torch.backends.cuda.flash_sdp_enabled()",)),
    Scene("attribute of a tensor", "t{n} = full(1.0); p{n} = nn.Parameter(full(2.0))", ("y = y * getattr(t{n}, 'scale', 2.0) + t{n}", "y = y * 3 if hasattr(p{n}, 'frozen') else y + p{n}.detach()", "y = y * vars(p{n}).get('scale', 2.0) * p{n}.detach()"), ("t{n}.scale = 3.0", "t{n}.__dict__.clear()", "p{n}.frozen = True", "p{n}.scale = 0.5", "p{n}.__dict__.clear()"), ("t{n}", "p{n}")),
    Scene("containers that become one", "u{n}, v{n} = [1.0], [1.0]; k{n} = {{'a': {{1}}, 'b': {{1}}}}", ("y = y * (2 if u{n} is v{n} else 3)", "y = y * (2 if k{n}['a'] is k{n}['b'] else 3)", "y = y * (len({{id(z) for z in (u{n}, v{n})}}) + 1)"), ("u{n} = v{n}", "v{n} = [1.0]", "k{n}['a'] = k{n}['b']", "k{n}['a'] = {{1}}"), ("u{n}", "v{n}")),
    # Kinds of state that a sweep by introspection (`reflected.py`) or a review has found missing.
    *[
        Scene("class of an object", f"o{{n}}, z{{n}} = {made}, {{{{'o': None}}}}; z{{n}}['o'] = o{{n}}", ("y = y * o{n}.factor()", "y = y * z{n}['o'].factor()"), (f"o{{n}}.__class__ = {other}", f"z{{n}}['o'] = None; z{{n}}['o'] = {other_made}", f"{kind}.factor = lambda self: 7.0; restored(setattr, {kind}, 'factor', factor_of(2.0))"))
        for kind, made, other, other_made in (
            ("Weak", "Weak()", "OtherWeak", "OtherWeak()"), ("Empty", "Empty()", "OtherEmpty", "OtherEmpty()"), ("Shape", "Shape.A", "OtherShape", "OtherShape.A"),
            ("Stateless", "Stateless()", "OtherStateless", "OtherStateless()"),
        )
    ],
    Scene("object in a registry of PyTorch", "m{n}, h{n} = nn.Identity(), Changing(); restored(nn.modules.module.register_module_forward_hook(h{n}).remove)", ("y = m{n}(y)",), ("h{n}.k = 5.0",), ("h{n}.calls",)),
    Scene("method that rebinds its object", "class R{n}:\n    def look(self):\n        self = self.child\n        return self.__dict__['factor']\nr{n} = R{n}(); r{n}.child = SimpleNamespace(factor=2.0)", ("y = y * r{n}.look()",), ("r{n}.child.factor = 3.0", "vars(r{n}.child).update(factor=4.0)")),
    Scene("module that is passed on", "c{n} = package('passed{n}.config', 2.0); c{n}.S = 3.0\ndef look{n}(c):\n    return c.K", ("y = y * c{n}.S + look{n}(c{n})", "y = y * look{n}(c{n})", "y = y * (2 if hasattr(c{n}, 'Z') else 3)", "y = y * len(vars(c{n}))", "y = y * len(str(c{n})) + c{n}.S", "y = y * getattr(c{n}, ''.join(['K']))"), ("c{n}.K = 5.0", "c{n}.Z = 1", "c{n}.__name__ = 'longer name'", "del c{n}.S; c{n}.S = 4.0")),
    Scene("attribute of a function of PyTorch", "act{n} = F.celu; restored(vars(F.celu).clear)", ("y = y * (3 if getattr(act{n}, 'flag', False) else 2)", "y = y * len(vars(act{n}))"), ("F.celu.flag = True", "F.celu.other = 1")),
    Scene("text of a class", "class K{n}:\n    pass", ("y = y * len(repr(K{n}))", "y = y * len(f'{{K{n}}}')", "y = y * len(K{n}.__module__)", "y = y * len(str(list[K{n}]))"), ("K{n}.__module__ = 'longer.name'", "K{n}.__qualname__ = 'Longer'", "K{n}.__name__ = 'Longer'")),
    Scene("text of a module", "m{n} = nn.BatchNorm1d(3).to(device); d{n} = nn.Dropout(0.5)", ("y = y * len(m{n}.extra_repr())", "y = y * len(repr(m{n}))", "y = y * len(d{n}.extra_repr())"), ("m{n}.affine = ()", "m{n}.eps = 0.0625", "d{n}.p = 0.125", "m{n}.num_features = 1000")),
    Scene("text of an exception", "o{n} = OSError(1, 'a', 'b')", ("y = y * len(str(o{n}))", "y = y * len(repr(o{n}))"), ("o{n}.filename = 'longer'", "o{n}.strerror = 'longer'", "o{n}.args = (1, 2, 3)")),
    *[
        Scene(
            "record as argument", "k{n} = 2.0; keep{n} = Data(full(1.0)); w{n} = nn.Parameter(full(0.5))",
            ("y = y + a{n}.v", "y = y * (2 if a{n} is keep{n} else 3) + a{n}.v", "a{n}.v.add_(1); y = y + a{n}.v", "a{n}.v = y.sum(); y = y + a{n}.v", "y = y * len(dir(a{n}))", "y = y + a{n}.v * k{n} * w{n}.detach()", "y = y * getattr(a{n}, 'z', 2.0) + a{n}.v", "y = y + a{n}.v; keep{n}.v = a{n}.v", "y = y + keep{n}.v + a{n}.v", "(a{n}.v * w{n}).sum().backward()"),
            ("k{n} = 3.0", "keep{n} = Data(full(4.0))", "keep{n}.v = full(5.0)", "Data.z = 3.0; restored(delattr, Data, 'z')", "SlotData.z = 3.0; restored(delattr, SlotData, 'z')", "w{n}.grad = None"), ("keep{n}.v", "w{n}.grad"), argument,
        )
        for argument in (
            "Data(full(1.0 + i))", "SimpleNamespace(v=full(1.0 + i), w=k{n})", "SlotData(full(1.0 + i))", "(keep{n} if i % 9 == 8 else Data(full(1.0 + i)))", "Plain(full(1.0 + i))", "(Plain if i % 9 < 7 else Negated)(full(1.0 + i))", "Data(full(1.0 + i)[: 3 - (i > 11)].sum())",
            "attributed(Plain(full(1.0 + i)), full(2.0))", "Data(data(i, 3).requires_grad_())", "Data(keep{n}.v)", "Data(same_x[0])",
        )
    ],
    Scene("container as argument", "g{n}, h{n} = [1.0], {{'a': 1.0}}; k{n} = 0", ("y = y * (2 if a{n}[0] is g{n} else 3)", "y = y * (2 if a{n}[1] is h{n} else 3)", "y = y * (2 if any(a is g{n} or a is h{n} for a in a{n}) else 3)"), ("k{n} = 1", "k{n} = 0", "g{n} = [1.0]", "h{n} = {{'a': 1.0}}"), (), "[([1.0], {{'a': 1.0}}), (g{n}, h{n})][k{n}]", rate=2),
    # A number that varies in each call.
    Scene("number that varies", "", ("y = y * a{n}", "y = y + a{n}", "y = y * 2 if a{n} % 2 else y"), (), (), "i"),
    Scene("float that varies", "", VARYING, (), (), "0.37 + 0.11 * i"),
    Scene("float that varies in the state", "k{n} = types.SimpleNamespace(v=0.37)", tuple(use.replace("a{n}", "k{n}.v") for use in VARYING), ("k{n}.v = 1.0", "k{n}.v = -0.4", "k{n} = types.SimpleNamespace(v=3.3)"), (), "", ("k{n}.v += 0.09",)),
    Scene("floats that vary in a tuple", "k{n} = [(0.37, 1.9)]", tuple(use.replace("a{n}", "k{n}[0][1]") for use in VARYING), ("k{n}[0] = (0.5, 0.0)", "k{n}[0] = [0.5, 2]"), (), "", ("k{n}[0] = (k{n}[0][0] * 1.1, k{n}[0][1] + 0.13)",)),
    Scene("float that varies now and then", "k{n} = types.SimpleNamespace(v=0.37, flag=True)", tuple(f"y = y + 1 if k{{n}}.flag else y\n{use.replace('a{n}', 'k{n}.v')}" for use in VARYING), ("k{n}.v, k{n}.flag = 0.5, False", "k{n}.v = 0.9", "k{n}.flag, k{n}.v = True, 1.7", "k{n}.v += 0.01", "k{n}.flag = not k{n}.flag"), ("k{n}.flag",), rate=2),
    Scene("large module", "torch.manual_seed(3); m{n} = nn.Sequential(*(nn.Linear(3, 3) for _ in range(250))).to(device).requires_grad_(False)", ("y = m{n}[0](y)", "y = m{n}[0](y) * a{n}"), ("m{n}[0] = nn.Tanh()", "m{n}[0].weight.data.mul_(2)", "m{n}[0].bias = None"), (), "i", rate=2),
    Scene("host tensor that varies", "", ("y = y * a{n}.to(device)", "y = y * a{n}", "y = y * a{n}.item()", "y = y * torch.exp(-a{n}).to(device)"), (), (), "torch.tensor(1.0 + i // 4)", rate=2),
    Scene("sparse argument", "", ("y = y + a{n}.to_dense().to(device)",), ("z{n} = 1",), (), "torch.eye(3)[:2].to_sparse_csr()"),
    Scene("subclass as argument", "k{n} = 0", ("y = y + a{n}", "y = y + torch.sin(a{n})"), ("k{n} = 1",), (), "(full(1.0).as_subclass(Sub) if k{n} else full(1.0))"),
    Scene("shape that varies", "k{n} = 2", ("y = y + a{n}.sum()", "y = y + a{n}.numel()"), ("k{n} = 3", "k{n} = 4"), (), "torch.ones(k{n}, device=device)"),
]  # fmt: skip

# Ways in which a program calls a function `{f}` of `x`.
CALLS = {
    "vmap": "torch.vmap({f})({x})",
    "torch.func.grad": "torch.func.grad(lambda x: torch.as_tensor({f}(x)).sum())({x})",
    "torch.func.jvp": "torch.func.jvp({f}, ({x},), ({x},))",
    "torch.compile": "torch.compile(lambda x: {f}(x), backend='eager')({x})",
    "torch.jit.trace": "torch.jit.trace(lambda x: {f}(x) + 1, {x}.detach(), check_trace=False)({x})",
    "deepcopy": "copy.deepcopy({f})({x})",
    "thread": "in_thread(lambda: {f}({x}))",
    "no_grad": "torch.no_grad()({f})({x})",
    "inference mode": "torch.inference_mode()({f})({x})",
    "autocast": "torch.autocast('tandem', torch.bfloat16)({f})({x})",
    "autocast without its cache": "torch.autocast('tandem', torch.bfloat16, cache_enabled=False)({f})({x})",
    "mode": "under(mode_of(lambda y: y * 3), {f}, {x})",
    "default device": "under(torch.device(device), {f}, {x})",
    "keyword": "{f}(x={x})",
    "partial": "functools.partial({f})({x})",
    "map": "next(map({f}, [{x}]))",
    "checkpoint": "checkpoint({f}, {x}, use_reentrant=False)",
    "interrupted": "interrupted(lambda: {f}({x}), i)",
    "in a plain function": "(lambda x: {f}(x) * 2)({x})",
    "subclass": "{f}({x}.as_subclass(Sub))",
    "parameter": "{f}(nn.Parameter({x}.detach()))",
    "non-leaf": "{f}({x}.detach().requires_grad_() * 1)",
    "view": "{f}(wide({x}))",
    "expanded": "{f}({x}[:1].expand(2, 3))",
    "transposed": "{f}({x}.t().contiguous().t())",
    "inference tensor": "{f}(inference({x}))",
    "host": "{f}({x}.cpu())",
}  # fmt: skip

# Kinds of callables that are wrapped.
FORMS = {
    "no_grad": "{f} = torch.no_grad()({f})",
    "partial": "{f} = functools.partial({f})",
    "wraps": "{f} = wrapping({f})",
    "installed": "{f} = installed({f})",
    "method": "class C_{f}:\n    def __init__(self): self.k = 1.0\n    def m(self, *a, **k): return self.f(*a, **k)\n    f = staticmethod({f})\no_{f} = C_{f}(); {f} = o_{f}.m",
    "module": "class C_{f}(nn.Module):\n    f = staticmethod({f})\n    def forward(self, *a, **k): return self.f(*a, **k)\n{f} = C_{f}()",
    "callable": "class C_{f}:\n    f = staticmethod({f})\n    def __call__(self, *a, **k): return self.f(*a, **k)\n{f} = C_{f}()",
    "lambda": "{f} = (lambda f: lambda *a, **k: f(*a, **k))({f})",
    "static method": "class C_{f}:\n    m = staticmethod({f})\n{f} = C_{f}.m",
    "enable_grad": "{f} = torch.enable_grad()({f})",
    "partialmethod": "class C_{f}:\n    f = staticmethod({f})\n    def m(self, k, *a, **kw): return self.f(*a, **kw)\n    p = functools.partialmethod(m, 1)\no_{f} = C_{f}(); {f} = o_{f}.p",
}  # fmt: skip
