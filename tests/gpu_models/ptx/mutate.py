"""Faults put into compiled kernels on purpose, and whether the machine finds them.

An edit of one instruction is caught where the machine faults or a result leaves the error budget. One that leaves the
same bits changes nothing of that call; other bits within the budget are a difference of rounding, or not caught.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.testing import CASES, Inputs, assert_right, make_inputs, run

from .gpu import Gpu
from .machine import PtxError


class Kind(NamedTuple):
    """Edits of one kind: of lines that a pattern finds, replaced as by re.sub."""

    pattern: str
    replacement: str


KINDS = {
    "bar.sync removed": Kind(r"^\s*bar\.sync .*;", ""),
    "cp.async.wait_group removed": Kind(r"^\s*cp\.async\.wait_group.*;", ""),
    "cp.async.wait_group waits for one less": Kind(r"(cp\.async\.wait_group\s+)(\d+)", r"\g<1>1\2"),
    "cp.async.commit_group removed": Kind(r"^\s*cp\.async\.commit_group;", ""),
    "predicate of a global access dropped": Kind(r"@!?%p\d+ ((?:ld|st)\.global)", r"\1"),
    "less became less or equal": Kind(r"setp\.lt\.s32", "setp.le.s32"),
    "greater became greater or equal": Kind(r"setp\.gt\.s32", "setp.ge.s32"),
    "greater or equal became greater": Kind(r"setp\.ge\.s32", "setp.gt.s32"),
    "zero fill of cp.async dropped": Kind(r"(cp\.async\.c[ag]\S* .*(?:0x\w+|16)), %r\d+;", r"\1;"),
    "constant of an xor changed": Kind(r"(xor\.b32\s+\S+ \S+ )(\d+);", r"\g<1>1\2;"),
    "butterfly became a shift": Kind(r"shfl\.sync\.bfly", "shfl.sync.down"),
    "offset in shared memory changed": Kind(r"((?:ld|st)\.shared.*\[%r\d+\+)(\d+)\]", r"\g<1>1\2]"),
    "wgmma.wait_group removed": Kind(r"^\s*wgmma\.wait_group.*;", ""),
    "wgmma.fence removed": Kind(r"^\s*wgmma\.fence.*;", ""),
    "fence.proxy.async removed": Kind(r"^\s*fence\.proxy\.async.*;", ""),
    "parity of a wait turned": Kind(r"(try_wait\.parity\S* complete, \[\S+\]), (%r\d+);", r"\1, 1;"),
    "arrival at an mbarrier removed": Kind(r"^.*mbarrier\.arrive\.shared.*;", ""),
    "wait for bulk copies removed": Kind(r"^\s*cp\.async\.bulk\.wait_group.*;", ""),
    "expected bytes changed": Kind(r"(arrive\.expect_tx.*, )(\d+);", r"\g<1>1\2;"),
}
OUTCOMES = ("fault", "wrong result", "same bits", "other bits")


class Site(NamedTuple):
    """One edit: a line of a kernel's text."""

    kernel: str
    kind: str
    line: int

    def edited(self, text: str) -> str:
        """The text of the kernel with this edit."""
        lines = text.split("\n")
        lines[self.line] = re.sub(*KINDS[self.kind], lines[self.line])
        return "\n".join(lines)


def sites(texts: dict[str, str]) -> Iterator[Site]:
    """All edits of these kernels."""
    for kernel, text in texts.items():
        for i, line in enumerate(text.split("\n")):
            for kind, (pattern, _) in KINDS.items():
                if re.search(pattern, line):
                    yield Site(kernel, kind, i)


class Mutations:
    """Calls of a backend, right without an edit, and what becomes of them with one.

    They are two samples of a case, and the same with so many tokens that its loops run several times.
    """

    def __init__(self, gpu: Gpu, case: str, dtype: torch.dtype, backend: str, tokens: int = 150) -> None:
        self._gpu, self._backend = gpu, backend
        short = next(c for c in CASES if c.name == case)
        short = replace(short, B=2, H=2, H_kv=1)
        long = replace(short, n_q=tokens, n_k=None if short.n_k is None else tokens)
        gpu.programs.clear()
        self._calls: list[tuple[Inputs, dict[str, Tensor]]] = []
        for inputs in (make_inputs(short, dtype), make_inputs(long, dtype)):
            self._calls.append((inputs, run(inputs, backend)))
            assert_right(*self._calls[-1])
        self.texts = {name: programs[0].text for name, programs in gpu.programs.items() if len(programs) == 1}

    def outcome(self, site: Site) -> tuple[str, str]:
        """One of OUTCOMES with that edit, and what was found."""
        edited = site.edited(self.texts[site.kernel])
        self._gpu.edit = lambda name, text: edited if text == self.texts[site.kernel] else text
        same = True
        try:
            for inputs, right in self._calls:
                outputs = run(inputs, self._backend)
                assert_right(inputs, outputs)
                same = same and all(torch.equal(x, outputs[name]) for name, x in right.items())
        except PtxError as error:
            return "fault", str(error)
        except AssertionError as error:
            return "wrong result", str(error)
        finally:
            self._gpu.edit = lambda name, text: text
        return "same bits" if same else "other bits", ""


def table(
    mutations: list[Mutations], kinds: list[str], most: int, say: Callable[[str], None] = print, seed: int = 0
) -> dict[str, Counter]:
    """How many edits of each kind have which outcome, of at most so many that are drawn in a kernel.

    Args:
        say: called with each edit that was not found.
    """
    found = {kind: Counter() for kind in kinds}
    for call in mutations:
        by_kind: dict[tuple[str, str], list[Site]] = {}
        for site in sites(call.texts):
            if site.kind in kinds:
                by_kind.setdefault((site.kernel, site.kind), []).append(site)
        for (kernel, kind), of_kind in by_kind.items():
            for site in random.Random(seed).sample(of_kind, min(most, len(of_kind))):
                outcome, _ = call.outcome(site)
                found[kind][outcome] += 1
                if outcome not in ("fault", "wrong result"):
                    text = call.texts[kernel].splitlines()[site.line].strip()
                    say(f"{outcome}: {kind}: {kernel}, line {site.line + 1}: {text}")
    return found
