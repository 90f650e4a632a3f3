"""Count the ATen calls of eager training steps, those of digits.py, and how many of them Tandem captures.

The same steps run on the CPU and on the device "tandem", each under a TorchDispatchMode. It sees every call
below autograd: forward, backward and optimizer. A call is captured if `ops_captured` of Tandem's report grew
while it ran. Calls that only make a view of their argument, which the operators' schemas tell, do not count:
they run no kernel, and for Tandem they are windows and no operators. Nor do calls without a tensor of the
device, such as Adam's step counters: they are the host's on any device.
"""

import itertools
from collections import Counter

import digits
import torch
import torch.nn.functional as F
import torch_tandem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Views whose schemas do not say so, and a question that runs no kernel.
VIEWS = {"aten::_unsafe_view", "aten::_has_compatible_shallow_copy_type"}


class Count(TorchDispatchMode):
    """Counts calls by operator: all, those captured, and those that have no tensor of the device tandem."""

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
    """Whether an operator only makes a window on its argument."""
    windows = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return any(windows) or schema.name in VIEWS


def count(device: str, steps: int) -> Count:
    """The calls of some training steps."""
    torch.manual_seed(0)
    batches, _ = digits.load(seed=0, batch_size=64)
    model = digits.Net().to(device)
    # PyTorch would choose otherwise by device; this is its choice on the CPU.
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
    """How many of eager's calls Tandem captured, and how many there were."""
    eager, tandem = count("cpu", steps), count("tandem", steps)
    expected = eager.calls - tandem.host
    # Operator by operator: what Tandem captures besides, such as moves between devices, makes up for nothing.
    return (expected & tandem.captured).total(), expected.total()


if __name__ == "__main__":
    print("captured {} of {} ATen calls".format(*captured()))
