"""The machine for PTX: Triton's kernels as they are compiled for GPUs, each in a process that does not interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="there is no triton for this platform")

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "tests" / "backends" / "test_conformance.py"


def compiled(*command: str) -> str:
    """What a command of Python prints where Triton compiles its kernels, which are kept in build/."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(ROOT / "build" / "ptx_machine" / "triton")}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-10000:]
    return done.stdout


@pytest.mark.parametrize(
    "chosen",
    [
        # Those whose kernels others use, too, so that few are compiled.
        "sm_80 and (float32 or bfloat16) and (plain or one-query or tail-above or causal-cross or pad-queries-causal)",
        "sm_80 and torch.float16 and (everything or scattered-segments-alibi)",
    ],
)
def test_compiled_kernels_are_right(chosen):
    printed = compiled("-m", "pytest", "-q", str(CONFORMANCE), "-k", f"test_case_is_right_or_refused and {chosen}")
    assert " passed" in printed
