"""Several devices, as `TANDEM_DEVICE` lists them. Here both devices are the same adapter, and each program
runs in a new process.
"""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch_tandem

PRELUDE = """
import io
import torch, torch_tandem
from torch import nn

def raises(f, text):
    try:
        f()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that says {text}")
"""


@pytest.fixture(scope="module")
def adapter() -> str:
    return str(torch_tandem.list_devices()[0]["index"])


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new process."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def on_two(adapter):
    def program(code: str, **environment: str) -> str:
        r = run(code, TANDEM_DEVICE=f"{adapter},{adapter}", **environment)
        assert r.returncode == 0, r.stdout + r.stderr
        return r.stdout

    return program


def test_tensors_are_where_the_program_says(on_two):
    on_two(
        """
        assert torch.tandem.device_count() == 2
        assert torch.ones(2, device="tandem:1").device == torch.device("tandem:1")
        assert torch.ones(2).to("tandem:1").device.index == 1
        assert torch.ones(2, device="tandem").device.index == 0
        with torch.tandem.device(1):
            assert torch.tandem.current_device() == 1
            assert torch.empty(3, device="tandem").device.index == 1
            assert torch.ones(2).to("tandem").device.index == 1
            with torch.tandem.device_of(torch.ones(1, device="tandem:0")):
                assert torch.tandem.current_device() == 0
            assert torch.tandem.current_device() == 1
        assert torch.tandem.current_device() == 0
        with torch.device("tandem:1"):
            x = nn.Linear(3, 4).weight
        assert x.device.index == 1
        torch.tandem.set_device("tandem:1")
        assert torch.arange(3, device="tandem").device.index == 1
        assert torch.tandem.current_stream().device_index == 1
        torch.tandem.set_device(0)
        for made in (x * 2, x.t(), x.new_zeros(2), torch.randn_like(x), x.sum(), x.clone(), x[x > 0]):
            assert made.device.index == 1
        assert torch.UntypedStorage(8, device="tandem:1").device.index == 1
        x = torch.ones(3, device="tandem:1")
        x.resize_(100).fill_(2)
        assert x.sum().item() == 200
        y = torch.empty(0, device="tandem:1").set_()
        assert y.device.index == 1 and y.resize_(3).fill_(1).tolist() == [1, 1, 1]
        raises(lambda: torch.ones(2, device="tandem:2"), "invalid device ordinal")
        raises(lambda: torch.tandem.set_device(2), "invalid device index")
        """
    )


def test_copies_go_both_ways(on_two):
    on_two(
        """
        x = torch.randn(5, 7)
        a = x.to("tandem:0")
        b = a.to("tandem:1")
        assert b.device.index == 1 and torch.equal(b.cpu(), x)
        assert torch.equal((b + 1).to("tandem:0").cpu(), x + 1)
        a[1:3].copy_(b[2:4] * 2)  # windows
        y = x.clone()
        y[1:3] = x[2:4] * 2
        assert torch.equal(a.cpu(), y)
        a.copy_(b.t().contiguous().t().to("tandem:0", torch.bfloat16))
        assert torch.equal(a.cpu(), x.bfloat16().float())
        for dtype in (torch.int64, torch.complex64, torch.float64, torch.bool, torch.int8):
            z = x.to(dtype).to("tandem:1")
            assert torch.equal(z.to("tandem:0").cpu(), x.to(dtype))
        big = torch.arange(100_000, device="tandem:1")
        assert big[70_000:70_003].to("tandem:0").tolist() == [70_000, 70_001, 70_002]
        assert big[5].to("tandem:0").item() == 5
        file = io.BytesIO()
        torch.save({"a": a, "b": b}, file)
        file.seek(0)
        loaded = torch.load(file)
        assert loaded["b"].device.index == 1 and torch.equal(loaded["b"].cpu(), x)
        """
    )


def test_tensors_of_different_devices_do_not_mix(on_two):
    on_two(
        """
        a, b = torch.ones(3, device="tandem:0"), torch.ones(3, device="tandem:1")
        text = "Expected all tensors to be on the same device, but found at least two devices, tandem:"
        for f in (lambda: a + b, lambda: b.add_(a), lambda: torch.cat([a, b]), lambda: torch.dot(b, a),
                  lambda: torch.where(a > 0, b, b), lambda: a + b.sum(), lambda: torch._foreach_add([a, b], [a, a])):
            raises(f, text)
        assert (b * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a zero-dim host tensor goes anywhere
        """
    )


