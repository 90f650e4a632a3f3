"""`tandem run` exits as the interpreter does: children, threads, exit handlers, signals, late errors."""

import json
import subprocess
import sys

import forked
import pytest

CHILD_ENDED = "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
PROCESS = "p = mp.get_context({!r}).Process(target=fail)\np.start()\np.join()\nsys.exit(p.exitcode)"
SCRIPTS = {
    "number": "sys.exit(3)",
    "large number": "sys.exit(300)",
    "text": "sys.exit('it failed')",
    "object": "sys.exit(torch.ones(1).cuda().tolist())",
    "exception": "1 / 0",
    "hook": "sys.excepthook = lambda *error: print('hooked', error[0].__name__)\n1 / 0",
    "at once": "os._exit(6)",
    "in a thread": "t = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
    "exit in a thread": "t = threading.Thread(target=lambda: sys.exit(4))\nt.start()\nt.join()",
    "late thread": "threading.Timer(0.5, lambda: print(model(x).shape)).start()",
    "at exit": "atexit.register(lambda: 1 / 0)",
    "ends at exit": "atexit.register(lambda: os._exit(5))",
    "deleted": "class D:\n    def __del__(self):\n        1 / 0\nd = D()\ndel d",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(9)"
    ),
    "program": "sys.exit(subprocess.run([sys.executable, '-c', 'import sys; sys.exit(7)']).returncode)",
    "forked": "pid = os.fork()\nif pid == 0:\n    os._exit(2)\n" + CHILD_ENDED,
    "forked and falls through": "pid = os.fork()\nif pid == 0:\n    sys.exit(2)\n" + CHILD_ENDED,
    "spawned process": PROCESS.format("spawn"),
    "killed process": (
        "p = mp.get_context('fork').Process(target=time.sleep, args=(99,))\np.start()\np.kill()\np.join()\n"
        "sys.exit(-p.exitcode)"
    ),
    "spawned ranks": "torch.multiprocessing.spawn(rank, nprocs=2)",
    "pool": "mp.get_context('spawn').Pool(1).apply(fail)",
    "loader": "list(torch.utils.data.DataLoader(Broken(), num_workers=1))",
    "operator": "torch.ones(3).cuda()[torch.tensor([5]).cuda()]",
    "operator in a step": "for i in range(9):\n    step(7 if i == 8 else 1)",
    "hook of a gradient": "y = model(x)\ny.register_hook(lambda g: 1 / 0)\ny.sum().backward()",
}
"""Code at the end of a script."""

HEAD = """
import atexit, os, signal, subprocess, sys, threading, time
import multiprocessing as mp
import torch

def fail():
    raise ValueError("in a child")

def rank(number):
    if number == 1:
        raise ValueError("in a rank")

class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        raise KeyError(number)

class Table(torch.nn.Embedding):
    pass

if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self: self
    model, x = torch.nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda()
    table = Table(4, 2).cuda()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(word):
        optimizer.zero_grad()
        table(torch.tensor([word]).cuda()).sum().backward()
        optimizer.step()

    step(0)
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_end_as_without_tandem(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(HEAD + "".join(f"    {line}\n" for line in SCRIPTS[name].splitlines()))
    command = [sys.executable, "-m", "torch_tandem", "run", "--quiet", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    eager = forked.run([script])
    assert (ran.returncode, ran.stdout) == (eager.returncode, eager.stdout), (ran, eager)


@pytest.mark.parametrize(
    ("end", "note"),
    [
        (
            "import json\njson.loads('{')",
            "json.decoder.JSONDecodeError at script.py:3: Expecting property name",
        ),
        ("import sys\nsys.exit(3)", "SystemExit at script.py:3: 3"),
    ],
)
def test_the_report_names_the_exception_that_ended_the_script(tmp_path, end, note):
    (tmp_path / "script.py").write_text(f"import torch\n{end}\n")
    forked.run(["-m", "torch_tandem", "run", "--report-json", "report.json", "script.py"], cwd=tmp_path)
    notes = json.loads((tmp_path / "report.json").read_text())["notes"]
    assert notes[-1].startswith(f"the script ended with {note}")


def test_a_forked_child_does_not_wait_for_the_threads_of_autograd():
    """The limit is in the environment of the child's C code, which PyTorch reads at exit."""
    child = "os.execvp('sh', ['sh', '-c', 'echo $TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT'])"
    fork = f"pid = os.fork()\nif pid == 0:\n    {child}\nos.waitpid(pid, 0)"
    ran = forked.run(["-c", f"import os, torch_tandem\n{fork}"])
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr
