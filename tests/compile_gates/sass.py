"""The machine code of a kernel, as nvdisasm prints it: its instructions, and its loops."""

from __future__ import annotations

import heapq
import re
from functools import reduce
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
_TARGET = re.compile(r"\.L_x_\d+")
_ENDS = re.compile(r"(BRA|EXIT|RET|BRX|JMP)\b")  # without a predicate, nothing goes on after it


class Loop(NamedTuple):
    """Instructions of a loop: all of them by their addresses, and those of the shortest way round it past that name."""

    every: list[str]
    shortest_way: list[str]


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
