"""Functions whose results require grad: both passes are replayed, with eager's bits and errors."""

import functools
import gc
import random
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch_tandem
from functions import REFERENCE, both, data, mlp, replayed, same
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("error:.*an audit found")

STEPS = 30


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


def loop(
    device, forward, leaves, loss_of=lambda out, y: F.mse_loss(out, y), shapes=((5, 6), (5, 3)), steps=STEPS
):
    """Train `leaves` with SGD. Return the losses, the gradients of the last step, and the leaves."""
    optimizer = torch.optim.SGD(leaves, lr=0.01, momentum=0.5)
    values = []
    for i in range(steps):
        batch = [data(*shape, seed=10 * i + j).to(device) for j, shape in enumerate(shapes)]
        optimizer.zero_grad()
        loss = loss_of(forward(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    grads = [torch.zeros(()) if p.grad is None else p.grad for p in leaves]
    return values + grads + [p.detach().clone() for p in leaves]


def check(program, hits=15, **options):
    eager, ours, functions = both(program, **options)
    same(eager, ours)
    for function in functions:
        replayed(function, hits)
    return functions


# --- what is replayed ---------------------------------------------------------------------------


def test_a_model_with_batch_norm_and_dropout():
    def program(device, wrap):
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        model = nn.Sequential(*layers).to(device)
        values = loop(device, wrap(model), list(model.parameters()))
        return [*values, *model.buffers(), torch.rand(3, device=device)]

    check(program)


def test_gradients_that_accumulate():
    def program(device, wrap):
        model = mlp(dropout=0.2).to(device)
        forward = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for i in range(STEPS):
            loss = F.mse_loss(forward(data(5, 6, seed=i).to(device)), data(5, 3, seed=-i).to(device))
            loss.backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=i % 2 == 0)
            values.append(loss.detach())
        return [*values, *model.parameters()]

    check(program)


def test_functions_one_after_another():
    def program(device, wrap):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6).to(device) for _ in range(3)]
        first, second = wrap(layers[0]), wrap(lambda h, s: (torch.tanh(layers[1](h)) * s, h.relu()))

        def forward(x):
            h = layers[2](first(x)).sigmoid()
            a, b = second(h, h)
            return layers[0](a + b)

        return loop(
            device, forward, [p for layer in layers for p in layer.parameters()], shapes=((5, 6), (5, 6))
        )

    check(program)


def test_one_weight_used_often_within_and_outside():
    # Three gradients are added, because the bits of such sums depend on the order of the additions.
    def program(device, wrap):
        weight = (data(6, 6) / 4).to(device).requires_grad_()
        bias = data(6, seed=1).to(device).requires_grad_()
        inner = wrap(lambda x: torch.tanh(torch.tanh(x @ weight + bias) @ weight + bias) @ weight * bias)

        def forward(x):
            x = x @ weight + bias
            x = torch.tanh(inner(x)) @ weight
            return inner(x) @ weight + bias

        return loop(device, forward, [weight, bias], shapes=((5, 6), (5, 6)))

    check(program)


def test_several_calls_before_their_backward_passes():
    def program(device, wrap):
        model = mlp(dropout=0.2).to(device)
        critic = wrap(model)
        forward = lambda x, z: (critic(x) - critic(z) * 2).mean()  # noqa: E731
        return loop(
            device,
            forward,
            list(model.parameters()),
            loss_of=lambda out, y: out + y.sum(),
            shapes=((5, 6), (5, 6), (1,)),
        )

    check(program)


@dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor
    name: str


register_dataclass(Output)


def test_structures_of_which_some_results_are_used():
    def program(device, wrap):
        model = mlp().to(device)

        def compute(batch, *, scale):
            out = model(batch["x"])
            loss = F.mse_loss(out * scale, batch["y"])
            return Output(loss, out.exp(), "out"), {"unused": out.sum(), "no grad": out.detach() + 1}

        step = wrap(compute)
        forward = lambda x, y: step({"x": x, "y": y}, scale=2.0)[0]  # noqa: E731
        values = loop(
            device,
            forward,
            list(model.parameters()),
            loss_of=lambda out, y: out.loss * y.sum(),
            shapes=((5, 6), (5, 3), (1,)),
        )
        return values

    check(program)


