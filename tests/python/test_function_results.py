"""Results of replayed calls: their versions, and their bases in autograd."""

import pytest
import torch
import torch_tandem
from functions import batches, both, data, mlp, replayed, same, trainer

# If an audit finds a difference, either a call was replayed wrongly, or the audit is wrong.
pytestmark = pytest.mark.filterwarnings("error:.*an audit found")


@pytest.fixture(autouse=True)
def nothing_traced_before():
    torch_tandem.reset()


def test_views_of_parameters_are_returned_without_grad():
    def program(device, wrap):
        weight = data(4, 4).to(device).requires_grad_()
        step = wrap(torch.no_grad()(lambda x: (weight.t(), x @ weight)))
        return [value for i in range(30) for value in step(data(2, 4, seed=i).to(device))]

    eager, ours, [step] = both(program)
    same(eager, ours)
    replayed(step, 12)


def test_a_result_without_its_graph_says_so():
    model = mlp().to("tandem")
    step = trainer("tandem", model, torch.optim.SGD(model.parameters(), lr=0.1), torch_tandem.function)
    for x, y in batches(20, (5, 6), (5, 3)):
        loss = step(x.to("tandem"), y.to("tandem"))
    replayed(step, 5)
    assert loss.requires_grad
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_versions_count_writes():
    state = torch.zeros(3, device="tandem")
    step = torch_tandem.function(lambda x: state.add_(x).mul_(2).sum(), audit=1000)
    versions = []
    for i in range(20):
        before = state._version
        step(data(3, seed=i).to("tandem"))
        versions.append(state._version - before)
    replayed(step, 5)
    assert versions == [2] * 20


def test_versions_of_tensors_that_share_memory_and_count_writes_apart():
    one, two = torch.zeros(3, device="tandem"), torch.zeros(3, device="tandem")
    two.set_(one)
    step = torch_tandem.function(lambda x: (one.add_(x), two.mul_(2))[0].sum(), audit=1000)
    for i in range(20):
        before = one._version, two._version
        step(data(3, seed=i).to("tandem"))
        assert (one._version, two._version) == (before[0] + 1, before[1] + 1)
    replayed(step, 5)


def test_views_that_are_returned_count_writes_with_their_base():
    base = torch.zeros(3, device="tandem")
    other = torch.zeros(3, device="tandem").set_(base)
    step = torch_tandem.function(lambda x: (base[:2], other[1:], x * base.sum() * other.sum()), audit=1000)
    for i in range(20):
        first, last, _ = step(data(3, seed=i).to("tandem"))
        before = base._version, other._version
        first.add_(1)
        assert (base._version, other._version) == (before[0] + 1, before[1])
        last.add_(1)
        assert (base._version, other._version) == (before[0] + 1, before[1] + 1)


def test_views_of_arguments_in_inference_mode():
    step = torch_tandem.function(lambda x: (x * 2, x[0]))
    for i in range(20):
        x = data(3, 4, seed=i).to("tandem")
        with torch.inference_mode():
            twice, row = step(x)
        assert (twice.is_inference(), row.is_inference()) == (True, False)
        assert torch.equal(twice[0], row * 2)
    replayed(step, 5)


RESULTS_WITH_VIEWS = {
    "a result": lambda x, y: (y, y[0]),
    "a temporary tensor": lambda x, y: (y[0], y[1]),
    "an argument": lambda x, y: (y, x[0]),
    "several outputs": lambda x, y: torch.unbind(y),
}


def writes_to_views(device, call):
    """Yield what autograd says of a call's results after one of them was multiplied by a parameter."""
    weight = torch.ones(3, device=device, requires_grad=True)
    for _ in range(20):
        x = torch.zeros(5, 3, device=device)[1:3]
        one, two = call(x)
        seen = [one._is_view(), two._is_view(), two._base is one, two._base is x._base]
        try:
            two.mul_(weight)
            one.sum().backward()
        except RuntimeError as error:
            seen.append(str(error))
        seen += [x.requires_grad, one.requires_grad, two.requires_grad]
        yield seen, None if weight.grad is None else weight.grad.tolist()


@pytest.mark.parametrize("base", RESULTS_WITH_VIEWS)
def test_results_that_are_views_belong_to_their_bases(base):
    def call(x):
        return RESULTS_WITH_VIEWS[base](x, x * 2)

    wrapped = torch_tandem.function(call)
    assert [*writes_to_views("tandem", wrapped)] == [*writes_to_views("cpu", call)]
    assert wrapped.cache_info().hits >= 8, wrapped.reason()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_view_that_was_made_without_grad_mode_reports_its_base(is_leaf):
    step = torch_tandem.function(torch.no_grad()(lambda x: (x * 2, x[0])))
    for i in range(20):
        x = data(3, 4, seed=i).to("tandem").requires_grad_()
        _, row = step(x if is_leaf else x * 1)
        assert row.requires_grad and row.is_leaf
    assert step.cache_info().hits >= 8, step.reason()


@pytest.mark.parametrize("is_argument", [False, True])
def test_versions_of_gradients_that_are_views_of_what_is_written(is_argument):
    base = torch.zeros(6, device="tandem")
    weight = torch.nn.Parameter(torch.ones(3, device="tandem"))
    weight.grad = base[:3]
    if is_argument:
        step = torch_tandem.function(lambda x, weight: (base.add_(x), weight.detach() + weight.grad)[1])
    else:
        step = torch_tandem.function(lambda x, _: (base.add_(x), weight.detach() + weight.grad)[1])
    for i in range(20):
        before = base._version
        step(torch.ones(1, device="tandem"), weight if is_argument else None)
        assert base._version == weight.grad._version == before + 1, i


