"""Gradients of a function's results and leaves: each way to ask for them, in recorded and replayed calls."""

import gc
import itertools
import weakref

import pytest
import torch
import torch_tandem
from helpers import data
from torch import nn

CALLS = 14

# --- Results on which other results depend ---


def _features(x, w):
    features = torch.relu(x @ w)
    return features, features.sum(1), features * w[0, 0]


def _chain(x, w):
    a = (x @ w).tanh()
    b = a * a + w.sum()
    return a, b, (a * b).sum()


def _apart(x, w):
    return x @ w, (x * 2).sum() * w[0], w * 2


def _of_one_operator(x, w):
    low, high = torch.aminmax(x @ w, dim=1)
    return low, high, low * high


STRUCTURES = {f.__name__: f for f in (_features, _chain, _apart, _of_one_operator)}


def _retain(results, losses):
    results[0].retain_grad()
    sum(losses()).backward()
    return [results[0].grad]


def _hook(results, losses):
    seen = {}
    results[0].register_hook(lambda grad: seen.update(first=grad.clone()) or grad * 3)
    results[1].register_hook(lambda grad: seen.update(second=grad.clone()))
    sum(losses()).backward()
    return [seen["first"], seen["second"]]


def _hook_after_use(results, losses):
    loss, seen = sum(losses()), []
    results[0].register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
    (loss + results[0].sum()).backward()
    return seen


def _grad(results, losses):
    return torch.autograd.grad(losses()[2] + losses()[1], results[:2], allow_unused=True)


def _grad_after_use(results, losses):
    loss = sum(losses())
    return torch.autograd.grad(loss, results[0], retain_graph=True) + torch.autograd.grad(loss, results[1])


def _edge(results, losses):
    return torch.autograd.grad(
        sum(losses()), [torch.autograd.graph.get_gradient_edge(results[0])], allow_unused=True
    )


def _several_hooks(results, losses):
    seen = []
    torch.autograd.graph.register_multi_grad_hook(results[:2], lambda grads: seen.extend(grads))
    sum(losses()).backward()
    return [grad.clone() for grad in seen]


def _changed_in_place(results, losses):
    results[2].mul_(2)
    results[0].register_hook(lambda grad: grad * 3)
    sum(losses()).backward()
    return []


def _hook_while_a_pass_runs(results, losses):
    loss = sum(losses())
    loss.register_hook(lambda grad: results[1].retain_grad())
    loss.backward()
    return []


WAYS = {
    f.__name__: f
    for f in (
        _retain,
        _hook,
        _hook_after_use,
        _grad,
        _grad_after_use,
        _edge,
        _several_hooks,
        _changed_in_place,
        _hook_while_a_pass_runs,
    )
}


def _run(device, wrap, structure, way, since):
    function = wrap(STRUCTURES[structure])
    w = data(4, 4).to(device).requires_grad_()
    found = []
    for i in range(CALLS):
        x = data(3, 4, seed=i).to(device).requires_grad_()
        before = torch.exp(x @ w * 0.1)
        results = function(x, w)
        after = torch.exp(x @ w * 0.2)

        def losses(results=results, others=(before, after)):
            return [(result * (k + 1)).sum() for k, result in enumerate(results)] + [o.sum() for o in others]

        if i < since:
            sum(losses()).backward()
            asked = []
        else:
            asked = WAYS[way](results, losses)
        found.append([None if t is None else t.cpu().clone() for t in (*asked, x.grad, w.grad)])
        w.grad = None
    return found, function


@pytest.mark.parametrize(("structure", "way"), list(itertools.product(STRUCTURES, WAYS)))
def test_gradients_of_results_that_others_depend_on(structure, way):
    for since in (0, 2, 10):
        expected, _ = _run("cpu", lambda f: f, structure, way, since)
        actual, function = _run("tandem", torch_tandem.function, structure, way, since)
        _compare(expected, actual)
        assert function.cache_info().hits > 0 or since < 10, function.reason()


def _compare(expected, actual):
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None) and (x is None or torch.equal(x, y)), (i, x, y)


# --- Gradients of leaves that are on one memory ---


def _sum(a, b):
    return (a + b).square().sum()


def _sum_of_views(a, b):
    return (a.view(-1) + b.t().reshape(-1)).square().sum()


def _part_of(a, b):
    return (torch.cat([a[:1].expand(2, -1), b[2:] * 2]) + b).square().sum()


def _swapped(a, b):
    return (b.t() + a).exp().sum()


def _joined(a, b):
    return (torch.cat([a, b]) + torch.cat([b, a])).square().sum()


@pytest.mark.parametrize("of", [_sum, _sum_of_views, _part_of, _swapped, _joined])
def test_leaves_have_gradients_of_their_own(of):
    def run(device, wrap):
        function = wrap(of)
        a, b = (data(4, 4, seed=seed).to(device).requires_grad_() for seed in (1, 2))
        found = []
        for _ in range(CALLS):
            a.grad = b.grad = None
            for _ in range(2):
                function(a, b).backward()
            nn.utils.clip_grad_norm_([a, b], 0.5)
            a.grad.mul_(2)
            found.append([a.grad.cpu().clone(), b.grad.cpu().clone()])
        return found, function

    expected, _ = run("cpu", lambda f: f)
    actual, function = run("tandem", torch_tandem.function)
    _compare(expected, actual)
    assert function.cache_info().hits > 0, function.reason()


# --- The gradients that a pass begins with ---

LAYOUTS = {
    "dense": lambda y, g: (y * g).sum(),
    "transposed": lambda y, g: (y.t() * g.t().contiguous()).sum(),
    "expanded": lambda y, g: y.sum(),
    "sliced": lambda y, g: torch.cat([y, y * 0], 1).mul(torch.cat([g, g], 1)).sum(),
}


@pytest.mark.parametrize("later", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_gradient_with_other_strides_has_its_own_bits(first, later):
    def run(device, wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.Linear(64, 65)).to(device))
        found = []
        for i in range(CALLS):
            model.zero_grad()
            y = model(data(300, 33, seed=i).to(device))
            LAYOUTS[first if i < 10 else later](y, data(300, 65, seed=i).to(device)).backward()
            found.append([p.grad.cpu().clone() for p in model.parameters()])
        return found

    _compare(run("tandem", lambda f: f), run("tandem", torch_tandem.function))


# --- Arguments after the call ---


def test_arguments_of_a_kept_loss_are_freed():
    function = torch_tandem.function(lambda fake, real: fake.mean() - real.mean())
    losses, arguments = [], []
    for i in range(CALLS):
        fake, real = (torch.full((8,), float(i + k), device="tandem", requires_grad=True) for k in (1, 2))
        loss = function(fake * 2, made := real * 2)
        loss.backward()
        losses.append(loss)
        arguments.append(weakref.ref(made))
        del made
        assert fake.grad.tolist() == [0.25] * 8
    gc.collect()
    assert function.cache_info().hits > 0
    assert not any(argument() is not None for argument in arguments)


def test_a_leaf_may_be_frozen_before_the_backward_pass():
    function = torch_tandem.function(lambda x, w: (x @ w).square().sum())
    w = data(4, 4).to("tandem").requires_grad_()
    for i in range(CALLS):
        x = data(3, 4, seed=i).to("tandem").requires_grad_()
        loss = function(x, w)
        (x if i % 2 else w).requires_grad_(i < 8)
        loss.backward()
        for leaf in (x, w):
            assert (leaf.grad is not None) == leaf.requires_grad
        w.grad = None
        w.requires_grad_(True)
    assert function.cache_info().hits > 0


def test_many_results_have_graphs_of_their_own():
    function = torch_tandem.function(lambda w: [(w[k] * k).sum() for k in range(70)])
    w = data(70, 2).to("tandem").requires_grad_()
    for _ in range(CALLS):
        w.grad = None
        for result in function(w):
            result.backward()
        assert torch.equal(w.grad.cpu(), torch.arange(70.0).view(70, 1).expand(70, 2))
    assert "64" in function.reason()


