"""A few random programs of functions; `make fuzz` runs more."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "options", [["--programs", "80"], ["--programs", "8", "--compile"]], ids=["function", "compile"]
)
def test_functions_act_as_plain_python(options):
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.functions",
        "--seed",
        "1",
        "--jobs",
        "2",
        "--stop-after",
        "1",
        *options,
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
