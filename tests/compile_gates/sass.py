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
_ENCODED = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")  # the second half, in a line of its own
_TARGET = re.compile(r"\.L_x_\d+")
_ENDS = re.compile(r"(BRA|EXIT|RET|BRX|JMP)\b")  # without a predicate, nothing goes on after it


class Instruction(str):
    """An instruction, and what the compiler tells the scheduler about it.

    control: bits 0 to 3 are the cycles until the next instruction of the warp, 5 to 7 and 8 to 10 the scoreboards that
    are held until the result is written and until the operands are read, 7 for none, and 11 to 16 those to wait for.
    """

    control = 7 << 5 | 7 << 8


class Loop(NamedTuple):
    """Instructions of a loop: all of them by their addresses, and those of the shortest way round it past that name."""

    every: list[Instruction]
    shortest_way: list[Instruction]


def disassembled(cubin: bytes) -> str:
    """The machine code of what Triton has compiled."""
    return _printed_of(cubin, "nvdisasm", "-c", "-hex")


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where registers are spilled to."""
    printed = _printed_of(cubin, "cuobjdump", "--dump-resource-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", printed).groups()
    return int(registers), int(stack)


def _printed_of(cubin: bytes, tool: str, *options: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


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


def instructions(sass: str) -> list[Instruction]:
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
        name = opcode(text)
        if match := re.match(r"HMMA\.(16816|1688)", name):
            products += {"16816": 4096, "1688": 2048}[match[1]] * warps
        elif match := re.match(r"HGMMA\.64x(\d+)x(\d+)", name):  # one for four warps
            products += 2 * 64 * int(match[1]) * int(match[2]) * warps / 4
        elif name.startswith("MUFU"):
            exponentials += 32 * warps
        if not re.match(r"(LDG|STG|SHFL)\b", name):
            moved += bytes_of_shared_memory(text) * warps
    return Clocks(products / flops, moved / 128, exponentials / 16, len(texts) * warps / 4)


def opcode(text: str) -> str:
    """The name of an instruction with its types and options, without the predicate before it."""
    return re.sub(r"^@!?U?P\w+ ", "", text).partition(" ")[0]


def bytes_of_shared_memory(text: str) -> float:
    """What a warp's instruction moves to or from shared memory, or to or from global memory.

    An operand of wgmma is read for four warps at once; 64 rows of its left one lie there or in registers.
    """
    name = opcode(text)
    if match := re.match(r"HGMMA\.64x(\d+)x(\d+)", name):
        of_left = 0 if re.search(r"HGMMA\S* R\d+, R\d+", text) else 64
        return 2 * int(match[2]) * (int(match[1]) + of_left) / 4
    if match := re.match(r"LDSM\S*\.MT?\d+(?:\.([24]))?", name):
        return 128 * int(match[1] or 1)
    if re.match(r"(LDS|STS|LDL|STL|LDGSTS|LDG|STG|RED|ATOM|SHFL)\b", name):
        width = re.search(r"\.(8|16|64|128)\b", name.replace("U8", ".8").replace("U16", ".16"))
        return 32 * (int(width[1]) if width else 32) // 8
    return 0


def _blocks(sass: str) -> tuple[list[list[Instruction]], list[set[int]]]:
    """Instructions that are run one after the other, and which of these blocks may follow each."""
    blocks: list[list[Instruction]] = [[]]
    begins: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            begins[label[1]] = len(blocks) - 1
        elif instruction := _INSTRUCTION.match(line):
            last = Instruction(instruction[1])
            blocks[-1].append(last)
            if _ENDS.search(last):
                blocks.append([])
        elif encoded := _ENCODED.match(line):
            last.control = int(encoded[1], 16) >> 41
    successors = []
    for i, block in enumerate(blocks):
        last = block[-1] if block else ""
        follow = {begins[label] for label in _TARGET.findall(last) if label in begins}
        if not _ENDS.match(last) and i + 1 < len(blocks):
            follow.add(i + 1)
        successors.append(follow)
    return blocks, successors


def _shortest_way(
    start: int, end: int, body: set[int], blocks: list[list[Instruction]], successors: list[set[int]]
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
