"""Attention of DTensors: every way to place samples, heads and tokens, against one process."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from jobs import inputs_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastattn
from fastattn.testing import Case, assert_right

PLACED = [
    ((2,), (0,)), ((2,), (1,)), ((3,), (2,)), ((2,), (None,)), ((2, 2), (0, 1)), ((2, 2), (1, 2)), ((2, 2), (2, 0)),
    ((2, 2), (0, 0)), ((2, 2), (None, 2)), ((3,), (0,)),
]  # fmt: skip
CASES = [
    Case("everything", "", B=3, H=4, H_kv=2, n_q=40, n_k=50, causal=True, q_offset=10, window=(30, None), keys="holes",
         queries=True, dense=True, bias=(3, 1, 40, 50), softcap=5.0, alibi=True, sinks=True, dropout_p=0.2),
    Case("documents", "", B=3, H=4, n_q=37, causal=True, segment_ids=True, bias=(4, 37, 37)),
    Case("dense-by-head", "", B=3, H=4, n_q=40, dense=True, causal=True),
    Case("dropout", "", B=3, H=4, H_kv=2, n_q=37, n_k=43, keys="right", dropout_p=0.5),
    Case("slopes-by-sample", "", B=1, H=4, n_q=13, causal=True, keys="left", alibi=True),  # no sample on some ranks
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "terms"),
    [(case, False) for case in CASES] + [(case, True) for case in CASES if case.bias or case.alibi or case.sinks],
    ids=str,
)
@pytest.mark.parametrize(("mesh", "shards"), PLACED)
def test_same_as_one_process(ranks, mesh, shards, case, terms):
    size = mesh[0] if len(mesh) == 1 else 4
    inputs = inputs_of(case, torch.float32)
    for result in ranks.run("attend_dtensors", size, case=case, mesh=mesh, shards=shards, terms=terms):
        assert_right(inputs, result, slack=2)  # sums over ranks have the roundings of each


def test_heads_are_merged_without_a_copy(ranks):
    assert ranks.run("order_of_dtensors", 2) == [True, True]


@contextmanager
def mesh_of(*shape: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks of which this process is the first, and the others do nothing."""
    dist.init_process_group("fake", rank=0, world_size=torch.Size(shape).numel(), store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shards", [(0, 1), (1, 0), (0, 0), (None, 1)])
def test_eight_ranks_in_one_process(shards):
    """LocalTensorMode plays them where all do the same: not with a plan, of which each sends what it alone knows."""
    from torch.distributed._local_tensor import LocalTensorMode

    q, k, v = torch.randn(3, 8, 8, 12, 4, generator=torch.Generator().manual_seed(0))

    def results(*leaves: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in leaves]
        generator = torch.Generator().manual_seed(3)
        o = fastattn.attention(*leaves, fastattn.Mask(True), dropout_p=0.5, generator=generator)
        return [o, *torch.autograd.grad(o.square().sum(), leaves)]

    exact = results(q, k, v)
    placements = [Replicate() if dim is None else Shard(dim) for dim in shards]
    with mesh_of(2, 4) as mesh, LocalTensorMode(8):
        actual = results(*(distribute_tensor(x, mesh, placements) for x in (q, k, v)))
        whole = [x.full_tensor().reconcile() for x in actual]
    for x, y in zip(whole, exact, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "call",
    [
        fastattn.attention_weights,
        fastattn.attention_received,
        lambda q, k: fastattn.attention_with_weights(q, k, k),
        lambda q, k: fastattn.top_keys(q, k, top_k=1),
    ],
)
def test_weights_of_dtensors_are_refused_in_a_sentence(call):
    q = torch.randn(1, 2, 4, 8)
    with mesh_of(2) as mesh:
        k = distribute_tensor(q, mesh)
        with pytest.raises(NotImplementedError, match=r"^k must lie in one process, as its to_local\(\) does"):
            call(q, k)


@pytest.mark.parametrize("name", ["k", "sinks", "mask.real_keys"])
def test_a_dtensor_beside_a_tensor_is_refused_in_a_sentence(name):
    q = torch.randn(1, 2, 4, 8)
    of = {"k": q, "sinks": torch.zeros(2), "mask.real_keys": torch.ones(1, 4, dtype=torch.bool)}[name]
    with mesh_of(1) as mesh:
        given = distribute_tensor(of, mesh)
        k, mask = given if name == "k" else q, fastattn.Mask(real_keys=given) if "mask" in name else None
        with pytest.raises(NotImplementedError, match=f"^{name} must lie in one process"):
            fastattn.attention(q, k, q, mask, sinks=given if name == "sinks" else None)


def test_documents_of_one_query():
    q, ends = torch.randn(2, 2, 8), torch.tensor([0, 1, 2])
    with mesh_of(1) as mesh:
        x = distribute_tensor(q, mesh, [Shard(1)])
        o = fastattn.attention_varlen(x, x, x, ends, ends).to_local()
    torch.testing.assert_close(o, q)


REFUSED = {
    "no DTensor": "k must be a DTensor, (Shard(dim=1),) on ",
    "placed otherwise": "v must be a DTensor, (Shard(dim=1),) on ",
    "head dim": "q must be replicated, or sharded along dim 0, 1 or 2, got (Shard(dim=3),)",
    "partial": "q must be replicated, or sharded along dim 0, 1 or 2, got (Partial(sum),)",
    "strided": "q must be replicated, or sharded along dim 0, 1 or 2, got (_StridedShard(dim=1, sf=2),)",
    "heads": "the heads of q and k must be multiples of the 2 ranks that share them, got 6 and 1",
    "dropout": "dropout_p must be between 0 and 1, got 1.5",
    "another mesh": "sinks must be a Tensor, or a DTensor on DeviceMesh(",
    "generator": "generator must be a torch.Generator, a DropoutSeed or None, got int",
    "mask": "mask.real_keys must be [2, 8], got [1, 8]",
    "sinks": "sinks must be [6], got [12]",
    "alibi_slopes": "alibi_slopes must be [6] or [2, 6], got [3, 6]",
    "bias": "bias must be broadcastable to [2, 6, 16, 16], got [7, 16, 16]",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_placed_is_refused_in_a_sentence(ranks, what):
    for message in ranks.run("refused_dtensors", 4 if what == "another mesh" else 2, what=what):
        assert message.startswith(REFUSED[what])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("what", ["no DTensor", "a term", "mask", "bias"])
def test_a_call_that_one_rank_refuses_is_refused_by_those_with_other_tokens(ranks, what, dropout_p):
    *others, mine = ranks.run("one_refuses_dtensors", 3, what=what, dropout_p=dropout_p)
    assert re.match("k must be|sinks must be|mask.real_keys must be|bias must be", mine)
    assert others == 2 * ["the call must be valid on every rank; rank 2 refused it and says why"]
