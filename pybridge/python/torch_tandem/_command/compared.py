"""One side of `tandem compare`: runs a script in this process, a block of iterations at a time.

The command runs this file by its path, so that the eager side does not import `torch_tandem`. The process
reads the number of iterations of its next block from one pipe, and writes its measurements to another pipe,
as lines of JSON. Between blocks the process waits.
"""

import contextlib
import functools
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, NoReturn
from urllib.parse import unquote

PROFILE = "profile"
"""The word in a request that asks for a block which is profiled by operator."""
RECORD = "record"
"""The word in a request that asks for a block whose report, timeline and graph are kept for a page."""
PAGE = "page="
"""The beginning of the word in a request, without iterations, that asks for the page of what was kept.

The rest of the word is JSON in the quoting of URLs: the path, and the measured speed.
"""


QUERIES = {
    "torch.accelerator": ("is_available", "device_count", "current_accelerator"),
    "torch.cuda": ("is_available", "device_count"),
}
"""Functions by which a script detects an accelerator. Their answers on the two sides may differ."""


def _watch_queries(asked: dict[str, str]) -> None:
    """Note the answers that the program and its libraries get from `QUERIES`, by query and line."""
    for module_name, names in QUERIES.items():
        module = importlib.import_module(module_name)
        for name in names:
            if query := getattr(module, name, None):
                setattr(module, name, _noting(query, f"{module_name}.{name}()", asked))


def _noting(query: Callable, name: str, asked: dict[str, str]) -> Callable:
    folder = os.path.dirname(sys.modules["torch"].__file__) + os.sep

    @functools.wraps(query)
    def noting(*args: Any, **kwargs: Any) -> Any:
        answer, caller = query(*args, **kwargs), sys._getframe(1)
        if not caller.f_code.co_filename.startswith(folder):
            asked.setdefault(f"{name} at {caller.f_code.co_filename}:{caller.f_lineno}", repr(answer))
        return answer

    return noting


class Side:
    """The script's iterations on one side. This class is eager PyTorch on the CPU; a subclass is Tandem."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests = os.fdopen(requests)
        self.answers = os.fdopen(answers, "w")
        self.left = 0  # iterations until the end of the block
        self.steps = 0  # iterations of the block
        self.losses: list[Any] = []  # scalars whose gradients the block's iterations computed
        self.asked: dict[str, str] = {}  # answers to the script's queries for accelerators
        self.profiled = self.recorded = False
        self.started = time.perf_counter()
        self.profiler: Any = None

    def install(self, script: Any) -> None:
        """Prepare the process before the script runs."""
        import torch
        from torch import nn
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch.erf(torch.zeros(1))  # as Tandem does (device/threads.h), so that both sides have the same bits
        torch.manual_seed(0)
        random.seed(0)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(0)
        _watch_queries(self.asked)
        hide_frames = load_file("_program", "tracebacks").hide_frames
        backward, call = torch.autograd.backward, nn.Module.__call__
        inside = False

        def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            self.losses += [t.detach() for t in roots if isinstance(t, torch.Tensor) and t.numel() == 1][:1]
            try:
                backward(tensors, *args, **kwargs)
            except BaseException as error:
                hide_frames(error)
                raise

        def watched_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            is_outermost, inside = not inside, True
            try:
                return call(module, *args, **kwargs)
            except BaseException as error:
                hide_frames(error)
                raise
            finally:
                if is_outermost:
                    inside = False
                    if not torch.is_grad_enabled():
                        self.end_iteration()

        def after_step(*_: Any) -> None:
            # As for Tandem: once there is an optimizer, only its steps end iterations.
            if nn.Module.__call__ is watched_call:
                nn.Module.__call__ = call
            self.end_iteration()

        torch.autograd.backward = watched_backward
        nn.Module.__call__ = watched_call
        register_optimizer_step_post_hook(after_step)

    def wait(self) -> None:
        """Wait for all work of the device."""

    def end_iteration(self) -> None:
        """Count an iteration. At the end of a block, report the block and wait for the next request."""
        self.steps += 1
        if self.steps > self.left:
            self.end_block(False)

    def end_block(self, is_last: bool) -> None:
        """Report the block. Unless `is_last`, wait for a request and start the next block."""
        self.wait()
        seconds = time.perf_counter() - self.started
        if self.profiled:
            operators = self.stop_profile()
        if self.recorded:
            self.keep()
        answer = {
            "seconds": seconds,
            "steps": self.steps,
            "losses": [float(loss) for loss in self.losses],
            "resident": _peak_resident(),
            "asked": self.asked,
            "operators": operators if self.profiled else {},
            "last": is_last,
        }
        print(json.dumps(answer), file=self.answers, flush=True)
        if is_last and not self.has_kept():
            return
        count, *options = self.requests.readline().split() or self.end()
        for page in (option.removeprefix(PAGE) for option in options if option.startswith(PAGE)):
            self.write_page(**json.loads(unquote(page)))
            print("{}", file=self.answers, flush=True)
        self.left, self.steps, self.losses = int(count) - 1, 0, []
        if self.left < 0:
            self.end()
        self.profiled, self.recorded = PROFILE in options, RECORD in options
        if self.recorded:
            self.record()
        if self.profiled:
            self.start_profile()
        self.started = time.perf_counter()

    def end(self) -> NoReturn:
        """End the process, because enough was measured or because the other side has ended."""
        os._exit(0)

    def record(self) -> None:
        """Begin to record what a page shows. There is no page of eager's side."""

    def keep(self) -> None:
        """Keep what was recorded."""

    def has_kept(self) -> bool:
        return False

    def write_page(self, path: str, compared: dict[str, float] | None) -> None:
        """Write the page of what was kept."""

    def start_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiler.start()

    def stop_profile(self) -> dict[str, list[float]]:
        """Return the time in seconds, inner operators included, and the number of calls of each operator."""
        self.profiler.stop()
        rows = self.profiler.key_averages()
        return {r.key: [r.cpu_time_total * 1e-6, r.count] for r in rows if "::" in r.key}


