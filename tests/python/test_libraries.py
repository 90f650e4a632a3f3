"""A sample of the programs of `tests/libraries`, and the comparisons, measurements and pages of `make
libraries`.

The sample uses libraries of the project's environment. `make libraries` runs all programs.
"""

import os
import sys

import forked
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.libraries import environments, program, run
from tests.libraries.__main__ import news
from tests.libraries.compare import ABSOLUTE, FIRST, RELATIVE, Agreement, near_values, same_text
from tests.libraries.known import KNOWN
from tests.libraries.page import page

PROGRAMS = {found.name: found for found in program.all_programs()}
SAMPLE = ("accelerate", "ignite", "skorch", "torchmetrics")


def text_of(name: str, arguments: list[str], folder, **env: str) -> str:
    folder.mkdir()
    path = PROGRAMS[name].copy_to(folder)
    ran = forked.run([*arguments, str(path)], {**os.environ, **run.ENVIRONMENT, **env}, folder)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.parametrize("name", SAMPLE)
def test_programs_print_what_they_print_in_eager(name, tmp_path):
    assert PROGRAMS[name].is_installed()
    expected = text_of(name, [], tmp_path / "eager")
    arguments, variables = run.WAYS["PyTorch's kernels"]
    assert text_of(name, arguments, tmp_path / "tandem", **variables) == expected


# --- programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_pin_their_library_and_do_not_know_tandem(name):
    found = PROGRAMS[name]
    assert "==" in found.requirements[0]
    assert found.does.endswith(".")
    assert "tandem" not in (program.FOLDER / f"{name}.py").read_text().lower()


def test_listed_programs_exist():
    assert set(KNOWN) <= set(PROGRAMS)


def made(folder, text: str, monkeypatch, requirements: str = '"torch"') -> program.Program:
    path = folder / "small.py"
    path.write_text(f'"""Does it."""\n\n# /// script\n# dependencies = [{requirements}]\n# ///\n{text}')
    monkeypatch.setattr(program, "FOLDER", folder)
    return program.read(path)


def test_metadata(tmp_path, monkeypatch):
    found = made(tmp_path, "", monkeypatch, '"einops==0.8.2", "torch"')
    assert (found.name, found.does, found.library, found.version) == ("small", "Does it.", "einops", "0.8.2")
    assert made(tmp_path, "", monkeypatch).is_installed()
    assert not made(tmp_path, "", monkeypatch, '"torch==0.1"').is_installed()
    assert not made(tmp_path, "", monkeypatch, '"a-library-that-is-not-there"').is_installed()
    (tmp_path / "small.py").write_text('"""Does it."""\n')
    with pytest.raises(ValueError, match=r"small\.py lacks a docstring or the metadata of a script"):
        program.read(tmp_path / "small.py")


# --- comparison --------------------------------------------------------------------------------

numbers = st.lists(st.floats(-1e6, 1e6), min_size=FIRST, max_size=2 * FIRST)


def printed(values: list[float]) -> str:
    return "".join(f"loss_{n} {value!r}\n" for n, value in enumerate(values))


@given(numbers, st.integers(0, 2 * FIRST), st.floats(0, 3))
def test_the_first_values_are_held_to_the_tolerance(values, place, error):
    place %= len(values)
    room = max(RELATIVE * abs(values[place]), ABSOLUTE)
    other = [*values]
    other[place] += error * room
    if abs(error - 1) < 0.01:
        return  # the bound is relative to the value with the larger magnitude
    assert near_values(printed(values), printed(other)).agrees == (error < 1 or place >= FIRST)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("loss 1.0", "error 1.0"),
        ("1 2", "1 2 3"),
        ("1.0\n2.0", "1.0 2.0"),
        ("0.5", "nan"),
        ("inf", "-inf"),
        ("1e300", "inf"),
        ("True 1", "False 1"),
        ("[1, 2]", "[1, 3]"),
        ("-1e-3", "1e-3"),
        ("width10", "width11"),
    ],
)
def test_texts_that_differ(expected, found):
    assert not near_values(expected, found).agrees
    assert not same_text(expected, found).agrees


def test_differences_are_told():
    assert near_values("a 1.0 b nan -inf", "a 1.00001 b nan -inf") == Agreement(True, "1e-05")
    later = "1 " * FIRST
    assert near_values(f"{later}1.0", f"{later}1.5") == Agreement(True, "0e+00, later 3e-01")
    assert near_values("1 2", "1 2.5") == Agreement(False, "value 2 is 2.5, not 2.0")
    assert same_text("1\n2\n", "1\n2\n") == Agreement(True, "same")
    assert same_text("1\n2\n", "1\n3\n") == Agreement(False, "line 2 is '3', not '2'")
    assert same_text("1\n2\n", "1\n") == Agreement(False, "1 lines, not 2")