TRAINING = """
import copy

first, second = placement.split("/")
torch_tandem.set_mode(mode)
torch.manual_seed(3)
one, two = nn.Linear(8, 16), nn.Linear(16, 4)
rows, targets = torch.randn(12, 6, 8), torch.randint(4, (12, 6))

def train(first, second):
    a, b = copy.deepcopy(one).to(first), copy.deepcopy(two).to(second)
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()], lr=0.01)
    losses = []
    for x, t in zip(rows, targets):
        x, t = x.to(first), t.to(second)
        hidden = torch.relu(a(x)) + torch.ones(16, device=first)
        noise = torch.zeros(6, 4, device=second)
        loss = nn.functional.cross_entropy(b(hidden.to(second)) + noise, t)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert a.weight.grad.device == a.weight.device and b.weight.device.type == loss.device.type
    return losses

expected = train("cpu", "cpu")
torch_tandem.reset_report()
got = train(first, second)
worst = max(abs(g - e) for g, e in zip(got, expected))
assert worst < 1e-5, (got, expected)
report = torch_tandem.report()
assert mode == "trace" or report["steps_coexecuted"] >= 5, report["phases"]
used = [d["native_ops"] > 50 for d in report["devices"]]
assert used == ["0" in placement, "1" in placement], report["devices"]
assert report["device"]["native_ops"] == sum(d["native_ops"] for d in report["devices"])
assert not report["host_ops"], report["host_ops"]
"""


@pytest.mark.parametrize("mode", ["trace", "coexec"])
@pytest.mark.parametrize("placement", ["tandem:1/tandem:1", "tandem:0/tandem:1", "tandem:1/tandem:0"])
def test_training(on_two, placement, mode):
    on_two(f"placement, mode = {placement!r}, {mode!r}\n" + TRAINING)


def test_one_line_may_run_on_one_device_or_the_other(on_two):
    on_two(
        """
        models = [nn.Linear(4, 4).to(f"tandem:{i}") for i in (0, 1)]
        models[1].load_state_dict(models[0].state_dict())
        x = torch.randn(3, 4)
        with torch.no_grad():
            for step in range(12):
                outs = [m(x.to(m.weight.device)) + torch.ones(4, device=m.weight.device) for m in models]
                assert torch.equal(outs[0].cpu(), outs[1].cpu())
                # The source's device changes from step to step.
                target = torch.zeros(3, 4, device="tandem:0")
                target.copy_(outs[step % 2])
                assert torch.equal(target.cpu(), outs[0].cpu())
                torch_tandem.mark_step()
        assert torch_tandem.report()["steps_coexecuted"] >= 6
        """
    )


def test_random_numbers_and_memory(on_two):
    on_two(
        """
        def draw():
            torch.manual_seed(5)
            return [torch.randn(4, device=f"tandem:{i}").tolist() for i in (0, 1, 0)]
        assert draw() == draw()
        before = [torch.tandem.memory_allocated(i) for i in (0, 1)]
        x = torch.ones(1000, device="tandem:1")
        assert torch.tandem.memory_allocated(1) == before[1] + 4000
        assert torch.tandem.memory_allocated("tandem:0") == before[0]
        assert torch.tandem.max_memory_allocated(1) >= before[1] + 4000
        with torch.tandem.device(1):
            assert torch.tandem.memory_allocated() == before[1] + 4000
        """
    )


def test_faults_and_failures_cross_devices(on_two):
    on_two(
        """
        table = torch.randn(10, 4, device="tandem:1")
        spoilt = nn.functional.embedding(torch.tensor([1, 12], device="tandem:1"), table)
        there = None
        try:
            there = spoilt.to("tandem:0") + 1
            there.cpu()
        except IndexError as error:
            assert "<string>" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        assert (table * 2).to("tandem:0").shape == (10, 4)
        """
    )


def test_a_lost_device_is_named_and_the_other_goes_on(on_two):
    out = on_two(
        """
        import os
        a, b = torch.ones(4, device="tandem:0"), torch.ones(4, device="tandem:1")
        (a + 1).cpu(), (b + 1).cpu()
        torch_tandem._core.lose_device(1)
        raises(lambda: (b + 1).cpu(), "the GPU cannot be used any more: tandem:1 (")
        assert (a + 1).tolist() == [2, 2, 2, 2]
        print("good", flush=True)
        os._exit(0)
        """
    )
    assert out == "good\n"


@pytest.mark.parametrize("wrong", ["gpu,cpu", "0,", "gpu,no such thing"])
def test_a_list_names_adapters_alone(wrong):
    r = run("torch.ones(2, device='tandem') + 1", TANDEM_DEVICE=wrong)
    assert r.returncode != 0 and "TANDEM_DEVICE=" in r.stderr and "tandem devices" in r.stderr, r.stderr


def test_one_device_unless_a_list_is_given():
    assert torch.tandem.device_count() == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="tandem:1")


def test_the_cuda_alias_shows_both(adapter, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        assert torch.cuda.device_count() == 2
        x = torch.ones(3, device="cuda:1")
        assert x.get_device() == 1 and x.to("cuda:0").get_device() == 0
        with torch.cuda.device(1):
            assert torch.zeros(2).cuda().get_device() == 1
            assert torch.cuda.current_device() == 1
        torch.save(x, "x.pt")
        assert torch.load("x.pt").get_device() == 1
        assert torch.load("x.pt", map_location="cuda:0").get_device() == 0
        print("good")
        """)
    )
    r = subprocess.run(
        [sys.executable, "-m", "torch_tandem", "run", "--quiet", str(script)],
        env=os.environ | {"TANDEM_DEVICE": f"{adapter},{adapter}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "good" in r.stdout, r.stdout + r.stderr