def test_arguments_that_are_leaves_or_belong_to_a_graph():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(lambda x, s: model(x) * s)
        values = []
        for i in range(STEPS):
            x = data(5, 6, seed=i).to(device).requires_grad_()
            s = data(5, 3, seed=-i).to(device).requires_grad_() * 2
            s.retain_grad()
            out = forward(x, s)
            out.sum().backward()
            values += [out, x.grad, s.grad]
        return values

    check(program)


def test_gradients_of_chosen_inputs():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)
        weights = list(model.parameters())
        values = []
        for i in range(STEPS):
            x = data(5, 6, seed=i).to(device).requires_grad_()
            out = forward(x).tanh()
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            out.square().sum().backward(inputs=weights[:1])
            values += [gradient, weights[0].grad.clone()]
            assert weights[1].grad is None and x.grad is None
        return values

    check(program)


def test_hooks_of_parameters_and_results():
    def program(device, wrap):
        model = mlp().to(device)
        values = []
        weight = model[0].weight
        model[3].bias.register_hook(lambda g: g * 2)
        weight.register_post_accumulate_grad_hook(lambda p: values.append(p.grad.clone()))
        forward = wrap(model)

        def hooked(x):
            y = forward(x)
            y.register_hook(lambda g: g + 1)
            y.retain_grad()
            return y

        return loop(device, hooked, list(model.parameters())) + values

    check(program)


def test_autocast():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)

        def cast(x):
            with torch.autocast(device, dtype=torch.bfloat16):
                return forward(x).float()

        return loop(device, cast, list(model.parameters()))

    check(program, reference="tandem")


def test_training_and_evaluation_take_turns():
    def program(device, wrap):
        model = mlp(dropout=0.2).to(device)
        forward = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for i in range(60):
            x = data(5, 6, seed=i).to(device)
            if i % 4 == 3:
                model.eval()
                with torch.no_grad():
                    values.append(forward(x))
                model.train()
                continue
            loss = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        return values

    check(program, hits=25)


def test_a_backward_pass_under_another_layout_of_gradients():
    def program(device, wrap):
        weight = data(6, 4).to(device).requires_grad_()
        forward = wrap(lambda x: x @ weight)
        values = []
        for i in range(STEPS):
            y = forward(data(5, 6, seed=i).to(device))
            gradient = data(4, 5, seed=i).to(device).t() if i % 7 == 6 else data(5, 4, seed=i).to(device)
            y.backward(gradient)
            values.append(weight.grad.clone())
        return values

    check(program, hits=3)


def test_frozen_parameters_and_changed_settings():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)
        values = []
        for i in range(60):
            if i % 20 == 10:
                model[0].weight.requires_grad_(i != 10)
            model.zero_grad()
            loss = forward(data(5, 6, seed=i).to(device)).square().sum()
            loss.backward()
            values += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return values

    check(program, hits=20)


def test_a_pass_within_another_function():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = wrap(lambda loss: (loss.backward(), optimizer.step(), optimizer.zero_grad())[1])
        values = []
        for i in range(STEPS):
            loss = forward(data(5, 6, seed=i).to(device)).square().mean()
            update(loss)
            values.append(loss.detach())
        return values

    eager, ours, _ = both(program)
    same(eager, ours)


# --- memory -------------------------------------------------------------------------------------


def test_the_graph_of_a_replayed_call_is_freed():
    weight = data(64, 64).to("tandem").requires_grad_()
    forward = torch_tandem.function(lambda x: torch.tanh(torch.tanh(x @ weight) @ weight))

    def use(backward):
        torch.accelerator.synchronize()
        gc.collect()
        x = data(64, 64).to("tandem")
        before = torch.accelerator.memory_allocated()
        y = forward(x)
        torch.accelerator.synchronize()
        with_graph = torch.accelerator.memory_allocated() - before
        if backward:
            y.backward(x, inputs=[weight])
            weight.grad = None
        torch.accelerator.synchronize()
        after = torch.accelerator.memory_allocated() - before
        assert after <= 64 * 64 * 4 * (1 if backward else 4)
        del y, x
        return with_graph

    first = use(True)
    for _ in range(20):
        assert use(True) <= first
    replayed(forward, 10)
    assert use(False) <= first
    x = data(64, 64).to("tandem")
    kept = weakref.ref(x)
    y = forward(x)
    del x
    assert kept() is not None
    del y
    assert kept() is None


