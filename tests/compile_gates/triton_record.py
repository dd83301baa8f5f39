"""Record of what the Triton kernels take on each GPU, with several Tritons, and of the sources that were compiled.

`python tests/compile_gates/triton_record.py` prints the table of docs/performance.md. With `--is-current` it prints
nothing, and fails where the kernels are no longer those of the record: `make triton` compiles them anew and writes it.
Needs Python alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import records
from cycles import RATES, tflops
from records import CHOSEN, TRITONS

FILE = Path(__file__).with_name("triton_compiled.json")
TRAINING = ("forward_kernel", "dk_dv_kernel", "dq_kernel")
"""Kernels whose loops take the time of a training step."""
PLAIN = ("plain", "causal", "keys")
"""Calls with no more than limits and padded keys."""
SHARED_KIB = {80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
"""Shared memory that a block of threads can have, and that a multiprocessor has.

Source: CUDA C++ Programming Guide, technical specifications per compute capability.
"""
MOST_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
"""Of a multiprocessor. Source: the same."""
FLOPS = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
"""Dense floating-point operations of a multiprocessor in a clock cycle, 16 bits with sums in fp32.

Source: the peak rates of A100, A40, L40S, H100, B200 and RTX PRO 6000 in NVIDIA's data sheets, by their multiprocessors
and boost clocks. GeForce cards have half of it.
"""
OWN_INSTRUCTION = {
    80: "mma.sync",
    86: "mma.sync",
    89: "mma.sync",
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
    120: "mma.sync",
}
_BARRIERS = 3
"""Of a step over a full tile: before a stage of the ring is read, before it is written, and one to spare."""
_FRAGMENTS = {"forward_kernel": 0.5, "dk_dv_kernel": 0.75, "dq_kernel": 0.75}
"""Loads of matrices from shared memory (LDSM) for each mma.sync: from 0.8 on the A100's shared memory is the limit."""
_LOCAL = {"forward_kernel": 0, "dk_dv_kernel": 16, "dq_kernel": 0}
"""Instructions of a step over a full tile that spill, of a plain, causal or padded call; 8 on sm_86 and sm_120."""
_LOCAL_ON_HOPPER = 75
"""The same for dK and dV of more than 64 dims: tiles that spill none take twice the products there."""
_LOCAL_WITH_TERMS = 112
"""The same for dK and dV of other calls, which have as many registers less."""
_LOCAL_PARTIAL = {"forward_kernel": 30, "dk_dv_kernel": 48, "dq_kernel": 8}
"""The same of a step over a partial tile, of which a row of tiles has one or two."""
_LOCAL_PARTIAL_WITH_TERMS = 98


