"""`torch.profiler` shows GraphRunner's kernels as events of the device that belong to the calls that issued
them.
"""

import itertools
import json
import time

import forked
import pytest
import torch
import torch_tandem
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to("tandem")
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(128, 256).to("tandem")


def train(model, optimizer, x, times=1):
    for _ in range(times):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def kernels(profiled):
    return [event for event in profiled.events() if event.device_type == DeviceType.PrivateUse1]


def row(profiled, name, device=DeviceType.CPU, **options):
    found = [
        event
        for event in profiled.key_averages(**options)
        if event.key == name and event.device_type == device
    ]
    assert len(found) == 1, profiled.key_averages().table()
    return found[0]


@pytest.mark.parametrize("warm", [0, 6], ids=["traced", "co-executed"])
@pytest.mark.parametrize("activities", [BOTH, None], ids=["named", "default"])
def test_kernels_are_device_events(warm, activities):
    model, optimizer, x = network()
    train(model, optimizer, x, warm) if warm else None
    with profile(activities=activities) as profiled:
        begin = time.perf_counter()
        train(model, optimizer, x, 3)
        whole = (time.perf_counter() - begin) * 1e6
    found = kernels(profiled)
    assert {event.device_index for event in found} == {0}
    spent = sum(event.time_range.elapsed_us() for event in found)
    assert 0 < spent <= whole
    products = row(profiled, "aten::addmm")
    assert products.count == 6 and products.self_device_time_total > 0
    # The six products of the forward pass take a large part of the time. The times of all kernels add up to
    # the total.
    total = sum(
        event.self_device_time_total
        for event in profiled.key_averages()
        if event.device_type == DeviceType.CPU
    )
    assert products.self_device_time_total <= total * 1.001
    assert total == pytest.approx(spent, rel=0.2)
    assert "tandem" in profiled.key_averages().table(sort_by="self_device_time_total").lower()


def test_kernels_lie_within_the_profile_in_order():
    model, optimizer, x = network()
    train(model, optimizer, x, 5)
    with profile(activities=BOTH) as profiled:
        train(model, optimizer, x, 3)
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels(profiled))
    assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(spans))
    calls = [event.time_range for event in profiled.events() if event.name.startswith("aten::")]
    assert spans[0][0] >= min(call.start for call in calls)


def test_a_trace_for_chrome_has_lines(tmp_path):
    model, optimizer, x = network()
    train(model, optimizer, x, 5)
    with profile(activities=BOTH, record_shapes=True, with_stack=True) as profiled, record_function("mine"):
        train(model, optimizer, x, 2)
    path = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel"]
    assert found and all(event["dur"] >= 0 for event in found)
    assert all("test_profiler.py" in event["args"]["lines"] for event in found)
    assert any("aten::addmm" in event["args"]["operators"] for event in found)
    names = [event["args"]["name"] for event in events if event["name"] in ("thread_name", "process_name")]
    assert any("GraphRunner" in name for name in names)
    shapes = {str(event.input_shapes) for event in profiled.key_averages(group_by_input_shape=True)}
    assert any("256" in shape for shape in shapes)
    assert row(profiled, "aten::addmm").device_time_total > 0
    mine = next(event for event in profiled.events() if event.name == "mine")
    assert mine.device_time_total > 0


def test_a_schedule_profiles_its_iterations():
    model, optimizer, x = network()
    ready = []
    with profile(
        activities=BOTH,
        schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda profiled: ready.append(len(kernels(profiled))),
    ) as profiled:
        for _ in range(8):
            train(model, optimizer, x)
            profiled.step()
    assert len(ready) == 2 and all(count > 10 for count in ready)


def test_replays_of_functions_are_visible():
    model, _, x = network()

    @torch_tandem.function
    def forward(x):
        return model(x).pow(2).mean()

    with torch.no_grad():
        for _ in range(6):
            forward(x).item()
        with profile(activities=BOTH) as profiled:
            for _ in range(4):
                forward(x).item()
    replays = row(profiled, "torch_tandem::replay")
    assert replays.count == 4 and replays.device_time_total > 0
    assert any("mm" in event.name for event in kernels(profiled))


def test_the_program_s_calls_are_those_it_made():
    """Kernels that run on the program's thread do not count as calls of the program."""
    model, optimizer, x = network()
    train(model, optimizer, x, 6)
    with profile(activities=BOTH) as profiled:
        train(model, optimizer, x, 2)
    host = network()
    train_on = [tensor.cpu() for tensor in (host[2],)]
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    with profile(activities=[ProfilerActivity.CPU]) as eager:
        train(model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=True), train_on[0], 2)
    for name in ("aten::linear", "aten::addmm", "aten::relu", "aten::pow"):
        assert row(profiled, name).count == row(eager, name).count, name


def test_nothing_is_recorded_outside():
    x = torch.ones(64, 64, device="tandem")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        (x @ x).sum().item()
    assert not kernels(profiled) and row(profiled, "aten::mm").device_time_total == 0
    with profile(activities=BOTH) as profiled:
        (x @ x).sum().item()
    (x @ x).sum().item()
    assert sum("mm" in event.name for event in kernels(profiled)) == 1


def test_the_profiler_without_kineto():
    x = torch.ones(256, 256, device="tandem")
    for _ in range(4):
        (x @ x).sum().item()
    with torch.autograd.profiler.profile(use_device="tandem") as profiled:
        y = x @ x
        y.sum().item()
    product = [event for event in profiled.key_averages() if event.key == "aten::mm"]
    assert product and product[0].device_time_total > 0


ALIAS = """
import torch
from torch.profiler import ProfilerActivity, profile
x = torch.ones(128, 128, device="cuda")
for _ in range(5):
    (x @ x).sum().item()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    for _ in range(5):
        (x @ x).sum().item()
rows = {event.key: event for event in profiled.key_averages() if str(event.device_type) == "DeviceType.CPU"}
assert rows["aten::mm"].count == 5 and rows["aten::mm"].device_time_total > 0
with torch.autograd.profiler.profile(use_device="cuda") as profiled:
    (x @ x).sum().item()
assert any(event.device_time_total > 0 for event in profiled.key_averages())
print("done")
"""


def test_the_activity_cuda_is_tandem(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALIAS)
    ran = forked.run(["-m", "torch_tandem", "run", script])
    assert "done" in ran.stdout, ran.stderr
