"""Record of the resources that the Hopper kernels took on every Triton, and of the sources that were compiled.

`python tests/compile_gates/hopper_record.py` prints the table of docs/hopper.md. With `--is-current` it prints nothing,
and fails where the kernels are no longer those of the record: `make hopper` compiles them anew and writes it. Needs
Python alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import records
from cycles import RATES, tflops
from records import CHOSEN, TRITONS

FILE = Path(__file__).with_name("hopper_compiled.json")
_PRODUCTS = {  # of a step with the head dim, in units of 16 that are summed over: the matrix instructions of the loop
    "forward_kernel": {64: 12, 128: 16, 256: 20},
    "dk_dv_kernel": {64: 16, 128: 24, 256: 36},
    "dk_dv_kernel, 2": {256: 20},
    "dq_kernel": {64: 16, 128: 24, 256: 36},
    "fused_kernel": {64: 40, 128: 32},
}
_MOST_EXPOSED = {"forward_kernel": 0, "dk_dv_kernel": 0, "dq_kernel": 16, "fused_kernel": 0}
"""Exponentials of a step that may run while no matrix product is under way, of 32 to 64 for each thread.

Not of `fused_kernel` where there is padding: what would keep them beside products spills there.
"""
_SPILLING = ("3.8.0", "3.9.0")
"""Tritons that spill a little more, though not in what most steps take."""
_MOST_SHARED = 227 * 1024
"""Bytes that a block of threads can have on sm_90. Source: CUDA C++ Programming Guide, technical specifications."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes on sm_90a.

    triton: its version. call: the mask it was compiled for. registers: of a thread at the start. spilled: bytes that
    ptxas stores and loads. local: instructions that touch local memory. shared: bytes. hgmma, tma, setmaxreg:
    instructions (HGMMA, UTMALDG, USETMAXREG). loop, loop_hgmma: all instructions, and the matrix instructions, of the
    shortest way round a loop with such: it waits for nothing, and applies no mask where there are tiles without.
    loop_exposed: its exponentials that run while no matrix product is under way. loop_local: how many of `local` are
    on such a way. predicted: clock cycles for 128 x 128 pairs by the model of cycles.py, where there is no mask.
    warnings: of ptxas about performance.
    """

    triton: str
    kernel: str
    D: int
    call: str
    registers: int
    spilled: int
    local: int
    shared: int
    hgmma: int
    tma: int
    setmaxreg: int
    loop: int
    loop_hgmma: int
    loop_exposed: int
    loop_local: int
    predicted: int | None = None
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel} D{self.D} {self.call} on Triton {self.triton}"

    @property
    def is_hottest(self) -> bool:
        """Whether it is what most calls take: head dims up to 128, without documents."""
        return self.D <= 128 and self.call != "documents"

    def complaints(self) -> Iterator[str]:
        """What is wrong with it, in sentences."""
        is_forward = self.kernel == "forward_kernel"
        never_spills = self.is_hottest or (is_forward and self.D <= 128)
        if never_spills and self.triton not in _SPILLING and (self.spilled or self.local):
            yield f"spills {self.spilled} bytes, with {self.local} instructions"
        elif self.loop_local and (self.is_hottest or (is_forward and self.call != "documents")):
            yield f"spills {self.spilled} bytes, with {self.loop_local} instructions of a step"
        if self.shared > _MOST_SHARED:
            yield f"takes {self.shared} bytes of shared memory, of {_MOST_SHARED}"
        for name in ("tma", "setmaxreg"):
            if getattr(self, name) == 0:
                yield f"has no {name}"
        if self.loop_hgmma != (products := _PRODUCTS[self.kernel][self.D]):
            yield f"has {self.loop_hgmma} matrix instructions in its loop instead of {products}"
        overlaps = self.kernel in _MOST_EXPOSED and (self.kernel, self.call) != ("fused_kernel", "padded")
        if overlaps and self.loop_exposed > _MOST_EXPOSED[self.kernel]:
            yield f"computes {self.loop_exposed} exponentials of its loop with no matrix product under way"
        yield from self.warnings


def kernels_of(D: int, call: str) -> set[str]:
    """The names of the kernels for such calls of a head dim; wide causal ones have none for sums in any order."""
    names = {name.partition(",")[0] for name, products in _PRODUCTS.items() if D in products}
    return names - ({"fused_kernel"} if D > 64 and call in ("causal", "documents") else set())


def digest() -> str:
    """Of the sources that the kernels are made of."""
    return records.digest("hopper")


def recorded() -> tuple[str, list[Compiled]]:
    """The digest and the kernels of the record; "" and none where there is no record."""
    of_record, rows = records.read(FILE)
    return of_record, [Compiled(**row | {"warnings": tuple(row["warnings"])}) for row in rows]


def is_current() -> bool:
    """Whether the record is of these kernels, and of every Triton."""
    of_record, kernels = recorded()
    return of_record == digest() and {kernel.triton for kernel in kernels} == {*TRITONS}


def record(kernels: list[Compiled]) -> None:
    """Writes the record, a line for each kernel."""
    records.write(FILE, digest(), kernels)


def table(kernels: list[Compiled]) -> str:
    """Markdown: the speeds that are predicted, then what each kernel takes."""
    return f"{speeds(kernels)}\n\n{resources(kernels)}"


def speeds(kernels: list[Compiled]) -> str:
    """Markdown: TFLOP/s of an H100 by the model of cycles.py, without a mask: of the forward, and of both backwards."""
    lines: list[tuple[object, ...]] = [("D", "forward", "dK with dV, and dQ", "all three at once")]
    lines.append(("--:", "--:", "--:", "--:"))
    for D in dict.fromkeys(x.D for x in kernels):
        cycles = {x.kernel: x.predicted for x in kernels if (x.D, x.triton) == (D, CHOSEN) and x.predicted is not None}
        apart = sum(n for name, n in cycles.items() if name.startswith(("dk_dv", "dq")))
        rates = [
            round(tflops(n, 2 * D * products, RATES[90], "wgmma.mma_async")) if n else ""
            for n, products in ((cycles.get("forward_kernel"), 2), (apart, 5), (cycles.get("fused_kernel"), 5))
        ]
        lines.append((D, *rates))
    return records.markdown(lines)


def resources(kernels: list[Compiled]) -> str:
    """Markdown: a line for each kernel and call, with the figures of each Triton."""
    versions = sorted({kernel.triton for kernel in kernels})
    by_key = {(x.kernel, x.D, x.call, x.triton): x for x in kernels}
    lines = [("kernel", "D", "mask", "KiB", *(f"Triton {version}" for version in versions))]
    lines.append(("---", "--:", "---", "--:", *("---" for _ in versions)))
    for name, D, call in dict.fromkeys((x.kernel, x.D, x.call) for x in kernels):
        each = [by_key.get((name, D, call, version)) for version in versions]
        shared = max(x.shared for x in each if x)
        lines.append((f"`{name}`", str(D), call, f"{shared / 1024:.0f}", *map(_in_short, each)))
    return records.markdown(lines)


def _in_short(kernel: Compiled | None) -> str:
    if kernel is None:
        return "n/a"
    return f"{kernel.registers}, {kernel.spilled} B, {kernel.loop} ({kernel.loop_hgmma})"


if __name__ == "__main__":
    records.answer(__doc__, is_current, lambda: table(recorded()[1]))
