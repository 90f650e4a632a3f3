"""Modules as functions. They remain the same objects."""

import copy
import io
import pickle
import typing

import pytest
import torch
import torch_tandem
from functions import both, data, mlp, replayed, same
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("error:.*an audit found")


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


def train(model, device, steps=20, call=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    values = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss((call or model)(data(5, 6, seed=i).to(device)), data(5, 3, seed=-i).to(device))
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return values + [p.detach().clone() for p in model.parameters()]


def test_a_module_stays_what_it_is():
    plain = mlp()
    names = repr(plain)
    model = torch_tandem.function(plain.to("tandem"))
    assert model is plain and isinstance(model, nn.Sequential) and repr(model) == names
    assert type(model).__name__ == "Sequential" and type(model).__module__ == nn.Sequential.__module__
    assert torch_tandem.function(model) is model
    assert [*model.state_dict()] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    train(model, "tandem")
    replayed(model, 8)
    assert model.reason() is None and "Sequential" in model.explain()
    model.extra = 3
    assert plain.extra == 3 and not model.eval().training


def test_submodules():
    def program(device, wrap):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = wrap(mlp())
                self.head = nn.Linear(3, 3)

            def forward(self, x):
                return self.head(self.body(x))

        torch.manual_seed(0)
        net = Net().to(device)
        assert len([*net.parameters()]) == 6 and len([*net.modules()]) == 7
        return train(net, device)

    eager, ours, [body] = both(program)
    same(eager, ours)
    replayed(body, 8)


def test_copies_and_pickles_are_plain_modules():
    model = torch_tandem.function(mlp().to("tandem"))
    expected = train(model, "tandem")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    x = data(5, 6).to("tandem")
    for other in copies:
        assert type(other) is nn.Sequential and not hasattr(other, "cache_info")
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(x), model(x))
    assert expected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(dropout=0.1)

    def forward(self, x):
        return self.layers(x)

    def explain(self):
        return "of the program"


def test_classes_of_modules():
    class Wrapped(Net):
        pass

    assert torch_tandem.function(Wrapped) is Wrapped
    one, two = Wrapped().to("tandem"), Wrapped().to("tandem")
    for model in (one, two):
        train(model, "tandem")
        replayed(model, 8)
        assert model.explain() == "of the program"
    with pytest.raises(TypeError, match="classes of modules"):
        torch_tandem.function(dict)


def test_hooks_and_replaced_forwards():
    def program(device, wrap):
        model = Net().to(device)
        wrap(model)
        values = train(model, device, 10)
        handle = model.register_forward_hook(lambda m, args, out: out * 2)
        values += train(model, device, 10)
        handle.remove()
        forward = model.forward
        model.forward = lambda x: forward(x) + 1
        return values + train(model, device, 10)

    eager, ours, _ = both(program)
    same(eager, ours)


def test_forward_mode_runs_python():
    from torch.autograd import forward_ad

    model = torch_tandem.function(nn.Linear(4, 4).to("tandem"))
    for i in range(14):
        model(data(3, 4, seed=i).to("tandem")).sum().backward()
    replayed(model, 3)
    x, t = data(3, 4).to("tandem"), data(3, 4, seed=1).to("tandem")
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, t))).tangent
        torch.testing.assert_close(tangent, t @ model.weight.t())


def test_scripted_modules():
    scripted = torch.jit.script(nn.Linear(4, 4)).to("tandem")
    forward = torch_tandem.function(scripted)
    x = data(3, 4).to("tandem")
    with torch.no_grad():
        for _ in range(6):
            assert torch.equal(forward(x), scripted(x))
    # PyTorch's C++ code holds the module's attributes.
    assert "ScriptModule" in forward.reason() or "ScriptMethod" in forward.reason(), forward.reason()


class NamesItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        scale = {NamesItself: 2.0}[type(self)] if type(self) is NamesItself else 3.0
        return self.linear(x) * scale


class Derived(NamesItself):
    registered: typing.ClassVar[list] = []

    def __init_subclass__(cls, *, required, **options):
        Derived.registered.append(cls)

    def forward(self, x):
        return super(self.__class__, self).forward(x)


@pytest.mark.parametrize("kind", [NamesItself, Derived])
def test_a_wrapped_module_keeps_its_class(kind):
    plain = kind().to("tandem")
    model = torch_tandem.function(plain)
    assert model is plain and type(model) is kind and not Derived.registered
    twin = kind().to("tandem")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        for i in range(12):
            x = data(2, 3, seed=i).to("tandem")
            assert torch.equal(model(x), twin(x))
    assert model.cache_info().hits > 2


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale


class WithState(Scaled):
    def __getstate__(self):
        return self.__dict__.copy()


class Twice(Scaled):
    def __call__(self, x):
        return super().__call__(x) + super().__call__(x)


@pytest.mark.parametrize("kind", [Scaled, WithState])
def test_copies_run_themselves(kind):
    model = torch_tandem.function(kind())
    x = torch.ones(3, device="tandem")
    for _ in range(8):
        model(x)
    twin = copy.copy(model)
    replica = kind.__new__(kind)
    replica.__dict__ = model.__dict__.copy()
    for other in (twin, replica):
        other.scale = 5.0
        assert torch.equal(other(x), x * 5) and torch.equal(model(x), x * 2)


def test_classes_are_wrapped_in_any_order():
    x = torch.ones(3, device="tandem")
    base = type("Base", (Scaled,), {})
    derived = type("Derived", (base,), {})
    for kind in (base, derived, derived):
        torch_tandem.function(kind)
    twice = torch_tandem.function(type("Other", (Twice,), {}))
    both = torch_tandem.function(twice())
    for _ in range(8):
        assert (
            torch.equal(derived()(x), x * 2)
            and torch.equal(twice()(x), x * 4)
            and torch.equal(both(x), x * 4)
        )


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}])
def test_dynamo_compiles_wrapped_modules(options):
    x = torch.ones(3, device="tandem")
    kind = torch_tandem.function(type("Compiled", (Scaled,), {}))
    for model in (kind(), torch_tandem.function(Scaled())):
        compiled = torch.compile(model, backend="eager", **options)
        assert all(torch.equal(compiled(x), x * 2) for _ in range(5))
