"""Attention over several processes against one process, for every case of the conformance table."""

import pytest
import torch
from jobs import inputs_of
from ranks import Ranks
from torch import Tensor

from fastattn.parallel.masks import Visibility
from fastattn.parallel.plans import ALGORITHMS
from fastattn.testing import CASES, Case, assert_right, make_inputs

ALL = [case for case in CASES if case.timed is None and case.relative_bias is None]


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
    inputs = inputs_of(case, dtype)
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


OTHER_WAYS = [
    (name, algorithm, layout)
    for name in ("multi-query", "segments-causal", "pad-holes-causal-window", "everything", "scattered-segments-alibi")
    for algorithm in ("gather", "ring")
    for layout in ALGORITHMS["gather"]
]
BY_NAME = {case.name: case for case in ALL}


@pytest.mark.parametrize(("name", "algorithm", "layout"), OTHER_WAYS)
def test_every_layout(ranks, name, algorithm, layout):
    answers = check(ranks, BY_NAME[name], 4, torch.float32, algorithm=algorithm, layout=layout)
    assert {answer["layout"] for answer in answers} == {layout}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["grouped-heads", "pad-queries-causal", "segments", "bias-broadcast", "sinks", "everything"]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype(ranks, algorithm, name, dtype):
    case = BY_NAME[name]
    check(ranks, case, min(3, case.H) if algorithm == "heads" else 3, dtype, algorithm=algorithm)


@pytest.mark.parametrize("H_kv", [1, 3, 4, 12])
def test_key_heads_that_several_ranks_need(ranks, H_kv):
    """With 3 of them, the second rank has one query head of the first group, and two of the second."""
    case = Case("", "", H=12, H_kv=H_kv, n_q=40, causal=True, alibi=True, bias=(12, 40, 40), sinks=True)
    check(ranks, case, 4, torch.float32, algorithm="heads")


PRODUCTS = [("heads", "gather"), ("heads", "ring")]
OF_PRODUCTS = (
    "plain", "causal", "multi-query", "grouped-heads", "wide-values", "pad-left-causal", "pad-queries-causal",
    "pad-holes-causal-window", "segments-causal", "scattered-segments-alibi", "dense", "bias-broadcast", "sinks",
    "everything",
)  # fmt: skip


@pytest.mark.parametrize("algorithm", PRODUCTS, ids=lambda names: names[1])
@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_two_algorithms(ranks, name, algorithm):
    answers = check(ranks, BY_NAME[name], 4, torch.float32, algorithm=algorithm, mesh=(2, 2))
    assert len({len(answer["rows"]) for answer in answers}) <= 3


@pytest.mark.parametrize("algorithm", PRODUCTS, ids=lambda names: names[1])
@pytest.mark.parametrize("H_kv", [1, 3, 4])
def test_key_heads_of_two_algorithms(ranks, H_kv, algorithm):
    """12 heads on 4 ranks that share them, and on 2, with which 3 key heads are not shared evenly."""
    case = Case(
        "dense-by-head", "", H=12, H_kv=H_kv, n_q=40, causal=True, alibi=True, bias=(12, 40, 40), sinks=True, dense=True
    )
    for mesh in ((2, 2), (4, 1)):
        check(ranks, case, 4, torch.float32, algorithm=algorithm, mesh=mesh)


OTHER_CALLS = {
    "heads apart": (Case("dense-by-head", "", H=4, n_q=40, dense=True, causal=True), 4, {}),
    "reference": (BY_NAME["everything"], 3, {"backend": "reference"}),
    "queries and keys apart": (BY_NAME["everything"], 3, {"together": False}),  # as many of both, of other tokens
    "no samples": (Case("no-samples", "", B=0, H=4, n_q=13, causal=True, bias=(4, 13, 13), sinks=True), 3, {}),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls(ranks, name, algorithm):
    case, size, how = OTHER_CALLS[name]
    check(ranks, case, size, torch.float32, algorithm=algorithm, **how)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *PRODUCTS], ids=str)
@pytest.mark.parametrize("name", ["everything", "bias-shared", "segments-causal", "grouped-heads"])
def test_same_bits_on_every_run(ranks, name, algorithm):
    size, how = (min(3, BY_NAME[name].H), {}) if isinstance(algorithm, str) else (4, {"mesh": (2, 2)})
    once, again = (
        ranks.run("attend", size, case=BY_NAME[name], dtype=torch.bfloat16, algorithm=algorithm, **how)
        for _ in range(2)
    )
    for a, b in zip(once, again, strict=True):
        assert all(torch.equal(x, b["result"][output]) for output, x in a["result"].items())


COUNTED = (
    "plain", "causal", "grouped-heads", "wide-values", "pad-left-causal", "pad-queries-causal", "segments-causal",
    "dense",
)  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTED, "everything"])
@pytest.mark.parametrize("layout", ["contiguous", "longest first"])
def test_gathered_bytes_are_those_of_the_plan(ranks, name, layout):
    case = BY_NAME[name]
    answers = ranks.run("attend", 4, case=case, dtype=torch.float16, algorithm="gather", layout=layout)
    (_, (B, H_kv, _, D), (_, _, _, d_v)) = case.shapes()
    samples = Visibility(make_inputs(case, torch.float16).mask, *(x[2] for x in case.shapes()[:2])).samples
    keys = answers[0]["received"].sum().item() * B // samples
    assert sum(answer["sent"] for answer in answers) == keys * H_kv * (D + d_v) * 2


@pytest.mark.parametrize("name", COUNTED)
def test_a_ring_sends_a_key_as_far_as_it_is_seen(ranks, name):
    case = BY_NAME[name]
    answers = ranks.run("attend", 4, case=case, dtype=torch.float16, algorithm="ring")
    (B, _, n_q, _), (_, H_kv, n_k, D), (_, _, _, d_v) = case.shapes()
    seen = make_inputs(case, torch.float16).mask.keep(n_q, n_k).any(1).expand(B, -1, -1)
    hops = 0
    for holder, answer in enumerate(answers):
        for step in range(3, 0, -1):  # the last rank that sees a key, counted from its own
            further = torch.cat([answers[(holder + s) % 4]["rows"] for s in range(step, 4)])
            hops += seen[:, further][..., answer["keys"]].any(1).sum().item()
    assert sum(answer["sent"] for answer in answers) == hops * H_kv * (D + d_v) * 2
