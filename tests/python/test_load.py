"""The message of the package if it cannot be loaded, with a stand-in for torch in a new interpreter."""

import subprocess
import sys

import pytest
import torch
from torch_tandem._startup import load

IMPORT = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(__version__={version!r})
try:
    import torch_tandem
except ImportError as error:
    print(error)
"""


def message(version: str) -> str:
    """Returns the error of importing the package with a version of torch."""
    code = IMPORT.format(version=version)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0+cpu", "3.0.0a0+git1234567"])
def test_an_unknown_torch_gets_a_sentence(version):
    said = message(version)
    assert said.count("\n") == 1
    assert said.startswith("torch-tandem supports torch 2.")
    assert f"but torch {version} is installed here: install one that is supported, or " in said


def test_the_shim_is_that_of_the_minor_version():
    major, minor = torch.__version__.split(".")[:2]
    assert load._shim_for(f"{major}.{minor}.99+cpu").stem == f"_shim_torch{major}{minor}"


def test_a_package_without_shims_is_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "__file__", str(tmp_path / "_startup" / "load.py"))
    with pytest.raises(ImportError, match="not built here"):
        load._shim_for(torch.__version__)
