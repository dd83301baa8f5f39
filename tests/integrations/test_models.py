"""Every family of models, swapped, answers what it does with its library's own attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers_cases
from model_cases import ModelCase, RefusedCase
from model_table import CASES, REFUSED, committed, differences_in_bf16, examine

import fastattn

ROOT = Path(__file__).parents[2]
COMMAND = "python tests/integrations/model_table.py renders docs/models.md"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_gradients_and_weights(case: ModelCase):
    finding = examine(case)
    assert not finding.wrong, "\n".join(finding.wrong)
    assert finding.swapped
    assert finding.terms == case.needs
    assert finding.learns
    assert finding.row() in committed().splitlines(), COMMAND


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bf16(case: ModelCase):
    wrong = differences_in_bf16(case)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_swapped_is_named_and_left_alone(case: RefusedCase):
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():
        before = case.run(model)
        report = fastattn.swap(model)
        after = case.run(model)
    assert report.refused == case.refused
    assert set(report.swapped.values()) == case.swapped
    if case.swapped:
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(after, before)


def test_the_document_has_these_models_and_no_others():
    tables = [line for line in committed().splitlines() if line.startswith("| ")]
    rows = [line.split(" | ") for line in tables if not line.startswith(("| ---", "| family", "| library"))]
    families = [row[0].removeprefix("| ") for row in rows[: len(CASES)]]
    assert families == [case.family for case in CASES], COMMAND
    assert rows[len(CASES) :] == [case.row().split(" | ") for case in REFUSED], COMMAND


def test_no_page_names_a_family_that_has_no_row():
    rows = {case.family for case in (*CASES, *REFUSED)}
    compared = {case.family for case in vars(transformers_cases).values() if isinstance(case, ModelCase)}
    assert compared - rows  # in fp32 alone
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert [family for family in compared - rows if family in path.read_text()] == [], path.name
