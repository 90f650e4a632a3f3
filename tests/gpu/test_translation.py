"""The kernels of programs, translated to the languages of other systems' drivers.

Only the translation is tested here, not its compilation by a driver.
"""

import os
import re
import subprocess
import sys

import pytest

from .examples import ROOT, TRANSLATE, needs_examples

PROGRAMS = ["digits", "tree_lstm", "reinforce"]
if os.environ.get("TANDEM_ALL_PROGRAMS"):
    PROGRAMS = sorted(path.stem for path in (ROOT / "benches" / "programs").glob("[!_]*.py"))
# Features of Vulkan, and 64-bit floats. Adapters without these features get no kernels that use them.
WITHOUT = "f64,int16,matrices,spirv"

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TANDEM_GPU_WITHOUT")), reason="the profiles are set here"
)


def kernels(program: str, without: str) -> set[str]:
    """The WGSL of the kernels of a program's first steps."""
    command = [sys.executable, "-m", "torch_tandem", "run", f"benches/programs/{program}.py", "--steps", "6"]
    env = os.environ | {"TANDEM_GPU_WITHOUT": without, "TANDEM_DEBUG": "5"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    blocks = re.findall(
        r"^TRACE [\w ]+:\n(.*?)(?=^(?:TRACE|DEBUG|INFO|WARN) |\Z)", done.stderr, re.MULTILINE | re.DOTALL
    )
    return {block[: block.rfind("\n}") + 3] for block in blocks if "@compute" in block}


@needs_examples
@pytest.mark.parametrize(
    "without", [WITHOUT, f"{WITHOUT},int64,f16,immediates,limits"], ids=["all", "weakest"]
)
def test_kernels_can_be_translated(tmp_path, without):
    found = set.union(*(kernels(program, without) for program in PROGRAMS))
    assert len(found) > 50
    for number, source in enumerate(sorted(found)):
        (tmp_path / f"{number}.wgsl").write_text(source)
    done = subprocess.run([TRANSLATE, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
