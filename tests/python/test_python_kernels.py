"""Operators of PyTorch whose kernels are written in Python, so that GraphRunner needs the GIL in the middle
of a run.
"""

import forked
import pytest

PROGRAM = """
import sys, time, torch, torch_tandem
from torch_tandem import _core

def slow(x):
    time.sleep(0.01)
    return torch.ones_like(x) * 3

library = torch.library.Library("aten", "IMPL")
library.impl("special_entr", slow, "CPU", allow_override=True)
x = torch.ones(4, device="tandem")
for step in range(12):
    y = x
    for _ in range(6):
        y = torch.special.entr(y)
    if step > 5:
        eval(sys.argv[1])
    total = y.sum()
    torch_tandem.mark_step()
assert total.item() == 12
"""

CALLS = (
    "torch_tandem.reset_report()",
    "torch_tandem.report()",
    "_core.report()",
    "_core.graph()",
    "_core.timeline()",
    "_core.record(True), _core.record(False)",
    "_core.empty_cache()",
    "_core.symbolic('text')",
    "_core.memory_allocated()",
    "_core.set_sync(False)",
    "_core.reset()",
    "torch.empty(3, device='tandem').untyped_storage().resize_(100)",
)


@pytest.mark.parametrize("call", CALLS)
def test_whatever_is_asked_meanwhile_does_not_deadlock(call, monkeypatch):
    monkeypatch.setenv("TANDEM_KERNELS", "aten")
    monkeypatch.setenv("TANDEM_RUNNER", "beside")
    ran = forked.run(["-c", PROGRAM, call], timeout=60)
    assert ran.returncode == 0, ran.stderr
