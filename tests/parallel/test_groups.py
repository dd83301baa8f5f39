"""What ranks do together besides attention, and what they do where one of them is not like the others."""

import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from jobs import of_second_order, second_order
from ranks import Ranks, _receive, _send
from torch import Tensor

import fastattn
from fastattn.parallel.plans import ALGORITHMS


@pytest.mark.parametrize(("size", "product"), [(1, False), (2, False), (3, False), (4, False), (4, True)])
@pytest.mark.parametrize("n", [2, 13, 64])
def test_shards_make_the_whole_again(ranks, size, n, product):
    x = torch.arange(2.0 * n * 3).view(2, n, 3)
    for answer in ranks.run("shard_and_unshard", size, n=n, product=product):
        assert torch.equal(answer["whole"], x)
        rows = answer["rows"]
        of_leaf = (rows + 1.0)[:, None].expand(2, -1, 3) * sum(range(1, size + 1))
        assert torch.equal(answer["of_leaf"], of_leaf)
        assert torch.equal(answer["of_x"], torch.zeros_like(x).index_fill(1, rows, 1))


def test_every_dtype_comes_whole_again(ranks):
    assert ranks.run("unshard_each_dtype", 2) == [[], []]


def test_sums_are_made_in_fp32(ranks):
    for gradients in ranks.run("small_beside_large", 4):
        assert all(torch.equal(x, torch.full_like(x, 260)) for x in gradients)  # 259, rounded once


def exact_second_order(loss: Callable[[tuple[Tensor, Tensor]], Tensor]) -> dict[str, Tensor]:
    leaves, options = of_second_order()
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    outputs = fastattn.attention(**leaves, **options)
    return dict(zip(leaves, second_order(loss(outputs), list(leaves.values())), strict=True))


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("algorithm", ["gather", "heads", ("heads", "gather")], ids=str)
def test_second_derivatives(ranks, algorithm, linear):
    answers = ranks.run(
        "second_derivatives", 3 if isinstance(algorithm, str) else 4, algorithm=algorithm, linear=linear
    )
    exact = exact_second_order(lambda outputs: sum(x.sum() if linear else x.square().sum() for x in outputs))
    for answer in answers:
        for name, x in exact.items():
            torch.testing.assert_close(answer[name], x[:, :, answer["rows"]] if name in "qkv" else x)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("algorithm", ["ring", ("heads", "ring")], ids=str)
def test_second_derivatives_of_a_ring_are_refused(ranks, algorithm, linear):
    for answer in ranks.run("second_derivatives", 4, algorithm=algorithm, linear=linear):
        assert answer["refused"].startswith("a ring has first derivatives only: make the plan with algorithm='gather'")


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shard", [0, 1, 2, None])
def test_second_derivatives_of_dtensors(ranks, shard, dim):
    exact = exact_second_order(lambda outputs: sum(x.mean(dim).square().sum() for x in outputs))
    for answer in ranks.run("second_derivatives_of_dtensors", 2, shard=shard, dim=dim):
        for actual, (name, x) in zip(answer, exact.items(), strict=True):
            torch.testing.assert_close(actual, x, msg=name)


def test_second_derivatives_of_graphs_are_refused_by_torch(ranks):
    for message in ranks.run("second_derivatives_of_a_graph", 2):
        assert message == "torch.compile with aot_autograd does not currently support double backward"


def test_masks_of_several_layers_on_one_plan(ranks):
    for errors in ranks.run("masks_of_layers", 3):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "job", ["error_under_another_default_device", "error_after_inference_mode", "error_of_a_mask_of_inference_mode"]
)
def test_modes_of_torch(ranks, job, algorithm):
    assert max(ranks.run(job, 3, algorithm=algorithm)) < 1e-5


@pytest.mark.parametrize("how", ["DistributedDataParallel", "fully_shard", "checkpoint"])
def test_training_as_on_one_process(ranks, how):
    for answer in ranks.run("train", 3, how=how):
        assert "0.sinks" in answer
        for actual, expected in answer.values():
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compiled(ranks, algorithm):
    assert ranks.run("compiled", 2, algorithm=algorithm) == 2 * [[True, True]]


