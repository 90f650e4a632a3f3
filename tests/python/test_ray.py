"""Ray Train on a local Ray: the example, on Tandem and on the CPU."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray.train.torch")
ROOT = Path(__file__).resolve().parents[2]
BOTH = """
import json, ray
from examples.ray_train import fit
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
print(json.dumps([fit("gloo"), fit("tandem")]))
"""


@pytest.mark.timeout(900)  # Ray and its workers may start on a busy machine.
def test_the_example_trains_on_tandem_with_the_losses_of_the_host():
    # Paths of sockets must be short, and Ray writes results to HOME.
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HOME": folder, "RAY_TMPDIR": folder}
        ran = subprocess.run(
            [sys.executable, "-c", BOTH], cwd=ROOT, env=env, capture_output=True, text=True, timeout=800
        )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    host, ours = json.loads(ran.stdout.splitlines()[-1])
    assert (host["device"], ours["device"]) == ("cpu", "tandem")
    assert ours["ops_coexecuted"] > 0.6 * ours["ops_captured"] > 300
    assert len(ours["losses"]) == 15
    assert ours["losses"] == pytest.approx(host["losses"], abs=1e-6)