# --- errors, and what is not replayed -----------------------------------------------------------


def error_of(run, whole=False):
    with pytest.raises(RuntimeError) as caught:
        run()
    text = str(caught.value)
    return text if whole else text.split(":")[0][:60]


def replaying(make):
    """A function, and a graph of autograd from outside of the function, after enough calls for replays."""
    weight = data(4, 4).to("tandem").requires_grad_()
    plain = make(weight)
    wrapped = torch_tandem.function(plain)
    for i in range(12):
        wrapped(data(3, 4, seed=i).to("tandem")).sum().backward()
    replayed(wrapped, 5)
    weight.grad = None
    return weight, plain, wrapped


def tanh_layer(weight):
    return lambda x: torch.tanh(x @ weight)


def test_a_second_backward_pass():
    weight, plain, wrapped = replaying(tanh_layer)
    x = data(3, 4).to("tandem")
    texts, grads = [], []
    for forward in (plain, wrapped):
        y = forward(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        grads.append(weight.grad)
        weight.grad = None
        texts.append(error_of(lambda y=y: y.sum().backward()))
    assert texts[0] == texts[1] and torch.equal(*grads)


@pytest.mark.parametrize("order", ["ab", "aba", "bba", "abccab", "sab", "scca"])
def test_passes_from_some_results(order):
    """A pass needs what an earlier pass has freed only if their results share nodes of autograd that save."""

    def works(y):
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "second time" in str(error)
            return False
        return True

    def program(device, wrap):
        weights = [data(4, 4, seed=i).to(device).requires_grad_() for i in range(2)]
        forward = wrap(lambda x: ((x @ weights[0]).exp(), (x @ weights[1]).sin(), x + weights[1][0]))
        values = []
        for i in range(STEPS):
            results = dict(zip("abc", forward(data(3, 4, seed=i).to(device)), strict=True))
            results["s"] = results["a"] + results["b"]
            values.append(torch.tensor([works(results[name]) for name in order]))
            values += [torch.zeros(()) if w.grad is None else w.grad for w in weights]
            for w in weights:
                w.grad = None
        return values

    check(program)


@pytest.mark.parametrize("changed", ["argument", "result", "parameter"])
def test_tensors_that_are_changed_before_the_backward_pass(changed):
    weight, plain, wrapped = replaying(lambda weight: lambda x: torch.tanh(x @ weight))
    texts = []
    for forward in (plain, wrapped):
        x = data(3, 4).to("tandem")
        z = x.clone().requires_grad_() if changed == "parameter" else x
        y = forward(z)
        with torch.no_grad():
            {"argument": x, "result": y, "parameter": weight}[changed].add_(1)
        texts.append(error_of(lambda y=y: y.sum().backward()))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("changed", ["argument", "parameter"])
def test_tensors_whose_data_is_replaced_before_the_backward_pass(changed):
    """Whether autograd would use the old elements or the new ones is not known."""
    weight, _, wrapped = replaying(tanh_layer)
    for i in range(20):
        x = data(3, 4, seed=i).to("tandem").requires_grad_()
        y = wrapped(x)
        if i < 19:
            y.sum().backward()
            weight.grad = None
    replaced = {"argument": x, "parameter": weight}[changed]
    replaced.data = replaced.data * 2
    assert "modified by an inplace operation" in error_of(lambda: y.sum().backward(), whole=True)


def test_a_dense_gradient_after_expanded_ones():
    """The gradient of a sum is expanded. The call draws numbers, so Python cannot make it again."""

    def program(device, wrap):
        torch.manual_seed(0)
        model = mlp(dropout=0.3).to(device)
        forward, values = wrap(model), []
        for i in range(STEPS):
            result = forward(data(5, 6, seed=i).to(device))
            (result.sum() if i < STEPS - 4 else (result * result).sum()).backward()
            values += [result, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return values

    check(program)


def test_a_model_that_is_moved_between_the_passes():
    def program(device, wrap):
        model = mlp().to(device)
        forward, results = wrap(model), []
        for i in range(2 * STEPS):
            results.append(forward(data(5, 6, seed=i).to(device)))
            if i > STEPS and i % 4 == 0:
                model.to("cpu").to(device)
            if i % 2:
                results.pop(0).sum().backward()
        return [*results, *(p.grad for p in model.parameters())]

    check(program, hits=5)


def test_a_result_that_is_changed_in_place_and_not_needed():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)
        return loop(device, lambda x: forward(x).mul_(2).relu_(), list(model.parameters()))

    check(program)


def test_double_backward_in_each_step_is_not_replayed():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)

        def penalized(x):
            x.requires_grad_()
            y = forward(x)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + g.square().sum()

        return loop(device, penalized, list(model.parameters()))

    eager, ours, [function] = both(program)
    # The order of additions differs in the first pass, because it runs the nodes of the call separately from
    # the nodes of the graph that it creates.
    for one, two in zip(eager, ours, strict=True):
        torch.testing.assert_close(one.detach().cpu(), two.detach().cpu())
    assert function.cache_info().hits == 0 and "create_graph" in function.reason()


