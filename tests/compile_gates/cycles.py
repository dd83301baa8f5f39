"""A model of time: the warps of a multiprocessor run a loop of machine code, clock cycle by clock cycle.

Each warp issues its instructions in order, when the compiler's control codes and the units they need let it: the stall
after each instruction, the scoreboards that later ones wait for, and the pipes of a scheduler, which its warps share,
as all warps share shared memory and the way to the L2 cache. What the model does not know are values: no load has bank
conflicts, every load from global memory finds its line in the L2 cache, and no wait for TMA ever waits.

`python tests/compile_gates/flash_attention_compile.py` holds it to kernels whose speed is published, and
`python tests/compile_gates/rank_tiles.py` ranks tiles by it.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from sass import Instruction, bytes_of_shared_memory, opcode

_SCHEDULERS = 4  # of a multiprocessor
_SHARED = 128  # bytes of shared memory in a cycle


class Rates(NamedTuple):
    """What a GPU does, by clock cycle of a multiprocessor.

    product: cycles of a scheduler's tensor cores for mma.sync of 16 x 8 x 16. fp32: cycles of a scheduler for a warp's
    operation in fp32. l2: bytes from the L2 cache, where all multiprocessors read. latency: cycles until they come.
    multiprocessors. gigahertz: under the load of mma.sync and of wgmma, the only numbers that are fitted: to
    FlashAttention-2, and to the 477 TFLOP/s of the forward of Triton's tutorial (pytorch/benchmark#2391), both with a
    head dim of 128. A GPU is the slower, the more power it draws.
    """

    product: float
    fp32: int
    l2: float
    latency: int
    multiprocessors: int
    gigahertz: dict[str, float]


_L2 = 0.75 * 5120
"""Bytes in a cycle: of the 5120 of the whitepapers, three quarters are assumed to be had."""
RATES = {
    80: Rates(product=8, fp32=2, l2=_L2 / 108, latency=220, multiprocessors=108, gigahertz={"mma.sync": 1.25}),
    90: Rates(
        product=6.4,
        fp32=1,
        l2=_L2 / 132,
        latency=270,
        multiprocessors=132,
        gigahertz={"mma.sync": 1.57, "wgmma.mma_async": 1.31},
    ),
}
"""Of an A100 and an H100, SXM.