def test_a_compiled_model_in_a_block(ranks):
    assert ranks.run("compiled_block", 2) == [True, True]


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_compiled_dtensors(ranks, shard, dropout_p):
    assert ranks.run("compiled_dtensors", 2, shard=shard, dropout_p=dropout_p) == [True, True]


OF_PRODUCTS = ("values of a mask", "layout", "heads", "options")
DIFFERENT = (*OF_PRODUCTS, "a field of a mask", "dtype", "gradients", "first of a seed")


@pytest.mark.parametrize(
    ("what", "size", "algorithm"),
    [
        *((what, 3, algorithm) for what in DIFFERENT for algorithm in ALGORITHMS),
        *((what, 4, ("heads", "gather")) for what in OF_PRODUCTS),
        ("options", 2, "gather"),  # of two ranks none is right
    ],
)
def test_unequal_calls_are_refused_on_every_rank_by_name(ranks, what, size, algorithm):
    for answer in ranks.run("attend_differently", size, what=what, algorithm=algorithm):
        assert answer.endswith(f"must be the same on every rank, got others on rank {size - 1} than on rank 0")


@pytest.mark.parametrize("what", ["sizes", "dtype", "gradients"])
def test_unequal_parts_are_refused_on_every_rank_by_name(ranks, what):
    for message in ranks.run("unshard_differently", 3, what=what):
        assert message == (
            "plan, of, and the dtype, sizes and requires_grad of y must be the same on every rank, "
            "got others on rank 2 than on rank 0"
        )


REFUSED_BY_ONE = [  # job, size, algorithm, what the last rank does, and what it says
    ("attend_differently", 3, "gather", "an error", "dropout_p must be between 0 and 1, got 1.5"),
    ("attend_differently", 4, ("heads", "ring"), "an error", "dropout_p must be between 0 and 1, got 1.5"),
    ("attend_differently", 3, "gather", "length", "q must have the 8 tokens of rank 2, got [1, 6, 7, 8]"),
    ("attend_differently", 3, "gather", "a bias by distance", "bias must be a Tensor where tokens are on several"),
    ("unshard_differently", 3, None, "length", "y must have 8 entries along dim 1 on rank 2, got [2, 7, 6]"),
]


@pytest.mark.parametrize(("job", "size", "algorithm", "what", "sentence"), REFUSED_BY_ONE)
def test_what_one_rank_refuses_is_refused_by_all(ranks, job, size, algorithm, what, sentence):
    *others, mine = ranks.run(job, size, what=what, **({"algorithm": algorithm} if algorithm else {}))
    assert mine.startswith(sentence)
    assert set(others) == {f"the call must be valid on every rank; rank {size - 1} refused it and says why"}


MALFORMED = {
    "shard": "x must be a Tensor, got list",
    "of": "of must be 'queries' or 'keys', got array(",
    "dim": "dim must be one of the 4 dimensions of x, got 4",
    "unshard": "y must be a Tensor, got int",
    "dim of a part": "dim must be one of the 4 dimensions of y, got '2'",
    "replicated": "x must be a Tensor, got NoneType",
    "sparse": "q must be a dense Tensor, got torch.sparse_coo",
    "transform": "plan must be None in a transform of torch.func, got one",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_call_of_a_plan_is_refused_in_a_sentence(ranks, what):
    for message in ranks.run("malformed", 2, what=what):
        assert message.startswith(MALFORMED[what])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_backend_is_refused_also_by_ranks_that_have_no_use_for_it(ranks, algorithm):
    for message in ranks.run("attend_differently", 3, what="backend", algorithm=algorithm):
        assert message.startswith("backend 'hopper' does not compute this call")


@pytest.mark.parametrize("how", ["dies", "does something else"])
def test_a_rank_that_does_not_come_is_an_error_of_the_group_within_its_timeout(tmp_path, how):
    ranks, start = Ranks(tmp_path, 2, timeout=timedelta(seconds=4)), time.monotonic()
    try:
        for connection in ranks.connections:
            _send(connection, ("without_the_last", 2, {"how": how}))
        for connection in ranks.connections[:1]:
            error, answer = _receive(connection)
            assert error is None
            assert re.search("RuntimeError|DistBackendError|DistNetworkError", answer)
    finally:
        ranks.stop()
    assert time.monotonic() - start < 60
