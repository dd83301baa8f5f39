"""Compiles FlashAttention for a GPU that need not be there, and holds the model of cycles.py to its published speed.

`python tests/compile_gates/flash_attention_compile.py FLASH_ATTENTION CUTLASS 80` takes checkouts of both, and prints
lines of the table that `python tests/compile_gates/triton_record.py` prints: of version 2, unmasked, fp16, with the
tiles that it launches on an A100 or H100 where nothing is dropped; and what the model predicts for it beside what was
published, on an H100 for version 3 too. Their backward is one kernel that adds dQ by atomics, so that the order of its
sums is another in each run. Needs nvcc.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import records
import torch
import triton_record
from cycles import RATES, cycles_of_groups, tflops
from sass import disassembled, innermost_loops, registers_and_stack
from triton_compile import predicted, programs_at_once, step_of
from triton_record import Compiled

SOURCE = """
#include "flash.h"
#include "{header}"
using Traits = {traits};
extern "C" __device__ int bytes_of_shared_memory = Traits::kSmemSize;
extern "C" __global__ void kernel(const __grid_constant__ flash::{parameters} parameters) {{
    flash::{function}<Traits, {options}>(parameters);
}}
"""
FORWARD = {
    "header": "flash_fwd_kernel.h",
    "parameters": "Flash_fwd_params",
    "function": "compute_attn",
    "options": "false, false, false, false, true, true, false, false",
}
BACKWARD = {
    "header": 'flash_bwd_preprocess_kernel.h"\n#include "flash_bwd_kernel.h',
    "parameters": "Flash_bwd_params",
    "function": "compute_dq_dk_dv_seqk_parallel",
    "options": "false, false, false, false, true, true, false",
}
KERNELS = [  # name, head dim, tile and warps, what the traits have besides
    ("forward", 64, (128, 128, 4), "false, false", FORWARD),
    ("forward", 128, (128, 64, 4), "false, false", FORWARD),
    ("forward", 256, (128, 64, 8), "false, false", FORWARD),
    ("dq_dk_dv", 64, (128, 128, 8), "4, 4, 4, false, false", BACKWARD),
    ("dq_dk_dv", 128, (64, 128, 8), "2, 4, 2, false, false", BACKWARD),
]
"""Source: flash_fwd_launch_template.h and flash_bwd_launch_template.h, by head dim."""
PUBLISHED = {  # compute capability, head dim -> TFLOP/s by pass
    (80, 64): {"both": 176},
    (80, 128): {"both": 203},
    (90, 64): {"forward": 324, "backward": 291},
    (90, 128): {"forward": 370, "backward": 322},
    (90, 256): {"forward": 326},
}
"""Of 16384 tokens without a mask, in fp16, on an A100 and an H100, SXM.

