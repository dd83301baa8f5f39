"""Compiles the CUDA kernels for GPUs that need not be there, prints what each takes, and fails where that is wrong.

`python tests/compile_gates/cuda_compile.py 75 80` compiles every file of csrc/cuda for sm_75 and sm_80, as many at once
as there are cores, and each header by itself, checks the syntax of the binding against the installed torch, which may
be one for the CPU, and prints a table. `--json` prints one object a line, `--summary` a row for each arch, and
`--record` that too, which it keeps in cuda_record.FILE if nothing is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
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

import cuda_record
import triton
from torch.utils import cpp_extension

from fastattn.backends import build

REPOSITORY = Path(__file__).resolve().parents[2]
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
    matrices, transposed: instructions that load matrices from shared memory, as they are and transposed. copies: those
    that copy from global to shared memory while others run.
    """

    arch: int
    name: str
    registers: int
    spilled: int
    shared: int
    mma: int
    matrices: int
    transposed: int
    copies: int

    @property
    def has_16_bits(self) -> bool:
        """Whether it multiplies matrices of 16-bit elements."""
        return re.search(r"Tiling<b?f16,", self.name) is not None

    @property
    def is_tiled(self) -> bool:
        """Whether it works on tiles in shared memory."""
        return "Tiling<" in self.name

    @property
    def is_empty(self) -> bool:
        """Whether it is there for the linker only: no GPU before sm_80 has instructions for its elements."""
        return self.arch < 80 and "Tiling<bf16," in self.name

    @property
    def head_dim(self) -> int:
        """What it is compiled for; 0 where it is for any."""
        match = re.search(r"Tiling<[^,]+, (\d+),", self.name)
        return int(match[1]) if match else 0

    @property
    def is_hot(self) -> bool:
        """Whether it is what most calls take: 16 bits, head dims up to 128, scores that are multiples of q k^T.

        Up to 64 on sm_75, whose copies go through registers: with 128 the gradients of keys spill there, though nothing
        that their loop over tiles reads.
        """
        widest = 128 if self.arch >= 80 else 64
        taken = self.has_16_bits and self.head_dim <= widest and self.name.endswith("false>")
        return taken and not self.name.startswith("measure_kernel")  # which most calls leave at once

    def complaints(self) -> Iterator[str]:
        """What is wrong with it, in sentences."""
        if self.has_16_bits and not self.is_empty:
            if self.mma == 0:
                yield "has no matrix instruction"
            if self.matrices == 0:
                yield "loads no matrix from shared memory"
            multiplies_scores_alone = self.name.startswith(("bias_gradient_kernel", "measure_kernel"))
            if self.transposed == 0 and not multiplies_scores_alone:
                yield "loads no transposed matrix from shared memory"
        if self.is_tiled and not self.is_empty and (self.copies > 0) != (self.arch >= 80):
            yield f"has {self.copies} asynchronous copies"
        if not self.has_16_bits and self.mma > 0:
            yield f"has {self.mma} matrix instructions, which are not true fp32 arithmetic"
        if self.is_hot and self.spilled > 0:
            yield f"spills {self.spilled} bytes"
        if self.shared > 1024 * MOST_SHARED_KIB[self.arch]:
            yield f"takes {self.shared} bytes of shared memory, of {MOST_SHARED_KIB[self.arch]} KiB"


def summary(version: str, arch: int, kernels: list[Kernel]) -> dict[str, object]:
    """A row of the table of an arch, by its columns, of the kernels that are not empty."""
    kernels = [kernel for kernel in kernels if not kernel.is_empty]
    spilling = [kernel for kernel in kernels if kernel.spilled > 0]
    return {
        "nvcc": version,
        "compute capability": f"{arch // 10}.{arch % 10}",
        "kernels": len(kernels),
        "that spill": len(spilling),
        "in 16 bits up to 128": sum(kernel.has_16_bits and kernel.head_dim <= 128 for kernel in spilling),
        "bytes at most": max(kernel.spilled for kernel in kernels),
        "shared memory": f"{max(kernel.shared for kernel in kernels) / 1024:.0f} of {MOST_SHARED_KIB[arch]} KiB",
    }


def kernel_files() -> list[str]:
    """The files with kernels, below csrc."""
    return [source for source in build.CUDA.sources if source.endswith(".cu")]


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
    code = {part.split()[0]: part for part in assembly.split("Function : ")[1:]}
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
            *(code[symbol].count(name) for name in ("HMMA", "LDSM.16.M88", "LDSM.16.MT88", "LDGSTS")),
        )


def readable(symbol: str) -> str:
    """`kernel<arguments>` of a mangled name."""
    demangled = output_of(["c++filt", symbol]).strip()
    return re.sub(r"^void |fastattn::cuda::|(?<=>)\(.*\)$", "", demangled)


