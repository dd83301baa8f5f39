"""The page about many processes: its code, as torchrun runs it."""

import os
import subprocess
import sys

from docs import pages

LOSSES_OF_THE_TRAINER = """
trainer.train()
for batch in trainer.get_train_dataloader():
    count = (batch["labels"] >= 0).sum()
    expected = model(**batch, num_items_in_batch=count).loss
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=count).detach() / 2
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, expected)
"""


def test_the_page_runs_under_torchrun(tmp_path):
    page = (pages.FOLDER / "parallel.md").read_text()
    assert page.index("$ torchrun --nproc-per-node 2") < page.index("```python")
    *code, last = (block.code for block in pages.python_blocks(page))
    code = ["import torchvision_import", *code, LOSSES_OF_THE_TRAINER, last]  # the first for transformers
    (tmp_path / "train.py").write_text("\n".join(code))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([4])") == 2


def test_the_package_imports_no_more_of_torch_distributed_than_torch():
    code = """if True:
        import sys, torch
        before = {name for name in sys.modules if name.startswith("torch.distributed")}
        import fastattn
        print(sorted({name for name in sys.modules if name.startswith("torch.distributed")} - before))
        """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