Source: the whitepapers of both; for mma.sync on Hopper, which gets 63 % of the peak, Luo et al. 2024, Benchmarking and
Dissecting the Nvidia Hopper GPU Architecture. Latencies, here and in `_decoded`, are round numbers of the size that
microbenchmarks find; none was fitted.
"""


class _Decoded(NamedTuple):
    """An instruction.

    kind: what it does. pipe: of its scheduler, busy for so many cycles. data: bytes. latency: cycles until its result
    is there. stall: until the warp's next instruction. waits: scoreboards that must be empty. written, read:
    scoreboards that are held until the result is there, and until the operands are read. at_most: how many may be under
    way after a wait. last: whether a group of wgmma ends here.
    """

    kind: str
    pipe: str
    cycles: float
    data: float
    latency: float
    stall: int
    waits: tuple[int, ...]
    written: int | None
    read: int | None
    at_most: int = 0
    last: bool = False


@dataclass
class _Warp:
    """Where a warp is: its next instruction, when that may be issued, and what is under way."""

    program: int
    ready: float
    place: int = 0
    ends: list[float] = field(default_factory=list)  # of its rounds
    boards: list[list[float]] = field(default_factory=lambda: [[] for _ in range(6)])  # when what holds them is done
    groups: list[float] = field(default_factory=list)  # of wgmma
    copied: float = 0.0  # when its copies to shared memory are done
    in_barrier: bool = False


def cycles_of_step(loop: list[Instruction], rates: Rates, warps: int, programs: int) -> float:
    """Clock cycles in which each of `programs` programs of so many warps goes once round the loop, in the long run.

    Programs that run at once may fall into step, or into turns, by when they began: the mean of several beginnings.
    """
    apart = (137, 700, 1600) if programs > 1 else (0,)
    return sum(_Multiprocessor(loop, rates, warps, programs, cycles).run() for cycles in apart) / len(apart)


def cycles_of_groups(loop: list[Instruction], groups: int, columns: int) -> float:
    """Clock cycles of a multiprocessor of an H100 for 128 x 128 pairs, by warp groups of 64 x `columns` pairs a step.

    Loads and sums that other warps copy are not waited for.
    """
    return cycles_of_step(loop, RATES[90], 4, groups) * 128 * 128 / (64 * columns * groups)


def tflops(cycles: float, flops_of_pair: float, rates: Rates, matrix: str) -> float:
    """TFLOP/s of the whole GPU, whose multiprocessors compute 128 x 128 pairs of query and key in these cycles.

    Args:
        matrix: the matrix instructions, in PTX.
    """
    return 128 * 128 * flops_of_pair / cycles * rates.multiprocessors * rates.gigahertz[matrix] / 1000


class _Multiprocessor:
    _ROUNDS, _FIRST = 16, 6  # how often each warp runs the loop at least, and from which round on it counts
    _MOST = 1000  # cycles for an instruction in a round

    def __init__(self, loop: list[Instruction], rates: Rates, warps: int, programs: int, apart: int) -> None:
        self.rates, self.loop = rates, [_decoded(text, rates) for text in loop]
        self.warps = [_Warp(program, apart * program) for program in range(programs) for _ in range(warps)]
        self.of_program = warps
        self.free: list[dict[str, float]] = [{} for _ in range(_SCHEDULERS)]  # since when, by pipe
        self.queues: list[deque[float]] = [deque() for _ in range(_SCHEDULERS)]  # to shared and global memory
        self.last = self.warps[:_SCHEDULERS]  # that issued, by scheduler
        self.shared = self.l2 = 0.0  # when they are free
        self.now = 0.0

    def run(self) -> float:
        of_scheduler = [self.warps[i::_SCHEDULERS] for i in range(_SCHEDULERS)]
        while any(len(warp.ends) < self._ROUNDS for warp in self.warps):
            if self.now > self._MOST * self._ROUNDS * len(self.loop):
                raise RuntimeError(f"a loop of {len(self.loop)} instructions does not end")
            earliest = min(self._issue(i, of_scheduler[i]) for i in range(_SCHEDULERS))
            self.now = max(self.now + 1, float(int(earliest)))
        rounds = [(len(warp.ends) - 1 - self._FIRST) / (warp.ends[-1] - warp.ends[self._FIRST]) for warp in self.warps]
        return len(rounds) / sum(rounds)

    def _issue(self, scheduler: int, warps: list[_Warp]) -> float:
        """Issues at most one instruction; says when the next may be.

        The warp that has just issued goes on as long as it can, then it is the turn of the youngest that can, as Huerta
        et al. 2025, Analyzing Modern NVIDIA GPU Cores, have found.
        """
        earliest = self.now + 1000
        last = self.last[scheduler]
        for warp in (last, *(warp for warp in reversed(warps) if warp is not last)):
            if warp.in_barrier:
                continue
            at = max(warp.ready, self._possible(scheduler, warp)) if warp.ready <= self.now else warp.ready
            if at > self.now:
                earliest = min(earliest, at)
                continue
            self.last[scheduler] = warp
            self._do(scheduler, warp)
            return self.now + 1
        return earliest

    def _possible(self, scheduler: int, warp: _Warp) -> float:
        """When the next instruction of a warp can be issued, as far as is known."""
        x = self.loop[warp.place]
        at = max((done for board in x.waits for done in warp.boards[board]), default=0.0)
        if x.kind == "wait for copies":
            at = max(at, _done_but(x.at_most, warp.boards[0], self.now))
        elif x.kind == "wait for wgmma":
            at = max(at, _done_but(x.at_most, warp.groups, self.now))
        elif x.kind == "memory":
            queue = self.queues[scheduler]
            while queue and queue[0] <= self.now:
                queue.popleft()
            at = max(at, queue[0] if len(queue) >= 8 else 0.0)
        elif x.pipe:
            at = max(at, self.free[scheduler].get(x.pipe, 0.0))
        return at

    def _do(self, scheduler: int, warp: _Warp) -> None:
        x, now = self.loop[warp.place], self.now
        for board in x.waits:
            warp.boards[board].clear()
        done, operands_read = now + x.latency, now + 6
        if x.kind == "memory":
            done, operands_read = self._to_memory(scheduler, warp, x)
        elif x.kind == "wgmma":
            free = self.free[scheduler]
            free["tensor"] = max(free.get("tensor", 0.0), now + 10) + x.cycles
            if x.last:
                warp.groups = [*(end for end in warp.groups if end > now), free["tensor"] + x.latency]
        elif x.kind == "end of copies":
            warp.boards[0].append(max(warp.copied, now))
        elif x.pipe:
            # A pipe that became free within the last cycle loses none.
            self.free[scheduler][x.pipe] = max(self.free[scheduler].get(x.pipe, 0.0), now - 0.99) + x.cycles
        if x.written is not None:
            warp.boards[x.written].append(done)
        if x.read is not None:
            warp.boards[x.read].append(operands_read)
        if x.kind == "barrier":
            warp.in_barrier = True
            together = [other for other in self.warps if other.program == warp.program]
            if all(other.in_barrier for other in together):
                for other in together:
                    other.in_barrier, other.ready = False, now + 20
                    self._go_on(other)
            return
        warp.ready = now + x.stall
        self._go_on(warp)

    def _go_on(self, warp: _Warp) -> None:
        warp.place += 1
        if warp.place == len(self.loop):
            warp.place = 0
            warp.ends.append(self.now)
            warp.ready = max(warp.ready, self.now + 6)  # after a jump

    def _to_memory(self, scheduler: int, warp: _Warp, x: _Decoded) -> tuple[float, float]:
        """When an access is done, and when its operands are read; it waits for its turn in the pipe that it needs."""
        free = self.free[scheduler]
        begin = free["memory"] = max(free.get("memory", 0.0), self.now) + 2
        if x.pipe in ("l2", "copy"):
            self.l2 = max(self.l2, begin) + x.data / self.rates.l2
            accepted, done = begin + 2, self.l2 + self.rates.latency
            if x.pipe == "copy":
                self.shared = max(self.shared, begin) + x.data / _SHARED
                warp.copied = max(warp.copied, done)
        else:
            accepted = self.shared = max(self.shared, begin) + x.data / _SHARED
            done = accepted + x.latency
        self.queues[scheduler].append(accepted)
        return done, accepted + 10


def _done_but(at_most: int, ends: list[float], now: float) -> float:
    """When no more than so many are under way."""
    under_way = sorted(end for end in ends if end > now)
    return under_way[len(under_way) - 1 - at_most] if len(under_way) > at_most else 0.0


def _decoded(text: Instruction, rates: Rates) -> _Decoded:
    """What an instruction does."""
    name, control = opcode(text), text.control
    pending = re.search(r"DEPBAR\.LE \w+, (0x\w+)", text)
    of_all = {
        "stall": max(control & 15, 1),
        "waits": tuple(board for board in range(6) if control >> 11 + board & 1),
        "written": None if control >> 5 & 7 == 7 else control >> 5 & 7,
        "read": None if control >> 8 & 7 == 7 else control >> 8 & 7,
        "at_most": int(pending[1], 16) if pending else 0,
        "last": "gsb0" in text,
    }
    data = bytes_of_shared_memory(text)

    def decoded(kind: str, pipe: str = "", cycles: float = 0.0, latency: float = 0.0) -> _Decoded:
        return _Decoded(kind, pipe, cycles, data, latency, **of_all)

    if match := re.match(r"HMMA\.(16816|1688)", name):
        return decoded("product", "tensor", rates.product / (1 if match[1] == "16816" else 2), 33)
    if match := re.match(r"HGMMA\.64x(\d+)x(\d+)", name):
        operands = 4 * data / _SHARED  # of four warps, while the tensor cores multiply those of the last one
        return decoded("wgmma", cycles=max(int(match[1]) * int(match[2]) / 32, operands, 8), latency=24)
    if name.startswith("WARPGROUP.DEPBAR"):
        return decoded("wait for wgmma")
    if name.startswith("DEPBAR"):
        return decoded("wait for copies")
    if name.startswith("LDGDEPBAR"):
        return decoded("end of copies")
    if name.startswith("BAR") and "ARV" not in name:
        return decoded("barrier")
    if text.startswith("@!PT"):  # never runs
        return decoded("nothing")
    if name.startswith("LDGSTS"):
        return decoded("memory", "copy")
    if re.match(r"(LDG|STG|RED|ATOM)\b", name):
        return decoded("memory", "l2")
    if re.match(r"(LDSM|LDS|LDL|SHFL|STSM|STS|STL|ATOMS)\b", name):
        return decoded("memory", latency=12 if name.startswith("ST") else 24)
    if name.startswith("MUFU"):
        return decoded("pipe", "exponentials", 8, 22)
    if re.match(r"(FFMA|FMUL|FADD|HFMA2|HADD2|HMUL2)\b", name):
        return decoded("pipe", "fma", rates.fp32, 4)
    if name.startswith("IMAD"):
        return decoded("pipe", "fma", rates.fp32, 5)
    if re.match(r"(U|R2UR|S2UR)", name):
        return decoded("pipe", "uniform", 2, 12)
    if re.match(r"(BRA|NOP|YIELD|WARP|BSYNC|BSSY|MEMBAR|FENCE|SYNCS|BAR|ERRBAR|CCTL|PLOP3)", name):
        return decoded("nothing", latency=12)
    return decoded("pipe", "alu", 2, 5)
