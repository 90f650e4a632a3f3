"""Tensors larger than the adapter's binding limit: kernels run in parts, on parts of the buffers."""

import os

import pytest
import torch
import torch.nn.functional as F
import torch_tandem

device = "tandem"
ROWS, COLUMNS = 40961, 1031
N = ROWS * COLUMNS  # 161 MiB of floats

pytestmark = pytest.mark.skipif(
    "limits" not in os.environ.get("TANDEM_GPU_WITHOUT", ""), reason="needs WebGPU's baseline limits"
)


@pytest.fixture(scope="module")
def values():
    """A large tensor on the CPU and on the device, with a storage offset."""
    x = torch.rand(N + 3, generator=torch.Generator().manual_seed(0))
    return x[3:], x.to(device)[3:]


def same(got, expected, bound=1e-6):
    torch.testing.assert_close(got.cpu(), expected, rtol=bound, atol=bound)


def test_elements(values, hosted):
    x, y = values
    # The first operation writes `b`, so its operand must be a copy of the part that it reads.
    a, b = x.clone(), y.clone()
    same(b.add_(b).mul_(y).sub_(1), a.add_(a).mul_(x).sub_(1))
    same((y > 0.5)[-5000:], (x > 0.5)[-5000:])
    same(y.half()[-5000:], x.half()[-5000:])
    b.zero_()
    b[::2].fill_(3)
    assert b.sum().item() == 3 * ((N + 1) // 2)
    assert not hosted()


def test_orders_of_memory(values, hosted):
    x, y = (v[: 640 * 64 * 1024].view(640, 64, 1024) for v in values)
    ours, expected = y.transpose(1, 2).contiguous(), x.transpose(1, 2).contiguous()
    assert torch.equal(ours.cpu(), expected)
    row, column = torch.rand(1024), torch.rand(640, 64, 1)
    same(y * row.to(device) + column.to(device), x * row + column)
    assert not hosted()


def test_rows_and_columns(values, hosted):
    x, y = (v.view(ROWS, COLUMNS) for v in values)
    bias = torch.rand(COLUMNS)
    scale = torch.rand(ROWS, 1)
    ours = y * scale.to(device) + bias.to(device)
    expected = x * scale + bias
    for part in (slice(0, 100), slice(ROWS // 2, ROWS // 2 + 3000), slice(-100, None)):
        same(ours[part], expected[part])
    same(F.softmax(ours, 1)[-2000:], F.softmax(expected, 1)[-2000:])
    weight = torch.rand(COLUMNS)
    same(
        F.layer_norm(ours, (COLUMNS,), weight.to(device))[-2000:],
        F.layer_norm(expected, (COLUMNS,), weight)[-2000:],
        1e-5,
    )
    same(ours.amax(1), expected.amax(1))
    assert torch.equal(ours.argmin(1).cpu()[:50], expected.argmin(1)[:50])
    assert not hosted()


def test_picked_and_joined(values, hosted):
    x, y = (v.view(ROWS, COLUMNS) for v in values)
    label = torch.randint(COLUMNS, (ROWS,), generator=torch.Generator().manual_seed(1))
    same(y.gather(1, label.to(device)[:, None]), x.gather(1, label[:, None]))
    same(F.cross_entropy(y, label.to(device)), F.cross_entropy(x, label), 1e-5)
    half = ROWS // 2
    joined = torch.cat([y[half:], y[:half]])
    for part in (slice(0, 10), slice(half - 10, half + 10), slice(-10, None)):
        same(joined[part], torch.cat([x[half:], x[:half]])[part])
    assert not hosted()


def test_all_elements_become_one(values, hosted):
    x, y = values
    same(y.sum(), x.double().sum().float(), 1e-4)
    same(y.mean(), x.double().mean().float(), 1e-5)
    same(y.max(), x.max())
    assert y.argmax().item() == x.argmax().item()
    same(torch._foreach_norm([y])[0], x.double().norm().float(), 1e-4)
    assert not hosted()


def test_an_optimizer(values, hosted):
    x, y = values
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    options = {**numbers, "amsgrad": False, "maximize": False}
    kept = []
    for v in (x, y):
        p, g, m, s = v.clone(), v - 0.5, torch.zeros_like(v), torch.zeros_like(v)
        for step in (1.0, 2.0):
            steps = torch.tensor(step, device=v.device)
            torch._fused_adamw_([p], [g], [m], [s], [], [steps], **options)
        kept.append([t[part] for t in (p, m, s) for part in (slice(0, 5000), slice(-5000, None))])
    for ours, expected in zip(kept[1], kept[0], strict=True):
        same(ours, expected, 1e-5)
    assert not hosted()


def test_parts_draw_different_numbers(hosted):
    x = torch.empty(N, device=device).normal_()
    assert abs(x.mean().item()) < 1e-3
    assert abs(x.std().item() - 1) < 1e-3
    same((x.view(ROWS, COLUMNS)[1:] == x[:COLUMNS]).sum(1).max(), torch.tensor(0))
    assert not hosted()


def test_small_views_of_a_large_storage(values, hosted):
    x, y = values
    for part in (slice(0, 6400), slice(N // 2, N // 2 + 6400), slice(N - 6400, N)):
        a, b = x[part].view(80, 80), y[part].view(80, 80)
        same(b @ b.t(), a @ a.t(), 1e-4)
        same(b.cumsum(0), a.cumsum(0), 1e-5)
    assert not hosted()


def test_products(values, hosted):
    x, y = (v.view(ROWS, COLUMNS) for v in values)
    few, more = torch.rand(COLUMNS, 2), torch.rand(COLUMNS, 40)
    for right in (few, more):
        same(y @ right.to(device), x @ right, 1e-3)
        same(right.t().to(device) @ y.t(), right.t() @ x.t(), 1e-3)
    # The depth is split, or the right operand is large.
    left = torch.rand(20, ROWS)
    same(left.to(device) @ y, left @ x, 1e-3)
    same(y.t() @ left.t().to(device), x.t() @ left.t(), 1e-3)
    # The result is large.
    same(
        (left.t().to(device) @ left[:, :COLUMNS].to(device))[-3000:],
        left.t()[-3000:] @ left[:, :COLUMNS],
        1e-3,
    )
    a, b = torch.rand(40, 1024, 9), torch.rand(40, 9, 1031)
    product = torch.bmm(a.to(device), b.to(device))
    for part in (slice(0, 2), slice(19, 21), slice(38, None)):
        same(product[part], torch.bmm(a, b)[part], 1e-4)
    assert not hosted()


def test_gradients_of_products(values, hosted):
    x, y = (v.view(ROWS, COLUMNS) for v in values)
    gradients = []
    for v in (x, y):
        weight = torch.linspace(-1, 1, 8 * COLUMNS).view(8, COLUMNS).to(v.device).requires_grad_()
        own = v.detach().requires_grad_()
        F.linear(own, weight).square().mean().backward()
        gradients.append((weight.grad, own.grad[-2000:]))
    for ours, expected in zip(gradients[1], gradients[0], strict=True):
        same(ours * 1e3, expected * 1e3, 1e-3)
    assert not hosted()


def test_convolutions(hosted):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(24, 8, 430, 430, generator=generator)  # 135 MiB
    weight = torch.rand(5, 8, 3, 3, generator=generator) - 0.5
    results = []
    for place in ("cpu", device):
        own = x.clone().to(place).requires_grad_()
        w = weight.clone().to(place).requires_grad_()
        y = F.conv2d(own, w, stride=2, padding=1)
        (y * y).mean().backward()
        results.append((y[-1], w.grad, own.grad[-1] * 1e6))
    for ours, expected in zip(results[1], results[0], strict=True):
        same(ours, expected, 1e-3)
    assert not hosted()


def test_look_ups_and_their_gradients(values, hosted):
    x, y = (v.view(ROWS, COLUMNS) for v in values)
    index = torch.tensor([[0, ROWS - 1, 5], [ROWS // 2, 5, ROWS // 2 + 1]])
    for pick in (
        lambda table, index: F.embedding(index, table),
        lambda table, index: table[index],
        lambda table, index: table.index_select(0, index.flatten()),
        lambda table, index: table.take(index * 1000),
        lambda table, index: table[index, index % COLUMNS],
    ):
        same(pick(y, index.to(device)), pick(x, index))
    rows = torch.arange(6.0).view(2, 3, 1).expand(2, 3, COLUMNS)
    results = []
    for v in (x, y):
        table = v.clone().requires_grad_()
        F.embedding(index.to(v.device), table).mul(rows.to(v.device)).sum().backward()
        put = v.clone()
        put[index[0].to(v.device)] = rows[0].to(v.device)
        put.index_add_(0, index[0].to(v.device), torch.ones(3, COLUMNS, device=v.device))
        put.index_add_(0, index[0].repeat(40).to(v.device), torch.ones(120, COLUMNS, device=v.device))
        results.append([t[part] for t in (table.grad, put) for part in ([0, 5], [ROWS // 2, ROWS - 1])])
    for ours, expected in zip(results[1], results[0], strict=True):
        same(ours, expected)
    assert not hosted()


def test_an_index_out_of_range_is_an_error(values):
    _, y = (v.view(ROWS, COLUMNS) for v in values)
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([3, ROWS]).to(device), y).cpu()
    torch_tandem.mark_step()


def test_what_cannot_be_divided_takes_the_host_path(values, hosted):
    x, y = values
    same(y.sort().values[-1000:], x.sort().values[-1000:])
    assert hosted()
    torch_tandem.mark_step()
