"""Whether the installed package has compiled CPU kernels, and they compute right: cibuildwheel runs it on each wheel.

It is started as a file, so that Python finds the installed package and not that of the checkout.
"""

from __future__ import annotations

from importlib import resources

import torch

import fastattn
from fastattn.backends import build, cpu, objections
from fastattn.testing import CASES, assert_right, make_inputs, run


def main() -> None:
    state = build.CPU.state()
    assert state.startswith("built ahead of time: "), state
    assert resources.files("fastattn").joinpath("py.typed").is_file()
    computed = 0
    for case in CASES:
        if case.timed is None:
            for dtype in (torch.float32, torch.bfloat16):
                inputs = make_inputs(case, dtype)
                if not objections(cpu, inputs.q, inputs.k, inputs.v, inputs.spec()):
                    assert_right(inputs, run(inputs, cpu.NAME))
                    computed += 1
    assert computed > 100, computed
    print(f"fastattn {fastattn.__version__} on torch {torch.__version__}, {cpu.capability()}, {state}")
    print(f"{computed} calls are right")


if __name__ == "__main__":
    main()
