"""Compiles the CUDA kernels for GPUs that need not be there, prints what each takes, and fails where that is wrong.

`python tests/cuda_compile.py 75 80` compiles every file of csrc/cuda for sm_75 and sm_80, as many at once as there are
cores, checks the syntax of the binding against the installed torch, which may be one for the CPU, and prints a table.
`--json` prints one object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from torch.utils import cpp_extension

from fastattn.backends.native import build

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a block of threads can have, by arch. Source: CUDA C++ Programming Guide, table of technical specifications."""

AS_TORCH_COMPILES = [
    "-std=c++20",
    *cpp_extension.COMMON_NVCC_FLAGS,
    *build.CUDA.flags["nvcc"],
]
TRITONS_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"  # cuobjdump, and nvdisasm, which it starts


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes on an arch.

    name: with its template arguments. shared: bytes, static and dynamic. spilled: bytes. mma: matrix instructions.
    """

    arch: int
    name: str
    registers: int
    spilled: int
    shared: int
    mma: int

    @property
    def has_16_bits(self) -> bool:
        """Whether it multiplies matrices of 16-bit elements."""
        return re.search(r"Tiling<b?f16,", self.name) is not None

    @property
    def is_hot(self) -> bool:
        """Whether it is what most calls take: 16 bits, head dims up to 128, scores that are multiples of q k^T.

        Up to 64 on sm_75, whose copies go through registers: with 128 the gradients of keys spill there, though nothing
        that their loop over tiles reads.
        """
        head_dim = re.search(r"Tiling<b?f16, (\d+),", self.name)
        widest = 128 if self.arch >= 80 else 64
        return head_dim is not None and int(head_dim[1]) <= widest and self.name.endswith("false>")

    def complaints(self) -> Iterator[str]:
        """What is wrong with it, in sentences."""
        if self.has_16_bits and self.mma == 0:
            yield "has no matrix instruction"
        if not self.has_16_bits and self.mma > 0:
            yield f"has {self.mma} matrix instructions, which are not true fp32 arithmetic"
        if self.is_hot and self.spilled > 0:
            yield f"spills {self.spilled} bytes"
        if self.shared > 1024 * MOST_SHARED_KIB[self.arch]:
            yield f"takes {self.shared} bytes of shared memory, of {MOST_SHARED_KIB[self.arch]} KiB"


def kernel_files(arch: int) -> list[str]:
    """The files with kernels for that arch, below csrc: none of bf16 before sm_80, which has no instructions for it."""
    files = [source for source in build.CUDA.sources if source.endswith(".cu")]
    return [file for file in files if arch >= 80 or not file.endswith("bf16.cu")]


def compiled(nvcc: str, arch: int, file: str, folder: Path) -> tuple[Path, str]:
    """The object file of a source, and what ptxas says of its kernels."""
    target = folder / f"{Path(file).stem}.sm_{arch}.o"
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, *AS_TORCH_COMPILES, code, "-Xptxas=-v", "-c", build.source_dir() / file, "-o", target]
    return target, output_of(command)


def kernels_in(arch: int, target: Path, ptxas_says: str, dynamic: dict[str, int]) -> Iterator[Kernel]:
    """The kernels of an object file; `dynamic` are the bytes of shared memory that the host gives to each."""
    environment = {**os.environ, "PATH": os.pathsep.join((str(TRITONS_TOOLS), os.environ["PATH"]))}
    assembly = output_of([TRITONS_TOOLS / "cuobjdump", "-sass", target], environment)
    mma = {part.split()[0]: part.count("HMMA") for part in assembly.split("Function : ")[1:]}
    for part in ptxas_says.split("Compiling entry function ")[1:]:
        symbol = part.split("'")[1]
        stores, loads, registers = re.search(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers", part
        ).groups()
        static = re.search(r" (\d+) bytes smem", part)
        yield Kernel(
            arch,
            readable(symbol),
            int(registers),
            int(stores) + int(loads),
            (int(static[1]) if static else 0) + dynamic[symbol],
            mma[symbol],
        )


def readable(symbol: str) -> str:
    """`kernel<arguments>` of a mangled name."""
    demangled = output_of(["c++filt", symbol]).strip()
    return re.sub(r"^void |fastattn::cuda::|(?<=>)\(.*\)$", "", demangled)


def dynamic_shared_memory(nvcc: str, objects: list[Path], folder: Path) -> dict[str, int]:
    """The most bytes that the host gives to each kernel, by its mangled name."""
    program = folder / "launches"
    source = REPOSITORY / "tests" / "cuda_launches.cpp"
    output_of([nvcc, "-std=c++20", "-cudart=none", source, *objects, "-o", program])
    found = {}
    for line in output_of([program]).splitlines():
        symbol, shared = line.split()
        found[symbol] = max(int(shared), found.get(symbol, 0))
    return found


def check_binding(nvcc: str, folder: Path) -> None:
    """SystemExit with what the C++ compiler, which nvcc only shows its headers, has against the binding."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    defined = [
        f"-DTORCH_EXTENSION_NAME={build.CUDA.stem}",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",  # instead of a header that a torch for the CPU does not have
    ]
    flags = ["-std=c++20", "-Xcompiler=-fsyntax-only,-Wall", *defined]
    source = build.source_dir() / "cuda" / "binding.cpp"
    output_of([nvcc, *flags, *(f"-isystem={path}" for path in includes), "-c", source, "-o", folder / "binding.o"])


def output_of(command: list, environment: dict[str, str] | None = None) -> str:
    """What a command says, both ways; SystemExit with it where the command fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def main() -> None:
    """Prints the table; exits with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, nargs="+", choices=MOST_SHARED_KIB)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    jobs = [(arch, file) for arch in options.arch for file in kernel_files(arch)]
    # Those that take longest first, and fp32 with its unrolled products does.
    jobs.sort(key=lambda job: not job[1].endswith("f32.cu"))
    wrong = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        binding = pool.submit(check_binding, options.nvcc, folder)
        done = dict(zip(jobs, pool.map(lambda job: compiled(options.nvcc, *job, folder), jobs), strict=True))
        binding.result()
        fullest = max(options.arch)
        objects = [target for (arch, _), (target, _) in done.items() if arch == fullest]
        dynamic = dynamic_shared_memory(options.nvcc, objects, folder)
        for (arch, file), (target, ptxas_says) in sorted(done.items()):
            for kernel in kernels_in(arch, target, ptxas_says, dynamic):
                row = asdict(kernel)
                print(json.dumps(row) if options.json else "  ".join(f"{key} {row[key]!s:>5}" for key in row))
                wrong += [f"sm_{arch} {kernel.name} ({file}) {why}" for why in kernel.complaints()]
    print(f"{len(jobs)} files in {time.monotonic() - started:.0f} s", file=sys.stderr)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
