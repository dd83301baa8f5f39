"""The definitions: Mask.keep against a loop over its docstring, Philox against published answers, dropout."""

import dataclasses
import functools
import io
import itertools
import math
import random
import sys
import warnings
import xml.etree.ElementTree as ET

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import fastattn
from fastattn import Mask, spec
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
    assert spec.features() == FEATURES - {"relative_bias"}
    assert Spec(Mask(), 1.0, learned, bias_by_distance=True).features() == {"relative_bias"}
    for name, value in (
        ("causal", True),
        ("q_offset", -1),
        ("window", (None, 0)),
        ("real_keys", KEYS),
        ("dense", KEYS),
    ):
        assert Mask(**{name: value}).features() == {name}


@pytest.mark.parametrize("frozen", [Mask(), fastattn.RelativeBias(torch.ones(3))], ids=lambda x: type(x).__name__)
def test_what_describes_a_call_does_not_change(frozen):
    for name in (dataclasses.fields(frozen)[0].name, "is_causal"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(frozen, name, True)


def test_unreadable_rows():
    mask = Mask(real_keys=KEYS, segment_ids=SEGMENT_IDS)
    assert torch.equal(mask.readable_keys(), KEYS & (SEGMENT_IDS[1] >= 0))
    assert torch.equal(mask.readable_queries(), SEGMENT_IDS[0] >= 0)
    assert Mask(causal=True).readable_keys() is None


def test_ids_that_lie_in_another_order_are_read_without_a_warning(request):
    request.addfinalizer(functools.partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for views in ([ids[:, :4] for ids in SEGMENT_IDS], [ids[:, :4].T.contiguous().T for ids in SEGMENT_IDS]):
            masks = [Mask(True, segment_ids=(q, k)).keep(4, 4) for q, k in (views, [x.contiguous() for x in views])]
            assert torch.equal(*masks)
            both = Mask(segment_ids=tuple(views)) & Mask(segment_ids=tuple(x + 1 for x in views))
            assert torch.equal(both.keep(4, 4), Mask(segment_ids=tuple(views)).keep(4, 4))


def drawn_fields(rng: random.Random) -> dict:
    """Fields of a mask of two samples, six queries and six keys."""
    ids = torch.tensor(rng.choices((-1, 0, 1, 2, 3), k=24)).view(2, 2, 6)
    bools = torch.tensor(rng.choices((True, True, False), k=36)).view(6, 6)
    fields = {
        "causal": True,
        "q_offset": rng.choice((1, -2, torch.tensor([2, -1]))),
        "window": (rng.choice((None, 0, 1, 3)), rng.choice((None, 0, 2))),
        "real_keys": bools[:2],
        "real_queries": bools[2:4],
        "segment_ids": (ids[0], ids[0] if rng.random() < 0.7 else ids[1]),
        "dense": rng.choice((bools, bools[0], bools.expand(2, 3, 6, 6), bools[:1].expand(3, 1, 6))),
    }
    return {name: value for name, value in fields.items() if rng.random() < 0.3}


def test_and_shows_what_both_show_or_refuses():
    refused, pairs = [], set()
    for draw in range(1500):
        rng = random.Random(draw)
        fields, others = drawn_fields(rng), drawn_fields(rng)
        others |= {name: fields[name] for name in ("q_offset", "segment_ids") if name in fields and rng.random() < 0.5}
        one, other = Mask(**fields), Mask(**others)
        try:
            both = one & other
        except ValueError as error:
            refused.append(str(error))
            continue
        expected = one.keep(6, 6) & other.keep(6, 6)
        assert torch.equal(*torch.broadcast_tensors(both.keep(6, 6), expected)), (draw, fields, others)
        assert both.features() == one.features() | other.features()
        pairs |= set(itertools.product(fields, others))
    names = {field.name for field in dataclasses.fields(Mask)}
    assert pairs == set(itertools.product(names, names))
    assert len(refused) < 600
    assert {error.split()[0] for error in refused} == {"mask.q_offset", "mask.segment_ids"}


IDS = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"causal": True}, {"q_offset": 2}, "mask.q_offset must be one int or one Tensor in both masks, got 0 and 2"),
        (
            {"window": (1, 1)},
            {"segment_ids": (IDS, IDS)},
            "mask.segment_ids must be the same in both masks where one has window",
        ),
        (
            {"causal": True},
            {"segment_ids": (IDS, IDS[:, :3])},
            "mask.segment_ids must be the same in both masks where one has causal",
        ),
        (
            {"real_keys": IDS.bool()},
            {"real_keys": IDS[:, :3].bool()},
            "mask.real_keys must fit .* got [1, 4] and [1, 3]",
        ),
        ({"dense": torch.ones(2, 3).bool()}, {"dense": torch.ones(3, 2).bool()}, "mask.dense must fit"),
        ({"segment_ids": (IDS, IDS)}, {"segment_ids": (IDS, IDS[:, :3])}, "mask.segment_ids must fit"),
    ],
)
def test_and_refuses_what_it_cannot_say(one, other, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Mask(**one) & Mask(**other)
    with pytest.raises(TypeError, match="unsupported operand"):
        Mask(**one) & None


@pytest.mark.parametrize("combined", [lambda one, other: one and other, lambda one, other: one or other])
def test_a_mask_is_no_condition(combined):
    with pytest.raises(TypeError, match="neither true nor false: `one & other`"):
        combined(Mask(causal=True), Mask())


def test_masks_of_all_lengths_are_made_and_combined_in_one_compiled_graph():
    def attend(q, lengths, ids):
        n = q.shape[2]
        padding = Mask.from_lengths(lengths, n) & Mask.from_lengths(lengths, n, of="queries")
        near = Mask(window=(n // 2, None), segment_ids=(ids, ids)) & Mask(window=(5, 3), segment_ids=(ids, ids))
        return fastattn.attention(q, q, q, Mask(causal=True) & padding & near)

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    for n in (7, 12):
        args = torch.randn(2, 2, n, 8), torch.tensor([n, 3]), (torch.arange(n) // 4).expand(2, n)
        torch.testing.assert_close(compiled(*args), attend(*args))


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_from_lengths_is_what_pad_sequence_makes(padding_side):
    lengths = [3, 1, 4]
    padded = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in lengths], True, 0, padding_side).bool()
    for of, fields in (("keys", {"real_keys"}), ("queries", {"real_queries"}), ("both", {"real_keys", "real_queries"})):
        for given in (lengths, torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int32)):
            mask = Mask.from_lengths(given, 4, padding_side=padding_side, of=of)
            assert mask.features() == fields
            assert all(torch.equal(x, padded) for x in mask.tensors().values())


@pytest.mark.parametrize("pairs_at_once", [1, 60, 2**22])
@pytest.mark.parametrize(("B", "H"), [(None, None), (2, None), (None, 3), (2, 3)])
def test_from_flex_agrees_with_a_loop_and_with_flex_attention(B, H, pairs_at_once, monkeypatch):
    monkeypatch.setattr(spec, "_PAIRS_AT_ONCE", pairs_at_once)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])

    def mask_mod(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx + h >= kv_idx)

    dense = Mask.from_flex(mask_mod, B, H, 5, 7).dense
    assert dense.shape == (B or 1, H or 1, 5, 7)
    for index in itertools.product(*map(range, dense.shape)):
        assert dense[index] == mask_mod(*map(torch.tensor, index)), index
    assert torch.equal(dense, create_mask(mask_mod, B, H, 5, 7, device="cpu"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(window=(KEYS, None)), "mask.window's left must be None or an int .*, got Tensor"),
        (lambda: Mask.from_lengths([1.5], 3), "lengths must be an integer Tensor, or ints from 0 to n = 3, got 1.5"),
        (
            lambda: Mask.from_lengths(torch.ones(2, 2).long(), 3),
            r"lengths must be int32 or int64 \[B\], got torch.int64",
        ),
        (lambda: Mask.from_lengths([1, 4], 3), r"lengths must be from 0 to n = 3, got \[1, 4\]"),
        (lambda: Mask.from_lengths(torch.tensor([[1]]).to_sparse(), 3), "lengths must be .* got one that is not dense"),
        (lambda: Mask.from_lengths([1], -3), "n must be an int, at least 0, got -3"),
        (lambda: Mask.from_lengths([1], 3, padding_side="top"), "padding_side must be 'right' or 'left', got 'top'"),
        (lambda: Mask.from_lengths([1], 3, of="values"), "of must be 'keys' or 'queries' or 'both', got 'values'"),
        (lambda: Mask.from_flex(KEYS, 1, 1, 2, 2), "mask_mod must be a function of .*, got Tensor"),
        (
            lambda: Mask.from_flex(lambda *pair: pair[2], 1, 1, 2, 2),
            "mask_mod must return a bool Tensor, got torch.int64",
        ),
        (lambda: Mask.from_flex(min, 1, 1, 2, 2, "abacus"), "device must be a device of torch, got 'abacus'"),
        (lambda: Mask.from_flex(min, 0, None, 2, 2), "B must be an int, at least 1, or None, got 0"),
        (lambda: Mask.from_flex(min, None, None, 2, None), "KV_LEN must be an int, at least 1, got None"),
        (lambda: Mask(real_keys=KEYS).show(n_k=5), "n_k must be 7 as in the tensors of this mask, got 5"),
        (lambda: Mask(dense=KEYS).show(n_k=0), "n_k must be an int, at least 1, got 0"),
        (lambda: Mask().show(0), "n_q must be an int, at least 1, got 0"),
        (lambda: Mask(real_keys=KEYS).show(sample=2), "sample must be an int from 0 to 1, got 2"),
        (lambda: Mask.from_lengths([], 4).show(), "mask must have samples and heads to be shown, got 0 and 1"),
        (lambda: Mask(segment_ids=SEGMENT_IDS).keep(5, 9), "n_k must be 7 as in the tensors of this mask, got 9"),
        (lambda: Mask(dense=KEYS).keep(1, 7), "n_q must be 2 as in the tensors of this mask, got 1"),
        (lambda: Mask(real_keys=KEYS).keep(3, 1), "n_k must be 7 as in the tensors of this mask, got 1"),
        (lambda: Mask().show(head=1), "head must be an int from 0 to 0, got 1"),
    ],
)
def test_what_makes_and_shows_masks_refuses_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_show_draws_what_keep_says_in_characters_and_in_svg():
    dense = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.8
    mask = Mask(True, q_offset=2, real_keys=KEYS, real_queries=QUERIES, dense=dense)
    picture = mask.show(sample=1, head=2)
    *rows, legend = str(picture).splitlines()
    assert rows[0].split() == list("0123456")
    assert "// padding" in legend
    for i, row in enumerate(rows[1:]):
        seen = mask.keep(5, 7)[1, 2, i]
        padded = ~(QUERIES[1, i] & KEYS[1])
        kinds = ["██" if s else "//" if p else " ·" for s, p in zip(seen, padded, strict=True)]
        assert row == f"{i} {''.join(kinds)}"
    cells = [x.get("class") for x in ET.fromstring(picture._repr_svg_()).iter("{http://www.w3.org/2000/svg}rect")]
    assert cells[:-3] == [kind for row in picture.panels[0][3] for kind in row]
    assert len(mask.show().panels) == 2
    assert [Mask(segment_ids=SEGMENT_IDS).show(sample=0).panels[0][1][i] for i in (0, 2, 4)] == ["A", "B", "-"]
    assert len(Mask(dense=torch.ones(3, 7).bool()).show().panels[0][3]) == 3
    assert len(Mask(causal=True).show().panels[0][3]) == 8


