"""The machine code of a kernel, as nvdisasm prints it: its instructions, and its loops."""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from functools import reduce
from pathlib import Path
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
_TARGET = re.compile(r"\.L_x_\d+")
_ENDS = re.compile(r"(BRA|EXIT|RET|BRX|JMP)\b")  # without a predicate, nothing goes on after it


class Loop(NamedTuple):
    """Instructions of a loop: all of them by their addresses, and those of the shortest way round it past that name."""

    every: list[str]
    shortest_way: list[str]


def disassembled(cubin: bytes) -> str:
    """The machine code of what Triton has compiled."""
    return _printed_of(cubin, "nvdisasm", "-c")


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where registers are spilled to."""
    printed = _printed_of(cubin, "cuobjdump", "--dump-resource-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", printed).groups()
    return int(registers), int(stack)


def _printed_of(cubin: bytes, tool: str, option: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def innermost_loops(sass: str, name: str) -> list[Loop]:
    """The loops that have an instruction of that name and hold no such loop.

    A loop is what can be run again by a jump back to the block of instructions through which alone it is entered. Not
    every jump to an earlier address is one: code that waits often stands after the loop that it belongs to.
    """
    blocks, successors = _blocks(sass)
    predecessors = [[a for a, follow in enumerate(successors) if b in follow] for b in range(len(blocks))]
    dominators = _dominators(predecessors)
    bodies: dict[int, set[int]] = {}  # by the block where the loop begins
    for tail, follow in enumerate(successors):
        for head in follow:
            if dominators[tail] >> head & 1:
                body, waiting = bodies.setdefault(head, {head}), [tail]
                while waiting:
                    block = waiting.pop()
                    if block not in body:
                        body.add(block)
                        waiting += predecessors[block]
    named = {i for i, block in enumerate(blocks) if count(name, block)}
    named_loops = [(head, body) for head, body in bodies.items() if body & named]
    loops = []
    for head, body in named_loops:
        if not any(other < body for _, other in named_loops):
            # Nothing goes round these: each is on all ways to the next.
            stops = sorted(body & named - {head}, key=lambda block: dominators[block].bit_count())
            way = [head]
            for stop in (*stops, head):
                way += _shortest_way(way[-1], stop, body, blocks, successors)
            texts = ([text for block in order for text in blocks[block]] for order in (sorted(body), way[:-1]))
            loops.append(Loop(*texts))
    return loops


def instructions(sass: str) -> list[str]:
    """All instructions, in the order of their addresses."""
    return [text for block in _blocks(sass)[0] for text in block]


def count(name: str, texts: list[str]) -> int:
    """How many of the instructions have that name, which is a regular expression."""
    return sum(re.match(rf"(@!?U?P\w+ )?{name}\b", text) is not None for text in texts)


class Clocks(NamedTuple):
    """Clock cycles that each part of a multiprocessor takes at least for instructions of all warps of a program."""

    products: float
    shared: float
    exponentials: float
    issue: float


def clocks(texts: list[str], warps: int, flops: int) -> Clocks:
    """Clock cycles of instructions that each of `warps` warps runs.

    A multiprocessor issues an instruction in each of four schedulers, computes 16 exponentials, and moves 128 bytes to
    or from shared memory, which are also the cache of local memory. Operands of wgmma that lie there are read for each.

    Args:
        flops: floating-point operations of the tensor cores, for 16-bit operands.
    """
    products = moved = exponentials = 0
    for text in texts:
        name = re.sub(r"^@!?U?P\w+ ", "", text).partition(" ")[0]
        if match := re.match(r"HMMA\.(16816|1688)", name):
            products += {"16816": 4096, "1688": 2048}[match[1]] * warps
        elif match := re.match(r"HGMMA\.64x(\d+)x(\d+)", name):  # one for four warps
            columns, depth = map(int, match.groups())
            of_left = 0 if re.search(r"HGMMA\S* R\d+, R\d+", text) else 64
            products += 2 * 64 * columns * depth * warps / 4
            moved += 2 * depth * (columns + of_left) * warps / 4
        elif name.startswith("MUFU"):
            exponentials += 32 * warps
        elif match := re.match(r"LDSM\S*\.MT?\d+(?:\.([24]))?", name):
            moved += 128 * int(match[1] or 1) * warps
        elif re.match(r"(LDS|STS|LDL|STL|LDGSTS)\b", name):
            width = re.search(r"\.(8|16|64|128)\b", name.replace("U8", ".8").replace("U16", ".16"))
            moved += 32 * (int(width[1]) if width else 32) // 8 * warps
    return Clocks(products / flops, moved / 128, exponentials / 16, len(texts) * warps / 4)


def _blocks(sass: str) -> tuple[list[list[str]], list[set[int]]]:
    """Instructions that are run one after the other, and which of these blocks may follow each."""
    blocks: list[list[str]] = [[]]
    begins: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            begins[label[1]] = len(blocks) - 1
        elif instruction := _INSTRUCTION.match(line):
            blocks[-1].append(instruction[1])
            if _ENDS.search(instruction[1]):
                blocks.append([])
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1] if block else ""
        follow = {begins[label] for label in _TARGET.findall(last) if label in begins}
        if not _ENDS.match(last) and i + 1 < len(blocks):
            follow.add(i + 1)
        successors.append(follow)
    return blocks, successors


def _shortest_way(
    start: int, end: int, body: set[int], blocks: list[list[str]], successors: list[set[int]]
) -> tuple[int, ...]:
    """The blocks with the fewest instructions from one to another of a loop, without the first."""
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, (start,))]
    reached: set[int] = set()
    while True:
        length, way = heapq.heappop(waiting)
        if way[-1] == end and len(way) > 1:
            return way[1:]
        if way[-1] not in reached:
            reached |= {way[-1]} if len(way) > 1 else set()
            for block in successors[way[-1]] & body:
                heapq.heappush(waiting, (length + len(blocks[block]), (*way, block)))


def _dominators(predecessors: list[list[int]]) -> list[int]:
    """For each block a set of bits: the blocks through which every way to it leads, itself among them."""
    everything = (1 << len(predecessors)) - 1
    result = [everything if before else 1 << i for i, before in enumerate(predecessors)]
    result[0], changed = 1, True
    while changed:
        changed = False
        for i, before in enumerate(predecessors):
            if i and before:
                common = reduce(int.__and__, (result[b] for b in before)) | 1 << i
                changed |= common != result[i]
                result[i] = common
    return result
