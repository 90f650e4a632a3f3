"""Drift of losses that rounding alone causes, and the difference between Tandem's losses and eager's.

Kernels that add in a different order round differently, and training can amplify this: a value crosses zero
at a relu, or a draw falls on the other side of a threshold. Each program therefore runs eagerly once
unchanged, and several times with random changes of at most one unit in the last place in the results of
operators that are not exactly rounded. Over the steps in which all of these runs agree to 1e-5, an
implementation can be expected to match eager to 1e-5.
"""

import argparse
import functools
from types import ModuleType
from typing import Any

import torch
from measure import RUNNERS, WARM_UP, Runner, Side, load
from run import PROGRAMS
from tables import table, write_section
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOLERANCE = 1e-5
RUNS = 5

INEXACT = frozenset(
    [
        *("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution", "convolution_backward"),
        *("sum", "mean", "var", "std", "var_mean", "cumsum", "logsumexp", "linalg_vector_norm", "norm"),
        *("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "sin", "cos", "erf", "pow", "rsqrt", "logit"),
        *("gelu", "silu", "softplus", "elu", "mish", "addcmul", "addcdiv", "lerp", "addcmul_", "addcdiv_"),
        *("tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "softplus_backward"),
        *(
            "elu_backward",
            "mish_backward",
            "lerp_",
            "_foreach_addcmul_",
            "_foreach_addcdiv_",
            "_foreach_lerp_",
        ),
        *("_foreach_norm", "_foreach_pow", "_softmax", "_log_softmax", "_softmax_backward_data"),
        *("_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"),
        *("native_group_norm", "native_group_norm_backward", "native_batch_norm"),
        *("native_batch_norm_backward", "embedding_dense_backward", "mse_loss", "nll_loss_forward"),
        *("binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits"),
        *("smooth_l1_loss", "avg_pool2d", "_adaptive_avg_pool2d", "_thnn_fused_lstm_cell", "roi_align"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_roi_align_backward"),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ]
)
"""Operators for whose results PyTorch does not promise the last bit."""


class LastBits(TorchDispatchMode):
    """Changes the last bits of the results of inexact operators."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] in INEXACT:
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    ulps = torch.randint(-1, 2, x.shape, generator=self.random, dtype=x.dtype)
                    x.mul_(1 + torch.finfo(x.dtype).eps * ulps)
        return result


class Disturbed(Runner):
    """Eager PyTorch with changed last bits."""

    def __init__(self, program: ModuleType, seed: int) -> None:
        with LastBits(seed):
            super().__init__(program)
        self.seed = seed

    def warm_up(self) -> dict:
        with LastBits(self.seed):
            return super().warm_up()


def drift(expected: list[float], losses: list[float]) -> list[float]:
    """Return, for each step, the maximum relative difference from the expected losses up to that step."""
    apart = [
        abs(x - y) / max(abs(x), 1e-12) if x != y else 0.0 for x, y in zip(expected, losses, strict=True)
    ]
    return [max(apart[: i + 1]) for i in range(len(apart))]


def run(program: ModuleType, way: str) -> list[float]:
    side = Side(program, way, 0)
    side.warm_up()
    side.end()
    if side.failure:
        raise RuntimeError(f"{way}: {side.failure}")
    return side.facts["losses"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=PROGRAMS, help="all unless given")
    names = parser.parse_args().programs
    ways = [f"disturbed {seed}" for seed in range(RUNS)]
    RUNNERS.update((way, functools.partial(Disturbed, seed=seed)) for seed, way in enumerate(ways))
    rows = []
    for name in names:
        program = load(name)
        eager = run(program, "eager")
        theirs = [drift(eager, run(program, way)) for way in ways]
        ours = drift(eager, run(program, "tandem"))
        allowed = sum(max(step) <= TOLERANCE for step in zip(*theirs, strict=True))
        at = max(allowed, 1) - 1
        least, most = (f"{choose(run[-1] for run in theirs):.0e}" for choose in (min, max))
        rows.append([name, str(allowed), f"{ours[at]:.0e}", f"{ours[-1]:.0e}", f"{least} to {most}"])
        print(rows[-1], flush=True)
    head = [
        "program", "steps that keep to 1e-5", "Tandem over these", f"Tandem over {WARM_UP}",
        f"eager with other last bits over {WARM_UP}",
    ]  # fmt: skip
    if names == PROGRAMS:
        write_section("losses.py", table(head, rows))


if __name__ == "__main__":
    main()