def test_double_backward_now_and_then_runs_python_again():
    def program(device, wrap):
        weight = data(4, 4).to(device).requires_grad_()
        forward = wrap(lambda x: torch.tanh(x @ weight))
        values = []
        for i in range(STEPS):
            x = data(3, 4, seed=i).to(device).requires_grad_()
            y = forward(x).sum()
            if i == 20:
                (g,) = torch.autograd.grad(y, x, create_graph=True)
                y = y + g.square().sum()
            y.backward()
            values += [x.grad, weight.grad.clone()]
        return values

    eager, ours, [function] = both(program)
    same(eager[:40], ours[:40])
    for one, two in zip(eager, ours, strict=True):
        torch.testing.assert_close(one.detach().cpu(), two.detach().cpu())
    replayed(function, 8)
    assert "create_graph" in function.reason()


@pytest.mark.parametrize("changed", ["a value", "a captured tensor", "nothing"])
def test_a_call_is_made_again_only_if_all_is_as_it_was(changed):
    weight, scale = data(4, 4).to("tandem").requires_grad_(), torch.ones(4).to("tandem")
    factors = [2.0]
    forward = torch_tandem.function(lambda x: torch.tanh(x @ weight * scale) * factors[0])
    for i in range(40):
        hits = forward.cache_info().hits
        y = forward(data(3, 4, seed=i).to("tandem"))
        if i > 14 and forward.cache_info().hits > hits:
            break
        y.sum().backward()
    assert y.grad_fn.name() == "TandemFunctionBackward", forward.reason()
    if changed == "a value":
        factors[0] = 3.0
    elif changed == "a captured tensor":
        scale.mul_(2)
    if changed == "nothing":
        torch.autograd.grad(y.sum(), weight, create_graph=True)
    else:
        with pytest.raises(RuntimeError, match=r"cannot be made again|modified by an inplace operation"):
            torch.autograd.grad(y.sum(), weight, create_graph=True)


def test_double_backward_of_a_call_that_cannot_be_made_again():
    weight = data(4, 4).to("tandem").requires_grad_()
    forward = torch_tandem.function(lambda x: F.dropout(x @ weight))
    for i in range(20):
        forward(data(3, 4, seed=i).to("tandem")).sum().backward()
    replayed(forward, 5)
    y = forward(data(3, 4).to("tandem"))
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y.sum(), weight, create_graph=True)
    y = forward(data(3, 4).to("tandem"))
    torch.autograd.grad(y.sum(), weight, create_graph=True)


