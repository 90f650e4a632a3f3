"""`torch.compile(backend="tandem")`: Dynamo's graphs are functions, forward and backward."""

import contextlib
import gc
import json
import os
from pathlib import Path

import forked
import pytest
import torch
import torch_tandem
from torch import nn
from torch._dynamo import compiled_autograd, trace_rules
from torch._dynamo.backends.debugging import ExplainWithBackend
from torch.nn import functional as F
from torch_tandem._compile.backend import tandem
from torch_tandem._device import iterations

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    gc.collect()  # drops the functions of earlier tests
    torch_tandem.reset()


class Net(nn.Module):
    """Convolution, batch norm, and a branch on an attribute for which Dynamo has a guard."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 6 * 6, 3)
        self.twice = False

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        x = self.out(x.flatten(1))
        return x * 2 if self.twice else x


def train(device, compile, change=None, breaks=False, steps=40):
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    net = compile(model)
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        n = 4 if i % 8 else 3
        x, y = torch.randn(n, 1, 8, 8, generator=generator), torch.randint(3, (n,), generator=generator)
        if change and i == steps // 2:
            change(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses + [x.sum().item() for x in model.state_dict().values()])


def compiled(model):
    return torch.compile(model, backend="tandem")


def replayed():
    return sum(f["replayed"] for f in torch_tandem.report()["functions"])


@pytest.mark.parametrize(
    "change",
    [
        None,
        lambda model: model.eval(),
        lambda model: setattr(model, "twice", True),
        lambda model: model.conv.weight.requires_grad_(False),
        lambda model: setattr(model.out, "weight", nn.Parameter(model.out.weight.detach() * 0.5)),
    ],
    ids=["plain", "eval", "attribute", "frozen", "parameter"],
)
def test_training_has_eagers_losses(change):
    eager = train("cpu", lambda model: model, change)
    ours = train("tandem", compiled, change)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    assert replayed() > 20, torch_tandem.report()["functions"]


def test_inference_and_graph_breaks():
    def function(x):
        y = x.tanh() * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    ours = compiled(function)
    with torch.no_grad():
        for i in range(40):
            x = torch.randn(5, generator=torch.Generator().manual_seed(i))
            torch.testing.assert_close(ours(x.to("tandem")).cpu(), function(x))
    assert replayed() > 20, torch_tandem.report()["functions"]


@pytest.mark.parametrize(
    "backend", ["eager", "eager_noexcept", "aot_eager", "aot_eager_decomp_partition", "tandem"]
)
def test_backends_of_dynamo(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Sigmoid()).eval().to("tandem")
    x = torch.randn(2, 10).to("tandem")
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))


def test_the_backend_is_registered():
    assert "tandem" in torch._dynamo.list_backends()
    assert callable(torch._dynamo.lookup_backend("tandem"))
    explained = ExplainWithBackend("tandem")
    compiled = torch.compile(lambda x: (torch._dynamo.graph_break(), x.sin())[1] + 1, backend=explained)
    x = torch.ones(3, device="tandem")
    assert torch.allclose(compiled(x), x.sin() + 1)
    assert explained.output().graph_break_count >= 0


def test_dropout_draws_in_the_order_of_memory():
    views = [
        lambda x: x,
        lambda x: x.transpose(0, -1),
        lambda x: x[::2],
        lambda x: x.expand(3, *x.shape),
        lambda x: x.permute(*range(x.dim())[::-1])[1:],
    ]
    for shape in ((4, 5), (2, 3, 4, 5), (6,)):
        for view in views:
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                x = torch.randn(shape, dtype=dtype)
                drop = torch.compile(lambda x, view=view: F.dropout(view(x), 0.3), backend="tandem")
                results = []
                for call in (lambda x, view=view: F.dropout(view(x), 0.3), drop):
                    for y in (x, x.to("tandem")):
                        torch.manual_seed(3)
                        results.append(call(y).cpu())
                assert all(torch.equal(result, results[0]) for result in results[1:]), (shape, dtype)
        torch._dynamo.reset()


SCRIPT = """
import torch
from torch import nn
from torch._dynamo import compiled_autograd

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{compile}
for i in range(30):
    x = torch.randn(3 + i % 2, 4, generator=torch.Generator().manual_seed(i)).to("cuda")
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