VIEWS = {
    "of an argument": lambda x, w: x.view(-1),
    "beside the argument": lambda x, w: (x, x[1:], x.t()),
    "of a captured tensor": lambda x, w: (w[1:], x + 1),
    "of a result": lambda x, w: (y := x * 2, y[0], y.t()),
    "in inference mode": lambda x, w: _inference(x),
    "expanded": lambda x, w: x[:1].expand(4, -1),
}


def _inference(x):
    with torch.inference_mode():
        y = x * 2
        return y, y.view(-1), x[0]


@pytest.mark.parametrize("of", VIEWS.values(), ids=VIEWS)
def test_views_as_results(of):
    """Results have the memory, version, strides and flags that they have without the function."""
    w = data(3, 4).to("tandem")

    def run(function):
        found = []
        for i in range(12):
            x = data(3, 4, seed=i).to("tandem")
            results = function(x)
            results = results if isinstance(results, tuple) else (results,)
            facts = [(r.stride(), r.storage_offset(), r.is_inference(), r.is_leaf) for r in results]
            values = [r.cpu().clone() for r in results]
            x.add_(1)
            found.append((facts, values, [r.cpu().clone() for r in results]))
        return found

    def body(x):
        return of(x, w)

    function = torch_tandem.function(body)
    for plain, replayed_ in zip(run(body), run(function), strict=True):
        assert plain[0] == replayed_[0]
        for a, b in zip(plain[1] + plain[2], replayed_[1] + replayed_[2], strict=True):
            assert torch.equal(a, b)
    assert function.cache_info().hits > 0, function.reason()


def test_a_pass_without_operators_is_replayed():
    """The gradients of sums of leaves are views of the gradient that the pass is given."""
    p, q = (torch.ones(3, device="tandem", requires_grad=True) for _ in range(2))
    function = torch_tandem.function(lambda x: (x + p + q).sum())
    for i in range(14):
        p.grad = q.grad = None
        (function(torch.full((3,), float(i), device="tandem")) * (i + 1)).backward()
        p.grad.mul_(2)
        assert p.grad.tolist() == [2.0 * (i + 1)] * 3 and q.grad.tolist() == [i + 1.0] * 3
    assert function.cache_info().hits > 0, function.reason()


PARTS = {
    "chunk": lambda h: h.chunk(2, 1),
    "unbind": lambda h: h[:, 1:3].unbind(-1),
    "rows": lambda h: (h[:2], h[2:]),
    "detached": lambda h: (h, h.detach()),
    "every second column": lambda h: (h[..., ::2], h[..., 1::2]),
}


@pytest.mark.parametrize("of", PARTS.values(), ids=PARTS)
def test_parts_of_a_result(of):
    """A call returns parts of one tensor that require grad, such as a mean and a logarithm of a variance."""

    def run(device, wrap):
        torch.manual_seed(0)
        layer = torch.nn.Linear(6, 4).to(device)
        function, found = wrap(lambda x: of(layer(x))), []
        for i in range(14):
            layer.zero_grad()
            results = function(data(4, 6, seed=i).to(device))
            used = results if i % 5 else results[:1]
            sum((k + 1) * r.exp().sum() for k, r in enumerate(used)).backward()
            found.append([*(r.detach().cpu().clone() for r in results), layer.weight.grad.cpu().clone()])
        return found, function

    eager, _ = run("cpu", lambda f: f)
    ours, function = run("tandem", torch_tandem.function)
    for a, b in zip(eager, ours, strict=True):
        assert all(map(torch.equal, a, b))
    assert function.cache_info().hits > 0, function.reason()


@pytest.mark.parametrize("of", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("write", [lambda r: r.mul_(2), lambda r: r.relu_(), lambda r: r.data.mul_(2)])
def test_parts_of_a_result_are_changed_in_place(of, write):
    """PyTorch refuses changes of one of several views, but not of a slice."""

    def run(device, wrap):
        leaf = torch.ones(6, device=device, requires_grad=True)
        function, found = wrap(lambda x: of(x * leaf)), []
        for i in range(14):
            leaf.grad = None
            part = function(data(4, 6, seed=i).to(device))[-1]
            try:
                write(part)
                part.sum().backward()
                found.append(leaf.grad.tolist())
            except RuntimeError as error:
                found.append(str(error).partition(" is a view")[2])
        return found, function

    eager, _ = run("cpu", lambda f: f)
    ours, function = run("tandem", torch_tandem.function)
    assert ours == eager, function.reason()


def test_overlapping_results_that_require_grad_are_not_replayed():
    layer = torch.nn.Linear(6, 4).to("tandem")
    function = torch_tandem.function(lambda x: (h := layer(x), h[:1]))
    for i in range(8):
        whole, part = function(data(4, 6, seed=i).to("tandem"))
        (whole.sum() + part.sum()).backward()
    assert "same memory" in function.reason()


@pytest.mark.parametrize("times", [None, 2])
@pytest.mark.parametrize("window", [(2, 2), (5, 3)])
@pytest.mark.parametrize("offset", [None, 6])
def test_windows_of_arguments_at_other_offsets(times, window, offset):
    """`as_strided` takes an offset in the storage, and may reach beyond the argument."""

    def body(x):
        view = x.as_strided(window, (3, 1), offset)
        return view if times is None else view * times

    def run(device, wrap):
        function, found = wrap(body), []
        for i in range(20):
            whole = torch.arange(30.0, device=device).view(10, 3)
            begin = [2, 3, 6][i // 7]
            try:
                found.append(function(whole[begin : begin + 4]).cpu().tolist())
            except RuntimeError:
                found.append("out of bounds")
        return found

    assert run("cpu", lambda f: f) == run("tandem", torch_tandem.function)
