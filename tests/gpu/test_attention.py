"""Scaled dot product attention against the CPU: layouts, masks, grouped heads, partial tiles."""

import pytest
import torch
import torch_tandem

device = "tandem"
attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def moved(t):
    """Returns the tensor on the device with the same strides."""
    if t is None:
        return None
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device).copy_(t)


def check(q, k, v, causal=False, mask=None, scale=None):
    """Compares output, log-sum-exp and gradients on the device with the CPU's, and their strides."""
    keywords = {"attn_mask": mask, "scale": scale}
    expected = attention(q, k, v, 0.0, causal, **keywords)
    grad = torch.randn(q.shape).to(q.dtype)
    expected += attention_backward(grad, q, k, v, *expected, 0.0, causal, **keywords)
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    q, k, v, grad, mask = (moved(t) for t in (q, k, v, grad, mask))
    keywords = {"attn_mask": mask, "scale": scale}
    got = attention(q, k, v, 0.0, causal, **keywords)
    got += attention_backward(grad, q, k, v, *got, 0.0, causal, **keywords)
    for number, (e, g) in enumerate(zip(expected, got, strict=True)):
        tolerance = TOLERANCE[q.dtype] * max(1.0, e.abs().max().item())
        torch.testing.assert_close(g.cpu(), e, rtol=0, atol=tolerance, msg=lambda m, n=number: f"{n}: {m}")
        assert [s for s, n in zip(g.stride(), g.shape, strict=True) if n > 1] == [
            s for s, n in zip(e.stride(), e.shape, strict=True) if n > 1
        ]
    assert not any("attention" in n for n in torch_tandem.report()["host_ops"])


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("queries, keys, dim", ((70, 45, 20), (33, 100, 64), (1, 7, 33)))
def test_sizes(queries, keys, dim, causal):
    q, k, v = torch.randn(2, 3, queries, dim), torch.randn(2, 3, keys, dim), torch.randn(2, 3, keys, dim)
    check(q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_dtypes(dtype):
    q, k, v = (torch.randn(1, 40, 2, 36).to(dtype).transpose(1, 2) for _ in range(3))
    check(q, k, v, scale=0.3)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "queries, keys, dim",
    ((32, 32, 16), (70, 45, 20), (33, 100, 64), (129, 64, 128), (40, 130, 7), (40, 40, 130)),
)
def test_halves(queries, keys, dim, causal):
    q, k, v = (torch.randn(2, 3, n, dim).half() for n in (queries, keys, keys))
    check(q, k, v, causal=causal)


def test_halves_with_masks_groups_of_heads_and_layouts():
    mask = torch.randn(2, 1, 40, 50).half()
    mask[torch.rand(mask.shape) < 0.3] = float("-inf")
    mask[..., 3, :] = float("-inf")
    check(*(torch.randn(2, 4, n, 24).half() for n in (40, 50, 50)), mask=mask)
    check(torch.randn(2, 4, 40, 24).half(), *(torch.randn(2, 2, 50, 24).half() for _ in range(2)))
    packed = torch.randn(2, 45, 3, 2, 12).half()
    check(*(packed[:, :, i].transpose(1, 2) for i in range(3)))
    check_dropout(*(torch.randn(1, 2, 20, 48).half().transpose(2, 3) for _ in range(3)))


def test_groups_of_heads_and_wide_heads():
    check(torch.randn(1, 4, 9, 130), torch.randn(1, 2, 11, 130), torch.randn(1, 2, 11, 130))
    check(torch.randn(1, 1, 3, 256), torch.randn(1, 1, 4, 256), torch.randn(1, 1, 4, 256))


@pytest.mark.parametrize("shape", ((40, 50), (2, 1, 40, 50), (2, 3, 1, 50)))
def test_masks(shape):
    q, k, v = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 50, 16), torch.randn(2, 3, 50, 16)
    mask = torch.randn(shape)
    mask[torch.rand(shape) < 0.3] = float("-inf")
    check(q, k, v, mask=mask)
    mask[..., 0, :] = float("-inf")  # rows whose scores are all masked
    check(q, k, v, mask=mask)


def test_layouts():
    packed = torch.randn(2, 20, 3, 2, 12)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    check(q, k, v)
    check(q.contiguous(), k, v.contiguous())


