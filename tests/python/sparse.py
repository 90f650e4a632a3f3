"""Calls with sparse tensors, each printed with its result: `python sparse.py DEVICE`, or `python sparse.py`
for no device.
"""

import copy
import io
import pickle
import sys
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
PLACE = {"device": sys.argv[1]} if len(sys.argv) > 1 else {}


def there(tensor):
    return tensor.to(**PLACE) if PLACE else tensor


def dense(tensor):
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).cpu().tolist()


def ones(*sizes):
    return there(torch.ones(*sizes))


torch.manual_seed(0)
INDICES, VALUES = torch.tensor([[0, 1, 2, 0], [1, 0, 2, 1]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
coo = torch.sparse_coo_tensor(INDICES, VALUES, (3, 3), **PLACE)
unique = coo.coalesce()
csr = unique.to_sparse_csr()
POINTERS, PLAIN, TWO = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0])


def saved():
    file = io.BytesIO()
    torch.save({"coo": coo, "csr": csr}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return dense(loaded["coo"]), dense(loaded["csr"]), loaded["coo"].device == coo.device


def gradients():
    values, x = there(VALUES.clone()).requires_grad_(), ones(3, 2).requires_grad_()
    made = torch.sparse_coo_tensor(there(INDICES), values, (3, 3))
    torch.sparse.mm(made, x).square().sum().backward()
    leaf = unique.clone().requires_grad_()
    torch.sparse.sum(leaf * 2).backward()
    return dense(values.grad), dense(x.grad), dense(leaf.grad), leaf.grad.layout


def clipped():
    table = there(nn.Embedding(4, 2, sparse=True))
    table(there(torch.tensor([1, 2]))).sum().backward()
    norm = nn.utils.clip_grad_norm_(table.parameters(), 0.1)
    return norm.item(), dense(table.weight.grad)


def embedded(kind, make):
    torch.manual_seed(0)
    table = there(kind(10, 3, sparse=True))
    optimizer = make(table.parameters())
    words, losses = there(torch.tensor([[1, 1, 4], [2, 4, 7]])), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = table(words).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dense(table.weight), table.weight.grad.is_sparse


def graph_network(layout):
    torch.manual_seed(0)
    first, second = there(nn.Linear(4, 8)), there(nn.Linear(8, 2))
    edges = there((torch.rand(6, 6) > 0.5).float().to_sparse(layout=layout))
    x, y = there(torch.randn(6, 4)), there(torch.tensor([0, 1, 0, 1, 0, 1]))
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        hidden = torch.relu(torch.sparse.mm(edges, first(x)))
        loss = nn.functional.cross_entropy(edges @ second(hidden), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CALLS = {
    "coo": lambda: (coo.is_sparse, coo.layout, coo._nnz(), coo.is_coalesced(), coo.sparse_dim(), coo.shape),
    "size alone": lambda: dense(torch.sparse_coo_tensor((3, 3), **PLACE)),
    "moved": lambda: dense(there(torch.sparse_coo_tensor(INDICES, VALUES, (3, 3)))),
    "csr moved": lambda: dense(there(torch.eye(3).to_sparse_csr())),
    "csr": lambda: dense(torch.sparse_csr_tensor(POINTERS, PLAIN, TWO, **PLACE)),
    "csc": lambda: dense(torch.sparse_csc_tensor(POINTERS, PLAIN, TWO, **PLACE)),
    "compressed": lambda: dense(
        torch.sparse_compressed_tensor(POINTERS, PLAIN, TWO, layout=torch.sparse_csr, **PLACE)
    ),
    "zeros": lambda: [
        dense(torch.zeros(2, 2, layout=layout, **PLACE)) for layout in (torch.sparse_coo, torch.sparse_csr)
    ],
    "like": lambda: (torch.empty_like(coo).shape, dense(torch.zeros_like(coo))),
    "spdiags": lambda: dense(there(torch.sparse.spdiags(torch.ones(2, 3), PLAIN, (3, 3)))),
    "coalesce": lambda: (dense(unique.indices()), dense(unique.values())),
    "to_dense": lambda: dense(coo.to_dense()),
    "to_sparse": lambda: dense(ones(3, 2).to_sparse()),
    "layouts": lambda: [
        dense(ones(4, 4).to_sparse(layout=layout, blocksize=size))
        for layout, size in ((torch.sparse_csr, None), (torch.sparse_csc, None), (torch.sparse_bsr, (2, 2)))
    ],
    "mm": lambda: (dense(torch.sparse.mm(coo, coo)), dense(coo @ ones(3, 2)), dense(coo.mv(ones(3)))),
    "addmm": lambda: dense(torch.sparse.addmm(ones(3, 2), coo, ones(3, 2), beta=0.5)),
    "bmm": lambda: dense(torch.bmm(torch.stack([coo, coo]).coalesce(), ones(2, 3, 2))),
    "softmax": lambda: (dense(torch.sparse.softmax(coo, 1)), dense(torch.sparse.log_softmax(coo, 1))),
    "sums": lambda: (dense(torch.sparse.sum(coo)), dense(torch.sparse.sum(coo, 1)), dense(coo.norm())),
    "mask": lambda: dense(ones(3, 3).sparse_mask(unique)),
    "element-wise": lambda: [
        dense(x)
        for x in (
            coo * 2,
            coo / 2,
            -coo,
            coo + coo,
            coo - coo,
            unique * ones(3, 3),
            coo.sqrt(),
            unique.pow(2),
        )
    ],
    "added to dense": lambda: (dense(ones(3, 3) + coo), dense(ones(3, 3).add_(coo, alpha=2))),
    "parts": lambda: [
        dense(x) for x in (coo[0], coo.index_select(0, there(torch.tensor([0, 2]))), torch.cat([coo, coo], 1))
    ],
    "turned": lambda: (dense(coo.t()), dense(coo.transpose(0, 1)), dense(coo.unsqueeze(0))),
    "dtypes": lambda: (dense(coo.double()), dense(coo.to(torch.int64)), dense(coo.half())),
    "copies": lambda: [
        dense(x) for x in (coo.clone(), copy.deepcopy(coo), pickle.loads(pickle.dumps(coo)), csr.clone())
    ],
    "of csr": lambda: [dense(x) for x in (csr.t(), csr * 3, csr + csr, csr.to_sparse())],
    "parts of csr": lambda: [dense(x) for x in (csr.crow_indices(), csr.col_indices(), csr.values())],
    "products of csr": lambda: [
        dense(x)
        for x in (
            csr @ ones(3, 2),
            csr @ csr,
            torch.sparse.sampled_addmm(csr, ones(3, 2), ones(2, 3)),
            torch.sparse.mm(csr, ones(3, 2), "mean"),
        )
    ],
    "bsr": lambda: dense(ones(4, 4).to_sparse_bsr((2, 2)) @ ones(4, 2)),
    "saved": saved,
    "gradients": gradients,
    "clipped": clipped,
    "SparseAdam": lambda: embedded(nn.Embedding, lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    "SGD": lambda: embedded(nn.Embedding, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Adagrad": lambda: embedded(nn.Embedding, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "bag": lambda: embedded(nn.EmbeddingBag, lambda p: torch.optim.SparseAdam(p)),
    "graph network": lambda: [graph_network(layout) for layout in (torch.sparse_coo, torch.sparse_csr)],
    "printed": lambda: [
        [word for word in repr(x).split() if not word.startswith("device=")] for x in (coo, csr)
    ],
    "numpy": lambda: coo.cpu().numpy(),
}

for name, call in CALLS.items():
    try:
        print(name, call())
    except Exception as error:
        print(name, type(error).__name__)
