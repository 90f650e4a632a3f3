"""A few random programs; `make fuzz` runs more."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_random_programs_agree():
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "64", "--seed", "1", "--shrink", "60"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