def test_as_programs_call_it():
    q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
    mask = torch.rand(10, 10) < 0.7
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        results = []
        for where in ("cpu", device):
            leaves = [t.to(where).detach().clone().requires_grad_() for t in (q, k, v)]
            o = {n: t.to(where) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, **o)
            out.sum().backward()
            results.append([out, *(t.grad for t in leaves)])
        for e, g in zip(*results, strict=True):
            torch.testing.assert_close(g.cpu(), e, rtol=1e-4, atol=1e-5)


def check_dropout(q, k, v, dropout=0.3, causal=False, mask=None, scale=None):
    """Compares the device's kernels with the kernels on the host, which drop the same weights for a seed."""
    ops = torch.ops.tandem
    seed = torch.randint(2**31, (2,), dtype=torch.int32)
    grad = torch.randn(q.shape).to(q.dtype)
    results = []
    for to in (lambda t: t, moved):
        query, key, value, bias, words, given = (to(t) for t in (q, k, v, mask, seed, grad))
        torch_tandem.synchronize()
        torch_tandem.reset_report()
        out, sums = ops.attention(query, key, value, bias, words, dropout, causal, scale)
        gradients = ops.attention_backward(
            given, query, key, value, bias, words, out, sums, dropout, causal, scale
        )
        results.append([out, sums, *gradients])
        torch_tandem.synchronize()
    assert not torch_tandem.report()["host_ops"]
    for number, (e, g) in enumerate(zip(*results, strict=True)):
        tolerance = TOLERANCE[q.dtype] * max(1.0, e.abs().max().item())
        torch.testing.assert_close(g.cpu(), e, rtol=0, atol=tolerance, msg=lambda m, n=number: f"{n}: {m}")


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("queries, keys, dim", ((70, 45, 20), (33, 100, 64), (1, 7, 33), (64, 64, 32)))
def test_dropout(queries, keys, dim, dtype, causal):
    q, k, v = (torch.randn(2, 3, n, dim).to(dtype) for n in (queries, keys, keys))
    check_dropout(q, k, v, causal=causal)


def test_dropout_with_masks_and_groups_of_heads():
    q, k, v = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    mask = torch.randn(2, 1, 40, 50)
    mask[torch.rand(mask.shape) < 0.3] = float("-inf")
    mask[..., 3, :] = float("-inf")
    check_dropout(q, k, v, mask=mask, scale=0.3)
    for dropout in (0.0, 1.0):
        check_dropout(q, k, v, dropout=dropout)


def test_dropout_drops_the_given_share_and_keeps_the_mean():
    q = torch.zeros(4, 4, 64, 16, device=device)
    v = torch.eye(64, device=device).expand(4, 4, 64, 64)[..., :16]
    shares = []
    for _ in range(3):
        out = torch.nn.functional.scaled_dot_product_attention(q, q, v, dropout_p=0.25) * 64
        assert set(out.cpu().mul(3).round().unique().tolist()) == {0.0, 4.0}  # 0 or 1 / 0.75
        shares.append((out == 0).float().mean().item())
    assert all(abs(share - 0.25) < 0.02 for share in shares), shares
    assert len(set(shares)) > 1  # each call drops other weights


def test_dropout_is_fused_as_programs_call_it():
    q, k, v = (torch.randn(2, 4, 10, 8, device=device, requires_grad=True) for _ in range(3))
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.rand(10, 10, device=device) < 0.7}):
        torch_tandem.synchronize()
        torch_tandem.reset_report()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, **options)
        assert "FusedAttention" in out.grad_fn.name()
        out.sum().backward()
        torch_tandem.synchronize()
        assert not torch_tandem.report()["host_ops"]


def test_a_mask_that_needs_a_gradient_gets_it():
    q = torch.randn(2, 4, 10, 8, device=device)
    mask = torch.zeros(10, 10, device=device, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1).sum().backward()
    assert mask.grad.abs().sum() > 0


def test_with_dropout_and_rows_in_which_no_score_counts():
    q, k, v = (torch.randn(2, 4, 10, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(10, 10) < 0.7
    mask[3] = False
    outputs = []
    for where in ("cpu", device):
        leaves = [t.detach().to(where).requires_grad_() for t in (q, k, v)]
        torch_tandem.synchronize()
        torch_tandem.reset_report()
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=mask.to(where), dropout_p=1e-7
        )
        out.sum().backward()
        outputs.append([out, *(t.grad for t in leaves)])
    for e, g in zip(*outputs, strict=True):
        torch.testing.assert_close(g.cpu(), e, rtol=1e-4, atol=1e-5)
    assert not torch_tandem.report()["host_ops"]
