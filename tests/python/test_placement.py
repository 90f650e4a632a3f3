"""Neither the thread that runs the kernels nor the memory of their results changes a bit."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, torch, torch_tandem
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64)).to("tandem")
optimizer = torch.optim.Adam(model.parameters())
losses = []
for i in range(60):
    x = torch.randn(1024, 64)
    loss = model(x.to("tandem")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 3 == 0:
        losses.append(loss.item())
    if i == 29:
        torch_tandem.synchronize()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch_tandem.synchronize()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"losses": losses, "regions": torch_tandem.report()["regions"], "faults": faults}))
"""

WITH_EVALUATION = """
import json, torch, torch_tandem
torch.set_num_threads(2)
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024).to("tandem")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(1024, 1024).to("tandem")
losses = []
for epoch in range(10):
    for _ in range(4):
        loss = model(data[:16]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for _ in range(16):
            losses.append(data.mm(model.weight).add(model.bias).square().mean().item())
print(json.dumps({"losses": losses, "regions": torch_tandem.report()["regions"]}))
"""


def run(place: str, program: str = PROGRAM) -> dict:
    environment = os.environ | {"TANDEM_RUNNER": place, "TANDEM_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs() -> dict[str, dict]:
    return {place: run(place) for place in ("beside", "inline", "")}


def test_bits_do_not_depend_on_who_carries_out_runs(runs):
    assert runs["beside"]["losses"] == runs["inline"]["losses"] == runs[""]["losses"]


def test_a_place_that_was_asked_for_is_kept(runs):
    for place in ("beside", "inline"):
        only = {"line": None, "place": place, "beside_ns": None, "inline_ns": None}
        assert runs[place]["regions"] == [only]


def test_both_places_are_tried_and_the_faster_one_is_kept(runs):
    placement, *loops = runs[""]["regions"]
    assert not loops
    if placement["beside_ns"] is None:
        pytest.skip("iterations were too short for the trials to end")
    faster = min(("beside", "inline"), key=lambda place: placement[f"{place}_ns"])
    if abs(placement["beside_ns"] / placement["inline_ns"] - 1) > 0.03:
        assert placement["place"] == faster


def test_a_long_loop_is_a_region_of_its_own():
    """The evaluation takes about 16 x 10 ms. The test does not check which thread is faster for it."""
    chosen, inline = run("", WITH_EVALUATION), run("inline", WITH_EVALUATION)
    assert chosen["losses"] == inline["losses"]
    assert len(inline["regions"]) == 1
    outside, loop = chosen["regions"]
    assert outside["line"] is None
    assert "<string>:17" in loop["line"], loop


def test_steps_fault_no_pages_in(runs):
    for place, result in runs.items():
        # A step creates about 20 tensors of 2 MiB, which would cause 10,000 page faults if the memory were
        # returned to the system.
        assert result["faults"] < 30 * 500, place
