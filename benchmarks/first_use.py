"""Prints how long the kernels of a check at first use take to compile, side by side and one after the other.

    python benchmarks/first_use.py [--capability 9.0] [--dtype bfloat16 float32] [--backend triton]

No GPU is needed: Triton compiles for one that need not be there. Each time is of a new process with an empty cache.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from fastattn.backends import build

DTYPES = ["bfloat16", "float16", "float32"]


def compile_check(backend: str, capability: tuple[int, int], dtype: str, side_by_side: bool) -> float:
    """Seconds for the kernels of the family that trains, in this process."""
    import torch
    from triton.runtime import driver

    from benchmarks.gpu.compiling import NoGPU
    from fastattn.backends import backend_by_name, compiling, selfcheck

    module, device = backend_by_name(backend), torch.device("cpu")
    properties = SimpleNamespace(multi_processor_count=132)
    driver.set_active(NoGPU(10 * capability[0] + capability[1]))
    one_by_one = mock.patch.object(selfcheck, "compiled_at_once", compiling.compile_only)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "device_of", contextlib.nullcontext),
        mock.patch.object(module, "unsupported", return_value=[]),  # tensors are on the CPU
        contextlib.nullcontext() if side_by_side else one_by_one,
    ):
        start = time.monotonic()
        selfcheck._compile(module, device, getattr(torch, dtype), True)
        return time.monotonic() - start


def capability(text: str) -> tuple[int, int]:
    """(9, 0) for 9.0."""
    major, minor = map(int, text.split("."))
    return major, minor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=capability, default=(9, 0), help="of the GPU, such as 9.0")
    parser.add_argument("--dtype", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--backend", default="triton", choices=["triton", "hopper"])
    args = parser.parse_args()
    for dtype in args.dtype:
        took = []
        for side_by_side in (True, False):
            with tempfile.TemporaryDirectory() as cache:
                os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    took.append(
                        process.submit(compile_check, args.backend, args.capability, dtype, side_by_side).result()
                    )
        together, alone = took
        of = f"{args.backend} {dtype} for {'.'.join(map(str, args.capability))}"
        print(
            f"{of}: {together:.1f} s side by side on {build.processors()} cores, {alone:.1f} s one after the other",
            flush=True,
        )


if __name__ == "__main__":
    main()
