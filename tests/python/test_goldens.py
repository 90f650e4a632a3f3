"""Texts that must not change by accident: WGSL of typical kernels, plans of programs.

`TANDEM_UPDATE_GOLDENS=1 pytest tests/python/test_goldens.py` writes the texts anew, so that the diff can be
reviewed.
"""

import os
import pathlib
import re
import textwrap

import forked
import pytest
import torch_tandem

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "goldens"

WGSL = {
    "contraction": (
        "mm",
        """
        a, b = torch.ones(40, 24, device="tandem"), torch.ones(24, 36, device="tandem")
        (a @ b).cpu()
        """,
    ),
    "reduction": (
        "reduce",
        """
        torch.ones(5, 3000, device="tandem").sum(1).cpu()
        """,
    ),
    "attention": (
        "attention",
        """
        q = torch.ones(2, 4, 33, 16, device="tandem")
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).cpu()
        """,
    ),
    "bundle": (
        "group",
        """
        parameters = [torch.ones(n, device="tandem") for n in (3, 17, 40)]
        for step in range(12):
            torch._foreach_mul_(parameters, 0.5)
            torch._foreach_add_(parameters, 1.0)
            torch_tandem.mark_step()
        torch_tandem.synchronize()
        """,
    ),
}

# Settings for the weakest adapter that WebGPU allows. The text of a kernel depends on nothing else.
ANY_ADAPTER = {
    "TANDEM_DEVICE": "gpu",
    "TANDEM_ALLOW_SOFTWARE": "1",
    "TANDEM_GPU_WITHOUT": "int64,f64,f16,immediates,limits",
    "TANDEM_DEBUG": "5",
}

PLANS = ("tiny_mlp", "linear_sgd", "digits")


def logged(command: list[str], env: dict[str, str]) -> str:
    """The log of a Python program."""
    env = os.environ | env
    done = forked.run(command, env, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def compare(file: str, text: str) -> None:
    """Compare a text with the kept text, or write the kept text."""
    path = FOLDER / file
    if os.environ.get("TANDEM_UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; TANDEM_UPDATE_GOLDENS=1 writes it"


@pytest.mark.parametrize("name", WGSL)
def test_wgsl(name):
    if not torch_tandem.list_devices():
        pytest.skip("there is no graphics adapter")
    label, code = WGSL[name]
    log = logged(["-c", "import torch, torch_tandem\n" + textwrap.dedent(code)], ANY_ADAPTER)
    kernels = dict(re.findall(r"^TRACE ([\w ]+):\n(.*?)\n(?=\n|TRACE)", log, re.MULTILINE | re.DOTALL))
    compare(f"{name}.wgsl", kernels[label] + "\n")


@pytest.mark.parametrize("program", PLANS)
def test_plans(program):
    script = ["-m", "torch_tandem", "run", f"benches/programs/{program}.py", "--steps", "14"]
    env = {"TANDEM_DEVICE": "cpu", "TANDEM_KERNELS": "own", "TANDEM_RUNNER": "inline", "TANDEM_DEBUG": "4"}
    actions = re.findall(r"^(?:TRACE )?((?:\[.*\] |aten::).*)$", logged(script, env), re.MULTILINE)
    compare(f"{program}.plan", "\n".join(actions) + "\n")
