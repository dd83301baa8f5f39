"""Compiles the Triton kernels ahead of time, for GPUs that need not be there, and prints what each of them takes.

`python tests/compile_gates/triton_compile.py 80` prints a table for sm_80, `--json` one object a line, `--part` some of
them. It runs the functions of the backend and stops each launch after compiling: what is compiled is what would run. A
kernel that several calls share is printed once, for the first of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fastattn.backends import triton as backend
from fastattn.spec import Mask, Spec

sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks, which is never installed
from benchmarks.gpu.compiling import compile_only

B, H, N = 2, 2, 256
REAL = torch.ones(B, N, dtype=torch.bool)
WORST = Mask(causal=True, q_offset=torch.zeros(B, dtype=torch.int32), real_keys=REAL, real_queries=REAL)
CALLS = {  # name -> arguments of Spec
    "plain": {"mask": Mask()},
    "causal": {"mask": Mask(causal=True)},
    "keys": {"mask": Mask(real_keys=REAL)},
    "worst": {"mask": WORST},
    "documents": {"mask": Mask(causal=True, segment_ids=(REAL.int(), REAL.int()))},
    "dense": {"mask": Mask(causal=True, dense=torch.ones(B, 1, N, N, dtype=torch.bool))},
    "softcap": {"mask": Mask(causal=True), "softcap": 50.0},
    "alibi": {"mask": Mask(causal=True), "alibi_slopes": torch.zeros(H)},
    "bias": {"mask": Mask(causal=True), "bias": torch.zeros(H, N, N, dtype=torch.bfloat16)},
    "bias of keys": {"mask": Mask(), "bias": torch.zeros(B, 1, 1, N, dtype=torch.bfloat16)},
    "sinks": {"mask": Mask(causal=True), "sinks": torch.zeros(H)},
    "dropout": {"mask": Mask(causal=True), "dropout_p": 0.1, "seed": torch.zeros((), dtype=torch.int64)},
    "everything": {
        "mask": dataclasses.replace(
            WORST, segment_ids=(REAL.int(), REAL.int()), dense=torch.ones(N, N, dtype=torch.bool)
        ),
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
    100: [(D, torch.bfloat16, "causal") for D in (64, 128)],
}
FEW = [*((128, torch.bfloat16, call) for call in ("plain", "causal", "keys")), (256, torch.bfloat16, "everything")]
PARTS = {  # of what is compiled for an arch: `make test` compiles the few, `make triton` the rest
    (arch, part): [config for config in configs if (config in FEW) == (part == "few")]
    for part in ("few", "rest")
    for arch, configs in COMPILED.items()
}
WITH_WEIGHTS = [config for config in HOT if config[2] != "sinks"]  # which they know from the lse alone
MATRIX_INSTRUCTION = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


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


def compiled(arch: int, configs: list[tuple[int, torch.dtype, str]]) -> Iterator[dict[str, object]]:
    """What every kernel of these calls takes: see `_resources`."""
    driver.set_active(NoGPU(arch))
    torch.cuda.get_device_capability = lambda device: divmod(arch, 10)
    triton.knobs.compilation.disable_line_info = True  # faster, and the same instructions
    kernels, known = [], []

    def take(kernel_name: str, kernel: object) -> None:
        if not any(kernel is other for other in known):
            kernels.append((kernel_name, kernel))
            known.append(kernel)

    def is_wanted(options: dict[str, object]) -> bool:
        """Not the rows and lse of weights: kernels of the forward and the backward, but without values."""
        return options.get("D_V") != 0 or name == "causal"

    for D, dtype, name in configs:
        q = torch.zeros(B, H, N, D, dtype=dtype)
        lse, spec = torch.zeros(B, H, N), Spec(scale=D**-0.5, **CALLS[name])
        wanted = [True] * 3 + [x is not None for x in (spec.bias, spec.alibi_slopes, spec.sinks)]
        with compile_only(take, is_wanted):
            backend.forward(q, q, q, spec)
            backend.backward(q, lse, q, q, q, q, lse, spec, tuple(wanted))
            if (D, dtype, name) in WITH_WEIGHTS:
                backend.weights(q, q, lse, spec, average_heads=True)
            if (D, dtype, name) in WITH_WEIGHTS and spec.dropout_p == 0:
                backend.received(q, q, spec)
                backend.top_keys(q, q, spec, top_k=8)
        for kernel_name, kernel in kernels:
            of = {"arch": arch, "kernel": kernel_name, "D": D, "dtype": str(dtype).removeprefix("torch."), "call": name}
            yield of | _resources(kernel)
        kernels.clear()


def _resources(kernel) -> dict[str, object]:
    """Registers, bytes of stack and of shared memory; the matrix instructions, and how many stand in hot loops."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [cuobjdump, "--dump-resource-usage", cubin.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", printed).groups()
    ptx = kernel.asm["ptx"]
    instructions = MATRIX_INSTRUCTION.findall(ptx)
    return {
        "registers": int(registers),
        "stack": int(stack),  # where registers are spilled to
        "shared": kernel.metadata.shared,
        "mma": len(instructions),
        "in_loops": sum(len(MATRIX_INSTRUCTION.findall(loop)) for loop in _hot_loops(ptx)),
        "instruction": "+".join(sorted(set(instructions))),
    }


def _hot_loops(ptx: str) -> list[str]:
    """The text of each loop with matrix instructions that holds no other such loop."""
    labels = {match[1]: match.start() for match in re.finditer(r"^(\$\w+):", ptx, re.M)}
    jumps = ((labels[match[1]], match.start()) for match in re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", ptx))
    loops = [(begin, end) for begin, end in jumps if MATRIX_INSTRUCTION.search(ptx, begin, end)]
    innermost = [(b, e) for b, e in loops if not any(b <= x and y <= e and (x, y) != (b, e) for x, y in loops)]
    return [ptx[begin:end] for begin, end in innermost]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=COMPILED)
    parser.add_argument("--part", choices=("few", "rest"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configs = PARTS[options.arch, options.part] if options.part else COMPILED[options.arch]
    for row in compiled(options.arch, configs):
        text = json.dumps(row) if options.json else "  ".join(f"{name} {value!s:>8}" for name, value in row.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
