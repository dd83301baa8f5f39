"""Compiles the Triton kernels ahead of time, for GPUs that need not be there, and prints what each of them takes.

`python tests/triton_compile.py 80` prints a table for sm_80, `--json` one object a line. It runs the own `forward` and
`backward` of the backend and stops each launch after compiling: what is compiled is what would run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastattn.backends import triton as backend
from fastattn.bench.gpu.compiling import compile_only
from fastattn.spec import Mask, Spec

B, H, N = 2, 2, 256
REAL = torch.ones(B, N, dtype=torch.bool)
WORST = Mask(causal=True, q_start=torch.zeros(B, dtype=torch.int32), real_keys=REAL, real_queries=REAL)
CALLS = {  # name -> arguments of Spec
    "plain": {"mask": Mask()},
    "causal": {"mask": Mask(causal=True)},
    "keys": {"mask": Mask(real_keys=REAL)},
    "worst": {"mask": WORST},
    "documents": {"mask": Mask(causal=True, segments=(REAL.int(), REAL.int()))},
    "dense": {"mask": Mask(causal=True, dense=torch.ones(B, 1, N, N, dtype=torch.bool))},
    "softcap": {"mask": Mask(causal=True), "softcap": 50.0},
    "alibi": {"mask": Mask(causal=True), "alibi_slopes": torch.zeros(H)},
    "bias": {"mask": Mask(causal=True), "bias": torch.zeros(H, N, N, dtype=torch.bfloat16)},
    "bias of keys": {"mask": Mask(), "bias": torch.zeros(B, 1, 1, N, dtype=torch.bfloat16)},
    "sinks": {"mask": Mask(causal=True), "sinks": torch.zeros(H)},
    "dropout": {"mask": Mask(causal=True), "dropout_p": 0.1, "seed": torch.zeros((), dtype=torch.int64)},
    "everything": {
        "mask": dataclasses.replace(WORST, segments=(REAL.int(), REAL.int()), dense=torch.ones(N, N, dtype=torch.bool)),
        "bias": torch.zeros(H, N, N, dtype=torch.bfloat16),
        "softcap": 50.0,
        "alibi_slopes": torch.zeros(B, H),
        "sinks": torch.zeros(H),
        "dropout_p": 0.1,
        "seed": torch.zeros((), dtype=torch.int64),
    },
}
HOT = [(D, torch.bfloat16, call) for D in (64, 128) for call in CALLS if call not in ("worst", "everything")]
COMPILED = {
    80: [
        *HOT,
        (64, torch.float16, "worst"),
        (256, torch.bfloat16, "causal"),
        (64, torch.float32, "causal"),
        (256, torch.bfloat16, "everything"),
    ],
    90: [
        *HOT,
        (128, torch.float16, "worst"),
        (256, torch.bfloat16, "causal"),
        (64, torch.float32, "causal"),
        (256, torch.bfloat16, "everything"),
    ],
}


class NoGPU:
    """A Triton driver that knows which GPU to compile for, and nothing else."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compiled(arch: int) -> Iterator[dict[str, object]]:
    """What every kernel of `COMPILED[arch]` takes: registers, bytes of stack and shared memory, matrix instructions."""
    driver.set_active(NoGPU(arch))
    torch.cuda.get_device_capability = lambda device: divmod(arch, 10)
    kernels = []
    for D, dtype, name in COMPILED[arch]:
        q = torch.zeros(B, H, N, D, dtype=dtype)
        lse, spec = torch.zeros(B, H, N), Spec(scale=D**-0.5, **CALLS[name])
        wanted = [True] * 3 + [x is not None for x in (spec.bias, spec.alibi_slopes, spec.sinks)]
        with compile_only(lambda *kernel: kernels.append(kernel)):
            backend.forward(q, q, q, spec)
            backend.backward(q, lse, q, q, q, q, lse, spec, tuple(wanted))
            if (D, dtype, name) in HOT:
                backend.weights(q, q, lse, spec, average_heads=True)
                backend.received(q, q, spec)
                backend.top_keys(q, q, spec, top_k=8)
        for kernel_name, kernel in kernels:
            of = {"arch": arch, "kernel": kernel_name, "D": D, "dtype": str(dtype).removeprefix("torch."), "call": name}
            yield of | _resources(kernel)
        kernels.clear()


def _resources(kernel) -> dict[str, int]:
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [cuobjdump, "--dump-resource-usage", cubin.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", printed).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),  # where registers are spilled to
        "shared": kernel.metadata.shared,
        "mma": len(re.findall(r"\bmma\.sync|\bwgmma\.mma_async", kernel.asm["ptx"])),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=COMPILED)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for row in compiled(options.arch):
        text = json.dumps(row) if options.json else "  ".join(f"{name} {value!s:>8}" for name, value in row.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
