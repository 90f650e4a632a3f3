"""`import torch` loads nothing of Tandem unless autoload was turned on and the process sets the variable.

Each test runs a new interpreter that sees the entry point in a folder of its own.
"""

import os
import subprocess
import sys

import pytest
from torch_tandem import autoload

IMPORT_TORCH = """
import sys, torch
print(sorted(m for m in sys.modules if m in ("torch_tandem", "torch_tandem_autoload")))
"""


@pytest.fixture
def switch(tmp_path, monkeypatch):
    """The module that turns autoload on and off, with tmp_path in place of site-packages."""
    monkeypatch.setattr(autoload, "site_packages", lambda: tmp_path)
    return autoload


def import_torch(path, code=IMPORT_TORCH, **env):
    env = {**os.environ, "PYTHONPATH": str(path), **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def test_off_loads_nothing(tmp_path):
    if autoload.is_on():
        pytest.skip("this environment has autoload on")
    assert import_torch(tmp_path, TANDEM_AUTOLOAD="1").stdout == "[]\n"


def test_on_waits_for_the_variable(switch, tmp_path):
    switch.turn_on()
    assert import_torch(tmp_path, TANDEM_AUTOLOAD="0").stdout == "['torch_tandem_autoload']\n"


def test_on_with_the_variable_loads_the_package(switch, tmp_path):
    switch.turn_on()
    assert "'torch_tandem'" in import_torch(tmp_path, TANDEM_AUTOLOAD="1").stdout


def test_a_failure_is_a_warning(switch, tmp_path):
    switch.turn_on()
    (tmp_path / "torch_tandem").mkdir()
    (tmp_path / "torch_tandem" / "__init__.py").write_text("raise OSError('broken install')")
    assert "broken install" in import_torch(tmp_path, TANDEM_AUTOLOAD="1").stderr


def test_switching(switch, tmp_path, capsys):
    assert not switch.is_on()
    for args, on in [(["on"], True), (["on"], True), ([], True), (["off"], False), (["off"], False)]:
        assert switch.main(args) == 0
        assert switch.is_on() is on
    assert list(tmp_path.iterdir()) == []
    assert switch.main(["maybe"]) == 2
    assert "usage" in capsys.readouterr().out
