"""Plans: who has which tokens, what the figures are, and what is refused."""

import math
import re
import time

import pytest
import torch

import fastattn
from benchmarks.parallel import masks
from fastattn import Mask
from fastattn.parallel import plan
from fastattn.parallel.plans import ALGORITHMS

N, RANKS = 65536, 8


MASKS = dict(masks(N))
BOUNDED = ("23 causal documents", "causal window of 4096")
"""Where what is received is bounded by that of contiguous tokens."""


@pytest.mark.parametrize("name", MASKS)
def test_work_is_balanced_and_little_is_sent(name):
    mask = MASKS[name]
    start = time.process_time()
    actual = plan(mask, N, RANKS)
    assert time.process_time() - start < 5
    assert actual.work.max() / actual.work.mean() <= 1.05
    assert actual.received.max() <= N * (RANKS - 1) // RANKS
    if name in BOUNDED:
        assert actual.received.max() <= 1.5 * plan(mask, N, RANKS, layout="contiguous").received.max()


@pytest.mark.parametrize("layout", ALGORITHMS["gather"])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_token_has_one_rank(layout, n, ranks):
    actual = plan(Mask(True), n, ranks, layout=layout)
    tokens = torch.cat(actual._rows_of_all("queries"))
    assert tokens.sort().values.tolist() == list(range(n))
    assert max(map(len, actual._rows_of_all("queries"))) <= -(-n // ranks) + max(1, n // (4 * ranks))
    assert actual.work.sum() == n * (n + 1) // 2


def test_contiguous_as_torch_chunks_them():
    for n, ranks in ((10, 4), (9, 4), (3, 4), (8, 4)):
        chunks = torch.arange(n).chunk(ranks)
        actual = plan(None, n, ranks, layout="contiguous")._rows_of_all("queries")
        assert [x.tolist() for x in actual if len(x)] == [x.tolist() for x in chunks]


def test_dense_as_the_same_mask_in_fields():
    ids = torch.arange(300)[None] // 64
    for mask in (Mask(True, window=(20, 0)), Mask(True, segment_ids=(ids, ids))):
        for layout in ALGORITHMS["gather"]:
            fields, dense = (plan(m, 300, 3, layout=layout) for m in (mask, Mask(dense=mask.keep(300, 300))))
            assert torch.equal(fields.work, dense.work)
            assert torch.equal(fields.received, dense.received)


def test_ring_where_a_rank_would_receive_more_than_it_may():
    assert plan(Mask(True), 1024, 4, most_keys=768).algorithm == "gather"
    assert plan(Mask(True), 1024, 4, most_keys=767).algorithm == "ring"
    assert plan(Mask(True), 1024, 4, most_keys=767, algorithm="heads").algorithm == "heads"


def test_representation():
    assert repr(plan(Mask(True), 8192, 4)) == (
        "Plan of 8192 queries and 8192 keys on 4 ranks: gather, zigzag; work of the busiest rank 1.00 of the mean, "
        "keys received 6144 at most"
    )


REFUSED = {
    "mask": ({"mask": "causal"}, "mask must be a fastattn.Mask or None, got str"),
    "length": ({"n": -1}, "n must be an int, at least 0, or a pair (n_q, n_k) of them, got -1"),
    "pair": ({"n": (4, 5, 6)}, "n must be an int, at least 0, or a pair (n_q, n_k) of them, got (4, 5, 6)"),
    "mask-length": (
        {"mask": Mask(real_keys=torch.ones(2, 7, dtype=torch.bool))},
        "mask.real_keys must be [2, 8], got [2, 7]",
    ),
    "ranks": ({"mesh": 0}, "mesh must be a DeviceMesh, a ProcessGroup or an int, at least 1, got 0"),
    "mesh": ({"mesh": "cp"}, "mesh must be a DeviceMesh, a ProcessGroup or an int, at least 1, got 'cp'"),
    "layout": (
        {"layout": "striped"},
        "layout must be 'contiguous', 'zigzag', 'in runs', 'longest first' or None, got 'striped'",
    ),
    "algorithm": ({"algorithm": "ulysses"}, "algorithm must be 'gather', 'ring', 'heads' or None, got 'ulysses'"),
    "list": (
        {"algorithm": ["heads", "ring"]},
        "algorithm must be 'gather', 'ring', 'heads' or None, got ['heads', 'ring']",
    ),
    "two algorithms": (
        {"algorithm": ("ring", "heads")},
        "algorithm must be ('heads', 'gather') or ('heads', 'ring') where it is two, got ('ring', 'heads')",
    ),
    "two dimensions": (
        {"algorithm": ("heads", "ring")},
        "mesh must be a DeviceMesh of two dimensions for two algorithms, got int",
    ),
    "most_keys": ({"most_keys": 1.5}, "most_keys must be an int or None, got 1.5"),
    "key_cost": ({"key_cost": "much"}, "key_cost must be a finite number, at least 0, got 'much'"),
    "infinite key_cost": ({"key_cost": math.inf}, "key_cost must be a finite number, at least 0, got inf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_plan_is_refused_in_a_sentence(name):
    arguments, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        plan(**({"mask": None, "n": 8, "mesh": 2} | arguments))


def test_a_source_that_is_no_plan_is_refused():
    with pytest.raises(ValueError, match=r"source must be made by fastattn\.parallel\.plan, got NoneType"):
        plan(None, 8, 2).attending(None)


def test_plan_of_ranks_that_are_not_there_computes_nothing():
    of_two, x = plan(None, 8, 2), torch.ones(1, 1, 8, 4)
    for call in (
        lambda: of_two.shard(x, 2),
        lambda: of_two.unshard(x, 2),
        of_two.positions,
        lambda: of_two.replicated(x),
        lambda: fastattn.attention(x, x, x, plan=of_two),
    ):
        with pytest.raises(
            ValueError, match="mesh must be a DeviceMesh or a ProcessGroup for a plan that is carried out"
        ):
            call()
    with pytest.raises(ValueError, match=re.escape("plan must be made by fastattn.parallel.plan, got int")):
        fastattn.attention(x, x, x, plan=2)
