"""The GPU check: Tandem's kernels and the suite on a graphics adapter, compared with CUDA if torch has CUDA.

Prints a table and writes a JSON file. All figures of a row are medians from one run on one machine; ratios
are CUDA's time divided by Tandem's. On a software adapter the check only shows that everything runs, and says
that its times are no measure of speed. Takes at most ten minutes (`--budget`).
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TANDEM_DEVICE", "gpu")

import torch
import torch.nn.functional as F
import torch_tandem

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path.stem for path in (ROOT / "benches" / "programs").glob("[!_]*.py"))
WAYS = ("eager", "compile", "tandem")
FLOAT = 4  # bytes

Build = Callable[[str], Callable[[], Any]]


def kernels(scale: int) -> dict[str, tuple[Build, float, float]]:
    """Return for each kernel: a function that builds its call on a device, bytes to move, and flops."""
    n, rows, columns = scale * scale * 16, scale * 4, scale
    m = scale * 2

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
        return lambda device: torch.randn(*shape).to(dtype).to(device)

    def of(f: Callable[..., Any], *tensors: Callable[[str], torch.Tensor]) -> Build:
        def build(device: str) -> Callable[[], Any]:
            made = [t(device) for t in tensors]
            return lambda: f(*made)

        return build

    vector, matrix, square = make(n), make(rows, columns), make(m, m)
    heads, length, width = 8, max(scale // 2, 64), 64
    head = make(2, heads, length, width)
    image, weight = make(8, 64, 56, 56), make(64, 64, 3, 3)
    convolution_flops = 2 * 8 * 64 * 64 * 9 * 56 * 56
    halves = make(m, m, dtype=torch.float16)
    attention_flops = 4 * 2 * heads * length * length * width
    return {
        "add": (of(torch.add, vector, vector), 3 * n * FLOAT, 0),
        "gelu": (of(F.gelu, vector), 2 * n * FLOAT, 0),
        "copy, transposed": (of(lambda x: x.t().contiguous(), matrix), 2 * rows * columns * FLOAT, 0),
        "sum of all": (of(torch.sum, vector), n * FLOAT, 0),
        "sum of rows": (of(lambda x: x.sum(1), matrix), rows * columns * FLOAT, 0),
        "sum of columns": (of(lambda x: x.sum(0), matrix), rows * columns * FLOAT, 0),
        "softmax": (of(lambda x: x.softmax(1), matrix), 2 * rows * columns * FLOAT, 0),
        "layer norm": (of(lambda x: F.layer_norm(x, (columns,)), matrix), 2 * rows * columns * FLOAT, 0),
        "attention": (of(F.scaled_dot_product_attention, head, head, head), 0, attention_flops),
        "convolution": (
            of(lambda x, w: F.conv2d(x, w, padding=1), image, weight),
            0,
            convolution_flops,
        ),
        "matmul": (of(torch.matmul, square, square), 0, 2 * m**3),
        "matmul, float16": (of(torch.matmul, halves, halves), 0, 2 * m**3),
        "matmul, thin": (of(torch.matmul, make(32, m), square), m * m * FLOAT, 2 * 32 * m * m),
        "matrix-vector": (of(torch.mv, square, make(m)), m * m * FLOAT, 2 * m * m),
    }


def wait(device: str) -> None:
    """Wait for all work of the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "tandem":
        torch_tandem.synchronize()


