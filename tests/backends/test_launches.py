"""Launches that are repeated: against Triton's own, in a process that does not interpret the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_repeated_launches_are_those_that_triton_makes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("repeated_launches.py")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout.split()[0]) > 80, done.stdout
