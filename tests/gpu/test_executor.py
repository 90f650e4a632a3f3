"""The executor: where contents are, aliases, fetches, faults, memory, failures."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import torch_tandem


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new process, with Tandem imported."""
    program = "import torch, torch_tandem\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_device_is_a_gpu():
    x = torch.ones(3, device="tandem") + 1
    assert x.cpu().tolist() == [2, 2, 2]
    report = torch_tandem.report()
    assert report["executor"] == "gpu"
    assert report["device"]["native_ops"] >= 1
    assert not report["host_ops"]


def test_the_name_is_the_adapters():
    name = torch.tandem.get_device_name()
    assert name == f"Tandem ({torch_tandem.report()['devices'][0]['name']})"


def test_processes_cannot_share_memory():
    with pytest.raises(RuntimeError, match=re.escape("model.cpu().share_memory()")):
        torch.nn.Linear(1, 1, device="tandem").share_memory()


def test_sparse_tensors():
    host = (torch.arange(12.0).view(3, 4) % 3).to_sparse()
    x = torch.arange(8.0).view(4, 2)
    for sparse in (host, host.to_sparse_csr()):
        y = x.to("tandem").requires_grad_()
        product = torch.sparse.mm(sparse.to("tandem"), y)
        product.sum().backward()
        assert torch.equal(product.detach().cpu(), torch.sparse.mm(sparse, x))
        assert torch.equal(y.grad.cpu(), host.to_dense().sum(0)[:, None].expand(4, 2))


def test_adapters_are_listed():
    devices = torch_tandem.list_devices()
    assert {"index", "name", "kind", "backend", "driver", "features", "max_binding"} <= devices[0].keys()
    listed = subprocess.run([sys.executable, "-m", "torch_tandem", "devices"], capture_output=True, text=True)
    assert devices[0]["name"] in listed.stdout


def test_views_and_aliases():
    x = torch.arange(24.0).reshape(4, 6)
    y = x.to("tandem")
    for t in (x, y):
        t[1:].add_(t[:-1].clone())
        t.t()[2].mul_(t[:, 3])
        t.add_(t)
        t[0, ::2] = t[3, 1::2]
        t[:, 1].copy_(t[:, 0])
    assert torch.equal(x, y.cpu())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.half]
)
def test_parts_of_words_keep_their_neighbours(dtype):
    x = (torch.arange(37) % 2).to(dtype)
    y = x.to("tandem")
    for t in (x, y):
        t[3:8] = t[20:25]
        t[9] = 1
        t[11:29:3].zero_()
        t[30:].logical_not_()
    assert torch.equal(x, y.cpu())


def test_dtypes_go_through():
    for dtype in (torch.float64, torch.complex64, torch.uint16, torch.int32):
        x = torch.arange(5).to(dtype)
        assert torch.equal((x.to("tandem") * 2).cpu(), x * 2)


def test_int64_beyond_32_bits():
    x = torch.tensor([2**40 + 3, -(2**50), 7, -7, 2**62])
    y = x.to("tandem")
    for f in (
        lambda t: t + t // 3,
        lambda t: t * 5 - 1,
        lambda t: t % 1000,
        lambda t: (t >> 3) ^ (t << 2),
        lambda t: t > 2**39,
        lambda t: t.float(),
        lambda t: t.abs().clamp(max=2**41),
        lambda t: -t,
    ):
        assert torch.equal(f(y).cpu(), f(x))


def test_a_new_shape_compiles_nothing():
    def step(n: int) -> None:
        x = torch.ones(n, 3, device="tandem")
        ((x * 2 + 1).exp() > 3).any().item()

    step(5)
    step(30)  # more than 16 elements are reduced by several threads
    torch_tandem.synchronize()
    before = torch_tandem.report()["device"]["pipelines"]
    for n in range(6, 26):
        step(n)
    assert torch_tandem.report()["device"]["pipelines"] == before


def test_an_index_out_of_range_raises_and_spoils_only_what_depends_on_it():
    table = torch.randn(10, 4, device="tandem")
    index = torch.tensor([1, 12], device="tandem")
    spoilt = torch.nn.functional.embedding(index, table)
    after = spoilt + 1
    independent = table * 2
    with pytest.raises(IndexError, match=r"test_executor\.py"):
        after.cpu()
    assert torch.equal(independent.cpu(), table.cpu() * 2)
    with pytest.raises(IndexError):
        spoilt.sum().item()
    assert torch.nn.functional.embedding(index.clamp(max=9), table).shape == (2, 4)


def test_an_integer_division_by_zero_raises():
    x = torch.tensor([4, 5], device="tandem") // torch.tensor([2, 0], device="tandem")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x.cpu()


