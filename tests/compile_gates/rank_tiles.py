"""Ranks tiles of a Triton kernel by the time that the model of cycles.py predicts for them.

`python tests/compile_gates/rank_tiles.py 90 forward 128-bfloat16-causal` compiles the forward with every tile that
might do for sm_90, without a GPU, and prints the fastest; the kernels are forward, dk_dv and dq. It takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from unittest import mock

import torch
import triton
from cycles import RATES, tflops
from triton.runtime import driver
from triton_compile import CALLS, Call, resources
from triton_record import Compiled

from benchmarks.gpu.compiling import NoGPU
from fastattn.backends import triton as backend
from fastattn.backends.compiling import compile_only
from fastattn.backends.triton import configs
from fastattn.backends.triton.configs import Config
from fastattn.spec import Spec

PRODUCTS = {"forward": 2, "dk_dv": 4, "dq": 3}
"""Of matrices, for each tile of pairs."""
_B, _H, _N = 2, 2, 256


def tiles(kernel: str, arch: int) -> Iterator[Config]:
    """Tiles that give each warp 16 rows of its products, as the matrix instructions have them."""
    for rows in (64, 128):
        for columns in (64, 128) if arch == 90 else (16, 32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3, 4):
                    if rows >= 16 * warps:
                        yield Config(*((columns, rows) if kernel == "dk_dv" else (rows, columns)), warps, stages)


def compiled(kernel: str, config: Config, arch: int, call: Call) -> Compiled:
    """What the kernel takes with a tile, in place of that of configs.py."""
    q, lse = torch.zeros(_B, _H, _N, call.D, dtype=getattr(torch, call.dtype)), torch.zeros(_B, _H, _N)
    spec = Spec(scale=call.D**-0.5, **CALLS[call.name])
    found: dict[str, object] = {}
    wanted = (kernel == "dq", kernel == "dk_dv", kernel == "dk_dv", False, False, False)
    with (
        mock.patch.dict(configs._TABLE, {key: config for key in configs._TABLE if key[0] == kernel}),
        mock.patch.dict(configs._HEAVY, clear=True),
        mock.patch.dict(configs._HEAVIEST, clear=True),
        compile_only(found.__setitem__),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        if kernel == "forward":
            backend.forward(q, q, q, spec)
        else:
            backend.backward(q, lse, q, q, q, q, lse, spec, wanted)
    of = {"triton": triton.__version__, "arch": arch, "kernel": kernel, "D": call.D, "dtype": call.dtype}
    tile = config.BLOCK_M, config.BLOCK_N
    taken = resources(found[f"{kernel}_kernel"], arch, tile, printed.getvalue(), timed=True)
    return Compiled(**of, call=call.name, **taken)


def main() -> None:
    """Prints a line for each of the fastest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=RATES)
    parser.add_argument("kernel", choices=PRODUCTS)
    parser.add_argument("call", type=Call.of, metavar="DIM-DTYPE-NAME")
    parser.add_argument("--tile", type=int, nargs=4, action="append", metavar=tuple(Config._fields), help="these alone")
    parser.add_argument("--most", type=int, default=8, help="how many to print")
    options = parser.parse_args()
    call = options.call
    if call.name not in CALLS or call.dtype not in ("bfloat16", "float16", "float32") or not 0 < call.D <= 256:
        parser.error(
            f"DIM-DTYPE-NAME must be up to 256, bfloat16, float16 or float32, and one of {', '.join(CALLS)}, got {call}"
        )
    for tile in options.tile or []:
        if any(n < 1 or n & n - 1 for n in tile[:3]) or min(tile[:2]) < 16 or tile[3] < 1:
            parser.error(f"--tile must be powers of two, from 16 rows and columns on, and stages, got {tile}")
    driver.set_active(NoGPU(options.arch))
    torch.cuda.get_device_capability = lambda device: divmod(options.arch, 10)
    triton.knobs.compilation.disable_line_info = True
    triton.knobs.compilation.always_compile = True  # what is cached says nothing of ptxas
    triton.knobs.nvidia.dump_ptxas_log = True
    candidates = [Config(*tile) for tile in options.tile or tiles(options.kernel, options.arch)]
    ranked = []
    for i, config in enumerate(candidates, 1):
        print(f"{i} of {len(candidates)}: {config}", file=sys.stderr, flush=True)
        kernel = compiled(options.kernel, config, options.arch, options.call)
        if kernel.predicted is not None:
            ranked.append((kernel.predicted, config, kernel))
    print("| cycles | TFLOP/s | tile, warps, stages | at once | registers | stack | spills in a step | wgmma |")
    print("| --: | --: | --- | --: | --: | --: | --: | --- |")
    flops = 2 * PRODUCTS[options.kernel] * options.call.D
    for cycles, config, kernel in sorted(ranked, key=lambda row: row[0])[: options.most]:
        rate = tflops(cycles, flops, RATES[options.arch], kernel.matrix)
        tile = f"{config.BLOCK_M} x {config.BLOCK_N}, {config.num_warps}, {config.num_stages}"
        taken = f"{kernel.programs} | {kernel.registers} | {kernel.stack} | {kernel.full.local}"
        taken += f" | {'one by one' if kernel.warnings else ''}"
        print(f"| {cycles} | {rate:.0f} | {tile} | {taken} |")


if __name__ == "__main__":
    main()