def seconds(call: Callable[[], Any], device: str, patience: float = 0.3) -> float:
    """Return the median time of a call, in seconds. Several calls are issued between waits."""
    for _ in range(4):
        call()
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    calls = max(1, min(100, int(patience / 5 / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait(device)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def measure_kernels(scale: int, devices: list[str]) -> list[dict]:
    """Measure each kernel's time on each device, and compute bandwidth and arithmetic rate."""
    found = []
    torch_tandem.set_mode("trace")  # co-execution would eliminate ops whose results are not read
    for name, (build, moved, flops) in kernels(scale).items():
        row: dict[str, Any] = {"kernel": name}
        for device in devices:
            try:
                row[device] = seconds(build(device), device)
            except Exception as error:
                row[f"{device} failed"] = str(error).splitlines()[0][:200]
        spent = row.get("tandem")
        if spent:
            row["GB/s"] = moved / spent / 1e9 if moved else None
            row["GFLOP/s"] = flops / spent / 1e9 if flops else None
            if "cuda" in row:
                row["ratio"] = row["cuda"] / spent
        found.append(row)
        print(line(row), flush=True)
    torch_tandem.set_mode("coexec")
    return found


def line(row: dict) -> str:
    """Format a kernel's row."""

    def shown(key: str, unit: str, factor: float = 1) -> str:
        value = row.get(key)
        return f"{value * factor:.3g} {unit}" if value else ""

    rates = shown("GB/s", "GB/s") or shown("GFLOP/s", "GFLOP/s")
    failed = next((f"{k}: {v}" for k, v in row.items() if k.endswith("failed")), "")
    beside = f"cuda {shown('cuda', 'us', 1e6)}, {row['ratio']:.2f} of it" if "ratio" in row else ""
    return f"{row['kernel']:18} {shown('tandem', 'us', 1e6):>12} {rates:>14}  {beside}{failed}"


def dispatch_cost() -> dict:
    """Measure the cost of a tiny op in a long step, in microseconds: wall-clock and PythonRunner's time."""
    x = torch.ones(64, device="tandem")

    def step() -> None:
        y = x
        for _ in range(1000):
            y = y + 1
        torch_tandem.mark_step()

    for _ in range(6):
        step()
    torch_tandem.synchronize()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        step()
        issued = time.perf_counter() - start
        torch_tandem.synchronize()
        times.append((time.perf_counter() - start, issued))
    whole, issued = (statistics.median(t) for t in zip(*times, strict=True))
    return {"us an operator": whole * 1e3, "us of Python's": issued * 1e3}


CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import importlib, torch
name, way, budget = sys.argv[2], sys.argv[3], float(sys.argv[4])
if way == "tandem":
    import torch_tandem
    from torch_tandem import cuda_alias
    cuda_alias.install()
module = importlib.import_module("benches.programs." + name)
from _main import seed
seed()
step = module.make("cuda")
if way == "compile":
    torch._dynamo.config.cache_size_limit = 64
    step = torch.compile(step)
begin = time.perf_counter()
losses, times = [], []
while time.perf_counter() - begin < budget and len(times) < 60:
    start = time.perf_counter()
    losses.append(float(step()))
    times.append(time.perf_counter() - start)
late = sorted(times[len(times) // 2 :])
answer = {"ms": 1e3 * late[len(late) // 2], "steps": len(times), "losses": losses[:5]}
if way == "tandem":
    answer["host_ops"] = torch_tandem.report()["host_ops"]
print(json.dumps(answer))
"""


def run_program(name: str, way: str, budget: float) -> dict:
    """Measure a program's step in a separate process: the median of the second half of its steps."""
    command = [sys.executable, "-c", CHILD, str(ROOT), name, way, str(budget)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=budget * 2 + 40)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": "no answer in time"}
    except (IndexError, json.JSONDecodeError):
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}


def measure_programs(names: list[str], ways: list[str], deadline: float) -> list[dict]:
    """Measure the programs of the suite until the deadline. Skipped programs are named in the result."""
    rows = []
    for number, name in enumerate(names):
        left = deadline - time.monotonic()
        share = left / (len(names) - number) / (len(ways) + 1)
        row: dict[str, Any] = {"program": name}
        if share < 1:
            row["left out"] = "the time was up"
        else:
            for way in ways:
                row[way] = run_program(name, way, min(share, 8))
        rows.append(row)
        shown = ", ".join(f"{way} {row[way].get('ms', math.nan):.1f} ms" for way in ways if way in row)
        failures = "; ".join(f"{w}: {row[w]['failed']}" for w in ways if "failed" in row.get(w, {}))
        print(f"{name:20} {shown} {failures}{row.get('left out', '')}", flush=True)
    return rows


def facts() -> dict:
    """Return the adapters, versions and machine that the figures were measured on."""
    known: dict[str, Any] = {"adapters": torch_tandem.list_devices(), "torch": torch.__version__}
    known |= {"machine": platform.platform(), "cpus": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    if torch.cuda.is_available():
        known["cuda"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return known


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=int, help="size of the kernels' tensors; 2048 on a GPU")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="these of the suite")
    parser.add_argument("--no-programs", action="store_true")
    parser.add_argument("--json", metavar="FILE", default="gpu.json")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    has_cuda = torch.cuda.is_available()
    torch.ones(1, device="tandem").add_(1).cpu()
    used = torch_tandem.report()["device"]
    if used is None:
        parser.error("there is no graphics adapter: see `tandem devices` and TANDEM_DEVICE")
    software = any(d["name"] == used["name"] and d["kind"] == "software" for d in torch_tandem.list_devices())
    result = {"facts": facts() | {"used": used["name"], "software": software}}
    print(json.dumps(result["facts"], indent=2))
    if software:
        print("A SOFTWARE ADAPTER: this shows that everything runs, and nothing of speed.")
    result["kernels"] = measure_kernels(
        options.scale or (128 if software else 2048), ["tandem", *(["cuda"] if has_cuda else [])]
    )
    result["dispatch"] = dispatch_cost()
    print(result["dispatch"])
    if not options.no_programs:
        ways = list(WAYS) if has_cuda else ["tandem"]
        result["programs"] = measure_programs(options.program or PROGRAMS, ways, deadline)
    with open(options.json, "w") as file:
        json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
