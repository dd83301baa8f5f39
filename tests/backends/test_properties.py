"""Random combinations of everything that a call can have, each held to the budget of fastattn/testing.py.

`make properties` draws 2000 cases anew; without it 100 are drawn, which are the same where the same modules are
imported, whose constants hypothesis draws too. A failure prints the case, and the line that draws it again.
"""

import math
import os
import re
from dataclasses import replace
from statistics import median
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from places import CAPABILITIES, THREADS

from fastattn.backends import cpu, cuda, objections, triton
from fastattn.spec import FEATURES
from fastattn.testing import DTYPES, Case, Error, Inputs, errors, exact, make_inputs, run

DRAWS = int(os.environ.get("FASTATTN_PROPERTY_DRAWS", "0"))  # 0: the same few every time
OTHER_SEEDS = range(1, 64)


def profile(fraction: float) -> settings:
    """The settings of a test that takes this part of the draws."""
    # A case that is outside takes 64 times as long as others to judge: `make test` makes none smaller.
    return settings(
        phases=set(Phase) - (set() if DRAWS else {Phase.shrink, Phase.explain}),
        max_examples=max(1, round((DRAWS or 100) * fraction)),
        derandomize=DRAWS == 0,
        print_blob=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def cases(draw: st.DrawFn, features: frozenset[str], longest: int, widest: int, most: int = 3) -> Case:
    """A case of these features, with at most so many tokens, so wide a head, and `most` samples and heads of a kind."""

    def maybe(feature: str, values: st.SearchStrategy, otherwise: object) -> object:
        return draw(values) if feature in features and draw(st.booleans()) else otherwise

    around_blocks = st.sampled_from(
        [n + d for n in (0, 16, 32, 48, 64, 96, 128, 256) for d in (-1, 0, 1) if n + d >= 0]
    )
    lengths = (st.integers(0, longest) | around_blocks).filter(lambda n: n <= longest)
    head_dims = st.integers(1, widest) | st.sampled_from([d for d in (8, 16, 32, 64, 128) if d <= widest])
    B, H_kv, group = draw(st.integers(0, most)), draw(st.integers(1, most)), draw(st.integers(1, most))
    H, n_q, n_k = H_kv * group, draw(lengths), draw(lengths)
    starts = st.integers(-longest, longest)
    limits = st.none() | st.integers(0, longest)

    def bias_shape() -> st.SearchStrategy:
        whole = st.tuples(*(st.sampled_from((1, n)) for n in (B, H, n_q, n_k)))
        return st.tuples(whole, st.integers(0, 4)).map(lambda drawn: drawn[0][drawn[1] :])

    bias, alibi = maybe("bias", bias_shape(), None), maybe("alibi_slopes", st.just(True), False)
    softcap = maybe("softcap", st.floats(0.25, 64), None)
    relative = None if bias is not None else maybe("relative_bias", st.sampled_from((1, H)), None)
    of_some = st.tuples(*[starts] * B) | st.just("scattered")  # and documents of queries, of which it has no distances
    beside_products = bias is not None or relative or alibi or softcap
    huge_values = draw(st.just(0.0) | st.floats(0.85, 0.995))
    # Of one key the plain formula has a dS without any error, and that of two sums is one of |dO| |V|; times distances,
    # the sum of all dS overflows in the formula itself.
    if n_k == 1 or alibi:
        huge_values = 0.0
    return Case(
        name="drawn",
        why="",
        B=B,
        H=H,
        H_kv=H_kv,
        n_q=n_q,
        n_k=n_k,
        D=draw(head_dims),
        d_v=draw(st.none() | head_dims),
        causal=maybe("causal", st.just(True), False),
        q_offset=maybe("q_offset", starts if relative else starts | of_some, 0),
        window=maybe("window", st.tuples(limits, limits), (None, None)),
        keys=maybe("real_keys", st.sampled_from(("right", "left", "holes", "none")), None),
        queries=maybe("real_queries", st.just(True), False),
        segment_ids=maybe("segment_ids", st.just(relative is None), False),
        dense=maybe("dense", st.sampled_from((True, "blocks")), False),
        bias=bias,
        relative_bias=relative,
        softcap=softcap,
        alibi=alibi,
        sinks=maybe("sinks", st.just(True), False),
        dropout_p=maybe("dropout", st.sampled_from((0.1, 0.5, 1.0)), 0.0),
        scale=draw(st.none() | st.sampled_from((0.0, 0.05, 0.3, -0.3, 1.0))),
        # Beside products fp64 too would lose huge scores; beside huge values there would be no do for the largest.
        huge=0.0 if beside_products else draw(st.just(0.0) | st.floats(0.3, 0.5 if huge_values else 1)),
        huge_values=huge_values,
        layout=draw(st.sampled_from(("BHND", "BNHD", "sliced", "columns"))),
    )


def errors_of(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> list[Error]:
    """The error of each of these outputs."""
    if inputs.q.shape[:3].numel() * inputs.k.shape[2] == 0:  # the plain formula knows no softmax over nothing
        right = exact(inputs)
        return [
            Error(n, 0.0 if torch.equal(x.double(), right[n].double()) else math.inf, 0.0) for n, x in outputs.items()
        ]
    return errors(inputs, outputs)


def check(case: Case, dtype: torch.dtype, backend: str, threads: tuple[int | None, ...] = (None,)) -> None:
    """Computed within the budget, with the same bits on each number of threads, or refused with exactly its objections.

    The budget is twice the error of the plain formula. Where few numbers are compared, or one of them is far larger
    than the others, that error is nearly 0 by chance now and then. An output that is outside is then computed with
    other random numbers too: the median of its errors has to be within that of the budgets, and the largest within the
    largest of those, either as they are or as parts of the largest number: one draw rules all where far keys beside a
    sink weigh 1e-12 in it and 1e-18 in the next, or where its sum of gradients is nearly 0.
    """
    if backend in (cpu.NAME, cuda.NAME) and dtype == torch.bfloat16 and case.scale == 0:
        # The plain formula then has an lse without any error; that of bf16 products is exact to 1e-4, as their exp2 is.
        case = replace(case, scale=None)
    module = {module.NAME: module for module in (cpu, cuda, triton)}[backend]
    inputs = make_inputs(case, dtype)
    if why := objections(module, inputs.q, inputs.k, inputs.v, inputs.spec()):
        event("refused")
        with pytest.raises(NotImplementedError, match=re.escape("; ".join(why))):
            run(inputs, backend)
        return
    outputs, *others = (run(inputs, backend, n) for n in threads)
    for other in others:
        for name, value in outputs.items():
            assert torch.equal(value, other[name]), f"{name} depends on the number of threads"
    judged = errors_of(inputs, outputs)
    if not all(error.right for error in judged):
        redrawn = (make_inputs(case, dtype, seed=seed) for seed in OTHER_SEEDS)
        several = [judged, *(errors_of(inputs, run(inputs, backend)) for inputs in redrawn)]
        assert all(math.isfinite(error.largest) for each in several for error in each), "; ".join(map(str, judged))
        judged = []
        for of_output in zip(*several, strict=True):
            name = of_output[0].output
            judged.append(
                Error(f"median of {name}", median(e.largest for e in of_output), median(e.budget for e in of_output))
            )
            worst = [
                Error(
                    f"largest of {name}",
                    max(e.largest / unit(e) for e in of_output),
                    max(e.budget / unit(e) for e in of_output),
                )
                for unit in (lambda _: 1.0, lambda e: e.magnitude or 1.0)
            ]
            judged.append(next((error for error in worst if error.right), worst[0]))
    assert all(error.right for error in judged), "; ".join(str(error) for error in judged if not error.right)


@profile(1.0)
@given(
    case=cases(FEATURES, longest=140, widest=80),
    dtype=st.sampled_from(DTYPES),
    capability=st.sampled_from(CAPABILITIES),
)
def test_cpu(case, dtype, capability):
    with mock.patch.dict(os.environ, FASTATTN_CPU_CAPABILITY=capability):
        check(case, dtype, "cpu", THREADS)


@profile(0.25)
@given(case=cases(FEATURES, longest=700, widest=20), dtype=st.sampled_from(DTYPES))
def test_cpu_over_many_blocks(case, dtype):
    check(case, dtype, "cpu", THREADS)


@profile(0.1)
@given(case=cases(triton.features(torch.device("cpu")), longest=20, widest=20, most=2), dtype=st.sampled_from(DTYPES))
def test_triton_interpreted(case, dtype):
    check(case, dtype, "triton")
