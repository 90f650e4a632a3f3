"""The modes, the graph as a file, and `reset`."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import torch
import torch_tandem
from torch import nn


def train(device: str, steps: int) -> list[float]:
    """Returns the losses of a small training with changing loop counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)
    x = torch.randn(16, 4).to(device)
    losses = []
    for step in range(steps):
        loss = model(x).square().mean()
        for k in range(step % 4):
            loss = loss + 0.1 * model(x + k).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("mode", ["coexec", "lazy", "trace"])
def test_every_mode_gives_the_same_bits(mode):
    torch_tandem.set_mode(mode)
    assert torch_tandem.mode() == mode
    assert train("tandem", 12) == train("cpu", 12)
    assert torch_tandem.report()["mode"] == mode


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'coexec', 'lazy' or 'trace'"):
        torch_tandem.set_mode("eager")


def test_the_mode_from_the_environment():
    code = "import torch, torch_tandem; print(torch_tandem.mode())"
    env = {"TANDEM_MODE": "lazy", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "lazy"


def test_the_graph_as_text_for_graphviz_and_as_a_picture(tmp_path):
    train("tandem", 12)
    for name in ("graph.txt", "graph.dot", "graph.svg"):
        torch_tandem.save_graph(tmp_path / name)
    text = (tmp_path / "graph.txt").read_text()
    assert "= while(" in text and "loop_cond(" in text and "aten::addmm(" in text and "phi(" in text
    dot = (tmp_path / "graph.dot").read_text()
    assert dot.startswith("digraph") and "style=dashed" in dot
    picture = ET.parse(tmp_path / "graph.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) == text.count("  -> ")
    drawn = "\n".join(element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert drawn.count("aten::") == dot.count("aten::") and "\u2026" not in drawn


def test_beginning_anew():
    before = train("tandem", 8)
    assert torch_tandem.report()["tracegraph_nodes"] > 10
    torch_tandem.reset()
    report = torch_tandem.report()
    assert report["tracegraph_nodes"] == 0 and report["symbolic_blocks"] == 0
    assert train("tandem", 8) == before
    assert torch_tandem.report()["steps_coexecuted"] > 0
