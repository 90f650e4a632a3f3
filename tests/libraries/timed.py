"""Runs a program and writes the times of its iterations to times.json: `timed.py eager|tandem PROGRAM`.

An iteration ends with `optimizer.step()` or, before the first such call, with the outermost call of a module
without gradients, as for Tandem (`torch_tandem/_device/iterations.py`). Tandem's work is asynchronous, so
iterations are timed in blocks, and the end of a block waits for the work. Apart from this, the program runs
as with `python PROGRAM` and `tandem run PROGRAM`.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

BLOCK = 5
"""Number of iterations in a block. Programs are short, so it is small; it is more than 1 so that Python can
run ahead.
"""


class Clock:
    """Times of blocks of iterations, in seconds per iteration."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.blocks: list[float] = []
        self.iterations = 0
        self.trains = self.inside = False
        self.call = nn.Module.__call__
        nn.Module.__call__ = self.watching()
        register_optimizer_step_post_hook(self.after_step)
        self.start = time.perf_counter()

    def watching(self) -> Callable:
        def call(module, *args, **kwargs):
            if self.inside or torch.compiler.is_compiling():
                return self.call(module, *args, **kwargs)
            self.inside = True
            try:
                return self.call(module, *args, **kwargs)
            finally:
                self.inside = False
                if not torch.is_grad_enabled():
                    self.end_iteration()

        return call

    def after_step(self, *_) -> None:
        if not self.trains:
            # Calls before the training, for example to infer shapes, do not count as iterations.
            self.trains, self.blocks, self.iterations = True, [], 0
            nn.Module.__call__ = self.call
        self.end_iteration()

    def end_iteration(self) -> None:
        self.iterations += 1
        if self.iterations % BLOCK == 0:
            self.wait()
            now = time.perf_counter()
            self.blocks.append((now - self.start) / BLOCK)
            self.start = now


def main(side: str, program: str) -> int:
    sys.argv[:] = [program]
    folder, status = os.getcwd(), 0
    if side == "eager":
        clock = Clock(lambda: None)
        sys.path[0] = folder
        runpy.run_path(program, run_name="__main__")
    else:
        import torch_tandem
        from torch_tandem import cli

        clock = Clock(torch_tandem.synchronize)
        status = cli.main(["run", "--quiet", program])
    with open(f"{folder}/times.json", "w") as file:
        json.dump(clock.blocks, file)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
