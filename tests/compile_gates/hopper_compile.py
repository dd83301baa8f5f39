"""Compiles the Hopper kernels ahead of time, on a machine without a GPU, and prints what each of them takes.

`python tests/compile_gates/hopper_compile.py` prints a line for each kernel of each hot call, `--json` one object a
line, and `--head-dim` and `--mask` some of them. `--triton DIR` does it with the Triton that pip install --target DIR
unpacks. `--record DIR ...` does it with the installed one and with those in these folders, and writes
hopper_record.FILE. All fail where something is wrong. It runs the functions of the backend and stops each launch after
compiling: what is compiled is what would run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
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
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import hopper_record
from cycles import cycles_of_groups
from hopper_record import Compiled
from sass import count, disassembled, innermost_loops, instructions

HEAD_DIMS = (64, 128, 256)
CALLS = ("full", "causal", "padded", "documents")
_B, _H, _H_KV, _N = 2, 4, 2, 1024
_MULTIPROCESSORS = 132  # of an H100 or H200
_LOCAL = "(?:STL|LDL)"


def compiled(calls: list[tuple[int, str]]) -> Iterator[Compiled]:
    """What every kernel of these head dims with these masks takes, in bf16."""
    import torch
    import triton

    sys.path.insert(0, str(Path(__file__).parents[2]))  # of which the record has the digest, whatever is installed
    from benchmarks.gpu.compiling import NoGPU
    from fastattn.backends import hopper
    from fastattn.backends.compiling import compile_only
    from fastattn.spec import Mask, Spec

    triton.runtime.driver.set_active(NoGPU(90))
    triton.knobs.compilation.disable_line_info = True  # faster, and the same instructions
    triton.knobs.nvidia.dump_ptxas_log = True
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=_MULTIPROCESSORS)
    real = torch.ones(_B, _N, dtype=torch.bool)
    masks = {
        "full": Mask(),
        "causal": Mask(causal=True),
        "padded": Mask(real_keys=real, real_queries=real),
        "documents": Mask(causal=True, segment_ids=(real.int(), real.int())),
    }
    rows, known = [], []

    def take(name: str, kernel: object) -> None:
        ptxas_says = printed.getvalue()
        printed.truncate(printed.seek(0))
        if not any(kernel is other for other in known):
            known.append(kernel)
            same_name = sum(row["kernel"].startswith(name) for row in rows)  # with other constants
            kernel_name = f"{name}, {same_name + 1}" if same_name else name
            rows.append(_resources(kernel, ptxas_says, tile if call == "full" else None) | {"kernel": kernel_name})

    tile = 0, 0

    def is_of_warp_groups(options: dict[str, object]) -> bool:
        """Not the kernels of the Triton backend, which prepare rows and masks."""
        nonlocal tile
        tile = options.get("GROUPS", 2), options.get("BLOCK_N") or options.get("BLOCK_M")
        return "maxnreg" in options

    for D, call in calls:
        q = torch.zeros(_B, _H, _N, D, dtype=torch.bfloat16)
        k, lse = q[:, :_H_KV], torch.zeros(_B, _H, _N)
        printed = io.StringIO()
        with compile_only(take, is_of_warp_groups), contextlib.redirect_stdout(printed):
            for deterministic in (True, False):
                spec = Spec(masks[call], D**-0.5, deterministic=deterministic)
                if deterministic:
                    hopper.forward(q, k, k, spec)
                hopper.backward(q, lse, q, k, k, q, lse, spec, (True,) * 3 + (False,) * 3)
        for row in rows:
            yield Compiled(triton=triton.__version__, D=D, call=call, **row)
        rows.clear()


def _resources(kernel, ptxas_says: str, tile: tuple[int, int] | None) -> dict[str, object]:
    """Of a kernel that was just compiled, from what ptxas said of it and from its instructions.

    Args:
        tile: its warp groups, and the columns of what each of them computes in a step; None for no prediction.
    """
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_says)
    warnings = [line.strip() for line in ptxas_says.splitlines() if "C75" in line or "serializ" in line]
    if not _fenced(kernel.asm["ptx"]):
        warnings.append("may load before its barriers are seen")
    code = disassembled(kernel.asm["cubin"])
    every, loops = instructions(code), innermost_loops(code, "HGMMA")
    shortest = min((loop.shortest_way for loop in loops), key=len, default=[])
    return {
        "registers": int(re.search(r"Used (\d+) registers", ptxas_says)[1]),
        "spilled": sum(map(int, spilled)),
        "local": count(_LOCAL, every),
        "loop_local": sum(count(_LOCAL, loop.shortest_way) for loop in loops),
        "shared": kernel.metadata.shared,
        "hgmma": count("HGMMA", every),
        "tma": count("UTMALDG", every),
        "setmaxreg": count("USETMAXREG", every),
        "loop": len(shortest),
        "loop_hgmma": count("HGMMA", shortest),
        "loop_exposed": _exposed(shortest),
        "predicted": round(cycles_of_groups(shortest, *tile)) if tile and shortest else None,
        "warnings": tuple(warnings),
    }


def _fenced(ptx: str) -> bool:
    """Whether what loads asynchronously sees each barrier: a fence of its proxy stands before the threads meet."""
    after_the_last = ptx[ptx.rindex("mbarrier.init") :]
    return "fence.proxy.async" in after_the_last.partition("bar.sync")[0]


def _exposed(loop: list[str]) -> int:
    """How many exponentials of a loop run while no group of matrix products is under way."""
    exposed = under_way = 0
    for _ in ("the first time", "any later one"):
        exposed = 0
        for text in loop:
            if wait := re.search(r"DEPBAR\.LE gsb0, (0x\w+)", text):
                under_way = min(under_way, int(wait[1], 16))
            elif "HGMMA" in text and "gsb0" in text:
                under_way += 1
            elif "MUFU.EX2" in text and under_way == 0:
                exposed += 1
    return exposed


def compiled_with(folder: Path | None, head_dim: int, call: str) -> list[Compiled]:
    """The same in a process of its own, with the Triton in a folder or the installed one; keeps the results.

    Raises:
        CompilationError: something does not compile.
    """
    command = [sys.executable, str(Path(__file__)), "--json", "--head-dim", str(head_dim), "--mask", call]
    kept = Path(__file__).parents[2] / "build" / "hopper" / f"{_state(folder)}-{head_dim}-{call}.jsonl"
    if not kept.is_file():
        command += ["--triton", str(folder)] if folder else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, _WRONG):
            raise CompilationError(f"{' '.join(command)} ended with {done.returncode}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")  # make hopper and the tests may compile the same at once
        unfinished.write_text(done.stdout)
        unfinished.replace(kept)
    rows = map(json.loads, kept.read_text().splitlines())
    return [Compiled(**row | {"warnings": tuple(row["warnings"])}) for row in rows]


def _state(folder: Path | None) -> str:
    """Names all that what is compiled depends on."""
    version = folder.name if folder else importlib.metadata.version("triton")
    tools = b"".join(Path(module).read_bytes() for module in (__file__, hopper_record.__file__))
    return f"{version}-{hopper_record.digest()}-{hashlib.sha256(tools).hexdigest()[:8]}"


class CompilationError(Exception):
    """Kernels do not compile; the message is the command that says why."""


_WRONG = 3  # the exit code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", type=Path, metavar="DIR")
    parser.add_argument("--record", type=Path, metavar="DIR", nargs="*")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--mask", choices=CALLS, nargs="+", default=CALLS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.triton:
        paths = [str(options.triton.resolve()), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        rest = [x for x in sys.argv[1:] if x not in ("--triton", str(options.triton))]
        os.execv(sys.executable, [sys.executable, __file__, *rest])
    if options.record is not None:
        each = product((None, *options.record), options.head_dim, options.mask)
        kernels, wrong, digest = [], [], hopper_record.digest()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for future in [pool.submit(compiled_with, *call) for call in each]:
                try:
                    kernels += future.result()
                except CompilationError as error:
                    wrong.append(str(error))
        if hopper_record.digest() != digest:
            sys.exit("the kernels were changed while they were compiled, so that nothing is recorded")
        hopper_record.record(kernels)
        print(hopper_record.table(kernels))
        wrong += [f"{kernel} {complaint}" for kernel in kernels for complaint in kernel.complaints()]
    else:
        wrong = []
        with tempfile.TemporaryDirectory() as folder:  # what is cached says nothing of ptxas
            os.environ["TRITON_CACHE_DIR"] = folder
            os.environ.pop("TRITON_INTERPRET", None)
            for kernel in compiled(list(product(options.head_dim, options.mask))):
                row = asdict(kernel)
                print(
                    json.dumps(row) if options.json else "  ".join(f"{k} {v!s:>6}" for k, v in row.items()), flush=True
                )
                wrong += [f"{kernel} {complaint}" for complaint in kernel.complaints()]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    sys.exit(_WRONG if wrong else 0)


if __name__ == "__main__":
    main()