def dynamic_shared_memory(nvcc: str, objects: list[Path], folder: Path) -> dict[str, int]:
    """The most bytes that the host gives to each kernel in the object files, by its mangled name."""
    program = folder / "launches"
    source = Path(__file__).with_name("cuda_launches.cpp")
    output_of([nvcc, "-std=c++20", "-cudart=none", source, *objects, "-o", program])
    result = {}
    for line in output_of([program]).splitlines():
        symbol, shared = line.split()
        result[symbol] = max(int(shared), result.get(symbol, 0))
    return result


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


def check_header(nvcc: str, header: Path, folder: Path) -> None:
    """SystemExit with what nvcc has against a source that includes the header, twice, and nothing else."""
    source = folder / f"{header.name}.cu"
    source.write_text(2 * f'#include "{header}"\n')
    output_of([nvcc, *AS_TORCH_COMPILES, "-arch=compute_80", "-ptx", source, "-o", "/dev/null"])


def output_of(command: list, environment: dict[str, str] | None = None) -> str:
    """What a command says, both ways; SystemExit with it where the command fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def known_archs(nvcc: str) -> set[int]:
    """Those that it makes code for."""
    return {int(code) for code in re.findall(r"sm_(\d+)\n", output_of([nvcc, "--list-gpu-code"]))}


def version_of(nvcc: str) -> str:
    """Such as 13.0."""
    return re.search(r"release (\d+\.\d+)", output_of([nvcc, "--version"]))[1]


def compile_all(nvcc: str, archs: list[int], folder: Path) -> dict[int, list[Kernel]]:
    """The kernels for each arch; checks the binding and the headers by the way."""
    headers = sorted(path for pattern in ("*.h", "*.cuh") for path in (build.source_dir() / "cuda").glob(pattern))
    jobs = [(arch, file) for arch in archs for file in kernel_files()]
    # Those that take longest first, and fp32 with its unrolled products does.
    jobs.sort(key=lambda job: not job[1].endswith("f32.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        others = [pool.submit(check_binding, nvcc, folder)]
        others += [pool.submit(check_header, nvcc, header, folder) for header in headers]
        done = dict(zip(jobs, pool.map(lambda job: compiled(nvcc, *job, folder), jobs), strict=True))
        for other in others:
            other.result()
    fullest = max(archs)
    dynamic = dynamic_shared_memory(
        nvcc, [target for (arch, _), (target, _) in done.items() if arch == fullest], folder
    )
    return {
        arch: [
            kernel
            for (of_arch, _), (target, ptxas_says) in sorted(done.items())
            if of_arch == arch
            for kernel in kernels_in(arch, target, ptxas_says, dynamic)
        ]
        for arch in archs
    }


def main() -> None:
    """Prints the table; exits with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "arch",
        type=int,
        nargs="*",
        help=f"such as 75 for compute capability 7.5; default: those of {cuda_record.ARCHS} that nvcc knows",
    )
    parser.add_argument("--nvcc", default="nvcc")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true")
    how.add_argument("--summary", action="store_true")
    how.add_argument("--record", action="store_true")
    options = parser.parse_args()
    known = known_archs(options.nvcc) & MOST_SHARED_KIB.keys()
    if unknown := sorted(set(options.arch) - known):
        parser.error(f"nvcc {version_of(options.nvcc)} compiles for {sorted(known)}, got {unknown}")
    archs = options.arch or [arch for arch in cuda_record.ARCHS if arch in known]
    started, digest = time.monotonic(), cuda_record.digest()
    with tempfile.TemporaryDirectory() as folder:
        kernels = compile_all(options.nvcc, archs, Path(folder))
    of_archs = {arch: summary(version_of(options.nvcc), arch, of_arch) for arch, of_arch in kernels.items()}
    if options.summary or options.record:
        print(cuda_record.table(of_archs))
    else:
        for kernel in itertools.chain(*kernels.values()):
            cells = asdict(kernel)
            print(json.dumps(cells) if options.json else "  ".join(f"{key} {cells[key]!s:>5}" for key in cells))
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"sm_{', sm_'.join(map(str, archs))} by nvcc {version_of(options.nvcc)} in {time.monotonic() - started:.0f} s; "
        f"the compilers took {compilers.ru_utime + compilers.ru_stime:.0f} s of CPU time",
        file=sys.stderr,
    )
    wrong = [
        f"sm_{arch} {k.name} {why}" for arch, of_arch in kernels.items() for k in of_arch for why in k.complaints()
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))
    if options.record and (missing := sorted({*cuda_record.ARCHS} - {*archs})):
        print(f"not recorded without sm_{', sm_'.join(map(str, missing))}", file=sys.stderr)
    elif options.record:
        if cuda_record.digest() != digest:
            raise SystemExit("the sources were changed while they were compiled, so that nothing is recorded")
        cuda_record.record(of_archs)


if __name__ == "__main__":
    main()
