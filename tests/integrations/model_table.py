"""Effects of swapping on families of models, as measured.

`python tests/integrations/model_table.py` writes docs/models.md.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torchvision_import  # noqa: F401  first: the modules below import what it makes known

# isort: split
import sentence_cases
import torch
import torch_cases
import transformers_cases
import vision_cases
from model_cases import (
    PADDINGS,
    Compared,
    ModelCase,
    RefusedCase,
    calls_seen,
    compared,
    objections,
    outputs_and_gradients,
    weights,
)
from torch import nn

import fastattn

CASES: tuple[ModelCase, ...] = (
    *transformers_cases.CASES,
    *sentence_cases.CASES,
    *torch_cases.CASES,
    *vision_cases.CASES,
)
REFUSED: tuple[RefusedCase, ...] = (*transformers_cases.REFUSED, *vision_cases.REFUSED)
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
OF_PADDING = {"real_keys", "real_queries"}


@dataclass(frozen=True)
class Finding:
    """What was seen of a case in fp32.

    wrong: sentences about results that are not those of the library's own attention; none is as it should be.
    swapped: the classes of the modules that were.
    terms: what the attention needed besides padding.
    learns: whether each of the swapped modules had a gradient.
    packed: whether `packed=True` let the layers compute no padding.
    backends: which of fastattn's computed it.
    """

    case: ModelCase
    wrong: list[str]
    swapped: frozenset[str]
    terms: frozenset[str]
    learns: bool
    packed: bool
    backends: frozenset[str]

    def row(self) -> str:
        """The line of the table."""
        cells = (
            self.case.family,
            ", ".join(sorted(self.swapped)),
            ", ".join(sorted(self.terms)) or "-",
            _paddings(self.case),
            _yes(self.learns),
            _yes(self.case.run_with_weights is not None),
            _yes(self.packed),
            ", ".join(sorted(self.backends)),
        )
        return f"| {' | '.join(cells)} |"


HEADER = ("family", "swapped", "besides padding", "padding", "gradients", "weights", "packed", "on the CPU")


def examine(case: ModelCase) -> Finding:
    """Compares a case with its library's own attention, and notes what fastattn was asked for."""
    models = compared(case)
    with calls_seen() as calls:
        wrong = _objections(models, outputs_and_gradients)
    if case.run_with_weights is not None:
        wrong += [f"weights, {why}" for why in _objections(models, weights)]
    wrong += [f"{name or 'the model'}: {why}" for name, why in models.report.refused.items()]
    packed = replace(models, swapped=models.untouched)
    packs = _packs(packed)
    if packs:
        wrong += [f"packed, {why}" for why in _objections(packed, outputs_and_gradients)]
    return Finding(
        case,
        wrong,
        frozenset(models.report.swapped.values()),
        frozenset(calls.features - OF_PADDING),
        all(_has_gradient(models.swapped, name) for name in models.report.swapped),
        packs,
        frozenset(calls.backends),
    )


def differences_in_bf16(case: ModelCase) -> list[str]:
    """Sentences about results in bf16 that are further from exact than eager's own could be."""
    return _objections(compared(case, torch.bfloat16), outputs_and_gradients)


def _objections(models: Compared, results: Callable) -> list[str]:
    return [why for padding in models.case.paddings for why in objections(models, results, padding)]


def _has_gradient(model: nn.Module, attention: str) -> bool:
    """Whether the parameters of this attention module had a gradient that is not 0, when they were last computed."""
    return any(
        parameter.grad is not None and parameter.grad.any() for parameter in model.get_submodule(attention).parameters()
    )


def _packs(models: Compared) -> bool:
    """Swaps with `packed=True`; whether that let the layers compute no padding."""
    report = fastattn.swap(models.swapped, packed=True)
    if "right" in models.case.paddings:
        with torch.no_grad():
            models.case.run(models.swapped, PADDINGS["right"])
    stacks = (fastattn.nn.TransformerEncoder, fastattn.nn.TransformerDecoder)
    return report.calls.packed > 0 or any(isinstance(module, stacks) for module in models.swapped.modules())


def _paddings(case: ModelCase) -> str:
    if len(case.paddings) == 1:
        return "-"
    return "all" if set(case.paddings) == set(PADDINGS) else ", ".join(case.paddings)


def _yes(value: bool) -> str:
    return "yes" if value else "-"


def table(header: tuple[str, ...], rows: Iterator[str] | list[str]) -> str:
    """A table in Markdown."""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *rows])


def render() -> str:
    """The part of docs/models.md between the markers."""
    parts = []
    for library, cases in itertools.groupby(CASES, key=lambda case: case.library.name):
        parts += [f"### {library}", table(HEADER, [examine(case).row() for case in cases])]
    refusals = (case.row() for case in REFUSED)
    parts += ["### Not swapped, or not all of it", table(("library", "family", "swapped", "not swapped"), refusals)]
    return "\n\n".join(parts)


def committed() -> str:
    """That part as it is in the document."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Writes the results into the document."""
    before, begin, rest = DOCUMENT.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{DOCUMENT} must have the lines {BEGIN} and {END}")
    DOCUMENT.write_text(f"{before}{begin}\n\n{render()}\n\n{end}{after}")


if __name__ == "__main__":
    main()
