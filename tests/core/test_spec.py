"""The definitions: Mask.keep against a loop over its docstring, Philox against published answers, dropout."""

import itertools
import math

import pytest
import torch

from fastattn import Mask
from fastattn.spec import FEATURES, Spec, empty_output, philox


def sees(mask: Mask, b: int, h: int, i: int, j: int) -> bool:
    """The docstring of Mask, one pair at a time."""

    def rank(ids, n):
        return sum(ids[b, m] == ids[b, n] for m in range(n)).item() if n else 0

    position_q, position_k = i, j
    if mask.segment_ids is not None:
        ids_q, ids_k = mask.segment_ids
        position_q, position_k = rank(ids_q, i), rank(ids_k, j)
        if ids_q[b, i] != ids_k[b, j] or ids_k[b, j] < 0:
            return False
    if isinstance(mask.q_offset, torch.Tensor):
        position_q += mask.q_offset.reshape(2, -1).expand(2, 5)[b, i].item()
    else:
        position_q += mask.q_offset
    left, right = mask.window
    if mask.causal and position_k > position_q:
        return False
    if left is not None and position_k < position_q - left:
        return False
    if right is not None and position_k > position_q + right:
        return False
    if mask.real_keys is not None and not mask.real_keys[b, j]:
        return False
    if mask.real_queries is not None and not mask.real_queries[b, i]:
        return False
    return mask.dense is None or mask.dense.expand(2, 3, 5, 7)[b, h, i, j].item()


KEYS = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]).bool()
QUERIES = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
SEGMENT_IDS = (
    torch.tensor([[0, 0, 1, 1, -1], [4, 4, 4, 2, 2]]),
    torch.tensor([[0, 1, 0, 1, 1, -1, -1], [4, 4, 2, 2, 2, 2, 7]]),
)


EACH_QUERY = torch.tensor([[0, 3, -2, 1, 1], [5, -4, 0, 2, -1]])


@pytest.mark.parametrize("segment_ids", [None, SEGMENT_IDS], ids=["", "segment_ids"])
@pytest.mark.parametrize("q_offset", [0, 2, -2, torch.tensor([3, -1]), EACH_QUERY], ids=str)
@pytest.mark.parametrize("window", [(None, None), (1, None), (None, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_keep_is_what_the_docstring_says(causal, window, q_offset, segment_ids):
    dense = torch.rand(3, 1, 7, generator=torch.Generator().manual_seed(0)) < 0.8
    mask = Mask(
        causal,
        q_offset=q_offset,
        window=window,
        real_keys=KEYS,
        real_queries=QUERIES,
        segment_ids=segment_ids,
        dense=dense,
    )
    keep = mask.keep(5, 7).expand(2, 3, 5, 7)
    for b, h, i, j in itertools.product(range(2), range(3), range(5), range(7)):
        assert keep[b, h, i, j].item() == sees(mask, b, h, i, j), (b, h, i, j)
    rows = slice(1, 4)
    assert torch.equal(mask.keep(5, 7, rows=rows).expand(2, 3, 3, 7), keep[:, :, rows])


def test_features_names_exactly_the_fields_in_use():
    assert Mask().features() == frozenset()
    mask = Mask(
        True,
        q_offset=torch.zeros(2, dtype=torch.int64),
        window=(0, None),
        real_keys=KEYS,
        real_queries=QUERIES,
        segment_ids=SEGMENT_IDS,
        dense=KEYS,
    )
    learned = torch.zeros(3)
    spec = Spec(mask, 1.0, learned, 2.0, learned, learned, 0.1, torch.tensor(0))
    assert spec.features() == FEATURES
    for name, value in (
        ("causal", True),
        ("q_offset", -1),
        ("window", (None, 0)),
        ("real_keys", KEYS),
        ("dense", KEYS),
    ):
        assert Mask(**{name: value}).features() == {name}


def test_unreadable_rows():
    mask = Mask(real_keys=KEYS, segment_ids=SEGMENT_IDS)
    assert torch.equal(mask.readable_keys(), KEYS & (SEGMENT_IDS[1] >= 0))
    assert torch.equal(mask.readable_queries(), SEGMENT_IDS[0] >= 0)
    assert Mask(causal=True).readable_keys() is None


PHILOX_ANSWERS = (  # (seed, counter, words): kat_vectors of Random123 1.14, philox4x32 10, its keys as signed seeds
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0_A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("seed", "counter", "words"), PHILOX_ANSWERS)
def test_philox_gives_the_published_answers(seed, counter, words):
    actual = philox(torch.tensor(seed), tuple(torch.tensor(c) for c in counter))
    assert tuple(word.item() for word in actual) == words


def test_dropout_keeps_the_right_share_independently():
    p, shape = 0.3, (2, 3, 64, 130)
    keep = Spec(Mask(), 1.0, dropout_p=p, seed=torch.tensor(5)).dropout_keep(*shape).double()
    deviation = math.sqrt(p * (1 - p) / keep.numel())
    assert abs(keep.mean().item() - (1 - p)) < 4 * deviation
    for dim in range(4):  # neighbours along each index agree no more often than chance
        n = shape[dim] - 1
        together = (keep.narrow(dim, 0, n) * keep.narrow(dim, 1, n)).mean().item()
        assert abs(together - (1 - p) ** 2) < 6 * deviation, dim
    other = Spec(Mask(), 1.0, dropout_p=p, seed=torch.tensor(6)).dropout_keep(*shape).double()
    assert abs((keep * other).mean().item() - (1 - p) ** 2) < 6 * deviation


def test_dropout_of_a_block_of_rows_is_a_part_of_the_whole():
    spec = Spec(Mask(), 1.0, dropout_p=0.5, seed=torch.tensor(-7))
    assert torch.equal(spec.dropout_keep(2, 2, 3, 9, first_query=4), spec.dropout_keep(2, 2, 8, 9)[:, :, 4:7])


def test_output_keeps_the_memory_order_of_q():
    assert empty_output(torch.empty(2, 3, 5, 8), 4).stride() == (60, 20, 4, 1)
    assert empty_output(torch.empty(2, 5, 3, 8).transpose(1, 2), 4).stride() == (60, 4, 12, 1)
