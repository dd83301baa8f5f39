"""Compiles the Triton kernels ahead of time, for GPUs that need not be there, and prints what is wrong with them.

`python tests/compile_gates/triton_compile.py 80` names each kernel for sm_80 and what is wrong with it, `--json` prints
one object a line, `--calls` takes some calls alone. `--record DIR ...` compiles all of them with the installed Triton,
the hot ones with those that pip install --target DIR has unpacked too, and writes triton_record.FILE. It runs the
functions of the backend and stops each launch after compiling: what is compiled is what would run. A kernel that
several calls share is compiled once, for the first of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # of which the record has the digest, whatever is installed

import torch
import triton
import triton_record
from cycles import RATES, cycles_of_step
from sass import Instruction, clocks, count, disassembled, innermost_loops, registers_and_stack
from triton.runtime import driver
from triton_record import FLOPS, MOST_WARPS, PLAIN, SHARED_KIB, TRAINING, Compiled, Step

from benchmarks.gpu.compiling import NoGPU
from fastattn.backends import triton as backend
from fastattn.backends.compiling import compile_only
from fastattn.backends.triton import configs
from fastattn.spec import Mask, Spec

B, H, N = 2, 2, 256
REAL = torch.ones(B, N, dtype=torch.bool)
WORST = Mask(causal=True, q_offset=torch.zeros(B, dtype=torch.int32), real_keys=REAL, real_queries=REAL)
CALLS = {  # name -> arguments of Spec
    "plain": {"mask": Mask()},
    "causal": {"mask": Mask(causal=True)},
    "keys": {"mask": Mask(real_keys=REAL)},
    "pages": {"mask": Mask(causal=True, q_offset=torch.zeros(B, dtype=torch.int64), real_keys=REAL)},
    "pages of int8": {"mask": Mask(causal=True, q_offset=torch.zeros(B, dtype=torch.int64), real_keys=REAL)},
    "pages of float8": {"mask": Mask(causal=True, q_offset=torch.zeros(B, dtype=torch.int64), real_keys=REAL)},
    "worst": {"mask": WORST},
    "documents": {"mask": Mask(causal=True, segment_ids=(REAL.int(), REAL.int()))},
    "dense": {"mask": Mask(causal=True, dense=torch.ones(B, 1, N, N, dtype=torch.bool))},
    "softcap": {"mask": Mask(causal=True), "softcap": 50.0},
    "alibi": {"mask": Mask(causal=True), "alibi_slopes": torch.zeros(H)},
    "bias": {"mask": Mask(causal=True), "bias": torch.zeros(H, N, N, dtype=torch.bfloat16)},
    "bias by distance": {
        "mask": Mask(causal=True),
        "bias": torch.zeros(H, 1, 2 * N - 1, dtype=torch.bfloat16),
        "bias_by_distance": True,
    },
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


class Call(NamedTuple):
    """A call to compile: head dim, dtype and one of CALLS."""

    D: int
    dtype: str
    name: str

    @classmethod
    def of(cls, text: str) -> Call:
        """Read from what `str` gives."""
        D, dtype, name = text.split("-", 2)
        return cls(int(D), dtype, name)

    def __str__(self) -> str:
        return "-".join(map(str, self))


HOT = [Call(D, "bfloat16", name) for D in (64, 128) for name in PLAIN]
_TERMS = [Call(D, "bfloat16", name) for D in (64, 128) for name in CALLS if name not in (*PLAIN, "worst", "everything")]
_WIDE = [Call(256, "bfloat16", name) for name in (*PLAIN, "everything")]
_NARROW = [Call(D, "bfloat16", name) for D in (40, 72, 80, 96) for name in ("causal", "keys")]
_OTHERS = [Call(64, "float32", "causal"), Call(64, "float16", "worst"), Call(128, "float16", "worst")]
COMPILED = {
    80: [*HOT, *_TERMS, *_WIDE, *_NARROW, *_OTHERS],
    86: [*HOT, *_WIDE],
    89: HOT[:1],
    90: [*HOT, *_TERMS, *_WIDE, *_NARROW, *_OTHERS],
    100: [*HOT, *_WIDE],
    120: [*HOT, *_WIDE],
}
"""By arch. sm_89 takes the code of sm_86, which runs there."""
FEW = [Call(128, "bfloat16", "keys"), Call(72, "bfloat16", "causal"), Call(256, "bfloat16", "everything")]
"""Which `make test` compiles for sm_80 and sm_90 where the record is of other kernels or another Triton."""
WITH_WEIGHTS = {*HOT, *_TERMS} - {Call(D, "bfloat16", "sinks") for D in (64, 128)}
"""Whose kernels of weights are compiled too; those know sinks from the lse alone."""
MATRIX = r"(?:HMMA|HGMMA|UTC\w*MMA)"
OPERAND = re.compile(r"tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = (\d+)\}>> \*")
"""The left side of a product on mma.sync: its columns, and how many lie side by side in each of four threads."""
MATRIX_INSTRUCTION = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


def compiled(arch: int, calls: list[Call]) -> Iterator[Compiled]:
    """What every kernel of these calls takes."""
    driver.set_active(NoGPU(arch))
    torch.cuda.get_device_capability = lambda device: divmod(arch, 10)
    triton.knobs.compilation.disable_line_info = True  # faster, and the same instructions
    triton.knobs.nvidia.dump_ptxas_log = True
    kernels, known, printed, block, without_values = [], [], io.StringIO(), (0, 0), False

    def take(name: str, kernel: object) -> None:
        ptxas_says = printed.getvalue()
        printed.truncate(printed.seek(0))
        if not any(kernel is other for other in known):
            timed = name in TRAINING and call.name in PLAIN and not without_values
            taken = resources(kernel, arch, block, ptxas_says, timed) | {"without_values": without_values}
            kernels.append((name, taken))
            known.append(kernel)

    for call in calls:

        def is_wanted(options: dict[str, object], name: str = call.name) -> bool:
            """Not the rows and lse of weights: kernels of the forward and the backward, but without values."""
            nonlocal block, without_values
            block, without_values = (options.get("BLOCK_M", 1), options.get("BLOCK_N", 1)), options.get("D_V") == 0
            return options.get("D_V") != 0 or name == "causal"

        q = torch.zeros(B, H, N, call.D, dtype=getattr(torch, call.dtype))
        lse, spec = torch.zeros(B, H, N), Spec(scale=call.D**-0.5, **CALLS[call.name])
        for tiles in [{}, *tiles_to_try(call, q)]:
            with (
                mock.patch.dict(configs.in_place_of, tiles),
                compile_only(take, is_wanted),
                contextlib.redirect_stdout(printed),
            ):
                compile_call(call, q, lse, spec)
            for name, taken in kernels:
                of = {"triton": triton.__version__, "arch": arch, "kernel": name, "D": call.D, "dtype": call.dtype}
                yield Compiled(**of, call=call.name, **taken, is_to_try=bool(tiles))
            kernels.clear()


def tiles_to_try(call: Call, q: torch.Tensor) -> list[dict[str, str]]:
    """What `configs.in_place_of` is to be for each tile that `fastattn tune` tries, in a causal call."""
    if (call.name, call.dtype) != ("causal", "bfloat16"):
        return []
    tiles = configs.tiles_to_try(q).items()
    return [{name: other} for name, (_, *others) in tiles for other in others if name.endswith(f" {call.D}")]


def compile_call(call: Call, q: torch.Tensor, lse: torch.Tensor, spec: Spec) -> None:
    """Makes all calls of the backend that `call` stands for."""
    if call.name.startswith("pages"):
        stored = {"pages of int8": torch.int8, "pages of float8": torch.float8_e4m3fn}.get(call.name)
        k = torch.zeros(B * N // 16, H, 16, call.D, dtype=stored or q.dtype)
        table, scales = torch.zeros(B, N // 16, dtype=torch.int32), torch.zeros(B * N // 16, H, 16)
        for queries, heads in ((q, slice(None)), (q[:, :, :1], slice(1))):
            if stored is None:
                backend.forward_paged(queries, k[:, heads], k[:, heads], table, spec)
            else:
                rows = scales[:, heads]
                backend.forward_quantized(queries, k[:, heads], k[:, heads], rows, rows, table, spec)
        return
    wanted = [True] * 3 + [x is not None for x in (spec.bias, spec.alibi_slopes, spec.sinks)]
    backend.forward(q, q, q, spec)
    backend.forward(q[:, :, :1], q[:, :1], q[:, :1], spec)
    backend.backward(q, lse, q, q, q, q, lse, spec, tuple(wanted))
    if call in WITH_WEIGHTS:
        backend.weights(q, q, lse, spec, average_heads=True)
    if call in WITH_WEIGHTS and spec.dropout_p == 0:
        backend.received(q, q, spec)
        backend.top_keys(q, q, spec, top_k=8)


def resources(kernel, arch: int, block: tuple[int, int], ptxas_says: str, timed: bool) -> dict[str, object]:
    """What a kernel that was just compiled takes, by the names of `Compiled`.

    Args:
        block: its tile of pairs.
        timed: whether to predict its time, which takes seconds.
    """
    ptx, code = kernel.asm["ptx"], disassembled(kernel.asm["cubin"])
    registers, stack = registers_and_stack(kernel.asm["cubin"])
    warps = kernel.metadata.num_warps
    ways = sorted((loop.shortest_way for loop in innermost_loops(code, MATRIX)), key=len)
    steps = [step_of(way, arch, block, warps) for way in ways]
    programs = programs_at_once(arch, registers, kernel.metadata.shared, warps)
    of_warps = re.findall(r"warpsPerCTA = \[\d+, (\d+)\], instrShape", kernel.asm["ttgir"])
    columns = map(int, re.findall(r"wgmma\.mma_async\.\S*?m64n(\d+)", ptx))
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "tile": (*block, warps),
        "programs": programs,
        "matrix": "+".join(sorted(set(MATRIX_INSTRUCTION.findall(ptx)))),
        "columns": min(columns, default=0),
        "spread": any(int(n) > 1 for n in of_warps),
        "cramped": any(4 * int(width) > int(columns) for columns, width in OPERAND.findall(kernel.asm["ttgir"])),
        "full": steps[0] if steps else None,
        "partial": steps[-1] if len(steps) > 1 else None,
        "predicted": predicted(ways[0], arch, block, warps, programs) if timed and ways else None,
        "warnings": tuple(line.strip() for line in ptxas_says.splitlines() if "serialized" in line),
    }


def predicted(loop: list[Instruction], arch: int, block: tuple[int, int], warps: int, programs: int) -> int | None:
    """Clock cycles of a multiprocessor for 128 x 128 pairs by the model of cycles.py; None for a GPU that it lacks."""
    if arch not in RATES or programs == 0:
        return None
    return round(cycles_of_step(loop, RATES[arch], warps, programs) * 128 * 128 / (block[0] * block[1] * programs))


def step_of(texts: list[str], arch: int, block: tuple[int, int], warps: int) -> Step:
    narrow = sum(re.match(r"(@!?U?P\w+ )?LDG\S*\.[US](8|16)\b", text) is not None for text in texts)
    names = (MATRIX, "MUFU", "LDSM", "STS", "BAR", "(?:LDL|STL)")
    per_pair = 128 * 128 / (block[0] * block[1])
    each = tuple(round(per_pair * n) for n in clocks(texts, warps, FLOPS[arch]))
    return Step(len(texts), *(count(name, texts) for name in names), narrow, each)


def programs_at_once(arch: int, registers: int, shared: int, warps: int) -> int:
    """How many programs of a kernel a multiprocessor runs at once.

    Source: CUDA C++ Best Practices Guide, occupancy: a warp takes registers by 256, a block 1 KiB of shared memory more
    than it asks for.
    """
    of_warp = -(-registers * 32 // 256) * 256
    return min(65536 // (of_warp * warps), SHARED_KIB[arch][1] * 1024 // (shared + 1024), MOST_WARPS[arch] // warps)


def compiled_with(folder: Path | None, arch: int, calls: list[Call]) -> list[Compiled]:
    """The same in a process of its own, with the Triton in a folder or the installed one.

    Raises:
        subprocess.CalledProcessError: something does not compile.
    """
    paths = [str(folder.resolve())] if folder else []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:  # what is cached says nothing of ptxas
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *(p for p in sys.path if p)])
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, str(arch), "--json", "--calls", *map(str, calls)]
        printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [triton_record.compiled(json.loads(line)) for line in printed.splitlines()]


def main() -> None:
    """Prints what the kernels take, or records it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, nargs="?", choices=COMPILED)
    parser.add_argument("--calls", type=Call.of, nargs="+", metavar="DIM-DTYPE-NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path, metavar="DIR", nargs="*")
    options = parser.parse_args()
    if options.record is not None:
        sys.exit(record(options.record))
    for kernel in compiled(options.arch, options.calls or COMPILED[options.arch]):
        print(json.dumps(asdict(kernel)) if options.json else kernel, flush=True)
        for complaint in [] if options.json else kernel.complaints():
            print("   ", complaint, flush=True)


def record(folders: list[Path]) -> int:
    """Compiles everything with the installed Triton, the hot calls with those in these folders, and records it.

    Returns:
        How many complaints there are; each is printed.
    """
    digest = triton_record.digest()
    jobs = [(folder, arch, HOT) for folder in folders for arch in (80, 90)]
    jobs += [(None, arch, calls[i : i + 4]) for arch, calls in COMPILED.items() for i in range(0, len(calls), 4)]
    kernels = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, found in enumerate(pool.map(lambda job: compiled_with(*job), jobs), 1):
            kernels += found
            print(f"{i} of {len(jobs)}: sm_{jobs[i - 1][1]}, {len(found)} kernels", flush=True)
    if triton_record.digest() != digest:
        sys.exit("the kernels were changed while they were compiled, so that nothing is recorded")
    triton_record.record(kernels)
    wrong = [f"{kernel}: {complaint}" for kernel in kernels for complaint in kernel.complaints()]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return min(len(wrong), 1)


if __name__ == "__main__":
    main()
