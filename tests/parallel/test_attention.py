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


SUMS_OVER_RANKS = ("dbias", "dalibi_slopes", "dsinks")


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
    result = whole(answers, {"o": n_q, "lse": n_q, "dq": n_q, "dk": n_k, "dv": n_k})
    # What is a sum of the results of several calls has the roundings of each of them.
    sums = {name: x for name, x in result.items() if how.get("algorithm") == "ring" or name in SUMS_OVER_RANKS}
    assert_right(inputs, sums, slack=2)
    assert_right(inputs, {name: x for name, x in result.items() if name not in sums})
    return answers


ROUNDED = ("large-scores", "huge-scores", "huge-values-scores")
"""Cases whose lse is so large that its rounding changes weights, which a ring multiplies by differences of it."""

RUNS = [
    pytest.param(algorithm, case, 2 + number % 3, id=f"{algorithm}-{case.name}")
    for algorithm in ALGORITHMS
    for number, case in enumerate(ALL)
    if not (algorithm == "ring" and case.name in ROUNDED)
]


@pytest.mark.parametrize(("algorithm", "case", "size"), RUNS)
def test_same_as_one_process(ranks, algorithm, case, size):
    check(ranks, case, min(size, case.H) if algorithm == "heads" else size, torch.float32, algorithm=algorithm)