def test_show_of_many_tokens_lets_a_cell_stand_for_a_block():
    picture = Mask(True, q_offset=-1, real_keys=torch.arange(100)[None] < 41).show(70)
    assert picture.step == 4
    assert picture.panels[0][3][0] == ["edge"] + ["hidden"] * 10 + ["padding"] * 14
    assert picture.panels[0][3][17] == ["seen"] * 10 + ["edge"] + ["padding"] * 14
    assert "may be seen: all 4 x 4 pairs of a cell" in str(picture)


@pytest.mark.parametrize(("encoding", "shown"), [("cp1252", "0 ## .//"), ("utf-8", "0 ██ ·//")])
def test_show_draws_with_characters_that_stdout_can_print(monkeypatch, encoding, shown):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding))
    print(Mask(True, real_keys=torch.tensor([[True, True, False]])).show(1), flush=True)
    assert output.getvalue().decode(encoding).splitlines()[1] == shown


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
    assert torch.equal(spec.dropout_keep(2, 2, 3, 9, (0, 0, 4)), spec.dropout_keep(2, 2, 8, 9)[:, :, 4:7])


def test_dropout_of_a_part_is_that_of_the_whole():
    whole = Spec(Mask(), 1.0, dropout_p=0.5, seed=torch.tensor(12345))
    rows, fours = torch.tensor([7, 2, 9]), torch.tensor([1, 3, 5])
    part = dataclasses.replace(whole, places=torch.cat([torch.tensor([1, 2]), rows, fours]).int())
    keys = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15, 20, 21])
    expected = whole.dropout_keep(3, 4, 10, 22)[1:, 2:][:, :, rows][..., keys]
    assert torch.equal(part.dropout_keep(2, 2, 3, 10), expected)
    assert torch.equal(part.dropout_keep(2, 2, 2, 10, (0, 0, 1)), expected[:, :, 1:])


def test_output_keeps_the_memory_order_of_q():
    assert empty_output(torch.empty(2, 3, 5, 8), 4).stride() == (60, 20, 4, 1)
    assert empty_output(torch.empty(2, 5, 3, 8).transpose(1, 2), 4).stride() == (60, 4, 12, 1)
