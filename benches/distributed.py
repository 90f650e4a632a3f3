"""Step times of several ranks on this machine, beside eager PyTorch with Gloo, and the share of the
collectives' time that is hidden under kernels.

All ranks share this machine's cores, with one thread each. Tandem and eager PyTorch take turns, so that
ratios are within one run.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHILD = """
import importlib, json, random, sys, time
sys.path.insert(0, sys.argv[1])
program, wrapper, device, steps = sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
import torch, torch.distributed as dist
if device == "tandem":
    import torch_tandem
dist.init_process_group("gloo" if device == "cpu" else None)
torch.manual_seed(0)

def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)

def fsdp(model):
    from torch.distributed.fsdp import fully_shard
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)

random.seed(dist.get_rank())
wrap = {"ddp": ddp, "fsdp": fsdp}[wrapper]
step = importlib.import_module("benches.programs." + program).make(device, wrap)
times = []
for number in range(steps):
    if number == steps // 2 and device == "tandem":
        torch_tandem.reset_report()
    begin = time.perf_counter()
    step()
    times.append(time.perf_counter() - begin)
rows = torch_tandem.report()["collectives"] if device == "tandem" else []
total = {key: sum(row[key] for row in rows) for key in ("count", "bytes", "took_us", "waited_us")}
if dist.get_rank() == 0:
    print(json.dumps({"times": times[steps // 2:], "steps": steps - steps // 2, **total}))
dist.destroy_process_group()
"""


def run(ranks: int, program: str, wrapper: str, device: str, steps: int) -> dict:
    """Return rank 0's step times, and the sums of the times of its collectives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(ROOT), program, wrapper, device, str(steps)]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | shared | {"RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{program} failed on {device}")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| program | ranks | eager, ms | Tandem, ms | speed | collectives a step | MB a step | hidden |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for program, wrapper in (("digits", "ddp"), ("gpt2", "fsdp")):
        for ranks in options.ranks:
            eager, ours, rows = [], [], []
            for _ in range(options.rounds):
                eager += run(ranks, program, wrapper, "cpu", options.steps)["times"]
                rows.append(run(ranks, program, wrapper, "tandem", options.steps))
                ours += rows[-1]["times"]
            before, after = 1e3 * statistics.median(eager), 1e3 * statistics.median(ours)
            took, waited = (sum(row[key] for row in rows) for key in ("took_us", "waited_us"))
            count, sent = (rows[0][key] / rows[0]["steps"] for key in ("count", "bytes"))
            figures = f"{before:.1f} | {after:.1f} | {before / after:.2f}x | {count:.0f} | {sent / 1e6:.2f}"
            hidden = f"{100 * (took - waited) / took:.0f} %"
            print(f"| {program}, {wrapper.upper()} | {ranks} | {figures} | {hidden} |", flush=True)


if __name__ == "__main__":
    main()
