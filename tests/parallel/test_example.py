"""The example that trains on several processes: its losses are those of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DATA = Path(__file__).parents[2] / "examples/translation/data"
SMALL = [
    "--data", str(DATA), "--d-model", "32", "--nhead", "2", "--num-layers", "1", "--dim-feedforward", "64",
    "--max-size", "300", "--tokens", "150", "--warmup", "4", "--steps", "8", "--learning-rate", "0.01",
]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_losses_are_those_of_one_process(ranks, shape):
    for losses, of_one in ranks.run("model_jobs.translation", shape[0] * shape[1], shape=shape, options=SMALL):
        assert of_one[-1] < of_one[0] - 1  # it learns
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(of_one), rtol=1e-5, atol=0)


def test_the_program_does_not_end_python_beside_threads_of_its_groups():
    code = """if True:
        import atexit, runpy
        atexit.register(print, "Python ends")
        runpy.run_module("examples.translation.parallel", run_name="__main__", alter_sys=True)
        """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    environment = os.environ | alone | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *SMALL, "--steps", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.startswith("step 0: loss ")) == (0, True), done.stderr
    assert "Python ends" not in done.stdout
