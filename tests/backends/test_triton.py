"""The Triton backend: its twin of the mask, its refusals, and its kernels compiled for GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import test_paged
import torch
import triton
import triton.language as tl
from modelled_gpu import PTX_MACHINES
from parts import places_of_a_part
from places import place_id
from torch.utils import _pytree as pytree

import fastattn
from fastattn.backends import kept_results
from fastattn.backends import triton as backend
from fastattn.backends.triton import configs, flash_backward, flash_decoding, preparation
from fastattn.backends.triton.configs import Apart, Config, config_for
from fastattn.backends.triton.dropout import dropout, kept
from fastattn.backends.triton.preparation import real_spans, visibility
from fastattn.backends.triton.rules import rules_of
from fastattn.backends.triton.scores import tanh
from fastattn.backends.triton.tiles import dot_precision, heads
from fastattn.backends.triton.visibility import (
    as_column,
    as_row,
    hide,
    key_range,
    key_tokens,
    position_of_first_query,
    query_range,
    query_tokens,
    shown,
)
from fastattn.spec import Mask, Spec
from fastattn.testing import CASES, DTYPES, Case, assert_right, errors, make_inputs, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, N_Q, N_K, BLOCK_M, BLOCK_N = 2, 20, 30, 8, 8
TILES_Q, TILES_K = triton.cdiv(N_Q, BLOCK_M), triton.cdiv(N_K, BLOCK_N)


@triton.jit
def twin_kernel(kept, key_ranges, query_ranges, visible, n_q, n_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes what `hide`, `key_range` and `query_range` say of one sample."""
    i_b = tl.program_id(0)
    q_offset = position_of_first_query(visible, i_b)
    n_tiles_q, n_tiles_k = tl.cdiv(n_q, BLOCK_M), tl.cdiv(n_k, BLOCK_N)
    for i_m in tl.range(0, n_tiles_q):
        begin, full_begin, full_end, end = key_range(i_m, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
        p_range = key_ranges + (i_b * n_tiles_q + i_m) * 4
        tl.store(p_range, begin)
        tl.store(p_range + 1, full_begin)
        tl.store(p_range + 2, full_end)
        tl.store(p_range + 3, end)
        queries = query_tokens(i_m, i_b, n_q, q_offset, visible, True, BLOCK_M)
        for i_n in tl.range(0, n_tiles_k):
            keys = key_tokens(i_n, i_b, n_k, visible, True, BLOCK_N)
            m_dense = shown(queries, keys, i_b, 0, visible, QUERIES_DOWN=True)
            pairs = as_column(queries), as_row(keys), i_b, 0, n_q, n_k
            b_kept = hide(queries[1][:, None].to(tl.int32), 0, m_dense, pairs, visible, True)
            p_row = kept + (i_b * n_tiles_q * BLOCK_M + queries[0][:, None]) * (n_tiles_k * BLOCK_N)
            tl.store(p_row + keys[0][None, :], b_kept != 0)
    for i_n in tl.range(0, n_tiles_k):
        begin, full_begin, full_end, end = query_range(i_n, i_b, q_offset, n_q, n_k, visible, BLOCK_M, BLOCK_N)
        p_range = query_ranges + (i_b * n_tiles_k + i_n) * 4
        tl.store(p_range, begin)
        tl.store(p_range + 1, full_begin)
        tl.store(p_range + 2, full_end)
        tl.store(p_range + 3, end)


def padding(pattern: str | None, n: int, seed: int = 0) -> torch.Tensor | None:
    """bool [B, n] with another length for each sample, on DEVICE."""
    lengths, index = torch.tensor([[n // 3], [n - 2]]), torch.arange(n)
    patterns = {
        "right": index < lengths,
        "left": index >= n - lengths,
        "both": (index >= 2) & (index < lengths),
        "holes": torch.rand(B, n, generator=torch.Generator().manual_seed(seed)) < 0.8,
        "none": (index < 0) | (torch.arange(B)[:, None] == 1),
    }
    return None if pattern is None else patterns[pattern].to(DEVICE)


def documents(pattern: str | None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids [B, N_Q] and [B, N_K], other ones for each sample, on DEVICE; some tokens belong to none."""
    if pattern is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(-1, 3, (B, n), generator=generator) for n in (N_Q, N_K))
    return tuple((x.sort(dim=-1).values if pattern == "packed" else x).to(DEVICE) for x in ids)


def ranges_of(mask: Mask, n_q: int, n_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `twin_kernel` says of a mask: the pairs that it does not hide, key ranges and query ranges."""
    tiles_q, tiles_k = triton.cdiv(n_q, BLOCK_M), triton.cdiv(n_k, BLOCK_N)
    kept = torch.empty(B, tiles_q * BLOCK_M, tiles_k * BLOCK_N, dtype=torch.bool, device=DEVICE)
    key_ranges = torch.empty(B, tiles_q, 4, dtype=torch.int32, device=DEVICE)
    query_ranges = torch.empty(B, tiles_k, 4, dtype=torch.int32, device=DEVICE)
    visible = visibility(mask, n_q, n_k).in_tiles(BLOCK_M)
    twin_kernel[(B,)](kept, key_ranges, query_ranges, visible, n_q, n_k, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return kept, key_ranges, query_ranges


def tiled(pairs: torch.Tensor) -> torch.Tensor:
    """[B, TILES_Q, TILES_K, BLOCK_M, BLOCK_N] of a bool [B, TILES_Q * BLOCK_M, TILES_K * BLOCK_N]."""
    return pairs.unflatten(2, (TILES_K, BLOCK_N)).unflatten(1, (TILES_Q, BLOCK_M)).transpose(2, 3)


def padded(rows: torch.Tensor, n_tiles: int, block: int) -> torch.Tensor:
    """bool [B, n_tiles * block]: `rows` [B, n], and False for what lies beyond them."""
    return torch.nn.functional.pad(rows, (0, n_tiles * block - rows.shape[1]))


def in_range(ranges: torch.Tensor, n_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, tiles, n_tiles]: which tiles are visited, and which are called full."""
    begin, full_begin, full_end, end = ranges[..., None].unbind(2)
    i = torch.arange(n_tiles, device=ranges.device)
    return (begin <= i) & (i < end), (full_begin <= i) & (i < full_end)


@pytest.mark.parametrize("q_offset", [0, 1, 6, -11, 40, (5, -3)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["any order", "causal"])
def test_keep_and_ranges_are_twins_of_the_mask(causal, q_offset, monkeypatch):
    """Each visible pair lies in a visited tile, each pair of a full tile is visible, and no other tile is visited."""
    monkeypatch.setattr(preparation, "BLOCK", 4)  # or one block would hold all the tokens of a document
    start = torch.tensor(q_offset, device=DEVICE) if isinstance(q_offset, tuple) else q_offset
    windows = [(None, None), (0, 0), (6, None), (None, 6), (9, 5)]  # one off moves the edge of a tile
    keys, queries = [None, "right", "left", "both", "holes", "none"], [None, "right", "left", "holes", "none"]
    every = list(itertools.product(windows, keys, queries, [None, None, "packed", "any order"]))
    for window, keys_pattern, queries_pattern, documents_pattern in random.Random(f"{causal} {q_offset}").sample(
        every, 12
    ):
        mask = Mask(
            causal,
            q_offset=start,
            window=window,
            real_keys=padding(keys_pattern, N_K),
            real_queries=padding(queries_pattern, N_Q, seed=1),
            segment_ids=documents(documents_pattern),
        )
        kept, key_ranges, query_ranges = ranges_of(mask, N_Q, N_K)
        expected = torch.zeros_like(kept)
        expected[:, :N_Q, :N_K] = mask.keep(N_Q, N_K, DEVICE)[:, 0]
        assert torch.equal(kept, expected)

        everything = torch.ones(B, max(N_Q, N_K), dtype=torch.bool, device=DEVICE)
        real_queries, real_keys = mask.readable_queries(), mask.readable_keys()
        real_queries = everything[:, :N_Q] if real_queries is None else real_queries
        real_keys = everything[:, :N_K] if real_keys is None else real_keys
        # A full tile may hold rows that are not real on the side that the program owns: those are never written.
        excused_queries = ~padded(real_queries, TILES_Q, BLOCK_M)[:, :, None]
        excused_keys = ~padded(real_keys, TILES_K, BLOCK_N)[:, None, :]
        seen = tiled(expected).any((-1, -2))
        for visited, full, excused in (
            (*in_range(key_ranges, TILES_K), excused_queries),
            (*(tiles.mT for tiles in in_range(query_ranges, TILES_Q)), excused_keys),
        ):
            all_seen = tiled(expected | excused).all(-1).all(-1)
            assert (visited | ~seen).all(), "a visible pair is skipped"
            assert (all_seen | ~full).all(), "a full tile hides a pair"
            if documents_pattern is None and "holes" not in (keys_pattern, queries_pattern):
                assert torch.equal(visited, seen), "a tile without a visible pair is visited"
                assert torch.equal(full, all_seen & seen), "a tile without a hidden pair is not called full"


@pytest.mark.parametrize("n", [1, 40, 4096, 4097, 9000])  # 4096 at a time
def test_where_real_tokens_begin_and_end_and_where_the_first_hole_is(n):
    index = torch.arange(n)
    ends = [(0, n), (0, 0), (0, n // 2), (n // 3, n), (n // 3, n - 1), (n - 1, n), (n // 2, n // 2 + 1)]
    rows = [(begin <= index) & (index < end) for begin, end in ends]
    rows += [row & (index != hole) for row in rows for hole in (0, n // 3 + 1, n - 2, n - 1)]
    spans = []
    for row in rows:
        real = row.nonzero().flatten().tolist()
        first, end = (real[0], real[-1] + 1) if real else (n, 0)
        spans.append([first, next((i for i in range(first, n) if not row[i]), n), end])
    assert real_spans(torch.stack(rows).to(DEVICE)).tolist() == spans


@pytest.mark.parametrize("start", [2**29 + 3, 2**31 - 1, 2**40, 2**61, -(2**29) - 3, -(2**31), -(2**40)])
@pytest.mark.parametrize("documents_pattern", [None, "packed"])
def test_starts_beyond_32_bits(start, documents_pattern):
    """Causal, also from a tensor; and windows that end among the keys, although the queries are far from them."""
    window, as_tensor = (start - 2, None) if start > 0 else (None, -start - 2), torch.tensor([start] * B, device=DEVICE)
    segment_ids = documents(documents_pattern)
    for mask in (Mask(True, q_offset=start), Mask(True, q_offset=as_tensor), Mask(q_offset=start, window=window)):
        mask = dataclasses.replace(mask, segment_ids=segment_ids)
        kept, key_ranges, _ = ranges_of(mask, N_Q, N_K)
        expected = torch.zeros_like(kept)
        expected[:, :N_Q, :N_K] = mask.keep(N_Q, N_K, DEVICE)[:, 0]
        assert torch.equal(kept, expected)
        visited, _ = in_range(key_ranges, TILES_K)
        assert (visited | ~tiled(expected).any((-1, -2))).all(), "a visible pair is skipped"


def test_a_growing_cache_compiles_no_more_kernels():
    """Triton makes one of its own where an integer is 1 or a multiple of 16."""
    for q_offset in range(1, 100):
        coded = visibility(Mask(causal=True, q_offset=q_offset), 1, q_offset + 1).q_offset_coded
        assert coded != 1
        assert coded % 16 != 0


@pytest.mark.parametrize("shape", [(B, 1, N_Q, N_K), (N_Q, N_K), (B, 1, 1, N_K), (N_Q, 1), ()], ids=str)
def test_dense_masks_of_every_shape(shape):
    dense = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7).to(DEVICE)
    mask = Mask(causal=True, q_offset=5, real_keys=padding("holes", N_K), dense=dense)
    kept = ranges_of(mask, N_Q, N_K)[0]
    assert torch.equal(kept[:, :N_Q, :N_K], mask.keep(N_Q, N_K, DEVICE)[:, 0])
    assert not kept[:, N_Q:].any()
    assert not kept[:, :, N_K:].any()


def test_tiles_of_which_a_dense_mask_shows_nothing_are_not_read():
    """NaN stands there, which a weight of 0 would not hide."""
    n, half = 256, 128  # half is a multiple of every tile
    dense = torch.zeros(n, n, dtype=torch.bool, device=DEVICE)
    dense[:half, :half] = True
    q, k, v, do = torch.randn(4, 1, 1, n, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for x in (q, k, v, do):
        x[:, :, half:] = float("nan")
    bias = torch.zeros(n, n, device=DEVICE, requires_grad=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = fastattn.attention(*leaves, Mask(dense=dense), bias=bias, backend="triton")
    for x in (o, *torch.autograd.grad(o, leaves, do, retain_graph=True)):
        assert x[:, :, :half].isfinite().all()
        assert (x[:, :, half:] == 0).all()
    (dbias,) = torch.autograd.grad(o, [bias], do)
    assert dbias.isfinite().all()
    assert (dbias[~dense] == 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["any order", "causal"])
def test_documents_that_fill_their_tiles_visit_no_other(causal):
    """Lengths of 2, 1 and 3 tiles, then one of padding: just the blocks on the diagonal, and no edge but causal's."""
    tile = torch.tensor([0, 0, 1, 2, 2, 2, -1], device=DEVICE)
    ids = tile.repeat_interleave(BLOCK_M).expand(B, -1)
    _, key_ranges, query_ranges = ranges_of(Mask(causal=causal, segment_ids=(ids, ids)), ids.shape[1], ids.shape[1])
    seen = (tile[:, None] == tile) & (tile >= 0)
    order = torch.arange(len(tile), device=DEVICE)
    behind = order[:, None] - order
    full = seen & (behind > 0) if causal else seen
    seen = seen & (behind >= 0) if causal else seen
    for actual, expected in (
        (in_range(key_ranges, len(tile)), (seen, full)),
        (in_range(query_ranges, len(tile)), (seen.mT, full.mT)),
    ):
        for tiles, right in zip(actual, expected, strict=True):
            assert torch.equal(tiles, right.expand(B, -1, -1))


@pytest.mark.parametrize("left", [None, 9])
def test_documents_of_more_blocks_than_are_looked_at_at_once(left, monkeypatch):
    """Which is 128; of long documents with short ones between them, and windows that see a part of one."""
    monkeypatch.setattr(preparation, "BLOCK", 2)
    lengths = torch.tensor([200, 3, 1, 90, 2, 5, 30])
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)[None].to(DEVICE)
    mask, n = Mask(True, window=(left, None), segment_ids=(ids, ids)), ids.shape[1]
    visible = visibility(mask, n, n).in_tiles(16)
    assert torch.equal(visible.positions_k.long(), mask.positions(n, n)[1])
    expected = []
    for rows in mask.keep(n, n, DEVICE)[0, 0].split(16):
        seen = [row.nonzero().flatten() for row in rows]
        firsts, ends = [int(keys[0]) for keys in seen], [int(keys[-1]) + 1 for keys in seen]
        expected.append([min(firsts), max(firsts), min(ends), max(ends), int(len(rows) < 16)])
    assert visible.key_ranges[0].tolist() == expected


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that are launched."""
    names, run = [], type(preparation.spans_kernel).run

    def counted(self, *args, **options):
        names.append(self.fn.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(type(preparation.spans_kernel), "run", counted)
    return names


def with_gradients(mask: Mask) -> None:
    q, k, v = torch.randn(3, B, 1, N_Q, 16, device=DEVICE, requires_grad=True).unbind()
    fastattn.attention(q, k, v, mask, backend="triton").sum().backward()


PREPARED = {
    "padding": lambda: {"real_keys": padding("right", N_Q), "real_queries": padding("left", N_Q)},
    "documents": lambda: {"segment_ids": (documents("packed")[0],) * 2},
    "documents and padding": lambda: {"segment_ids": (documents("packed")[0],) * 2, "real_keys": padding("holes", N_Q)},
    "starts": lambda: {"q_offset": torch.tensor([1, 2], device=DEVICE), "real_keys": padding("holes", N_Q)},
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_mask_is_prepared_once_for_all_layers_and_the_backward(name, launches):
    tensors = PREPARED[name]()
    with_gradients(Mask(True, **tensors))
    first = len(launches)
    assert first > 4
    with_gradients(Mask(True, **tensors))
    assert launches[first:] == ["forward_kernel", "rows_kernel", "dk_dv_kernel", "dq_kernel"]


@pytest.mark.parametrize("name", PREPARED)
def test_a_mask_that_is_changed_is_prepared_anew(name):
    tensors = PREPARED[name]()
    for _ in range(2):
        mask = Mask(True, **tensors)
        expected = mask.keep(N_Q, N_Q, DEVICE)[:, 0]
        assert torch.equal(ranges_of(mask, N_Q, N_Q)[0][:, :N_Q, :N_Q], expected)
        for x in pytree.tree_leaves(tensors):
            x.copy_(x.flip(-1))


ALONE = {
    "padding": lambda: {"real_keys": padding("right", N_Q)},
    "documents": PREPARED["documents"],
    "starts": lambda: {"q_offset": torch.tensor([1, 2], device=DEVICE)},
    "starts of queries": lambda: {"q_offset": torch.zeros(B, N_Q, dtype=torch.int64, device=DEVICE)},
    "dense": lambda: {"dense": torch.ones(N_Q, N_Q, dtype=torch.bool, device=DEVICE)},
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_prepared_dies_with_the_mask(name):
    known, mask = len(kept_results._known), Mask(**ALONE[name]())
    visibility(mask, N_Q, N_Q).in_tiles(BLOCK_M)
    assert len(kept_results._known) == known + 1
    del mask
    assert len(kept_results._known) == known


def test_a_mask_whose_data_is_replaced_is_prepared_again():
    mask = Mask(real_keys=padding("right", N_K))
    visibility(mask, N_Q, N_K)
    mask.real_keys.data = padding("left", N_K)
    assert torch.equal(visibility(mask, N_Q, N_K).real_keys.bool(), mask.real_keys)


class OnGPU(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


def test_a_mask_is_prepared_for_each_stream_and_in_each_graph(monkeypatch):
    computed, stream, capturing = [], 1, False
    monkeypatch.setattr(preparation, "_computed", lambda *_: computed.append(stream) or object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream))
    mask = Mask(real_keys=torch.ones(B, N_K, dtype=torch.bool).as_subclass(OnGPU))

    def times() -> int:
        before = len(computed)
        visibility(mask, N_Q, N_K)
        visibility(mask, N_Q, N_K)
        return len(computed) - before

    assert times() == 1
    stream = 2
    assert times() == 1
    capturing = True
    assert times() == 2
    capturing = False
    assert times() == 0


def test_inference_tensors_are_prepared_each_time(launches):
    """They do not tell that they are changed."""
    with torch.inference_mode():
        real = padding("right", N_Q)
        for _ in range(2):
            visibility(Mask(real_keys=real), N_Q, N_Q)
            real.fill_(True)
    assert launches == ["spans_kernel"] * 2


def with_few_queries(case: Case) -> Case:
    """The same with 5 queries, against as many keys as it has."""
    bias = case.bias
    if bias is not None and len(bias) > 1 and bias[-2] > 1:
        bias = (*bias[:-2], 5, bias[-1])
    return dataclasses.replace(case, n_q=5, n_k=case.n_q if case.n_k is None else case.n_k, bias=bias)


SHORT = [with_few_queries(case) for case in CASES if case.timed is None and 0 < case.D <= 256]


@pytest.mark.parametrize(
    ("case", "dtype", "most"),
    [
        pytest.param(case, (torch.float32, torch.float16)[i % 2], most, id=f"{case}-{most}")
        for i, case in enumerate(SHORT)
        # Up to three tiles are a part each in both; the smallest have 16 keys.
        for most in ((3, 128) if case.n_k > 3 * 16 else (128,))
    ],
)
def test_keys_in_parts(case, dtype, most, launches, monkeypatch):
    """Of one tile each, of which there are more than parts that are added at once; or of several tiles.

    The forward alone: no kernel of the backward asks whether there were parts.
    """
    monkeypatch.setattr(flash_decoding, "keys_of_part", lambda programs: 1)
    monkeypatch.setattr(flash_decoding, "MOST_PARTS", tl.constexpr(most))
    inputs = make_inputs(case, dtype, DEVICE)
    o, lse = backend.forward(inputs.q, inputs.k, inputs.v, inputs.spec())
    assert_right(inputs, {"o": o, "lse": lse})
    padded_head_dim = configs.padded_head_dim(max(inputs.q.shape[3], inputs.v.shape[3]), inputs.q)
    tile = config_for("decoding", inputs.q, padded_head_dim, heavy_terms=0).BLOCK_N
    assert "decoding_kernel" in launches
    assert ("combine_kernel" in launches) == (inputs.k.shape[2] > tile)
    assert "forward_kernel" not in launches


ON_MACHINES = [(machine, "cpu") for machine in PTX_MACHINES if machine.backend is backend]


def of_every_dtype(things: Iterable, dtypes: tuple[torch.dtype, ...]) -> list[tuple]:
    """Each with every backend, device and dtype; where Triton is interpreted, 16 bits are bf16 and fp16 by turns.

    As in `every_call` of test_conformance.py: they differ in the headroom of weights alone.
    """
    turns = (torch.float16, torch.bfloat16)
    return [
        (thing, place, device, dtype)
        for place, device in [(backend, DEVICE), *ON_MACHINES]
        for i, thing in enumerate(things)
        for dtype in dtypes
        if (place, device) != (backend, "cpu") or dtype is not turns[i % 2]
    ]


def option_id(x: object) -> str:
    return "".join(x) if isinstance(x, dict) else place_id(x)


@pytest.mark.parametrize(("page_size", "dtype"), [(7, torch.float32), (16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("backend", "device"), [(backend, DEVICE), *ON_MACHINES], ids=place_id, indirect=["backend"])
@pytest.mark.parametrize("case", test_paged.CASES, ids=str)
def test_keys_in_pages(case, backend, device, page_size, dtype):
    inputs = make_inputs(case, dtype, device)
    for layout in ("NHD", "HND"):
        assert_right(inputs, test_paged.forward_paged(inputs, page_size, layout, backend))


@test_paged.each_stored_dtype
@pytest.mark.parametrize(
    ("case", "backend", "device", "dtype"),
    of_every_dtype(test_paged.OF_QUANTIZED, DTYPES),
    ids=place_id,
    indirect=["backend"],
)
def test_quantized_keys_in_pages(case, backend, device, dtype, stored):
    inputs = make_inputs(case, dtype, device)
    assert_right(inputs, test_paged.forward_quantized(inputs, 16, stored, backend))


@test_paged.each_stored_dtype
@pytest.mark.parametrize("words", test_paged.WORDS)
def test_requests_in_quantized_pages(words, stored):
    mask, options = test_paged.WORDS[words]
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with torch.device(DEVICE):
        requests = test_paged.OfQuantized(torch.float32, stored)
    o_and_lse = requests.attend(**{"causal": False} | mask | options, return_lse=True, backend=backend.NAME)
    requests.check(o_and_lse, mask, **options)


@test_paged.each_stored_dtype
@pytest.mark.parametrize("n_q", [1, 20])
@pytest.mark.parametrize(("backend", "device"), [(backend, DEVICE), *ON_MACHINES], ids=place_id, indirect=["backend"])
def test_all_codes_are_numbers_or_none(backend, device, n_q, stored):
    test_paged.check_codes(backend, torch.ones(256, 1, n_q, 1, device=device), stored)


@pytest.mark.parametrize("n_q", [1, 20])
def test_no_table_makes_a_kernel_read_outside_the_pages(n_q):
    inputs = make_inputs(Case("", "", n_q=n_q, n_k=64, keys="right"), torch.float32, DEVICE)
    around = inputs.k.new_full((6, inputs.k.shape[1], 16, inputs.k.shape[3]), math.nan)
    pages = around[2:4].fill_(1.0)
    table = torch.tensor([[-1, 2, 1, 0], [0, 2**31 - 1, -(2**31), 1]], dtype=torch.int32, device=DEVICE)
    o, _ = backend.forward_paged(inputs.q, pages, pages, table, inputs.spec())
    assert torch.equal(o.unique(), o.new_ones(1))


@pytest.mark.parametrize(
    ("options", "backend", "device", "dtype"),
    of_every_dtype([test_paged.WORDS["sinks"][1], {}, {"window": (150, None)}], DTYPES),
    ids=option_id,
    indirect=["backend"],
)
def test_the_bits_of_a_request_in_pages_depend_on_no_other(options, backend, device, dtype):
    page_size = 7 if dtype is torch.float32 else 16
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    test_paged.check_bits(page_size, dtype, device, backend=backend.NAME, **options)


@pytest.mark.parametrize("words", sorted(test_paged.OF_CHUNKS.keys() - {"window"}))  # whose partial tiles come last
@pytest.mark.parametrize(
    ("D", "backend", "device", "dtype", "ends"),
    [
        (*call, [64, 160, 200] if call[1] is backend else [17, 100, 137, 170])
        for call in of_every_dtype([64, 128], (torch.bfloat16, torch.float16))
    ],
    ids=place_id,
    indirect=["backend"],
)
def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks(D, backend, device, dtype, ends, words):
    """Of 17 tokens or more, in the interpreter of whole tiles: its products do not round each row by itself."""
    test_paged.check_chunks(ends, dtype, D, device, backend=backend.NAME, **test_paged.OF_CHUNKS[words])


def test_the_bits_of_a_sample_in_parts_do_not_depend_on_its_neighbours():
    """Nor on how many keys there is room for, be it for more parts than a sample has at most."""
    inputs = make_inputs(Case("", "", B=2, H=2, n_q=1, n_k=300, D=16), torch.float32, DEVICE)
    alone = {}
    for room in (300, 5000):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, room - 300), value=math.nan) for x in (inputs.k, inputs.v))
        real = torch.arange(room, device=DEVICE) < torch.tensor([[300], [100]], device=DEVICE)
        o = fastattn.attention(inputs.q, k, v, Mask(real_keys=real), backend=backend.NAME)
        for i in range(2):
            of_sample = [x[i : i + 1] for x in (inputs.q, k, v)]
            again = fastattn.attention(*of_sample, Mask(real_keys=real[i : i + 1]), backend=backend.NAME)
            assert torch.equal(o[i : i + 1], again)
            assert torch.equal(alone.setdefault(i, again), again)


def test_parts_fill_the_gpu_and_hold_enough_keys():
    """One query of 32 heads with 8 or 32 heads of keys: 256 programs for 8192 keys."""
    assert [flash_decoding.keys_of_part(programs) for programs in (0, 1, 8, 32, 100)] == [128, 128, 256, 1024, 1024]


@triton.jit
def kept_kernel(result, dropout, n_q: tl.constexpr, n_k: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes what `kept` says of one head."""
    i_b, i_h, o_q = tl.program_id(0), tl.program_id(1), tl.arange(0, n_q)
    for i_n in tl.range(0, n_k // BLOCK_N):
        p_row = result + ((i_b * tl.num_programs(1) + i_h) * n_q + o_q[:, None]) * n_k
        o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(p_row + o_k[None, :], kept(o_q, i_n, i_b, i_h, n_q, n_k, dropout, BLOCK_N))


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 7])
@pytest.mark.parametrize("places", [None, places_of_a_part(16, 64, DEVICE)], ids=["whole", "part"])
def test_dropout_keeps_what_the_spec_says(p, seed, places):
    shape = (2, 3, 16, 64)
    spec = Spec(Mask(), 1.0, dropout_p=p, seed=torch.tensor(seed, device=DEVICE), places=places)
    actual = torch.empty(shape, dtype=torch.bool, device=DEVICE)
    kept_kernel[shape[:2]](actual, dropout(spec), n_q=shape[2], n_k=shape[3], BLOCK_N=16)
    assert torch.equal(actual, spec.dropout_keep(*shape))


def test_sinks_count_where_the_rounding_of_a_large_lse_is_made_good():
    case = dataclasses.replace(next(case for case in CASES if case.name == "sinks"), scale=5.0)
    inputs = make_inputs(case, torch.float32, DEVICE)
    inputs.options["sinks"] += 30.0
    outputs = run(inputs, "triton")
    assert outputs["lse"].max() > 16.0  # in nats, so more in bits
    assert_right(inputs, outputs)


@triton.jit
def tanh_kernel(x, y, n: tl.constexpr):
    tl.store(y + tl.arange(0, n), tanh(tl.load(x + tl.arange(0, n))))


def test_tanh_is_exact_to_a_few_units_everywhere():
    tail = torch.tensor([0.0, 0.625, 88.0, 1e4, float("inf")])
    x = torch.cat([torch.logspace(-30, 2, 251), tail])
    x = torch.cat([x, -x]).to(DEVICE)
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, n=len(x))
    exact = x.double().tanh()
    assert ((y - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact.abs()).all()
    x.fill_(float("nan"))
    tanh_kernel[(1,)](x, y, n=len(x))
    assert y.isnan().all()


@pytest.mark.parametrize("name", ["grouped-heads", "dropout", "everything"])
def test_dk_and_dv_apart_have_the_bits_of_both_together(name, monkeypatch):
    case = next(case for case in CASES if case.name == name)
    inputs = make_inputs(case, torch.float32, DEVICE)
    together = run(inputs, "triton")
    passes = []

    def config_of(kernel: str, *of: object) -> object:
        config = config_for(kernel, *of)
        if kernel == "dk_dv":
            passes.append(Apart(config, config))
        return passes[-1] if kernel == "dk_dv" else config

    monkeypatch.setattr(flash_backward, "config_for", config_of)
    apart = run(inputs, "triton")
    assert len(passes) == 1
    assert together.keys() == apart.keys()
    for x, y in zip(together.values(), apart.values(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("shape", "dtype", "aligned"),
    [
        ((2, 3, 5, 72), torch.bfloat16, 1),
        ((2, 3, 5, 36), torch.bfloat16, None),
        ((2, 3, 5, 36), torch.float32, 1),
        ((2, 3, 5, 6), torch.float32, None),
    ],
    ids=str,
)
def test_rows_that_begin_at_multiples_of_16_bytes_are_known(shape, dtype, aligned):
    x = torch.empty(shape, dtype=dtype)
    assert heads(x).aligned == aligned
    assert heads(x.transpose(1, 2)).aligned == aligned


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((8, 0), torch.float32, "bf16x6"),
        ((9, 0), torch.float32, "bf16x6"),
        ((8, 9), torch.float32, "ieee"),
        ((12, 0), torch.float32, "ieee"),
        ((9, 0), torch.float16, "ieee"),
    ],
    ids=str,
)
def test_fp32_is_multiplied_exactly_unless_torch_is_told_otherwise(capability, dtype, expected, monkeypatch):
    q = torch.empty(1, dtype=dtype)
    assert torch.get_float32_matmul_precision() == "highest"
    assert dot_precision(q) == "ieee"  # where kernels are interpreted
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dot_precision(q) == expected
    torch.set_float32_matmul_precision("high")
    try:
        assert dot_precision(q) == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert dot_precision(q) == expected
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("products", ["cuda", "mkldnn"])
def test_precision_of_products_is_that_of_torch_backends(products):
    """Once it was set there, torch.get_float32_matmul_precision raises."""
    q, of_products = torch.ones(1, 1, 17, 16, device=DEVICE), getattr(torch.backends, products).matmul
    before, of_products.fp32_precision = of_products.fp32_precision, "tf32"
    try:
        fastattn.attention(q, q, q, backend=backend.NAME)
        assert (dot_precision(q) == "tf32") == (products == "cuda")
    finally:
        of_products.fp32_precision = before


@pytest.mark.parametrize("softcap", [1e-40, 2.3e38])
def test_softcaps_at_the_ends_of_fp32_make_no_nan(softcap):
    """In base 2 they would be below or beyond the normal numbers of fp32."""
    case = Case("ends", "", n_q=20, softcap=softcap)
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_right(inputs, run(inputs, backend.NAME))


@pytest.mark.parametrize("bias", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, math.nan])
@pytest.mark.parametrize("n_q", [4, 20])
def test_a_bias_that_is_beyond_fp32_in_base_2(n_q, bias):
    """Of one query, and of some keys of the others: -inf alone hides."""
    inputs = make_inputs(Case("beyond", "", n_q=n_q, n_k=40, bias=(n_q, 40)), torch.float32, DEVICE)
    inputs.options["bias"][1], inputs.options["bias"][2:, 35:], inputs.options["bias"][3, :9] = bias, bias, -math.inf
    of_reference = run(inputs, "reference")
    for name, result in run(inputs, backend.NAME).items():
        if name != "lse":  # which is cut off
            torch.testing.assert_close(result, of_reference[name], equal_nan=True)


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize(("backend", "device"), [(backend, DEVICE), *ON_MACHINES], ids=place_id, indirect=["backend"])
def test_scores_are_computed_again_bit_by_bit(backend, device, seed):
    """By dK and dV from the other side: the last bit of a score of thousands is a large part of a weight."""
    (case,) = (case for case in CASES if case.name == "large-scores")
    inputs = make_inputs(case, torch.float32, device, seed=seed)
    assert_right(inputs, run(inputs, backend.NAME))


@pytest.mark.parametrize(("machine", "device"), ON_MACHINES, ids=place_id)
def test_torch_may_be_told_that_tf32_will_do(machine, device):
    """Then an error is one of 11 bits, and no longer one of 24."""
    inputs = make_inputs(Case("", "", n_q=70, n_k=90, causal=True, q_offset=20), torch.float32, device)
    torch.set_float32_matmul_precision("high")
    try:
        with machine.computes_for_the_cpu():
            errors_found = errors(inputs, run(inputs, "triton"))
    finally:
        torch.set_float32_matmul_precision("highest")
    largest = {error.output: error.largest / error.budget for error in errors_found}
    for output in ("o", "dq", "dk", "dv"):
        assert 10 < largest[output] < 2**13, largest


def objections(shape=(1, 1, 4, 16), d_v=16, dtype=torch.float32, mask=None, **terms) -> list[str]:
    q = torch.empty(shape, dtype=dtype)
    return backend.unsupported(q, q, q.new_empty(*shape[:3], d_v), Spec(Mask() if mask is None else mask, 1.0, **terms))


def test_refusals_are_sentences(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert objections() == []
    assert objections(dtype=torch.float64) == ["needs float32, float16 or bfloat16, got float64"]
    assert objections((1, 1, 4, 257)) == ["takes head dims up to 256, got 257 for q and k"]
    assert objections(d_v=300) == ["takes head dims up to 256, got 300 for v"]
    slopes = {"alibi_slopes": torch.ones(1)}
    assert objections(mask=Mask(q_offset=2**29), **slopes) == []
    assert objections(mask=Mask(q_offset=-(2**29) - 1)) == []
    expected = "counts ALiBi distances from a q_offset of at most 2^29, got -536870913"
    assert objections(mask=Mask(q_offset=-(2**29) - 1), **slopes) == [expected]
    assert backend.by_name_only(torch.device("cpu")) == "interprets its kernels on the CPU, which is for tests"
    assert backend.by_name_only(torch.device("cuda")) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert objections() == ["runs on the CPU only in Triton's interpreter, with TRITON_INTERPRET=1"]


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, expected in (((9, 0), []), ((8, 0), []), ((7, 5), ["7.5"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        refusals = backend._device_objections(torch.device("cuda"))
        assert [sentence.rpartition(" ")[2] for sentence in refusals] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_each_heavy_term_takes_from_the_tiles(capability, dtype, monkeypatch):
    seed = torch.tensor(0)
    terms = [{"sinks": torch.ones(1)}, {"softcap": 1.0}, {"softcap": 1.0, "dropout_p": 0.5, "seed": seed}]
    heavy_terms = [rules_of(Spec(Mask(causal=True), 1.0, **term), 4, 4, torch.float32).heavy_terms for term in terms]
    assert heavy_terms == [0, 1, 2]
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q, smaller = torch.empty(1, dtype=dtype), [0, 0]
    for kernel, D in itertools.product(("forward", "rows", "dk_dv", "dq", "dbias", "top_keys"), (64, 128, 256)):
        tiles = [config_for(kernel, q, D, n) for n in (0, 1, 2, 5)]
        tiles = [tile.dk if isinstance(tile, Apart) else tile for tile in tiles]
        scores = [tile.BLOCK_M * tile.BLOCK_N / tile.num_warps for tile in tiles]  # that a warp holds
        assert scores == sorted(scores, reverse=True)
        assert tiles[2] == tiles[3]
        smaller = [n + (tiles[i] != tiles[i + 1]) for i, n in enumerate(smaller)]
    assert smaller[0] > 0 or dtype == torch.float32
    assert smaller[1] > 0 or (capability == (9, 0) and dtype == torch.bfloat16)  # where a wgmma wants 64 columns


@pytest.mark.parametrize("heavy_terms", range(4))
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dbias"])
def test_a_warp_group_on_hopper_has_64_columns(kernel, D, heavy_terms, monkeypatch):
    """Of fewer, with Triton 3.7, it would read beyond its shared memory (triton#11366)."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = config_for(kernel, torch.empty(1, dtype=torch.bfloat16), D, heavy_terms)
    beside = max(1, config.num_warps // 4 // (config.BLOCK_M // 64))  # warp groups that share rows
    assert config.BLOCK_N // beside >= 64


@pytest.mark.parametrize("tile", [(32, 16), (64, 16), (16, 32)], ids=str)
def test_diagonals_of_tiles_that_are_no_squares(tile, monkeypatch):
    monkeypatch.setattr(configs, "_INTERPRETED", Config(*tile, num_warps=4, num_stages=1))
    for n_q, n_k in ((70, 90), (90, 33), (64, 1), (17, 200)):
        inputs = make_inputs(Case("", "", n_q=n_q, n_k=n_k, causal=True, q_offset=9, relative_bias=2), torch.float32)
        assert_right(inputs, run(inputs, "triton"))
