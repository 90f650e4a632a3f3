"""Matrix products in layouts, dtypes and sizes that PyTorch's samples lack, against the CPU."""

import itertools

import pytest
import torch
import torch_tandem

device = "tandem"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def made(rows, columns, layout, dtype=torch.float32):
    """Returns a matrix as a view of a larger tensor, in a given layout."""
    if layout == "columns":
        return torch.randn(columns, rows).to(dtype).t()
    if layout == "strided":
        return torch.randn(rows, columns * 2).to(dtype)[:, ::2]
    if layout == "offset":
        return torch.randn(rows, columns + 3).to(dtype)[:, 1:-2]
    return torch.randn(rows, columns).to(dtype)


def moved(t):
    """Returns the same view on the device."""
    whole = t if t._base is None else t._base
    return whole.to(device).as_strided(t.size(), t.stride(), t.storage_offset())


def close(got, expected, dtype, depth):
    tolerance = TOLERANCE.get(dtype, 0) * max(1, depth) ** 0.5 * 4
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=tolerance)
    assert got.stride() == expected.stride()


def native(*names):
    hosted = torch_tandem.report()["host_ops"]
    return not any(name in op for op in hosted for name in names)


@pytest.mark.parametrize(
    "left, right", list(itertools.product(("rows", "columns", "strided"), ("rows", "columns")))
)
def test_layouts(left, right):
    for m, n, k in ((65, 70, 33), (200, 9, 40), (7, 130, 20)):
        a, b = made(m, k, left), made(k, n, right)
        close(moved(a) @ moved(b), a @ b, torch.float32, k)
    assert native("mm")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bits(dtype):
    for m, n, k in ((65, 71, 34), (130, 64, 600), (5, 64, 16)):
        for left, right in (("rows", "columns"), ("columns", "rows"), ("offset", "rows")):
            a, b = made(m, k, left, dtype), made(k, n, right, dtype)
            close(moved(a) @ moved(b), (a.float() @ b.float()).to(dtype), dtype, k)
    assert native("mm")


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8, torch.float64))
def test_other_types(dtype):
    a, b = torch.randint(0, 9, (5, 7)).to(dtype), torch.randint(0, 9, (7, 6)).to(dtype)
    assert torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b)
    assert torch.equal((a.to(device) @ b[:, 0].to(device)).cpu(), a @ b[:, 0])
    assert torch.equal(
        torch.addmm(a.to(device)[:, :6], a.to(device), b.to(device), beta=2, alpha=3).cpu(),
        torch.addmm(a[:, :6], a, b, beta=2, alpha=3),
    )


def test_split_depth_and_vectors():
    for m, n, k in ((20, 30, 5000), (1, 1, 40000), (1, 300, 700), (300, 1, 700), (3, 1, 9000)):
        for left, right in (("rows", "rows"), ("columns", "columns")):
            a, b = made(m, k, left), made(k, n, right)
            close(moved(a) @ moved(b), a @ b, torch.float32, k)
    a, x = torch.randn(70, 500), torch.randn(500)
    close(a.to(device) @ x.to(device), a @ x, torch.float32, 500)
    close(a.t().to(device).t() @ x.to(device), a @ x, torch.float32, 500)
    assert native("mm", "mv")


def test_added_matrices():
    a, b = torch.randn(40, 30), torch.randn(30, 50)
    for x in (torch.randn(50), torch.randn(40, 1), torch.randn(50, 40).t(), torch.tensor(2.0)):
        for beta, alpha in ((1, 1), (0.5, 2.0), (0, 1)):
            got = torch.addmm(x.to(device), a.to(device), b.to(device), beta=beta, alpha=alpha)
            close(got, torch.addmm(x, a, b, beta=beta, alpha=alpha), torch.float32, 30)
    nans = torch.full((50,), float("nan"))
    close(torch.addmm(nans.to(device), a.to(device), b.to(device), beta=0), a @ b, torch.float32, 30)
    activated = torch._addmm_activation(torch.ones(50).to(device), a.to(device), b.to(device), use_gelu=True)
    close(activated, torch._addmm_activation(torch.ones(50), a, b, use_gelu=True), torch.float32, 30)
    assert native("addmm")


def test_in_place_and_out():
    a, b, x = torch.randn(20, 20), torch.randn(20, 20), torch.randn(20, 20)
    da, db, dx = a.to(device), b.to(device), x.to(device)
    close(dx.addmm_(da, db, beta=0.5), x.addmm_(a, b, beta=0.5), torch.float32, 20)
    out = torch.empty(40, 20, device=device)[::2]
    torch.mm(da, db, out=out)
    torch.testing.assert_close(out.cpu(), a @ b, rtol=0, atol=1e-4)
    out = torch.empty(20, 20, device=device).t()
    torch.mm(da, db, out=out)
    torch.testing.assert_close(out.cpu(), a @ b, rtol=0, atol=1e-4)
    torch.mm(da, db, out=da)
    torch.testing.assert_close(da.cpu(), a @ b, rtol=0, atol=1e-4)
    assert native("mm")


def test_empty():
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 4, 0), (3, 1, 0)):
        got = torch.empty(m, k, device=device) @ torch.empty(k, n, device=device)
        assert torch.equal(got.cpu(), torch.zeros(m, n))
    x = torch.randn(3)
    got = torch.addmm(x.to(device), torch.empty(2, 0, device=device), torch.empty(0, 3, device=device))
    assert torch.equal(got.cpu(), x.expand(2, 3))


def test_batches():
    a, b = torch.randn(3, 20, 33), torch.randn(3, 33, 18)
    close(torch.bmm(a.to(device), b.to(device)), a @ b, torch.float32, 33)
    close(
        torch.bmm(a.to(device).expand(3, 20, 33), b.to(device)[:1].expand(3, 33, 18)),
        a @ b[:1].expand(3, 33, 18),
        torch.float32,
        33,
    )
    one = b[..., :1].contiguous()
    close(torch.bmm(a.to(device), one.to(device)), a @ one, torch.float32, 33)
    x = torch.randn(20, 1)
    close(
        torch.baddbmm(x.to(device), a.to(device), b.to(device), alpha=0.5),
        torch.baddbmm(x, a, b, alpha=0.5),
        torch.float32,
        33,
    )
    close(torch.addbmm(x.to(device), a.to(device), b.to(device)), torch.addbmm(x, a, b), torch.float32, 99)
    assert native("bmm")


def test_shapes_share_kernels():
    """Sizes are parameters of kernels, so twenty shapes compile few kernels."""
    sizes = [
        (m, n, k) for m, n in ((20, 24), (33, 65), (100, 40), (17, 300), (8, 70)) for k in (7, 64, 100, 900)
    ]
    pairs = [(torch.randn(m, k, device=device), torch.randn(k, n, device=device)) for m, n, k in sizes]
    torch_tandem.synchronize()
    before = torch_tandem.report()["device"]["pipelines"]
    for a, b in pairs:
        a @ b
    torch_tandem.synchronize()
    assert torch_tandem.report()["device"]["pipelines"] - before <= 6


def test_many_workgroups():
    """The result has more tiles than one axis of the workgroups may have."""
    a, b = torch.randn(70000 * 16, 4), torch.randn(4, 17)
    got = torch.bmm(a.view(70000, 16, 4).to(device), b.to(device).expand(70000, 4, 17))
    torch.testing.assert_close(got.cpu()[-3:], (a.view(70000, 16, 4)[-3:] @ b), rtol=1e-5, atol=1e-5)
