"""A few random programs of functions; `make fuzz` runs more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.functions import generate
from tests.fuzz.functions.scenes import SCENES

ROOT = Path(__file__).parents[2]


def test_each_scene_is_a_part_of_programs():
    # A program that does not compile is left out, and so would be a scene that never compiles.
    missing = []
    for scene in SCENES:
        for body in scene.body:
            play = generate.Play(1, scene, body)
            setup, statement, names = play.render()
            source = "\n".join([scene.setup.format(n=1), *setup, "def f0(y, a1):", *_indented(statement)])
            source += "\n" + "; ".join(f"# {generate.in_one_line(name)}" for name in names)
            for change in scene.changes or ("pass",):
                try:
                    compile(
                        f"{source}\nif True:\n" + "\n".join(_indented(change.format(n=1))), "<scene>", "exec"
                    )
                except SyntaxError as error:
                    missing.append((scene.name, body, change, error))
    assert not missing


def test_programs_have_scenes_of_several_lines():
    found = re.findall(r"body [^;]*\\n", "".join(generate.program(seed).source() for seed in range(200)))
    assert len(found) > 5


def _indented(text: str) -> list[str]:
    return ["    " + line for line in text.split("\n")]


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