def _peak_resident() -> int:
    """Return the peak of this process's resident memory, in bytes; 0 on Windows, where Python has none."""
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Tandem(Side):
    """The script's iterations on Tandem, run as `tandem run` does."""

    def install(self, script: Any) -> None:
        import torch_tandem
        from torch_tandem import adopt, cuda_alias
        from torch_tandem._compile import torch_compile

        self.api = torch_tandem
        self.kept: tuple | None = None
        torch_compile.install(False)
        cuda_alias.install()
        adopt.install_unless_it_chooses(script.source())
        super().install(script)

    def wait(self) -> None:
        self.api.synchronize()

    def record(self) -> None:
        self.api.record()
        self.api.reset_report()

    def keep(self) -> None:
        from torch_tandem import _core

        self.kept = self.api.report(), _core.timeline(), _core.graph()
        self.api.record(False)

    def has_kept(self) -> bool:
        return self.kept is not None

    def write_page(self, path: str, compared: dict[str, float] | None) -> None:
        from torch_tandem._report import page
        from torch_tandem._report.findings import Compared

        assert self.kept is not None, "a block was recorded"
        page.write(path, *self.kept, compared and Compared(**compared))

    def start_profile(self) -> None:
        self.record()

    def stop_profile(self) -> dict[str, list[float]]:
        """Return the time in seconds and the number of calls of each kernel. Its name lists its operators."""
        found: dict[str, list[float]] = {}
        for kernel in self.api.report()["kernels"]:
            figures = found.setdefault(" ".join(kernel["ops"]), [0.0, 0])
            figures[0] += kernel["exec_us"] * 1e-6
            figures[1] += kernel["count"]
        self.api.record(False)
        return found


def main(side: str, requests: str, answers: str, kind: str, name: str, *args: str) -> int:
    """Run a script or module (`kind`) until it ends or enough was measured."""
    scripts = load_file("_program", "scripts")
    script = scripts.find_module(name) if kind == "module" else scripts.find_file(name)
    it = (Tandem if side == "tandem" else Side)(int(requests), int(answers))
    alias = None
    if side == "eager" and not _has_cuda():
        alias = load_file("_command", "cuda_on_cpu")
        kernels = alias.install()  # noqa: F841, as long as it exists
    it.install(script)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # both sides print the same
        status, error = scripts.run(script, list(args), load_file("_program", "tracebacks").hide_all_frames)
    if alias is not None and alias.is_reason(error):
        print(alias.ADVICE, file=sys.stderr)
    if status == 0:
        it.end_block(True)
    return status


def load_file(folder: str, name: str) -> ModuleType:
    """Load a file of the package without importing the package."""
    package = os.path.dirname(os.path.dirname(__file__))
    spec = spec_from_file_location(name, os.path.join(package, folder, f"{name}.py"))
    module = module_from_spec(spec)
    sys.modules[f"{name} of tandem compare"] = module
    spec.loader.exec_module(module)
    return module


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C, the command ends without the script's traceback
    status = main(*sys.argv[1:])
    os._exit(status)  # worker processes of the script do not delay the end
