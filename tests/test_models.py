"""Every family of models, swapped, answers what it does with its library's own attention."""

from __future__ import annotations

import pytest
import torch
from model_cases import ModelCase, calls_seen, compared, objections, outputs_and_gradients, weights
import transformers_cases

CASES = transformers_cases.CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32(case: ModelCase):
    models = compared(case)
    with calls_seen() as calls:
        found = [why for padding in case.paddings for why in objections(models, outputs_and_gradients, padding)]
        if case.run_with_weights is not None:
            found += [f"weights, {why}" for padding in case.paddings for why in objections(models, weights, padding)]
    print(models.report, models.report.refused, calls)
    assert not found, found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bf16(case: ModelCase):
    models = compared(case, torch.bfloat16)
    found = [why for padding in case.paddings for why in objections(models, outputs_and_gradients, padding)]
    assert not found, found