def test_a_pass_after_everything_was_forgotten_runs_python_again():
    weight, plain, wrapped = replaying(tanh_layer)
    x = data(3, 4).to("tandem")
    plain(x).sum().backward()
    expected, weight.grad = weight.grad, None
    y = wrapped(x)
    torch_tandem.reset()
    y.sum().backward()
    assert torch.equal(weight.grad, expected)


SECOND_PASSES = {
    "a number is saved": lambda x: x * 3.0,
    "nothing is saved": lambda x: x + 1,
    "a result is saved": lambda x: x.tanh(),
}


@pytest.mark.parametrize("name", SECOND_PASSES)
def test_a_second_pass_fails_where_nodes_of_autograd_have_freed_something(name):
    def run(device, wrap):
        call, seen = wrap(SECOND_PASSES[name]), []
        for i in range(20):
            x = data(3, seed=i).to(device).requires_grad_()
            y = call(x).sum()
            y.backward()
            try:
                y.backward()
            except RuntimeError as error:
                seen.append("second time" in str(error))
            seen.append(x.grad.tolist())
        return seen

    wrapped = torch_tandem.function(SECOND_PASSES[name])
    assert run("tandem", lambda call: wrapped) == run(REFERENCE, lambda call: call)
    replayed(wrapped, 5)


def test_an_argument_on_the_host_that_requires_grad():
    call = torch_tandem.function(lambda x, host: x * host.to("tandem"))
    for i in range(20):
        x, host = data(3, seed=i), data(3, seed=100 + i).requires_grad_()
        call(x.to("tandem"), host).sum().backward()
        assert torch.equal(host.grad, x)


@pytest.mark.parametrize("at", [0, 1, 2, 14, 20])
def test_a_leaf_of_another_shape_whose_earlier_graph_still_exists(at):
    """Autograd expects gradients of the earlier shape, and sums no further than to that shape."""

    def run(device, wrap):
        weight = torch.ones(3, device=device, requires_grad=True)
        call = wrap(lambda x: x * weight)
        for i in range(30):
            if i == at:
                weight.data = torch.full((1,), 2.0, device=device)
            y = call(
                torch.ones(2, 3, device=device)
            )  # replaces the call before, whose graph has existed so far
            y.sum().backward()
        return weight.grad.tolist()

    assert run("tandem", torch_tandem.function) == run("cpu", lambda call: call)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def hooked(x):
    x = x * 1
    x.register_hook(lambda g: g * 3)
    return x


outside = []

