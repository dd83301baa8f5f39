"""The first calls of a backend on a GPU: every kind of kernel that it has, from one tile to more than the GPU holds.

Each is a test of its own, since a kernel whose barriers do not fit together never ends.
"""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.backends import backend_by_name, objections
from fastattn.testing import Case, assert_right, make_inputs, run

_SIZES = {  # what is simplest comes first
    "tile": {"B": 1, "H": 1, "n_q": 64},
    "head": {"B": 1, "H": 1, "n_q": 700},
    "grid": {"B": 8, "H": 8, "H_kv": 4, "n_q": 700},
}
_HEAD_DIMS = (128, 64, 256)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "padded": {"keys": "right", "queries": True},
    "documents": {"causal": True, "segment_ids": True},
}
_FORWARD, _IN_ANY_ORDER = "forward", "backward, deterministic=False"


@pytest.mark.parametrize("which", [_FORWARD, "backward", _IN_ANY_ORDER])  # the first parameter varies fastest
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("D", _HEAD_DIMS)
@pytest.mark.parametrize("size", _SIZES)
def test_first_call(size: str, D: int, mask: str, which: str, pytestconfig: pytest.Config) -> None:
    """Holds the backend to the error budget."""
    device, backend = pytestconfig.option.device, pytestconfig.option.only
    case = Case(f"{size}-D{D}-{mask}", "a first call", D=D, **_SIZES[size], **MASKS[mask])
    inputs = make_inputs(case, torch.bfloat16, device)
    inputs.options["deterministic"] = which != _IN_ANY_ORDER
    if why := objections(backend_by_name(backend), inputs.q, inputs.k, inputs.v, inputs.spec()):
        pytest.skip("; ".join(why))
    if which == _FORWARD:
        options = inputs.options | {"return_lse": True, "backend": backend}
        o, lse = fastattn.attention(inputs.q, inputs.k, inputs.v, inputs.mask, **options)
        assert_right(inputs, {"o": o, "lse": lse})
    else:
        assert_right(inputs, run(inputs, backend))