# --- Passes from some of the results ---


@pytest.mark.parametrize("later", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("first", [(0,), (1, 2), (0, 1, 2)])
def test_a_loss_of_other_results(first, later):
    """The model draws random numbers and changes its statistics, so its call cannot be made again."""

    def run(device, wrap):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)).to(device)
        heads = nn.ModuleList(nn.Linear(8, n) for n in (2, 3)).to(device)
        parameters = [*body.parameters(), *heads.parameters()]

        @wrap
        def forward(x):
            features = body(x)
            return features, heads[0](features), heads[1](features)

        found = []
        for i in range(CALLS):
            results = forward(data(10, 6, seed=i).to(device))
            used = [results[k] for k in (first if i < 10 else later)]
            (sum(r.square().mean() for r in used) if i % 2 else sum(r.sum() for r in used)).backward()
            found.append([p.grad.cpu().clone() if p.grad is not None else None for p in parameters])
            for p in parameters:
                p.grad = None
        return found, forward

    expected, _ = run("tandem", lambda f: f)
    actual, function = run("tandem", torch_tandem.function)
    _compare(expected, actual)
    assert function.cache_info().hits > 3, function.reason()


def test_hooks_of_leaves_run_in_autograds_order():
    """They draw random numbers. A weight that is used twice gets its gradient at the last use."""

    def run(device, wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        model[3].weight = model[0].weight
        model.to(device)
        order, found = [], []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda g, name=name: order.append(name) or g + 0.1 * torch.rand_like(g))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(f"after {name}"))
        function = wrap(model)
        for i in range(CALLS):
            model.zero_grad()
            order.clear()
            function(data(5, 6, seed=i).to(device)).square().mean().backward()
            found.append((list(order), [p.grad.cpu().clone() for p in model.parameters()]))
        return found, function

    expected, _ = run("cpu", lambda f: f)
    actual, function = run("tandem", torch_tandem.function)
    for a, b in zip(expected, actual, strict=True):
        assert a[0] == b[0]
        _compare([a[1]], [b[1]])
    assert function.cache_info().hits > 0, function.reason()


@pytest.mark.parametrize("change", ["result", "argument"])
def test_passes_that_are_recorded_beside_the_programs_raise_nothing(change):
    """The second result's pass would fail, since what it has saved is changed, but the program runs none."""

    def body(x):
        return (w * w, x @ w) if change == "argument" else (x @ w, torch.sigmoid(x @ w))

    w = torch.full((3, 3), 0.5, device="tandem", requires_grad=True)
    function = torch_tandem.function(body)
    for i in range(CALLS):
        x = torch.full((3, 3), 0.1 * i, device="tandem")
        w.grad = None
        one, other = function(x)
        with torch.no_grad():
            (x if change == "argument" else other).add_(1)
        one.sum().backward()
        assert w.grad is not None


def test_hooks_take_keywords_and_modes_see_only_the_programs_calls():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    y = torch.ones(3, device="tandem", requires_grad=True) * 2
    with Mode():
        y.register_hook(lambda grad: None)
    assert "open_calls" not in " ".join(seen)
    assert torch.autograd.graph.get_gradient_edge(tensor=y).node is y.grad_fn
    torch.autograd.graph.register_multi_grad_hook(tensors=[y], fn=lambda grads: None).remove()


def test_an_edge_to_a_functions_node_is_an_error():
    function = torch_tandem.function(lambda x: (h := x.tanh(), h * 2))
    for _ in range(CALLS):
        x = torch.ones(3, device="tandem", requires_grad=True)
        a, b = function(x)
        if function.cache_info().hits:
            break
        (a + b).sum().backward()
    with pytest.raises(RuntimeError, match="get_gradient_edge"):
        torch.autograd.grad((a + b).sum(), torch.autograd.graph.GradientEdge(a.grad_fn, a.output_nr))
