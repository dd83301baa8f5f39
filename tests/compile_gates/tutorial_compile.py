"""Compiles the attention of Triton's tutorial for a GPU that need not be there, and counts what it takes as for ours.

`python tests/compile_gates/tutorial_compile.py 06-fused-attention.py 80` takes the file from a checkout of Triton
(python/tutorials) and prints lines of the table that `python tests/compile_gates/triton_record.py` prints, for the
forward with some of the tiles that it tunes over. On Hopper it loads by TMA.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton_record
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_compile import resources
from triton_record import Compiled

from benchmarks.gpu.compiling import NoGPU

B, H, N = 2, 4, 1024
TILES = ((128, 64, 4, 3), (128, 32, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2))  # and warps and stages


class NoGPUForTorch(NoGPU):
    """The same, which the tutorial asks for a device of torch."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def tutorial(path: Path) -> ModuleType:
    """The tutorial without its tests and benchmarks, which ask for a GPU as they are defined."""
    source = path.read_text().partition("@pytest.mark.parametrize")[0]
    if "def _attn_fwd(" not in source:
        sys.exit(f"{path} must be python/tutorials/06-fused-attention.py of a checkout of Triton, and has no _attn_fwd")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tutorial.py")  # Triton reads the sources of kernels from their file
        file.write_text(source)
        spec = importlib.util.spec_from_file_location("tutorial", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def compiled(module: ModuleType, arch: int) -> Iterator[Compiled]:
    """What its forward takes with a causal mask, in fp16."""
    for D in (64, 128):
        q, k, v, o = (torch.zeros(B, H, N, D, dtype=torch.float16) for _ in range(4))
        lse = torch.zeros(B * H, N)
        of = {"triton": triton.__version__, "arch": arch, "D": D, "dtype": "float16", "call": "causal"}
        for block_m, block_n, warps, stages in TILES:
            if block_n > D:
                continue
            tensors = [q, k, v, o]
            if arch >= 90:
                rows = (block_m, block_n, block_n, block_m)
                tensors = [
                    TensorDescriptor(x, [B * H * N, D], [D, 1], [n, D]) for x, n in zip(tensors, rows, strict=True)
                ]
            options = {"FP8_OUTPUT": False, "STAGE": 3, "warp_specialize": False, "IS_HOPPER": arch == 90}
            options |= {"HEAD_DIM": D, "BLOCK_M": block_m, "BLOCK_N": block_n}
            kernel = module._attn_fwd.fn.warmup(
                D**-0.5, lse, B, H, *tensors, N, **options, num_warps=warps, num_stages=stages, grid=(1,)
            )
            yield Compiled(kernel="forward", **of, **resources(kernel, arch, (block_m, block_n), "", timed=True))


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tutorial", type=Path)
    parser.add_argument("arch", type=int, choices=triton_record.FLOPS)
    options = parser.parse_args()
    if not options.tutorial.is_file():
        sys.exit(f"{options.tutorial} must be a file: python/tutorials/06-fused-attention.py of a checkout of Triton")
    driver.set_active(NoGPUForTorch(options.arch))
    torch.cuda.get_device_capability = lambda device=None: divmod(options.arch, 10)
    print(triton_record.markdown(compiled(tutorial(options.tutorial), options.arch)))


if __name__ == "__main__":
    main()
