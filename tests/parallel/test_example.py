"""The example that trains on several processes: its losses are those of one."""

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
