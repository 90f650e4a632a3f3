"""Compares the results of PyTorch's operator samples on the device with those on the CPU.

python -m tests.conformance --op softmax --op 'sum*'   # these operators, with host path calls and failures
python -m tests.conformance --write docs/conformance.md # all operators, in all dtypes
"""

import argparse
import os
import sys
import time

os.environ.setdefault("TANDEM_DEVICE", "gpu")
os.environ.setdefault("TANDEM_ALLOW_SOFTWARE", "1")
os.environ.setdefault("TANDEM_GPU_CHECKS", "1")

import torch
import torch_tandem

from tests.op_db import op_db

from .check import Result, check
from .known import is_news
from .page import page

# Dtypes of the page, with the maximum number of samples that run for each operator (`None` for all samples).
DTYPES = {"float32": None, "float16": 8, "bfloat16": 8, "float64": 8, "int64": 8, "bool": 8}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", help="an operator's name, or its beginning followed by *")
    parser.add_argument("--dtype", action="append", help="float32 unless said otherwise; all for the page")
    parser.add_argument("--samples", type=int, help="the first so many samples of each")
    parser.add_argument("--write", metavar="FILE", help="write the page")
    options = parser.parse_args()
    torch_tandem.set_mode("trace")
    results, limits = [], {}
    for name in options.dtype or (DTYPES if options.write else ["float32"]):
        limit = limits[name] = options.samples or DTYPES.get(name)
        for op in op_db:
            if _wanted(op.name, options.op) and getattr(torch, name) in op.supported_dtypes("cpu"):
                results.append(_check(op, name, limit))
    if options.write:
        with open(options.write, "w") as file:
            limits = {name: limit or "all" for name, limit in limits.items()}
            file.write(page(results, torch_tandem.report()["device"]["name"], limits))
    wrong = [r for r in results if r.samples and is_news(r)]
    for r in wrong:
        print("not known to fail:" if r.failures else "known to fail, and passes:", r.name, r.dtype)
    return int(bool(wrong))


def _wanted(name: str, asked: list[str] | None) -> bool:
    return not asked or any(name == o or (o.endswith("*") and name.startswith(o[:-1])) for o in asked)


def _check(op: object, dtype: str, limit: int | None) -> Result:
    start = time.perf_counter()
    r = check(op, getattr(torch, dtype), "tandem", limit)
    seconds = time.perf_counter() - start
    print(
        f"{r.state:7} {r.name} {r.dtype}: forward {r.forward}/{r.samples}, gradient "
        f"{r.gradients_right}/{r.gradients}, native {r.native}/{r.samples}, {seconds:.1f} s "
        f"{r.host or ''}",
        flush=True,
    )
    for failure in r.failures[:3]:
        print("      ", failure[:400], flush=True)
    return r


if __name__ == "__main__":
    sys.exit(main())