REFUSED = {
    "autograd.Function": (lambda w: lambda x: Doubled.apply(x @ w), "Python code"),
    "hook": (lambda w: lambda x: hooked(x @ w), "_register_hook_dict"),
    "checkpoint": (
        lambda w: lambda x: checkpoint(lambda z: torch.tanh(z @ w), x, use_reentrant=False),
        "generator",
    ),
    "view of a parameter": (lambda w: lambda x: w.t(), "a view of"),
    "two views": (lambda w: lambda x: (lambda h: (h, h.t()))(x @ w), "same memory"),
    "graph from outside": (lambda w: lambda x, c=[w * 2]: x @ c[0], "graph of autograd from outside"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_replayed_has_eagers_gradients(kind):
    make, text = REFUSED[kind]

    def program(device, wrap):
        weight = data(4, 4).to(device).requires_grad_()
        forward = wrap(make(weight))
        values = []
        for i in range(20):
            y = forward(data(4, 4, seed=i).to(device))
            y = y[0] + y[1] if isinstance(y, tuple) else y
            y.square().sum().backward(retain_graph=True)
            values += [y, weight.grad.clone()]
        return values

    eager, ours, [function] = both(program)
    same(eager, ours)
    assert function.cache_info().hits == 0 and text in function.reason()


class Holder:
    pass


def kept_by(place):
    """A function that stores a tensor of its graph at a place, and a function that reads it there."""
    box = [None]

    def leave(x, h, given):
        if place == "global":
            box[0] = h
        elif place == "argument":
            given.h = h
        elif place == "list":
            given.append(h)
        elif place == "dict":
            given["h"] = h
        elif place == "attribute of a tensor":
            x.h = h

    read = {
        "global": lambda x, given, rest: box[0],
        "argument": lambda x, given, rest: given.h,
        "list": lambda x, given, rest: given[0],
        "dict": lambda x, given, rest: given["h"],
        "attribute of a tensor": lambda x, given, rest: x.h,
        "closure": lambda x, given, rest: rest(),
        "object": lambda x, given, rest: rest.h,
    }[place]
    make = {"list": list, "dict": dict, "argument": Holder}.get(place, lambda: 0)
    return leave, read, make


@pytest.mark.parametrize(
    "place", ["global", "argument", "list", "dict", "attribute of a tensor", "closure", "object"]
)
def test_tensors_of_the_graph_that_the_program_keeps(place):
    def program(device, wrap):
        weight = (data(4, 4) / 2).to(device).requires_grad_()
        leave, read, make = kept_by(place)

        def compute(x, given):
            h = torch.tanh(x @ weight)
            leave(x, h, given)
            if place == "closure":
                return h @ weight, lambda: h
            if place == "object":
                holder = Holder()
                holder.h = h
                return h @ weight, holder
            return h @ weight, None

        forward = wrap(compute)
        values = []
        for i in range(20):
            x, given = data(3, 4, seed=i).to(device), make()
            y, rest = forward(x, given)
            (y.sum() + read(x, given, rest).square().sum()).backward()
            values += [y, weight.grad.clone()]
        return values

    eager, ours, [function] = both(program)
    same(eager, ours)
    assert function.cache_info().hits == 0 and function.reason()


def test_calls_on_the_results_of_earlier_ones():
    def program(device, wrap):
        weight = (data(4, 4) / 2).to(device).requires_grad_()
        cell = wrap(lambda x, h: torch.tanh(x @ weight + h))

        def unrolled(x):
            h = torch.zeros(3, 4, device=device)
            for _ in range(4):
                h = cell(x, h)
            return h

        return loop(device, unrolled, [weight], shapes=((3, 4), (3, 4)))

    check(program, hits=60)


def test_checkpoints_around_a_function():
    def program(device, wrap):
        model = mlp().to(device)
        forward = wrap(model)
        return loop(device, lambda x: checkpoint(forward, x, use_reentrant=False), list(model.parameters()))

    eager, ours, _ = both(program)
    same(eager, ours)


def test_a_call_whose_backward_pass_never_runs():
    weight = data(4, 4).to("tandem").requires_grad_()
    forward = torch_tandem.function(lambda x: x @ weight)
    for i in range(20):
        forward(data(3, 4, seed=i).to("tandem"))
    assert forward.cache_info().hits == 0 and "has not run three times" in forward.reason()


def test_what_the_node_says_of_itself():
    _, _, wrapped = replaying(tanh_layer)
    y = wrapped(data(3, 4).to("tandem"))
    assert "TandemFunctionBackward" in repr(y)


@pytest.mark.parametrize("seed", range(4))
def test_a_storage_that_takes_the_number_of_a_dropped_result(seed):
    """A gradient's storage may have the number of a result that the program has dropped before the pass."""

    def train(wrap, device):
        choose = random.Random(seed)
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3).to(device)
        call = wrap(lambda x: (model(x).sum(), model(x) * 2))
        for i in range(80):
            last = call(torch.full((2, 3), i / 10).to(device))[-1]
            for _ in range(choose.randrange(1, 4)):
                (last.detach() + 1).cpu()  # the dropped result is freed now
            gradients = [torch.full_like(last, i + k) for k in range(choose.randrange(1, 6))]
            last.backward(choose.choice(gradients))
        return [p.grad.cpu() for p in model.parameters()], call

    ours, call = train(functools.partial(torch_tandem.function, audit=4), "tandem")
    for one, two in zip(ours, train(lambda f: f, "cpu")[0], strict=True):
        assert torch.equal(one, two)
    assert call.cache_info().hits > 40, call.reason()