Source: assets/flash2_a100_fwd_bwd_benchmark.png of FlashAttention's repository; Shah et al. 2024, FlashAttention-3,
figures 5 and 6.
"""
SOURCE_3 = """
#include "flash_{direction}_launch_template.h"
template void run_flash_{direction}<90, {arguments}>(Flash_{direction}_params&, cudaStream_t);
"""
_TEN, _SIX = ", false" * 10, ", false" * 6
KERNELS_3 = [  # pass, head dim, warp groups, columns of what each computes in a step, template arguments
    ("forward", 64, 3, 192, f"64, 64, 1, cutlass::half_t, cutlass::half_t{_TEN}"),
    ("forward", 128, 2, 176, f"128, 128, 1, cutlass::half_t, cutlass::half_t{_TEN}"),
    ("backward", 64, 2, 128, f"64, 128, 128, cutlass::half_t{_SIX}, 2, 2, true, false, false, 2, 1, 2, 2, false"),
    ("backward", 128, 2, 80, f"128, 80, 128, cutlass::half_t{_SIX}, 2, 2, true, false, true, 2, 1, 2, 1, false"),
]
"""Source: hopper/flash_fwd_launch_template.h, tile_size.h and flash_bwd_launch_template.h."""
PUBLISHED_3 = {  # TFLOP/s by pass and head dim
    ("forward", 64): 497,
    ("forward", 128): 648,
    ("backward", 64): 507,
    ("backward", 128): 561,
}
"""Of 16384 tokens without a mask on an H100. Source: figures 5 and 6 of the same; for the backward with a head dim of
64 the table of Dao-AILab/flash-attention#2207, of sums in a fixed order.
"""


def compiled(folders: list[Path], arch: int, nvcc: str, kernel: tuple) -> Compiled:
    """What one of KERNELS takes.

    Args:
        folders: where its headers, those of CUTLASS and those of PyTorch are.
    """
    name, D, (block_m, block_n, warps), more, of_pass = kernel
    kind = "fwd" if of_pass is FORWARD else "bwd"
    traits = f"Flash_{kind}_kernel_traits<{D}, {block_m}, {block_n}, {warps}, {more}, cutlass::half_t>"
    with tempfile.TemporaryDirectory() as scratch:
        source, ptx, cubin = (Path(scratch, f"kernel.{suffix}") for suffix in ("cu", "ptx", "cubin"))
        source.write_text(SOURCE.format(traits=traits, **of_pass))
        options = _options(folders)
        subprocess.run([nvcc, "-ptx", f"-arch=sm_{arch}", *options, "-o", ptx, source], check=True)
        subprocess.run([nvcc, "-cubin", f"-arch=sm_{arch}", "-o", cubin, ptx], check=True)
        shared, code = int(re.search(r"\bbytes_of_shared_memory = (\d+)", ptx.read_text())[1]), cubin.read_bytes()
    registers, stack = registers_and_stack(code)
    ways = sorted((loop.shortest_way for loop in innermost_loops(disassembled(code), "HMMA")), key=len)
    steps = [step_of(way, arch, (block_m, block_n), warps) for way in ways]
    programs = programs_at_once(arch, registers, shared, warps)
    return Compiled(
        triton="",
        arch=arch,
        kernel=name,
        D=D,
        dtype="float16",
        call="plain",
        registers=registers,
        stack=stack,
        shared=shared,
        tile=(block_m, block_n, warps),
        programs=programs,
        matrix="mma.sync",
        columns=0,
        spread=False,
        full=steps[0],
        partial=steps[-1],
        predicted=predicted(ways[0], arch, (block_m, block_n), warps, programs),
    )


def _options(folders: list[Path]) -> list[str]:
    options = ["-std=c++17", "-O3", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-w"]
    return [*options, *(option for folder in folders for option in ("-I", str(folder)))]


def beside_published_3(folders: list[Path], nvcc: str) -> str:
    """Markdown: the same of version 3, whose warp groups the model runs as programs of their own."""
    lines: list[tuple[object, ...]] = [("GPU", "D", "pass", "predicted", "published", "ratio")]
    lines.append(("---", "--:", "---", "--:", "--:", "--:"))
    for which, D, groups, columns, arguments in KERNELS_3:
        with tempfile.TemporaryDirectory() as scratch:
            source, cubin = Path(scratch, "kernel.cu"), Path(scratch, "kernel.cubin")
            source.write_text(SOURCE_3.format(direction="fwd" if which == "forward" else "bwd", arguments=arguments))
            options = [*_options(folders), "-DNDEBUG", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"]
            subprocess.run([nvcc, "-cubin", "-arch=sm_90a", *options, "-o", cubin, source], check=True)
            loops = innermost_loops(disassembled(cubin.read_bytes()), "HGMMA")
        loop = min((loop.shortest_way for loop in loops), key=len)
        flops = 2 * D * (2 if which == "forward" else 5)
        rate = tflops(cycles_of_groups(loop, groups, columns), flops, RATES[90], "wgmma.mma_async")
        published = PUBLISHED_3[which, D]
        lines.append(("sm_90", D, which, round(rate), published, f"{rate / published:.2f}"))
    return records.markdown(lines)


def beside_published(kernels: list[Compiled]) -> str:
    """Markdown: TFLOP/s as predicted and as published, and the first over the second."""
    lines: list[tuple[object, ...]] = [("GPU", "D", "pass", "predicted", "published", "ratio")]
    lines.append(("---", "--:", "---", "--:", "--:", "--:"))
    for (arch, D), speeds in PUBLISHED.items():
        cycles = {x.kernel: x.predicted for x in kernels if (x.arch, x.D) == (arch, D)}
        for which, published in speeds.items():
            names = [name for name in cycles if which == "both" or (name == "forward") == (which == "forward")]
            flops = sum(2 * D * (2 if name == "forward" else 5) for name in names)
            if names:
                rate = tflops(sum(cycles[name] for name in names), flops, RATES[arch], "mma.sync")
                lines.append((f"sm_{arch}", D, which, round(rate), published, f"{rate / published:.2f}"))
    return records.markdown(lines)


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flash_attention", type=Path)
    parser.add_argument("cutlass", type=Path)
    parser.add_argument("arch", type=int, choices=(80, 90))
    parser.add_argument("--nvcc", default="nvcc")
    options = parser.parse_args()
    of_torch = Path(torch.__file__).parent / "include"
    folders = [options.flash_attention / "csrc/flash_attn/src", options.cutlass / "include", of_torch]
    for folder in folders[:2]:
        if not folder.is_dir():
            sys.exit(f"{folder} must be a folder of a checkout")
    if shutil.which(options.nvcc) is None:
        sys.exit(f"--nvcc must be nvcc of a CUDA toolkit, and there is no {options.nvcc}")
    kernels = [compiled(folders, options.arch, options.nvcc, kernel) for kernel in KERNELS]
    print(triton_record.markdown(kernels), beside_published(kernels), sep="\n\n")
    if options.arch == 90:
        folders[0] = options.flash_attention / "hopper"
        print("", beside_published_3(folders, options.nvcc), sep="\n")


if __name__ == "__main__":
    main()