@dataclass(frozen=True)
class Step:
    """Instructions of a warp for one tile, on the shortest way round the loop over such tiles.

    matrix: HMMA, HGMMA or UTCHMMA. exponentials: MUFU. fragments: LDSM. stores: STS. barriers: BAR. local: LDL and STL,
    which touch what was spilled. narrow: loads of one or two bytes from global memory. clocks: of a multiprocessor, at
    least, for 128 x 128 pairs, in the order of `sass.Clocks`.
    """

    instructions: int
    matrix: int
    exponentials: int
    fragments: int
    stores: int
    barriers: int
    local: int
    narrow: int
    clocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on a GPU.

    triton: its version. call: the mask and terms it was compiled for. registers, stack: of a thread; bytes. shared:
    bytes. tile: queries, keys and warps. programs: how many of them run on a multiprocessor at once. matrix: the matrix
    instructions, in PTX. columns: those of the narrowest wgmma, 0 without one. spread: whether the scores of a row lie
    in several warps. cramped: whether a product has fewer columns than the layout of its left side, which Triton
    multiplies wrongly. full, partial: the steps over tiles of which every pair is seen and over the others; None where
    there is no such loop. predicted: clock cycles for 128 x 128 pairs that are all seen, by the model of cycles.py.
    warnings: of ptxas, that matrix instructions wait for each other. without_values: whether it computes the lse or
    rows of weights alone. is_to_try: whether its tile is one that `fastattn tune` tries in place of the default.
    """

    triton: str
    arch: int
    kernel: str
    D: int
    dtype: str
    call: str
    registers: int
    stack: int
    shared: int
    tile: tuple[int, int, int]
    programs: int
    matrix: str
    columns: int
    spread: bool
    full: Step | None
    partial: Step | None
    predicted: int | None = None
    warnings: tuple[str, ...] = ()
    without_values: bool = False
    is_to_try: bool = False
    cramped: bool = False

    def __str__(self) -> str:
        tile = f" in tiles of {self.tile}" if self.is_to_try else ""
        return f"{self.kernel} D{self.D} {self.dtype} {self.call}{tile} on sm_{self.arch}, Triton {self.triton}"

    @property
    def most_local(self) -> int:
        """How many instructions of a step over a full tile may spill."""
        if self.kernel != "dk_dv_kernel":
            return 8 if self.arch in (86, 120) else _LOCAL[self.kernel]
        if self.call not in PLAIN:
            return _LOCAL_WITH_TERMS
        return _LOCAL_ON_HOPPER if self.arch == 90 and self.D > 64 else _LOCAL[self.kernel]

    def complaints(self) -> Iterator[str]:
        """What is wrong with it, in sentences."""
        if self.shared > (most := SHARED_KIB[self.arch][0] * 1024):
            yield f"takes {self.shared} bytes of shared memory, of {most}"
        multiplies = self.kernel not in _WITHOUT_PRODUCTS
        if bool(self.matrix) != (multiplies and (self.dtype != "float32" or self.arch in _FP32_BY_MATRICES)):
            yield f"has {'' if self.matrix else 'no '}matrix instructions"
        if 0 < self.columns < 64:
            yield f"has a wgmma of {self.columns} columns, which Triton 3.7 gets wrong (triton#11366)"
        if self.cramped:
            yield "multiplies tiles that are narrower than their layout, which Triton gets wrong"
        if self.dtype == "float32" or not multiplies:
            return
        if self.is_to_try:  # which is timed before it serves
            return
        if self.call != "documents":  # of which Triton does not pipeline all loads on Hopper, for no known reason
            yield from self.warnings
        if self.call in ("dense", "everything") or self.D > 128:
            return
        slack = 1.0 if self.triton == CHOSEN else _OTHER_TRITONS
        if self.kernel not in TRAINING:
            if self.stack > (_STACK if self.triton == CHOSEN else _STACK_OF_OTHER_TRITONS).get(self.kernel, 8):
                yield f"spills {self.stack} bytes"
            if self.kernel == "decoding_kernel" and self.call in PLAIN and (self.full is None or self.full.narrow):
                yield "reads keys and values one or two bytes at a time"
            return
        if self.full is not None and self.full.local > slack * self.most_local:
            yield f"spills in a step, with {self.full.local} instructions"
        most_partial = _LOCAL_PARTIAL[self.kernel] if self.call in PLAIN else _LOCAL_PARTIAL_WITH_TERMS
        if self.partial is not None and self.partial.local > slack * most_partial:
            yield f"spills in a step over a partial tile, with {self.partial.local} instructions"
        if self.call not in PLAIN:
            return
        if self.matrix != (own := OWN_INSTRUCTION[self.arch]):
            yield f"multiplies by {self.matrix} instead of {own}"
        if self.arch == 100:  # where one thread issues the products, and waits in loops of its own
            return
        if self.full is None:
            yield "has no loop with matrix instructions"
            return
        if self.spread:
            yield "spreads the scores of a row over several warps"
        if self.full.barriers > slack * _BARRIERS:
            yield f"has {self.full.barriers} barriers in a step"
        if self.full.narrow:
            yield f"has {self.full.narrow} loads of one or two bytes in a step"
        if self.matrix == "mma.sync" and self.full.fragments > _FRAGMENTS[self.kernel] * self.full.matrix:
            yield f"loads {self.full.fragments} matrices from shared memory for {self.full.matrix} products"


_FP32_BY_MATRICES = (80, 90)
"""Whose tensor cores multiply fp32, as tiles.dot_precision says."""
_OTHER_TRITONS = 1.5
"""How many times as much may be waited and spilled with another Triton than that of constraints.txt."""
_WITHOUT_PRODUCTS = {
    "combine_kernel",
    "documents_kernel",
    "positions_kernel",
    "query_ranges_kernel",
    "ranges_kernel",
    "spans_kernel",
}
_STACK = {"dbias_kernel": 16}
_STACK_OF_OTHER_TRITONS = {"top_keys_kernel": 24}
"""Bytes of stack of the kernels that are not of a training step's loops; 8 where nothing is said."""


