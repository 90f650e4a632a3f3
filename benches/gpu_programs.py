"""Programs of the GPU check: the suite, and models of realistic size, with CUDA and with Tandem.

Libraries are imported once. Each measurement then runs in a forked process with its own time limit.
"""

import contextlib
import importlib
import json
import math
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROGRAMS = Path(__file__).resolve().parent / "programs"
FIRST = [
    *("resnet50", "gpt2", "vit", "lbfgs", "yolov3", "gnn", "beam_search", "tiny_mlp", "digits"),
    *("reinforce", "tree_lstm"),
]
"""Programs of different kinds, which are measured before the other programs."""
MAX_STEPS = 60
SET_UP = 20
"""Seconds that a program may take to make its model and data, in addition to its share of the time."""
LEAST, MOST = 10, 16
"""Minimum and maximum seconds for a program. The first steps compile kernels, so with less time only they
would be measured.
"""

Row = Callable[..., None]


def forked(work: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """Run `work` in a forked process. Return its answer, or the reason why it gave none."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(2, 1)
        try:
            answer = work()
        except BaseException as error:
            answer = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        with contextlib.suppress(BaseException):
            os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], limit)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading) as file:
        text = file.read() if ready else ""
    return json.loads(text) if text else {"failed": "no answer in time" if not ready else "the process died"}


def measured(make: Callable[[], Callable[[], Any]], way: str, seconds: float) -> dict[str, Any]:
    """Return the median time of the second half of the steps, the first losses, and Tandem's counters."""
    if way == "tandem":
        import torch_tandem
        from torch_tandem import cuda_alias

        cuda_alias.install()
    step = make()
    if way == "compile":
        step = torch.compile(step)
    begin = time.perf_counter()
    losses, times = [], []
    while time.perf_counter() - begin < seconds and len(times) < MAX_STEPS:
        start = time.perf_counter()
        losses.append(float(step()))
        times.append(time.perf_counter() - start)
        if way == "tandem" and len(times) == MAX_STEPS // 2:
            torch_tandem.reset_report()
    answer: dict[str, Any] = {
        "ms": statistics.median(times[len(times) // 2 :]) * 1e3,
        "first_s": times[0],
        "steps": len(times),
        "losses": losses[:5],
    }
    if way == "tandem":
        report = torch_tandem.report()
        counted = max(len(times) - MAX_STEPS // 2, 0) or len(times)
        waited = sum(fetch["wait_us"] for fetch in report["fetches"])
        answer |= {"host_ops": report["host_ops"], "fetch_wait_us": waited / counted}
        answer["dispatches"] = sum(d["dispatches"] for d in report["devices"]) / counted
        answer["submissions"] = sum(d["submissions"] for d in report["devices"]) / counted
    return answer


def ways() -> list[str]:
    """Return the ways to run a program."""
    return ["cuda", "tandem"] if torch.cuda.device_count() else ["tandem"]


def compared(
    name: str, make: Callable[[], Callable[[], Any]], all_of: list[str], share: float, row: Row
) -> None:
    """Measure a program in each way, and print its row."""
    values: dict[str, Any] = {}
    for way in all_of:
        # Tandem and torch.compile get twice the time, because they compile in the first steps.
        seconds = share * (1 if way == "cuda" else 2) / (2 * len(all_of) - ("cuda" in all_of))
        answer = forked(lambda way=way, seconds=seconds: measured(make, way, seconds * 0.6), seconds + SET_UP)
        values |= {f"{way}_{key}": value for key, value in answer.items()}
    if "cuda_losses" in values and "tandem_losses" in values:
        pairs = zip(values["cuda_losses"], values["tandem_losses"], strict=False)
        values["losses_differ_by"] = max((abs(a - b) / (abs(a) + 1e-6) for a, b in pairs), default=math.nan)
    if "cuda_ms" in values and "tandem_ms" in values:
        values["cuda_by_tandem"] = values["cuda_ms"] / values["tandem_ms"]
    row(row="program", program=name, **values)


def suite(budget: float, row: Row) -> None:
    """Measure the programs of the suite until the time is up."""
    deadline = time.monotonic() + budget
    names = FIRST + sorted({path.stem for path in PROGRAMS.glob("[!_]*.py")} - set(FIRST))
    modules: dict[str, Any] = {}
    for name in names:
        try:
            modules[name] = importlib.import_module(f"benches.programs.{name}")
        except ImportError as error:
            row(row="program", program=name, failed=str(error)[:200])
    import _main

    for number, (name, module) in enumerate(modules.items()):
        left = deadline - time.monotonic()
        share = min(max(left / (len(modules) - number), LEAST), MOST)
        if share > left:
            row(row="left out", programs=list(modules)[number:])
            break

        def make(module: Any = module) -> Callable[[], Any]:
            _main.seed()
            return module.make("cuda" if torch.cuda.device_count() else "tandem")

        compared(name, make, ways(), share, row)


def training(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor] | torch.Tensor, half: bool
) -> Callable[[], Any]:
    """Return a training step, under autocast to bfloat16 if `half`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            named = isinstance(inputs, dict)
            loss = model(**inputs).loss if named else model(inputs).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def models() -> dict[str, Callable[[str], tuple[torch.nn.Module, Any]]]:
    """Return functions that make models of realistic size, with their inputs."""

    def resnet50(device: str) -> tuple[torch.nn.Module, Any]:
        from timm import create_model

        return create_model("resnet50").to(device), torch.randn(64, 3, 224, 224, device=device)

    def gpt2(device: str) -> tuple[torch.nn.Module, Any]:
        from transformers import GPT2Config, GPT2LMHeadModel

        words = torch.randint(0, 50257, (8, 1024), device=device)
        return GPT2LMHeadModel(GPT2Config()).to(device), {"input_ids": words, "labels": words}

    def bert(device: str) -> tuple[torch.nn.Module, Any]:
        from transformers import BertConfig, BertForSequenceClassification

        words = torch.randint(0, 30522, (32, 256), device=device)
        labels = torch.randint(0, 2, (32,), device=device)
        return BertForSequenceClassification(BertConfig()).to(device), {"input_ids": words, "labels": labels}

    return {"resnet50 64x224": resnet50, "gpt2-124m 8x1024": gpt2, "bert-base 32x256": bert}


def real(budget: float, row: Row) -> None:
    """Measure models of realistic size, also with torch.compile."""
    deadline = time.monotonic() + budget
    cases = [(name, make, half) for half in (False, True) for name, make in models().items()]
    all_of = [*ways(), *(["compile"] if torch.cuda.device_count() else [])]
    for number, (name, make_model, half) in enumerate(cases):
        share = (deadline - time.monotonic()) / (len(cases) - number)

        def make(make_model: Any = make_model, half: bool = half) -> Callable[[], Any]:
            torch.manual_seed(0)
            model, inputs = make_model("cuda" if torch.cuda.device_count() else "tandem")
            return training(model.train(), inputs, half)

        compared(f"{name} {'bfloat16' if half else 'float32'}", make, all_of, share, row)