# --- runs --------------------------------------------------------------------------------------

TRAINS = """
import torch
layer = torch.nn.Linear(2, 2)
with torch.no_grad():
    layer(torch.ones(1, 2))
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(20):
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("done")
"""


def test_runs_are_timed_and_counted(tmp_path, monkeypatch):
    trains = made(tmp_path, TRAINS, monkeypatch)
    eager, aten, own = (
        run.run(trains, sys.executable, way) for way in ("eager", "PyTorch's kernels", "own kernels")
    )
    assert eager.text == aten.text == own.text == "done\n"
    assert 0 < eager.seconds < 1 and 0 < own.seconds < 1
    assert aten.report["ops_coexecuted"] > 20


def test_a_run_that_fails_tells_why(tmp_path, monkeypatch):
    raises = made(tmp_path, "print(1)\nraise ValueError('no\\nnumber')", monkeypatch)
    with pytest.raises(run.Failed, match=r"^status 1: ValueError: no$"):
        run.run(raises, sys.executable, "eager again")


def test_a_run_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LIMIT", 0.2)
    with pytest.raises(run.Failed, match=r"not finished after 0\.2 s"):
        run.run(made(tmp_path, "while True: ...", monkeypatch), sys.executable, "eager again")


SMALL = program.Program("small", "Does it.", ("torch",))
OUTCOMES = {
    "fails in eager": ({"eager": run.Failed("none")}, "in eager PyTorch: none", "not run"),
    "fails": ({"PyTorch's kernels": run.Failed("none")}, "none", "0e+00"),
    "fails with own kernels": ({"own kernels": run.Failed("none")}, "same", "none"),
    "differs": (
        {"PyTorch's kernels": "2", "own kernels": "3"},
        "line 1 is '2', not '1'",
        "value 1 is 3.0, not 1.0",
    ),
    "varies": (
        {"PyTorch's kernels": "2", "eager again": "3"},
        "line 1 is '2', not '1'; eager PyTorch, run again: line 1 is '3', not '1'",
        "0e+00",
    ),
    "agrees": ({}, "same", "0e+00"),
}


@pytest.mark.parametrize(("outcomes", "bits", "values"), OUTCOMES.values(), ids=OUTCOMES)
def test_what_fails_is_a_part_of_the_result(outcomes, bits, values, monkeypatch):
    def fake(program, python, way):
        found = outcomes.get(way, "1")
        if isinstance(found, run.Failed):
            raise found
        return run.Run(found, 0.25, {})

    monkeypatch.setattr(run, "run", fake)
    found = run.compared(SMALL, sys.executable)
    assert found.bits.text.startswith(bits) and found.values.text == values
    assert news([found]) == ([] if bits == "same" else [f"not known to differ: small: {found.bits.text}"])
    rows = [f"| torch | PyTorch's kernels | {found.bits.text} | |", f"| torch | own kernels | {values} | |"]
    assert [row in page([found]) for row in rows] == [bits != "same", values not in ("0e+00", "not run")]


def test_listed_programs_must_differ(monkeypatch):
    monkeypatch.setitem(KNOWN, "small", "for a reason")
    same, other = Agreement(True, "same"), Agreement(False, "other")
    assert news([run.Result(SMALL, same)]) == ["known to differ, and does not: small"]
    assert news([run.Result(SMALL, other)]) == []
    assert "| torch | PyTorch's kernels | other | for a reason |" in page([run.Result(SMALL, other)])


def test_programs_that_conflict_are_in_groups_of_their_own(monkeypatch):
    def agree(programs) -> bool:
        """Whether the programs agree on one version of each library."""
        wanted = {requirement for program in programs for requirement in program.requirements}
        return len(wanted) == len({requirement.split("==")[0] for requirement in wanted})

    monkeypatch.setattr(environments, "_agree", agree)
    wanted = {"a": "x==1", "b": "x==2", "c": "y==1", "d": "x==1", "e": "x==3"}
    found = environments._divide([program.Program(name, "", (text,)) for name, text in wanted.items()])
    assert [[program.name for program in group] for group in found] == [["a", "c", "d"], ["b"], ["e"]]