def test_memory_is_flat_and_returned():
    x = torch.randn(256, 256, device="tandem")
    for _ in range(20):
        y = (x * 2).relu() + x
    torch_tandem.synchronize()
    torch_tandem.reset_report()
    for _ in range(200):
        y = (x * 2).relu() + x
        torch_tandem.mark_step()
    del y
    torch_tandem.synchronize()
    device = torch_tandem.report()["device"]
    assert device["memory_live_peak"] <= 40 * x.numel() * 4


def test_an_allocation_that_cannot_succeed_raises_and_work_goes_on():
    x = torch.ones(4, device="tandem")
    with pytest.raises(RuntimeError, match=r"memory|too large|alloc"):
        torch.empty(2**50, device="tandem").fill_(1).sum().item()
    assert (x + 1).sum().item() == 8


def test_a_lost_device_raises_and_the_next_program_works():
    r = run(
        """
        x = torch.ones(4, device="tandem")
        for step in range(6):
            y = (x * 2 + 1).relu()
            torch_tandem.mark_step()
        torch_tandem._core.lose_device()
        for f in (y.cpu, lambda: (x + 1).sum().item(), lambda: torch.ones(3, device="tandem").tolist()):
            try:
                f()
            except RuntimeError as error:
                print("raised", str(error)[:60])
        """
    )
    assert r.returncode in (0, 1), r.stderr
    assert r.stdout.count("raised tandem: the GPU cannot be used any more") == 3, r.stdout + r.stderr
    assert run("print((torch.ones(2, device='tandem') + 1).tolist())").stdout == "[2.0, 2.0]\n"


def test_an_unknown_adapter_is_named():
    r = run("torch.ones(2, device='tandem') + 1", TANDEM_DEVICE="no such thing")
    assert r.returncode != 0
    assert "TANDEM_DEVICE=no such thing" in r.stderr and "tandem devices" in r.stderr


def test_a_software_adapter_is_not_taken_unasked():
    kinds = {device["kind"] for device in torch_tandem.list_devices()}
    if kinds != {"software"}:
        pytest.skip("there is a real adapter")
    r = run("torch.ones(2, device='tandem') + 1", TANDEM_DEVICE="gpu", TANDEM_ALLOW_SOFTWARE="0")
    assert "TANDEM_ALLOW_SOFTWARE=1" in r.stderr
    r = run("torch.ones(2, device='tandem'); print(torch_tandem.report()['executor'])", TANDEM_DEVICE="")
    assert r.stdout.strip() == "cpu", r.stderr


def test_a_damaged_cache_is_made_anew(tmp_path):
    code = "print((torch.ones(3, device='tandem') * 5).cpu().tolist()); torch_tandem.synchronize()"
    first = run(code, TANDEM_CACHE_DIR=str(tmp_path))
    files = list((tmp_path / "pipelines").glob("*"))
    if not files:
        pytest.skip("this driver keeps no pipelines")
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2] + b"damage")
    second = run(code, TANDEM_CACHE_DIR=str(tmp_path))
    assert first.stdout == second.stdout == "[5.0, 5.0, 5.0]\n", second.stderr
    assert files[0].read_bytes()[:8] == whole[:8] and files[0].stat().st_size >= len(whole) // 2


def test_without_a_cache_no_folder_is_made(tmp_path):
    code = "print((torch.ones(3, device='tandem') * 5).cpu().tolist()); torch_tandem.synchronize()"
    done = run(code, TANDEM_CACHE_DIR=str(tmp_path / "kept"), TANDEM_CACHE="0")
    assert done.stdout == "[5.0, 5.0, 5.0]\n", done.stderr
    assert not (tmp_path / "kept").exists()


def test_importing_touches_no_device():
    r = run("print(torch_tandem.report()['executor'])")
    assert r.stdout.strip() == "none", r.stderr


def test_the_host_path_writes_windows_of_large_storages():
    def steps(device):
        y = (torch.arange(100_000.0) % 17 * 0.1 + 0.5).to(device)
        a = torch.arange(1.0, 17.0).to(device)
        for _ in range(8):
            y = y * 1.0
            torch.frexp(a[:4], out=(y[20:24], torch.empty(4, dtype=torch.int32, device=device)))
            yield y[:30].cpu()
            z = y * 1.0
            q, r = z[60_000:60_016].view(4, 4), z[70_000:70_016].view(4, 4)
            torch.linalg.qr(a.view(4, 4) + torch.eye(4, device=device), out=(q, r))
            yield (z[60_000:60_016].view(4, 4) @ z[70_000:70_016].view(4, 4)).cpu()
            torch_tandem.mark_step()

    for got, expected in zip(steps("tandem"), steps("cpu"), strict=True):
        torch.testing.assert_close(got, expected)
