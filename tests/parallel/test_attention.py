"""Attention over several processes against one process, for every case of the conformance table."""

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from fastattn.parallel.plans import ALGORITHMS
from fastattn.testing import CASES, Case, assert_right, make_inputs

PLAIN = [case for case in CASES if case.timed is None and case.dropout_p == 0]
WITHOUT_DROPOUT = [
    Case(**{**{f: getattr(case, f) for f in case.__dataclass_fields__}, "dropout_p": 0.0})
    for case in CASES
    if case.timed is None and case.dropout_p
]
ALL = [*PLAIN, *WITHOUT_DROPOUT]


def whole(answers: list[dict], n: dict[str, int]) -> dict[str, Tensor]:
    """What one process would have returned, from what the ranks did."""
    result = {}
    for name, first in answers[0]["result"].items():
        parts = [answer["result"][name] for answer in answers]
        if name in n:
            index = torch.cat([answer["keys" if name in ("dk", "dv") else "rows"] for answer in answers])
            assert sorted(index.tolist()) == list(range(n[name]))
            result[name] = torch.cat(parts, 2)[:, :, index.argsort()]
        else:
            assert all(torch.equal(part, first) for part in parts), f"{name} differs between ranks"
            result[name] = first
    return result


def check(ranks: Ranks, case: Case, size: int, dtype: torch.dtype, **how: object) -> list[dict]:
    answers = ranks.run("attend", size, case=case, dtype=dtype, **how)
    inputs = make_inputs(case, dtype)
    n_q, n_k = inputs.q.shape[2], inputs.k.shape[2]
    assert_right(inputs, whole(answers, {"o": n_q, "lse": n_q, "dq": n_q, "dk": n_k, "dv": n_k}))
    return answers


@pytest.mark.parametrize("number", range(len(ALL)), ids=[case.name for case in ALL])
@pytest.mark.parametrize("algorithm", ["gather"])
def test_same_as_one_process(ranks, algorithm, number):
    case, size = ALL[number], 2 + number % 3
    check(ranks, case, size, torch.float32, algorithm=algorithm)
