"""What the tools of the machine for PTX say of kernels as Triton and nvcc compile them; `make ptx` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compiled(*command: str) -> str:
    """What a command of Python prints where Triton compiles its kernels, which are kept in build/."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-10000:]
    return done.stdout


def test_flex_attention_is_counted_beside_ours():
    printed = compiled("-m", "tests.gpu_models.ptx", "count", "--backend", "flex", "--case", "L2048-window")
    ratios = {line.split()[1]: line.split()[4] for line in printed.splitlines() if "tem_fused" in line}
    assert ratios == {f"triton_tem_fused_flex_attention{which}": "1.500" for which in ("_0", "_backward_1")}


def test_a_tutorial_is_counted_where_it_is_right(tmp_path):
    call = "fastattn.attention(q, k, v, fastattn.Mask(causal=causal), scale=scale, backend='triton')"
    command = "-m", "tests.gpu_models.ptx", "count", "--backend", "tutorial", "--dtype", "float16"
    command = *command, "--case", "L2048-none", "--tutorial", str(tmp_path / "tutorial.py")

    def write(result: str) -> None:
        (tmp_path / "tutorial.py").write_text(
            f"import fastattn\n\ndef attention(q, k, v, causal, scale, _): return {result}"
        )

    write(call)
    ratios = {line.split()[1]: line.split()[4] for line in compiled(*command).splitlines() if " 1." in line}
    assert ratios == {f"{kernel}_kernel": "1.000" for kernel in ("forward", "dk_dv", "dq")}
    write(f"1.1 * {call}")
    with pytest.raises(AssertionError, match="not close"):
        compiled(*command)


FOUND = {  # kinds of edits of which each that was drawn is found, or all but one
    ("triton", 80): ["bar.sync removed", "cp.async.wait_group removed", "predicate of a global access dropped"],
    ("cuda", 80): ["bar.sync removed", "cp.async.wait_group removed", "zero fill of cp.async dropped"],
    ("hopper", 90): ["fence.proxy.async removed", "arrival at an mbarrier removed", "expected bytes changed"],
}


@pytest.mark.parametrize(("backend", "arch"), FOUND)
def test_faults_put_into_compiled_kernels_are_found(backend, arch):
    most = "2" if backend == "cuda" else "1"  # whether a read outside of a tensor meets another one is by chance
    arguments = ("--backend", backend, "--arch", str(arch), "--case", "pad-queries-causal", "--most", most)
    table = compiled("-m", "tests.gpu_models.ptx", "mutate", *arguments, "--kind", *FOUND[backend, arch])
    rows = [line for line in table.splitlines() if line.startswith(tuple(FOUND[backend, arch]))]
    counts = [[int(n) for n in row[40:].split()] for row in rows]
    assert len(rows) == 3
    assert all(fault + wrong > missed for fault, wrong, missed, _ in counts), table
    assert all(row[3] == 0 for row in counts), table
