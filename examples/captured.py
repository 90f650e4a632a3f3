"""Count the ATen calls of eager training steps, those of digits.py, and how many of them Tandem captures.

The same steps run on the CPU and on the device "tandem", each under a TorchDispatchMode, which sees every
call below autograd: forward, backward and optimizer. A call counts as captured if `ops_captured` of Tandem's
report increased while it ran. Calls that only create a view of their argument, according to the operator's
schema, are not counted: they run no kernel, and Tandem does not treat them as ops. Calls without a tensor on
the device, such as those on Adam's step counters, are not counted either: they run on the host on any device.
"""

import itertools
from collections import Counter

import digits
import torch
import torch.nn.functional as F
import torch_tandem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A view without alias information in its schema, and a query that runs no kernel.
VIEWS = {"aten::_unsafe_view", "aten::_has_compatible_shallow_copy_type"}


class Count(TorchDispatchMode):
    """Counts calls by operator: all, captured, and those without a tensor on the device tandem."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.captured: Counter[str] = Counter()
        self.host: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = torch_tandem.report()["ops_captured"]
        out = operator(*args, **kwargs)
        captured = torch_tandem.report()["ops_captured"] > before
        if operator.namespace == "aten" and not is_view(operator._schema):
            name = str(operator)
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.calls[name] += 1
            self.captured[name] += captured
            self.host[name] += all(t.device.type != "tandem" for t in tensors)
        return out


def is_view(schema) -> bool:
    """Whether an operator only creates a view of its argument."""
    windows = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return any(windows) or schema.name in VIEWS


def count(device: str, steps: int) -> Count:
    """Count the calls of some training steps."""
    torch.manual_seed(0)
    batches, _ = digits.load(seed=0, batch_size=64)
    model = digits.Net().to(device)
    # The default of `foreach` depends on the device; False is the default on the CPU.
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    calls = Count()
    for x, y in itertools.islice(batches, steps):
        with calls:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
    return calls


def captured(steps: int = 8) -> tuple[int, int]:
    """Return the number of eager's calls that Tandem captured, and the number of eager's calls."""
    eager, tandem = count("cpu", steps), count("tandem", steps)
    expected = eager.calls - tandem.host
    # The intersection counts each operator separately, so additional captured calls, such as moves between
    # devices, do not compensate for calls of other operators that were not captured.
    return (expected & tandem.captured).total(), expected.total()


if __name__ == "__main__":
    print("captured {} of {} ATen calls".format(*captured()))
