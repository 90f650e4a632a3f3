"""`import torch` loads nothing of Tandem unless autoload was turned on and the process sets the variable.

Each test runs a new interpreter that finds the entry point in a temporary folder.
"""

import os
import subprocess
import sys

import pytest
from torch_tandem import autoload, cli

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


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment in which torch-tandem is installed in tmp_path."""
    (tmp_path / "torch_tandem-1.dist-info").mkdir()
    (tmp_path / "torch_tandem-1.dist-info" / "METADATA").write_text("Name: torch-tandem\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_command(site, capsys):
    for args, on in [(["on"], True), (["on"], True), ([], True), (["off"], False), (["off"], False)]:
        for command in (["autoload", *args], ["autoload", "status"]):
            assert cli.main(command) == 0
            assert ("autoload is on" in capsys.readouterr().out) is on
    assert [file.name for file in site.iterdir()] == ["torch_tandem-1.dist-info"]


@pytest.mark.parametrize(("variable", "device"), [("1", "tandem"), ("cuda", "cuda")])
def test_the_command_offers_the_device_to_programs(site, variable, device):
    assert cli.main(["autoload", "on"]) == 0
    code = f"import torch; print(torch.ones(2, device='{device}').sum().item())"
    assert import_torch(site, code, TANDEM_AUTOLOAD=variable).stdout == "2.0\n"


def test_the_command_says_what_it_cannot_do(site, capsys):
    with pytest.raises(SystemExit):
        cli.main(["autoload", "maybe"])
    assert "invalid choice: 'maybe'" in capsys.readouterr().err
    (site / autoload.DIST_INFO).write_text("a file where the folder should be")
    assert cli.main(["autoload", "on"]) == 1
    assert "cannot turn autoload on" in capsys.readouterr().err