def digest() -> str:
    """Of the sources that the kernels are made of."""
    return records.digest("triton")


def recorded() -> tuple[str, list[Compiled]]:
    """The digest and the kernels of the record; "" and none where there is no record."""
    of_record, rows = records.read(FILE)
    return of_record, [compiled(row) for row in rows]


def compiled(row: dict) -> Compiled:
    """A kernel from its line of JSON."""
    steps = {
        name: None if row[name] is None else Step(**row[name] | {"clocks": tuple(row[name]["clocks"])})
        for name in ("full", "partial")
    }
    return Compiled(**row | steps | {name: tuple(row[name]) for name in ("tile", "warnings")})


def is_current() -> bool:
    """Whether the record is of these kernels, and of every Triton."""
    of_record, kernels = recorded()
    return of_record == digest() and {kernel.triton for kernel in kernels} == {*TRITONS}


def record(kernels: list[Compiled]) -> None:
    """Writes the record, a line for each kernel."""
    records.write(FILE, digest(), kernels)


def table(kernels: list[Compiled]) -> str:
    """Markdown: the training kernels of causal and of padded calls, with the Triton that compiled for every GPU.

    Before them the speed of both passes, where it was predicted.
    """
    every = [x for x in kernels if x.triton == CHOSEN and x.dtype == "bfloat16" and x.D in (64, 128, 256)]
    shown = [x for x in every if x.kernel in TRAINING and not x.without_values and not x.is_to_try]
    return f"{speeds(shown)}\n\n{markdown(x for x in shown if x.call in ('causal', 'keys'))}"


def speeds(kernels: list[Compiled]) -> str:
    """Markdown: TFLOP/s of the passes of each call as predicted, of the pairs that are seen."""
    lines: list[tuple[object, ...]] = [("GPU", "D", "mask", "forward", "backward"), ("---", "--:", "---", "--:", "--:")]
    for arch, D, call in dict.fromkeys((x.arch, x.D, x.call) for x in kernels if x.predicted is not None):
        same = [x for x in kernels if (x.arch, x.D, x.call) == (arch, D, call)]
        forward, backward = (
            sum(x.predicted for x in same if (x.kernel == "forward_kernel") is of_forward)
            for of_forward in (True, False)
        )
        rates = (
            tflops(cycles, 2 * D * n, RATES[arch], OWN_INSTRUCTION[arch]) for cycles, n in ((forward, 2), (backward, 5))
        )
        lines.append((f"sm_{arch}", D, call, *map(round, rates)))
    return records.markdown(lines)


def markdown(kernels: Iterable[Compiled]) -> str:
    """A line for each kernel whose steps are known, with the clock cycles of those over full tiles."""
    names = ("GPU", "kernel", "D", "mask", "tile, warps", "at once", "products", "shared", "exp2", "issue", "partial")
    lines = [(*names, "predicted"), ("---", "---", "--:", "---", "---", "--:", *["--:"] * 6)]
    for x in kernels:
        if x.full is not None and x.partial is not None:
            of = (f"sm_{x.arch}", f"`{x.kernel}`", x.D, x.call, f"{x.tile[0]} x {x.tile[1]}, {x.tile[2]}", x.programs)
            lines.append((*of, *x.full.clocks, x.partial.clocks[-1], "" if x.predicted is None else x.predicted))
    return records.markdown(lines)


if __name__ == "__main__":
    records.answer(__doc__, is_current, lambda: table(recorded()[1]))
