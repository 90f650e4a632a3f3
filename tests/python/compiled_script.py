"""A script whose compiled code breaks at functions of PyTorch that Tandem replaces for adopted tensors."""

import io
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

warnings.simplefilter("ignore")


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        torch._dynamo.graph_break()
        return (y @ x).dtype, torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")


def backward(x):
    w = x.clone().requires_grad_()
    w.register_hook(lambda gradient: gradient * 3)
    (w * 2).sum().backward()
    return w.grad


def stored(x):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file)["x"]


def vector(x):
    parts = [nn.Parameter(x[0]), nn.Parameter(x[1:])]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parts) + 1, parts)
    return parts[0].detach()


def assigned(x):
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = x[:1]
    model.weight.grad = torch.from_numpy(np.ones((1, 3), np.float32))
    return model.weight.detach() + model.weight.grad


def packed(x):
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 1])).data


def lists(x):
    return [p.shape for p in nn.ParameterList([x, x[0]])], repr(nn.ParameterList([x]))


def host(*shape):
    return torch.from_numpy(np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape))


def written(x):
    h = host(2, 3)
    h.add_(x[0])
    h[1] = x[1]
    return h, h * x[0]


def mixed(x):
    h, one = host(3, 3), torch.from_numpy(np.array([2, 0]))
    yield from (torch.where(h > 0, x, h), torch.cat([h, x]), torch.stack([h[0], x[1]]), h @ x, x[one])
    yield from (F.conv1d(h[None], x[None]), h.index_add(0, one, x[:2]), F.layer_norm(h, (3,), x[0], x[1]))
    yield from (F.linear(h, x), F.cross_entropy(x[:2], one), h.lerp(x, 0.5), torch.maximum(x, h), x == h)


def trained(x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = F.cross_entropy(model(host(2, 3)), torch.from_numpy(np.array([1, 0]))) + x.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [round(p.sum().item(), 4) for p in model.parameters()]


CASES = {
    "autocast": autocast,
    "backward": backward,
    "stored": stored,
    "vector": vector,
    "assigned": assigned,
    "packed": packed,
    "lists": lists,
    "written": written,
    "mixed": lambda x: list(mixed(x)),
    "trained": trained,
    "types": lambda x: x.type(torch.DoubleTensor).type("torch.FloatTensor"),
    "as_tensor": lambda x: torch.as_tensor(np.ones(3, np.float32)) + x,
    "numpy": lambda x: torch.from_numpy((x + 1).numpy()) * x,
    "split": lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[1],
    "random": lambda x: torch.randint_like(x, 5).shape,
    "generator": lambda x: torch.rand(2, generator=torch.Generator().manual_seed(3)),
    "func": lambda x: torch.func.grad(lambda x: x.pow(3).sum())(x),
    "host func": lambda x: torch.func.grad(lambda x: x.pow(3).sum())(
        torch.from_numpy(np.ones(3, np.float32))
    ),
    "set": lambda x: torch.empty(0).set_(x).sum(),
    "printed": lambda x: str(x),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "close": lambda x: torch.testing.assert_close(x, x + 0),
    "share": lambda x: x.clone().share_memory_().sum(),
    "item": lambda x: x.sum().item() if x.sum() > 0 else 0,
    "seed": lambda x: (torch.manual_seed(1), torch.rand(2))[1],
    "script": lambda x: torch.jit.script(nn.Linear(3, 2))(x).shape,
    "no grad": lambda x: torch.no_grad()(lambda: (nn.Parameter(x) * 2).requires_grad)(),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y * 2, x, use_reentrant=False),
    "optimizer": lambda x: torch.optim.Adam([nn.Parameter(x)]).step(),
}


def compiled(case):
    @torch.compile
    def program(x):
        y = x * 2
        torch._dynamo.graph_break()
        made = case(y)
        torch._dynamo.graph_break()
        return made, y.sum()

    return program


for name, case in CASES.items():
    program = compiled(case)
    for i in range(2):
        print(name, program(torch.arange(9.0).view(3, 3) + i))
    torch._dynamo.reset()