@pytest.mark.parametrize(
    ("options", "code", "note", "replays"),
    [
        ([], "net = torch.compile(model)", "was passed through", False),
        ([], "net = model; model.compile(mode='max-autotune')", "was passed through", False),
        (["--compile"], "net = torch.compile(model, mode='max-autotune')", "makes functions", True),
        (["--compile"], "net = model; model.compile()", "makes functions", True),
        (["--compile"], "net = torch.compile(dynamic=False)(model)", "makes functions", True),
        ([], "net = torch.compile(model, backend='tandem')", "makes functions", True),
    ],
)
def test_scripts_that_compile(tmp_path, options, code, note, replays):
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT.format(compile=code))
    command = ["-m", "torch_tandem", "run", "--report-json", str(report), *options, str(script)]
    ran = forked.run(command)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(report.read_text())
    assert any(note in said for said in seen["notes"]), seen["notes"]
    assert (sum(f["replayed"] for f in seen["functions"]) > 20) == replays, seen["functions"]
    script.write_text(SCRIPT.format(compile="net = model").replace("cuda", "cpu"))
    eager = forked.run([str(script)])
    assert eager.returncode == 0, eager.stderr
    one, two = (
        [float.fromhex(x) for x in out.split() if "x" in x] for out in (eager.stdout, ran.stdout[:700])
    )
    torch.testing.assert_close(two[:30], one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dynamic", [False, True])
def test_modules_that_call_modules(dynamic):
    """Tandem watches the first calls of a program. Dynamo must not see that."""

    def train(device, compile):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        model = nn.Sequential(layer, nn.Dropout(0.5), nn.Linear(16, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        net, losses = compile(model), []
        for i in range(20):
            x = torch.randn(2, 3 + i % 3, 16, generator=torch.Generator().manual_seed(i)).to(device)
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    iterations.install()
    ours = train("tandem", lambda model: torch.compile(model, backend="tandem", dynamic=dynamic))
    torch.testing.assert_close(ours, train("cpu", lambda model: model), rtol=1e-5, atol=1e-6)
    assert replayed() > 10


def test_host_tensors_are_left_to_python():
    ours = compiled(lambda x: x.sin() + 1)
    for i in range(10):
        x = torch.full((3,), float(i))
        torch.testing.assert_close(ours(x), x.sin() + 1)


def nested_breaks(on):
    """Dynamo's configuration in which it breaks graphs within functions that it inlines, if it has that."""
    has = hasattr(torch._dynamo.config, "nested_graph_breaks")
    return torch._dynamo.config.patch(nested_graph_breaks=on) if has else contextlib.nullcontext()


@pytest.mark.parametrize("nested", [False, True])
def test_hooks_that_compiled_code_registers(nested):
    def f(x):
        x.register_hook(lambda grad: grad * 4)
        x.register_hook(lambda grad: grad / 2)
        x.register_hook(lambda grad: grad * 3)
        return x, x * x

    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return tandem(module, inputs)

    compiled = torch.compile(f, backend=backend)
    with nested_breaks(nested):
        for _ in range(4):
            x = compiled(torch.ones(3, device="tandem", requires_grad=True))[0]
            x.backward(torch.tensor([1.0, 2.0, 3.0], device="tandem"))
            assert x.grad.tolist() == [6.0, 12.0, 18.0]
    assert len(graphs) == 1


@pytest.mark.parametrize("nested", [False, True])
def test_a_backend_that_returns_the_graph_as_a_module(nested):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.buffer = torch.ones(4, device="tandem")

        def forward(self, x):
            self.buffer = self.buffer.to(x + 1)
            return self.buffer + x

    iterations.install()
    module = Adds()
    compiled = torch.compile(lambda x: module(x), backend=lambda graph, inputs: graph)
    with nested_breaks(nested):
        for i in range(3):
            assert compiled(torch.full((4,), float(i), device="tandem")).tolist() == [1.0 + i] * 4


def test_passes_that_dynamo_compiles():
    def grads(device, backend):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model.load_state_dict({name: torch.ones_like(p) / 3 for name, p in model.state_dict().items()})
        model.to(device)
        enabled = compiled_autograd._enable(torch.compile(backend=backend))
        with enabled if backend else contextlib.nullcontext():
            model(torch.ones(2, 3, device=device)).square().sum().backward()
        return [p.grad.cpu() for p in model.parameters()]

    for backend in ("eager", "aot_eager"):
        torch.testing.assert_close(grads("tandem", backend), grads("cpu", None))


def test_adopted_scripts_that_compile(tmp_path):
    """Compiled code may break at any function that Tandem replaces. Dynamo leaves these to Python."""
    script = str(Path(__file__).with_name("compiled_script.py"))
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    plain = forked.run([script], environment)
    assert plain.returncode == 0, plain.stderr
    ran = forked.run(["-m", "torch_tandem", "run", "--quiet", "--compile", script], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain.stdout


def test_graphs_that_aot_autograd_refuses():
    @torch.compile(backend="tandem")
    def assigned(parameter, x):
        parameter.data = x * 2
        return parameter.detach() + 1

    for i in range(4):
        parameter = nn.Parameter(torch.zeros(3, device="tandem"))
        assert assigned(parameter, torch.full((3,), float(i), device="tandem")).tolist() == [2.0 * i + 1] * 3
        assert parameter.tolist() == [2.0 * i] * 3


def test_dynamo_compiles_this_package_as_pytorchs_files():
    folder = Path(torch_tandem.__file__).parent
    for file in folder.rglob("*.py"):
        assert (
            trace_rules.check_file(str(file)).skipped and not trace_rules.check_file(str(file), True).skipped
        )
