"""attention_paged: what it gives, reads and writes, against attention to the keys of each request alone."""

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import Mask, paged
from fastattn.backends import cpu
from fastattn.paged import quantized
from fastattn.spec import Spec
from fastattn.testing import DTYPES, Case, Inputs, assert_right, make_inputs, run
from fastattn.validation import QUANTIZED

CASES = [
    Case("plain", ""),
    Case("wide-heads", "", D=128, d_v=80, n_k=300),
    Case("odd-heads", "", D=33, n_k=70),
    Case("grouped", "", H=6, H_kv=2, n_q=1, n_k=600),
    Case("causal", "", causal=True, n_q=40, n_k=90, q_offset=50),
    Case("window", "", causal=True, window=(30, None), n_q=3, n_k=700, q_offset=697),
    Case("padding", "", keys="right", n_q=1, n_k=600),
    Case("holes", "", keys="holes", n_q=2, n_k=300),
    Case("nothing", "", keys="none", n_q=20, n_k=100),
    Case("terms", "", softcap=3.0, alibi=True, sinks=True, n_q=1, n_k=200),
    Case("dense", "", dense=True, n_q=7, n_k=200),
    Case("few-keys", "", n_q=30, n_k=40),
]
PAGE_SIZES = (1, 7, 16, 64, 1000)


def in_pages(x: Tensor, page_size: int, layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """x [B, H_kv, n, D] on pages in any order, with NaN wherever no key is; and the table."""
    B, H, n, D = x.shape
    most = -(-n // page_size)
    table = torch.randperm(B * most + 2, generator=torch.Generator().manual_seed(n))[: B * most].view(B, most)
    pages = x.new_full((B * most + 2, page_size, H, D), math.nan if x.is_floating_point() else 99)
    if layout == "HND":
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.arange(n)
    pages[table[:, rows // page_size], rows % page_size] = x.transpose(1, 2)
    return pages, table.int().to(x.device)


def forward_paged(inputs: Inputs, page_size: int, layout: str = "NHD", backend: ModuleType = cpu) -> dict[str, Tensor]:
    """o and lse of the kernels of a backend for keys on pages."""
    (k, table), (v, _) = (in_pages(x, page_size, layout) for x in (inputs.k, inputs.v))
    n_k = table.shape[1] * page_size
    spec, B, n = inputs.spec(), len(table), inputs.k.shape[2]
    real = (
        torch.ones(B, n, dtype=torch.bool, device=table.device) if spec.mask.real_keys is None else spec.mask.real_keys
    )
    real = torch.nn.functional.pad(real, (0, n_k - n))
    dense = None if spec.mask.dense is None else torch.nn.functional.pad(spec.mask.dense, (0, n_k - n))
    spec = dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, real_keys=real, dense=dense))
    o, lse = backend.forward_paged(inputs.q, k.transpose(1, 2), v.transpose(1, 2), table, spec)
    return {"o": o, "lse": lse}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cpu_kernels_read_pages(case, page_size, dtype):
    inputs = make_inputs(case, dtype)
    actual = forward_paged(inputs, page_size)
    assert_right(inputs, actual)
    in_rows = run(inputs, "cpu", wanted=["q"])
    if inputs.q.shape[2] * inputs.q.shape[1] // inputs.k.shape[1] > 8:  # in the tiles of many queries nothing differs
        assert torch.equal(actual["o"], in_rows["o"])
    for other in (16, 64):  # nor do the places of pages in memory
        assert torch.equal(forward_paged(inputs, other, "HND")["o"], forward_paged(inputs, other)["o"])


LENGTHS, QUERIES = [1, 37, 130, 64, 700, 5], [1, 4, 1, 64, 1, 4]
H, H_KV, D = 4, 2, 32


class Requests:
    """Requests of these lengths with these numbers of queries, their keys on pages."""

    def __init__(self, dtype: torch.dtype = torch.float32, page_size: int = 16, order: list[int] | None = None) -> None:
        torch.manual_seed(0)
        tokens = [[torch.randn(n, h, D).to(dtype) for h in (H_KV, H_KV)] for n in LENGTHS]
        queries = [torch.randn(n, H, D).to(dtype) for n in QUERIES]
        order = list(range(len(LENGTHS))) if order is None else order
        self.k, self.v = ([tokens[i][j] for i in order] for j in (0, 1))
        self.queries = [queries[i] for i in order]
        self.q = torch.cat(self.queries)
        self.lengths = torch.tensor([LENGTHS[i] for i in order])
        self.cu_seqlens_q = torch.tensor([0, *(QUERIES[i] for i in order)]).cumsum(0)
        pages = -(-self.lengths // page_size)
        free = torch.randperm(int(pages.sum()) + 1)
        self.table = torch.full((len(order), int(pages.max())), 10**6)  # no page
        self.k_pages, self.v_pages = (torch.full((len(free), page_size, H_KV, D), math.nan, dtype=dtype) for _ in "kv")
        for i, n in enumerate(pages.tolist()):
            self.table[i, :n], free = free[:n], free[n:]
            for row in range(LENGTHS[order[i]]):
                at = self.table[i, row // page_size], row % page_size
                self.k_pages[at], self.v_pages[at] = self.k[i][row], self.v[i][row]

    def attend(self, **options: object) -> Tensor:
        return fastattn.attention_paged(
            self.q, self.k_pages, self.v_pages, self.table, self.lengths, self.cu_seqlens_q, **options
        )

    def one_by_one(self, i: int, mask: Mask, **options: object) -> tuple[Tensor, Tensor]:
        """(o [n, H, D], lse [H, n]) of a request by the reference, in fp64."""
        q, k, v = (x.double().transpose(0, 1)[None] for x in (self.queries[i], self.k[i], self.v[i]))
        o, lse = fastattn.attention(q, k, v, mask, return_lse=True, backend="reference", **options)
        return o[0].transpose(0, 1), lse[0]

    def check(self, actual: tuple[Tensor, Tensor], mask: dict[str, object], **options: object) -> None:
        o, lse = actual
        for i, (first, last) in enumerate(zip(self.cu_seqlens_q, self.cu_seqlens_q[1:], strict=False)):
            offset = int(self.lengths[i] - (last - first))
            o_of, lse_of = self.one_by_one(i, Mask(q_offset=offset, **mask), **options)
            tolerance = {torch.float32: 2e-6, torch.float64: 1e-12}.get(o.dtype, 2e-2)
            torch.testing.assert_close(o[first:last].double(), o_of, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse[:, first:last].double(), lse_of, rtol=tolerance, atol=5 * tolerance)


WORDS = {
    "causal": ({"causal": True}, {}),
    "not causal": ({}, {}),
    "window": ({"causal": True, "window": (20, None)}, {}),
    "two-sided window": ({"window": (9, 2)}, {}),
    "scale, softcap": ({"causal": True}, {"scale": 0.3, "softcap": 2.0}),
    "alibi": ({"causal": True}, {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 1.0])}),
    "sinks": ({"causal": True}, {"sinks": torch.tensor([0.5, -3.0, 2.0, 0.0])}),
}


def test_slopes_of_each_request():
    requests, slopes = Requests(), torch.rand(len(LENGTHS), H)
    o = requests.attend(alibi_slopes=slopes)
    for i, (first, last) in enumerate(zip(requests.cu_seqlens_q, requests.cu_seqlens_q[1:], strict=False)):
        mask = Mask(True, q_offset=int(requests.lengths[i] - (last - first)))
        expected, _ = requests.one_by_one(i, mask, alibi_slopes=slopes[i])
        torch.testing.assert_close(o[first:last].double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_backend_that_reads_no_pages_gets_a_copy(backend):
    requests = Requests()
    requests.check(requests.attend(return_lse=True, backend=backend), {"causal": True})


def test_copies_are_warned_of(monkeypatch):
    requests = Requests(torch.float64)
    with pytest.warns(
        fastattn.FallbackWarning, match="are copied for this attention, which the backend torch computes"
    ):
        requests.attend()
    calls = []
    monkeypatch.setattr(cpu, "forward_paged", lambda *given, real=cpu.forward_paged: calls.append(0) or real(*given))
    Requests().attend()
    assert len(calls) == len(set(QUERIES))


def check_bits(page_size: int, dtype: torch.dtype, device: str = "cpu", **options: object) -> None:
    """Each request has the same bits among others in any order, and alone."""
    order = [3, 0, 5, 4, 2, 1]
    with torch.device(device):
        together, others = Requests(dtype, page_size), Requests(dtype, page_size, order)
    options["return_lse"] = True
    (o, lse), (o_of_others, lse_of_others) = together.attend(**options), others.attend(**options)
    for i, request in enumerate(order):
        here, there = (slice(*x.cu_seqlens_q[j : j + 2]) for x, j in ((together, request), (others, i)))
        assert torch.equal(o[here], o_of_others[there])
        assert torch.equal(lse[:, here], lse_of_others[:, there])
        o_alone, lse_alone = fastattn.attention_paged(
            together.queries[request], together.k_pages, together.v_pages, together.table[request, None],
            together.lengths[request, None], torch.tensor([0, QUERIES[request]]), **options,
        )  # fmt: skip
        assert torch.equal(o[here], o_alone)
        assert torch.equal(lse[:, here], lse_alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_the_bits_of_a_request_depend_on_no_other(page_size, dtype):
    check_bits(page_size, dtype)


OF_CHUNKS = {
    "causal": {},
    "window": {"window": (150, None)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "sinks": {"sinks": torch.tensor([1.0, -1.0, 0.0, 3.0])},
}


def check_chunks(ends: list[int], dtype: torch.dtype, D: int, device: str = "cpu", **options: object) -> None:
    """A prompt has the same bits in chunks that end there, each with its keys and values, as in one."""
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    torch.manual_seed(0)
    n = ends[-1]
    q, k, v = (torch.randn(n, heads, D).to(device, dtype) for heads in (H, H_KV, H_KV))

    def read(ends: list[int]) -> tuple[Tensor, Tensor]:
        k_pages, v_pages = (torch.full((-(-n // 16), 16, H_KV, D), math.nan, dtype=dtype, device=device) for _ in "kv")
        table = torch.arange(len(k_pages), device=device)[None].flip(1)
        results = []
        for begin, end in zip([0, *ends], ends, strict=False):
            rows, lengths, cu_seqlens = slice(begin, end), torch.tensor([end]), torch.tensor([0, end - begin])
            new = {"k": k[rows], "v": v[rows], "return_lse": True}
            results.append(
                fastattn.attention_paged(
                    q[rows], k_pages, v_pages, table, lengths.to(device), cu_seqlens, **new, **options
                )
            )
        return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results], 1)

    for in_chunks, in_one in zip(read(ends), read([n]), strict=True):
        assert torch.equal(in_chunks, in_one)


@pytest.mark.parametrize("words", OF_CHUNKS)
@pytest.mark.parametrize("D", [32, 80])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", [[192, 256, 576, 700], [256, 700]], ids=str)
def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks(ends, dtype, D, words):
    """Of multiples of 64 tokens, the first of more than 128, and the last of more than 4."""
    check_chunks(ends, dtype, D, **OF_CHUNKS[words])


def test_new_tokens_are_written_to_their_places_first():
    full = Requests()
    expected = full.attend()
    empty = Requests()
    k, v = [], []
    for i, n in enumerate(QUERIES):
        k.append(empty.k[i][-n:]), v.append(empty.v[i][-n:])
        for row in range(LENGTHS[i] - n, LENGTHS[i]):
            at = empty.table[i, row // 16], row % 16
            empty.k_pages[at], empty.v_pages[at] = math.nan, math.nan
    assert torch.equal(empty.attend(k=torch.cat(k), v=torch.cat(v)), expected)
    for pages in ("k_pages", "v_pages"):
        torch.testing.assert_close(getattr(empty, pages), getattr(full, pages), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("of_each", [False, True])
def test_a_tree_of_drafts(of_each):
    """The newest five tokens: two branches of a root."""
    parents = [[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3]]
    trees = torch.zeros(2, 5, 5, dtype=torch.bool)
    for tree, of_tokens in zip(trees, parents, strict=True):
        for i, parent in enumerate(of_tokens):
            tree[i, i] = True
            if parent >= 0:
                tree[i] |= tree[parent]
    lengths, page_size = torch.tensor([5, 70]), 16
    k, v = torch.randn(2, H_KV, 70, D), torch.randn(2, H_KV, 70, D)
    (k_pages, table), (v_pages, _) = in_pages(k, page_size), in_pages(v, page_size)
    q = torch.randn(10, H, D)
    given = trees if of_each else trees[0]
    o = fastattn.attention_paged(q, k_pages, v_pages, table, lengths, torch.tensor([0, 5, 10]), tree=given)
    for i, n in enumerate(lengths.tolist()):
        dense = torch.ones(5, n, dtype=torch.bool)
        dense[:, n - 5 :] = trees[i if of_each else 0]
        expected = fastattn.attention(
            q[5 * i : 5 * i + 5].transpose(0, 1)[None], k[i : i + 1, :, :n], v[i : i + 1, :, :n], Mask(dense=dense),
            backend="reference",
        )  # fmt: skip
        torch.testing.assert_close(o[5 * i : 5 * i + 5], expected[0].transpose(0, 1), rtol=2e-6, atol=2e-6)


def test_one_query_each_and_nothing_at_all():
    requests = Requests()
    one = requests.cu_seqlens_q[1:] - 1
    o, lse = fastattn.attention_paged(
        requests.q[one], requests.k_pages, requests.v_pages, requests.table, requests.lengths, return_lse=True
    )
    expected, expected_lse = requests.attend(return_lse=True)
    torch.testing.assert_close(o, expected[one], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse[:, one], rtol=2e-6, atol=2e-6)
    nobody = fastattn.attention_paged(
        requests.q[:3], requests.k_pages, requests.v_pages, requests.table[:2], requests.lengths[:2],
        torch.tensor([0, 0, 0]), return_lse=True,
    )  # fmt: skip
    assert nobody[0].eq(0).all()
    assert nobody[1].eq(-math.inf).all()
    assert fastattn.attention_paged(
        requests.q[:0], requests.k_pages, requests.v_pages, requests.table[:0], requests.lengths[:0]
    ).shape == (0, H, D)  # fmt: skip


def test_a_step_is_checked_once_for_all_layers_and_again_where_anything_changes(monkeypatch):
    """Tensors that are changed in a way of which PyTorch knows nothing, too, and those of a step that is over."""
    requests, checks, check = Requests(), [], paged.check_pages
    monkeypatch.setattr(paged, "check_pages", lambda *arguments: checks.append(1) or check(*arguments))
    table, lengths = requests.table.clone(), requests.lengths.clone()

    def attend(**options: object) -> tuple[int, Tensor]:
        checks.clear()
        attended = requests.attend(**options)
        return len(checks), attended

    first, expected = attend()
    requests.table, requests.lengths = table.clone(), lengths.clone()
    assert first == len({*QUERIES})
    assert attend()[0] == 0
    assert attend(causal=False)[0] == attend(window=(3, None))[0] == attend()[0] == first
    with pytest.raises(ValueError, match="causal must be a bool"):
        attend(causal=1)
    newest = requests.q[requests.cu_seqlens_q[1:] - 1]
    over = table.clone()
    of_newest = fastattn.attention_paged(newest, requests.k_pages, requests.v_pages, over, lengths)
    over.numpy()[:] = 0
    assert torch.equal(fastattn.attention_paged(newest, requests.k_pages, requests.v_pages, table, lengths), of_newest)
    assert torch.equal(attend()[1], expected)
    requests.lengths.numpy()[2] -= 1
    shorter = attend()[1]
    requests.lengths = requests.lengths.int()
    assert attend()[0] == first
    assert not torch.equal(shorter, expected)
    requests.lengths = lengths + 1000
    with pytest.raises(ValueError, match="lengths must be from"):
        attend()


class Layer:
    """A layer of a step in which every request has n new tokens, which are given, and its keys on pages.

    Layers of one step differ in what their tensors hold.
    """

    def __init__(self, n: int, dtype: torch.dtype, layer: int, stored: torch.dtype | None = None) -> None:
        torch.manual_seed(layer)
        self.lengths = torch.tensor([length for length in LENGTHS if length >= n])
        B, most = len(self.lengths), max(LENGTHS)
        (self.k_pages, self.table), (self.v_pages, _) = (
            in_pages(torch.randn(B, H_KV, most, D).to(dtype), 16, "HND") for _ in "kv"
        )
        self.scales = {}
        if stored is not None:
            self.k_pages, self.scales["k_scales"] = quantized(self.k_pages.nan_to_num(), stored)
            self.v_pages, self.scales["v_scales"] = quantized(self.v_pages.nan_to_num(), stored)
        self.options = {}
        self.cu_seqlens_q = torch.arange(B + 1) * n
        self.q = torch.randn(B * n, H, D).to(dtype)
        self.k, self.v = torch.randn(2, B * n, H_KV, D).to(dtype)

    def attend(self, **options: object) -> Tensor:
        return fastattn.attention_paged(
            self.q, self.k_pages, self.v_pages, self.table, self.lengths, self.cu_seqlens_q,
            **self.scales, **self.options, **options,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "words",
    [*WORDS, "slopes of each", "pages of int8", "pages of float8", "new tokens", "new in int8", "new in float8"],
)
def test_later_layers_of_a_step_give_the_same_by_the_short_way(words, n, dtype, monkeypatch):
    stored = {"int8": torch.int8, "float8": torch.float8_e4m3fn}.get(words.split()[-1])
    mask, options = WORDS.get(words, ({"causal": True}, {}))
    options = {"causal": False, **mask, **options}
    if words == "slopes of each":
        options["alibi_slopes"] = torch.rand(len(Layer(n, dtype, 0).lengths), H)
    general, short = ([Layer(n, dtype, layer, stored) for layer in range(3)] for _ in range(2))

    def attend(layer: Layer) -> Tensor:
        return layer.attend(**options, **({"k": layer.k, "v": layer.v} if words.startswith("new") else {}))

    attended = [attend(short[0])]
    with monkeypatch.context() as patch:
        patch.setattr(paged, "_attention_paged", None)  # the general road
        attended += map(attend, short[1:])
    monkeypatch.setattr(paged, "_short_way", lambda *arguments: None)
    for layer, o in enumerate(attended):
        assert torch.equal(attend(general[layer]), o)
        for name in ("k_pages", "v_pages"):
            in_bytes = [getattr(layers[layer], name).contiguous().view(torch.uint8) for layers in (general, short)]
            assert torch.equal(*in_bytes)
        assert all(torch.equal(x, short[layer].scales[name]) for name, x in general[layer].scales.items())


@pytest.mark.parametrize(
    "other", [{"prefix": 16}, {"window": (3, 0)}, {"causal": False}, {"tree": torch.eye(2).bool()}]
)
def test_a_call_with_other_words_than_the_one_before(other, monkeypatch):
    torch.manual_seed(0)
    k_pages, v_pages = torch.randn(2, 4, 16, H_KV, D)
    table, lengths, q = torch.tensor([[0, 1, 2], [0, 3, 2]]), torch.tensor([33, 40]), torch.randn(4, H, D)
    given = q, k_pages, v_pages, table, lengths, torch.tensor([0, 2, 4])
    expected = []
    for words in ({}, other):
        monkeypatch.setattr(paged, "_last_step", None)
        expected.append(fastattn.attention_paged(*given, **words, backend="reference"))
    for i in (0, 1, 0, 0, 1, 1):
        o = fastattn.attention_paged(*given, **({}, other)[i])
        torch.testing.assert_close(o, expected[i], rtol=1e-5, atol=1e-5)


def test_padding_after_the_tokens_of_a_later_layer():
    layers = [Layer(1, torch.float32, i) for i in range(2)]
    expected = [layer.attend() for layer in layers]
    layers[1].q = layers[1].q.repeat(2, 1, 1)
    o = layers[1].attend()
    assert torch.equal(o[:6], expected[1])
    assert o[6:].eq(0).all()


@pytest.mark.parametrize("window", [[20, None], (torch.tensor(20), None)], ids=["list", "tensor"])
def test_a_window_that_is_changed_in_place_counts(window):
    layer = Layer(1, torch.float32, 0)
    wide, narrow = (layer.attend(window=(left, None), backend="reference") for left in (20, 3))
    assert not torch.allclose(wide, narrow)
    torch.testing.assert_close(layer.attend(window=window), wide)
    if isinstance(window, list):
        window[0] = 3
    else:
        window[0].fill_(3)
    torch.testing.assert_close(layer.attend(window=window), narrow)


def test_an_equal_window_is_the_same_step(monkeypatch):
    layers, left = [Layer(1, torch.float32, i) for i in range(2)], 1
    layers[0].attend(window=(left, None))
    with pytest.raises(ValueError, match="left must be None or an int"):
        layers[1].attend(window=(True, None))
    monkeypatch.setattr(paged, "_attention_paged", None)  # the general road
    layers[1].attend(window=(left, None))


def test_no_step_is_remembered_of_what_a_transform_has_wrapped():
    layer, other = Layer(1, torch.float32, 0), Layer(4, torch.float32, 1)
    other.attend()
    remembered = paged._last_step
    torch.func.grad(lambda q: fastattn.attention_paged(q, *(vars(layer)[name] for name in OF_PAGES)).sum())(layer.q)
    assert paged._last_step is remembered


OF_PAGES = ("k_pages", "v_pages", "table", "lengths", "cu_seqlens_q")


def test_new_tokens_that_lie_in_the_pages_are_refused_in_later_layers_too():
    pages, table, lengths = torch.arange(8.0).view(1, 8, 1, 1), torch.tensor([[0]]), torch.tensor([4])
    given = torch.zeros(3, 1, 1), pages, torch.ones_like(pages), table, lengths, torch.tensor([0, 3])
    for new in (pages[0, :3], pages[0, 2:5]):
        fastattn.attention_paged(*given)
        with pytest.raises(RuntimeError, match="single memory location"):
            fastattn.attention_paged(*given, k=new, v=torch.ones_like(new))
    assert torch.equal(pages.flatten(), torch.arange(8.0))


def test_requests_without_queries_have_slopes_too():
    layer = Layer(1, torch.float32, 0)
    layer.cu_seqlens_q, layer.q = torch.tensor([0, 1, 2, 2, 3, 4, 5]), layer.q[:5]
    slopes = torch.rand(6, H)
    expected = layer.attend(alibi_slopes=slopes)
    assert torch.equal(layer.attend(alibi_slopes=slopes), expected)
    with pytest.raises(ValueError, match=re.escape("alibi_slopes must be [4] or [6, 4], got [5, 4]")):
        layer.attend(alibi_slopes=slopes[:5])


@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("mode", ["inductor", "eager", "fake", "symbolic"])
@pytest.mark.filterwarnings("error::fastattn.FallbackWarning")
def test_a_graph_reads_pages_where_they_lie(mode, dtype):
    requests = Requests()
    given = [requests.q[:6], requests.k_pages, requests.v_pages, requests.table % 63, requests.lengths]
    scales, slopes = (None, None), torch.rand(H)
    if dtype is not None:
        (given[1], k_scales), (given[2], v_scales) = (quantized(x.nan_to_num(), dtype) for x in given[1:3])
        scales = (k_scales, v_scales)

    def attend(*given):
        *paged, k_scales, v_scales, slopes = given
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        return fastattn.attention_paged(*paged, **scales, alibi_slopes=slopes, return_lse=True)

    given = (*given, *scales, slopes)
    graph = as_graph(attend, given, mode) if mode in ("fake", "symbolic") else torch.compile(attend, backend=mode)
    for x, expected in zip(graph(*given), attend(*given), strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("writes", [False, True])
def test_the_ops_of_graphs_keep_pytorchs_rules(writes):
    (k_pages, v_pages), table = torch.randn(2, 9, 16, H_KV, D), torch.arange(8).view(2, 4)
    new = torch.randn(2, 5, H_KV, D) if writes else ()
    of_step = table, torch.tensor([40, 64]), torch.tensor([0, 2, 5]), None, True, 20, None, 0
    op = torch.ops.fastattn.attention_paged_ if writes else torch.ops.fastattn.attention_paged
    pages = torch.randn(5, H, D), k_pages, v_pages, None, None
    torch.library.opcheck(op.default, (*pages, *new, *of_step, 0.5, 3.0, torch.rand(H), None, None, True, ""))


def paged_of(q: Tensor, requests: Requests, **options: object) -> Tensor:
    given = requests.k_pages, requests.v_pages, requests.table % 63, requests.lengths
    return fastattn.attention_paged(q, *given, **options)


def test_a_decomposed_program_has_no_gradients_either():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.product, self.requests = torch.nn.Linear(D, D), Requests()

        def forward(self, q):
            return paged_of(self.product(q), self.requests)

    model, q = Model(), torch.randn(6, H, D)
    program = torch.export.export(model, (q,)).run_decompositions()
    assert torch.equal(program.module()(q), model(q))
    assert not program.module()(q).requires_grad


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_for_any_number_of_requests(strict):
    class Model(torch.nn.Module):
        def forward(self, q, k_pages, v_pages, table, lengths):
            return fastattn.attention_paged(q, k_pages, v_pages, table, lengths)

    requests = Requests()
    given = requests.q[:6], requests.k_pages, requests.v_pages, requests.table % 63, requests.lengths
    B = torch.export.Dim("B", max=64)
    of_all = ({0: B}, None, None, {0: B}, {0: B})
    program = torch.export.export(Model(), given, dynamic_shapes=of_all, strict=strict).module()
    for some in (slice(6), slice(1), slice(2, 5)):
        q, k_pages, v_pages, table, lengths = given
        given_now = q[some], k_pages, v_pages, table[some], lengths[some]
        assert torch.equal(program(*given_now), fastattn.attention_paged(*given_now))


def test_a_graph_refuses_a_page_that_there_is_not():
    requests = Requests()
    given = requests.k_pages, requests.v_pages, requests.table % 63 + 2**32, requests.lengths
    with pytest.raises(ValueError, match="block_table"):
        torch.compile(fastattn.attention_paged, backend="eager")(requests.q[:6], *given)


def test_eager_calls_between_those_of_a_graph_compile_nothing():
    requests, counter = Requests(), CompileCounter()
    attend = torch.compile(lambda q, ends: paged_of(q, requests, cu_seqlens_q=ends), backend=counter, fullgraph=True)
    for q, ends in ((requests.q[:6], None), (requests.q, requests.cu_seqlens_q)):
        for _ in range(2):
            assert torch.equal(attend(q, ends), paged_of(q, requests, cu_seqlens_q=ends))
    assert counter.frame_count == 2


def as_graph(attend: Callable, given: tuple, mode: str) -> Callable:
    if mode == "compiled":
        return torch.compile(attend, fullgraph=True, backend="eager")
    return make_fx(attend, tracing_mode=mode)(*given)


@pytest.mark.parametrize("mode", ["compiled", "fake", "symbolic"])
@pytest.mark.parametrize("writes", [False, True])
def test_one_graph_of_a_call_with_a_query_of_each_request(writes, mode):
    requests = Requests()
    given = requests.q[:6], requests.k_pages, requests.v_pages, requests.table % 63, requests.lengths
    given += tuple(torch.randn(6, *requests.k_pages.shape[2:]) for _ in range(2)) if writes else (None, None)

    def attend(*given):
        *paged, k, v = given
        return fastattn.attention_paged(*paged, k=k, v=v, backend="reference")

    graph, copies = as_graph(attend, copy.deepcopy(given), mode), copy.deepcopy(given)
    torch.testing.assert_close(graph(*copies), attend(*given), rtol=1e-6, atol=1e-6, equal_nan=True)
    for name, x, y in zip(("k_pages", "v_pages"), copies[1:3], given[1:3], strict=True):
        torch.testing.assert_close(x, y, equal_nan=True, msg=name)


def test_a_graph_of_any_number_of_requests_and_queries():
    def attend(q, pages, table, lengths, cu_seqlens_q):
        return fastattn.attention_paged(q, pages, pages, table, lengths, cu_seqlens_q, backend="reference")

    graph = torch.compile(attend, dynamic=True, backend="eager")
    for B, n in ((3, 2), (2, 3), (4, 5)):
        table = torch.arange(4 * B).reshape(B, 4)
        given = torch.randn(4 * B, 8, 2, 16), table, torch.full((B,), 20), torch.arange(B + 1) * n
        q = torch.randn(B * n, 4, 16)
        torch.testing.assert_close(graph(q, *given), attend(q, *given))


def test_autograd_learns_of_new_tokens_in_pages_by_the_short_way():
    layers = [Layer(1, torch.float32, i) for i in range(2)]
    layers[0].attend()
    factor = torch.ones(D, requires_grad=True)
    product = (factor * layers[1].v_pages).sum()
    layers[1].attend(k=layers[1].k, v=layers[1].v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"q": torch.zeros(6, 2, 3)}, "k_pages must be [pages, page_size, H_kv, 3], got"),
        ({"q": torch.zeros(5, H, D)}, "cu_seqlens_q must begin at 0, never fall, and end at 5"),
        ({"q": [1.0]}, "q must be a Tensor of"),
        ({"q": torch.zeros(6, 3, D)}, "the heads of k must divide the 3 heads of q, got 2"),
        ({"k_pages": torch.zeros(3, 16, H_KV, D)}, "v_pages must be [3, 16, 2, d_v], got"),
        ({"k_pages": torch.zeros(3, 16, H_KV, D), "v_pages": torch.zeros(3, 16, H_KV, D)}, "numbers of the 3 pages"),
        ({"k_pages": torch.zeros(266, 8, H_KV, D), "v_pages": torch.zeros(266, 8, H_KV, D)}, "to 352, the tokens of"),
        ({"v_pages": torch.zeros(266, 16, H_KV, D).half()}, "v_pages must be a Tensor of float32, got torch.float16"),
        ({"k": torch.zeros(6, H_KV, D + 1)}, "k must be [6, 2, 32], got [6, 2, 33]"),
        ({"v": torch.zeros(6, H_KV, D).half()}, "v must be a Tensor of float32, got torch.float16"),
        ({"k": torch.zeros(())}, "k must be [6, 2, 32], got []"),
        ({"v": None}, "k and v must both be given or neither, got Tensor and NoneType"),
        ({"lengths": torch.zeros(6)}, "lengths must be a Tensor of int32 or int64, got torch.float32"),
        ({"table": None}, "block_table must be a Tensor of int32 or int64, got NoneType"),
        ({"cu_seqlens_q": torch.arange(7).to("meta")}, "cu_seqlens_q must"),
        ({"scales": {"prefix": False}}, "prefix must be an int from 0"),
        ({"scales": {"k_scales": torch.zeros(266, 16, H_KV)}}, "k_scales must be None where k_pages is of"),
        ({"scales": {"v_scales": torch.zeros(2, 2)}}, "v_scales must be None where k_pages is of"),
        (
            {"v_pages": torch.zeros(266, 16, H_KV, D).char(), "scales": {"v_scales": torch.ones(266, 16, H_KV)}},
            "v_pages must be a Tensor of float32, got torch.int8",
        ),
        ({"options": {"alibi_slopes": torch.ones(5, H)}}, "alibi_slopes must be [4] or [6, 4], got [5, 4]"),
        *(
            (
                {name: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])},
                f"{name} must be a Tensor of float32",
            )
            for name in ("k_pages", "v_pages")
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_in_a_later_layer_is_a_sentence_and_nothing_is_written(changed, sentence):
    Layer(1, torch.float32, 0).attend()
    layer = Layer(1, torch.float32, 1)
    before = [x.clone() for x in (layer.k_pages, layer.v_pages)]
    after = layer.k_pages, layer.v_pages
    vars(layer).update(changed)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        layer.attend(k=layer.k, v=layer.v)
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"k": torch.zeros(6, H_KV, D).char()}, "k must be a Tensor of float32, got torch.int8"),
        ({"v": torch.zeros(6, H_KV, D).char()}, "v must be a Tensor of float32, got torch.int8"),
        ({"scales": {}}, "k_scales must be a Tensor of float32, got NoneType"),
        ({"v_pages": torch.zeros(266, 16, H_KV, D).to(torch.float8_e4m3fn)}, "v_pages must be a Tensor of int8, got"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_quantized_pages_in_a_later_layer_is_a_sentence(changed, sentence):
    Layer(1, torch.float32, 0, torch.int8).attend()
    layer = Layer(1, torch.float32, 1, torch.int8)
    pages, before = layer.k_pages, layer.k_pages.clone()
    vars(layer).update(changed)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        layer.attend(k=layer.k, v=layer.v)
    assert torch.equal(pages, before)


STORED = "k_pages must be a Tensor of float32 or int8 or float8_e4m3fn, "
WRONG = [
    ({"q": torch.zeros(2, 3)}, "q must be [total_q, H, D], got [2, 3]"),
    ({"k_pages": torch.zeros(3, 16, 2, 8)}, "k_pages must be [pages, page_size, H_kv, 32], got [3, 16, 2, 8]"),
    ({"k_pages": torch.zeros(3, 16, 2, 32).half()}, STORED + "got torch.float16"),
    ({"v_pages": torch.zeros(3, 16, 2, 32)}, "v_pages must be [63, 16, 2, d_v], got [3, 16, 2, 32]"),
    ({"k_pages": torch.zeros(3, 0, 2, 32), "v_pages": torch.zeros(3, 0, 2, 32)}, "pages of at least one token"),
    (
        {"k_pages": torch.zeros(0, 16, 2, 32), "v_pages": torch.zeros(0, 16, 2, 32)},
        "must have a page where block_table",
    ),
    ({"q": torch.zeros(75, 3, 32)}, "the heads of k must divide the 3 heads of q, got 2"),
    ({"lengths": torch.tensor([1, 37])}, "block_table must be [2, most pages], got [6, 44]"),
    ({"lengths": [1, 37]}, "lengths must be a Tensor of int32 or int64, got list"),
    (
        {"lengths": torch.tensor([1, 37, 130, 64, 705, 5])},
        "to 704, the tokens of a row of block_table, got [1, 130, 705]",
    ),
    ({"lengths": torch.tensor([1, 3, 130, 64, 700, 5])}, "lengths must be from 4, the queries of these requests"),
    ({"table": torch.zeros(6, 44)}, "block_table must be a Tensor of int32 or int64, got torch.float32"),
    ({"table": torch.full((6, 44), 63)}, "block_table must have numbers of the 63 pages of k_pages, got 63"),
    ({"table": torch.full((6, 44), -1)}, "block_table must have numbers of the 63 pages of k_pages, got -1"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q must be given where there are not 6 queries, got [75, 4, 32]"),
    ({"cu_seqlens_q": torch.tensor([0, 75])}, "cu_seqlens_q must be [7] like lengths, got [2]"),
    (
        {"cu_seqlens_q": torch.tensor([0, 1, 5, 6, 70, 71, 76])},
        "cu_seqlens_q must begin at 0, never fall, and end at 75",
    ),
]


@pytest.mark.parametrize(("changed", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_what_does_not_fit_is_a_sentence_and_nothing_is_written(changed, sentence):
    requests = Requests()
    before = requests.k_pages.clone()
    for name, x in changed.items():
        setattr(requests, name, x)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        requests.attend(k=torch.zeros(75, H_KV, D), v=torch.zeros(75, H_KV, D))
    if "k_pages" not in changed:
        torch.testing.assert_close(requests.k_pages, before, rtol=0, atol=0, equal_nan=True)


def test_wrong_options_are_sentences():
    requests = Requests()
    for options, error, sentence in [
        ({"k": torch.zeros(75, H_KV, D)}, ValueError, "k and v must both be given or neither, got Tensor and NoneType"),
        (
            {"tree": torch.ones(4, 4, dtype=torch.bool)},
            ValueError,
            "tree must be of the [1, 4, 64] queries of a request",
        ),
        ({"tree": torch.ones(4, 3, dtype=torch.bool)}, ValueError, "tree must be [3, 3], got [4, 3]"),
        ({"causal": "yes"}, ValueError, "causal must be a bool, got 'yes'"),
        ({"window": 3}, ValueError, "mask.window must be a pair (left, right), got 3"),
        ({"is_causal": True}, TypeError, "write causal="),
        ({"backend": "fast"}, ValueError, "backend must be"),
    ]:
        with pytest.raises(error, match=re.escape(sentence)):
            requests.attend(**options)


def test_the_kernels_refuse_pages_that_are_none():
    """As the last to see them; whoever calls the backend."""
    inputs = make_inputs(Case("", "", n_q=1, n_k=40), torch.float32)
    (k, table), (v, _) = (in_pages(x, 16) for x in (inputs.k, inputs.v))
    real = torch.ones(len(table), 48, dtype=torch.bool)
    spec = dataclasses.replace(inputs.spec(), mask=Mask(real_keys=real))
    for page in (-1, len(k)):
        wrong = table.clone()
        wrong[1, 2] = page
        with pytest.raises(
            ValueError, match=f"block_table must have numbers of the {len(k)} pages, got {page} for key 32"
        ):
            cpu.forward_paged(inputs.q, k.transpose(1, 2), v.transpose(1, 2), wrong, spec)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_autocast_leaves_the_pages_as_they_are(backend):
    requests = Requests()
    expected = requests.attend(backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(requests.attend(backend=backend), expected)


def test_gradients_are_not_recorded():
    requests = Requests()
    requests.q.requires_grad_()
    assert not requests.attend().requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("words", WORDS)
def test_a_prefix_that_all_share(words, dtype):
    """Two pages of it, the first of request 4; then each request's own."""
    mask, options = WORDS[words]
    shared, n = Requests(dtype), 32
    for i in range(len(LENGTHS)):
        shared.k[i] = torch.cat([shared.k[4][:n], shared.k[i]])
        shared.v[i] = torch.cat([shared.v[4][:n], shared.v[i]])
    shared.lengths = shared.lengths + n
    shared.table = torch.cat([shared.table[4, :2].expand(len(LENGTHS), 2), shared.table], 1)
    actual = shared.attend(prefix=np.int64(n), **{"causal": False} | mask | options, return_lse=True)
    shared.check(actual, mask, **options)


def test_what_is_no_prefix_is_a_sentence():
    requests = Requests()
    for options, sentence in [
        (
            {"prefix": 15},
            "prefix must be an int from 0 to the 704 tokens of a row of block_table, and a multiple of the 16",
        ),
        ({"prefix": -16}, "prefix must be an int from 0"),
        ({"prefix": 720}, "prefix must be an int from 0"),
        ({"prefix": 16}, "lengths must be from 17, the queries of these requests after the prefix"),
        ({"prefix": 16, "sinks": torch.ones(3)}, "sinks must be [4], got [3]"),
        ({"prefix": 16, "alibi_slopes": torch.ones(6, H)}, "alibi_slopes must be [4] with a prefix, got [6, 4]"),
    ]:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            requests.attend(**options)
    requests.lengths = torch.full((6,), 300)
    requests.table = torch.zeros(6, 44, dtype=torch.int64)
    requests.table[2, 0] = 1
    with pytest.raises(ValueError, match="must begin with the same 1 pages in each row"):
        requests.attend(prefix=16)


OF_QUANTIZED = [
    case for case in CASES if case.name in ("plain", "wide-heads", "odd-heads", "grouped", "window", "terms")
]
each_stored_dtype = pytest.mark.parametrize("stored", QUANTIZED, ids=str)


@each_stored_dtype
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("case", OF_QUANTIZED, ids=str)
def test_the_cpu_kernels_read_quantized_pages(case, page_size, dtype, stored):
    inputs = make_inputs(case, torch.float32)
    (k8, k_scales), (v8, v_scales) = quantized(inputs.k, stored), quantized(inputs.v, stored)
    (k, table), (v, _) = (in_pages(x, page_size, "HND") for x in (k8, v8))
    scales = [in_pages(x[..., None], page_size, "HND")[0][..., 0] for x in (k_scales, v_scales)]
    n_k = table.shape[1] * page_size
    real = torch.arange(n_k) < torch.full((len(table), 1), inputs.k.shape[2])
    spec = inputs.spec()
    spec = dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, real_keys=real))

    def of(q: Tensor) -> tuple[Tensor, Tensor]:
        return cpu.forward_quantized(q, *(x.transpose(1, 2) for x in (k, v, *scales)), table, spec)

    inputs.q = inputs.q.to(dtype).float()
    o, lse = of(inputs.q)
    inputs.k, inputs.v = k8.float() * k_scales[..., None], v8.float() * v_scales[..., None]
    assert_right(inputs, {"o": o, "lse": lse})
    o_in_dtype, lse_in_dtype = of(inputs.q.to(dtype))  # all arithmetic is that of fp32
    assert torch.equal(o_in_dtype, o.to(dtype))
    assert torch.equal(lse_in_dtype, lse)


class OfQuantized(Requests):
    """The same with quantized pages, and the keys and values that are in them."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype) -> None:
        super().__init__(dtype)
        self.k_pages, self.k_scales = quantized(self.k_pages, stored)
        self.v_pages, self.v_scales = quantized(self.v_pages, stored)
        for of_requests in (self.k, self.v):
            for i, x in enumerate(of_requests):
                x8, scales = quantized(x, stored)
                scales = scales.double() if dtype == torch.float64 else scales
                of_requests[i] = x8.to(scales.dtype) * scales[..., None]

    def attend(self, **options: object) -> Tensor:
        return super().attend(k_scales=self.k_scales, v_scales=self.v_scales, **options)


def forward_quantized(inputs: Inputs, page_size: int, stored: torch.dtype, backend: ModuleType) -> dict[str, Tensor]:
    """The same for keys and values of a quantized dtype, times powers of two, which those of `inputs` become."""
    (k8, scales), (v8, _) = quantized(inputs.k, stored), quantized(inputs.v, stored)
    scales = torch.exp2(torch.arange(scales.numel(), device=scales.device) % 8 - 10.0).view(scales.shape)
    inputs.k, inputs.v = ((x.float() * scales[..., None]).to(inputs.q.dtype) for x in (k8, v8))
    (k, table), (v, _) = (in_pages(x, page_size, "HND") for x in (k8, v8))
    rows = in_pages(scales[..., None], page_size, "HND")[0][..., 0].transpose(1, 2)
    n_k = table.shape[1] * page_size
    real = torch.arange(n_k, device=table.device) < torch.full_like(table[:, :1], inputs.k.shape[2])
    spec = inputs.spec()
    spec = dataclasses.replace(spec, mask=dataclasses.replace(spec.mask, real_keys=real))
    o, lse = backend.forward_quantized(inputs.q, k.transpose(1, 2), v.transpose(1, 2), rows, rows, table, spec)
    return {"o": o, "lse": lse}


def check_codes(backend: ModuleType, q: Tensor, stored: torch.dtype) -> None:
    """The numbers of all 256 codes are each the score of the only key of a sample, and stand in its value.

    Args:
        q: [256, 1, n_q, D], of ones.
    """
    B, _, n_q, D = q.shape
    codes = torch.arange(B, device=q.device)[:, None].expand(B, D)
    k, v = (x.byte().view(stored).view(B, 1, 1, D) for x in (codes, codes + torch.arange(D, device=q.device)))
    table, scales = codes[:, :1], torch.full((B, 1, 1), 0.5, device=q.device)
    o, lse = backend.forward_quantized(q, k, v, scales, scales, table, Spec(Mask(), 2 / D))
    torch.testing.assert_close(lse[:, 0], k[:, 0, 0, :1].float().expand(B, n_q), equal_nan=True)
    expected = (v.float() / 2).expand(B, 1, n_q, D)
    torch.testing.assert_close(o.float(), expected.where(lse.isfinite()[..., None], math.nan), equal_nan=True)


@each_stored_dtype
@pytest.mark.parametrize("n_q", [1, 20])
@pytest.mark.parametrize("D", [1, 8, 37])
def test_all_codes_are_numbers_or_none(n_q, D, stored):
    check_codes(cpu, torch.ones(256, 1, n_q, D), stored)


@pytest.mark.parametrize("stored", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
def test_each_request_has_what_it_has_alone(words, dtype, stored):
    mask, options = WORDS[words]
    requests = Requests(dtype) if stored is None else OfQuantized(dtype, stored)
    requests.check(requests.attend(**{"causal": False} | mask | options, return_lse=True), mask, **options)


@each_stored_dtype
def test_quantized_pages_are_copied_where_they_cannot_be_read(stored):
    requests = OfQuantized(torch.float32, stored)
    with pytest.warns(fastattn.FallbackWarning, match="are copied"):
        fastattn.attention_paged(
            requests.q.double(), requests.k_pages, requests.v_pages, requests.table, requests.lengths,
            requests.cu_seqlens_q, k_scales=requests.k_scales, v_scales=requests.v_scales,
        )  # fmt: skip
    requests.check(requests.attend(return_lse=True, backend="reference"), {"causal": True})


@each_stored_dtype
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_tokens_are_quantized(dtype, stored):
    full, empty, k, v = OfQuantized(dtype, stored), OfQuantized(dtype, stored), [], []
    new = Requests(dtype)
    for i, n in enumerate(QUERIES):
        k.append(new.k[i][-n:]), v.append(new.v[i][-n:])
        rows = torch.arange(LENGTHS[i] - n, LENGTHS[i])
        for x in (empty.k_pages, empty.v_pages, empty.k_scales, empty.v_scales):
            x[empty.table[i, rows // 16], rows % 16] = 99
    assert torch.equal(empty.attend(k=torch.cat(k), v=torch.cat(v)), full.attend())
    for name in ("k_pages", "v_pages"):
        assert torch.equal(getattr(empty, name).view(torch.uint8), getattr(full, name).view(torch.uint8))
    for name in ("k_scales", "v_scales"):
        torch.testing.assert_close(getattr(empty, name), getattr(full, name), rtol=0, atol=0, equal_nan=True)


@each_stored_dtype
def test_rows_are_rounded_to_nearest_with_the_largest_in_range(stored):
    torch.manual_seed(0)
    x = torch.randn(50, 3, 40) * torch.logspace(-30, 30, 50)[:, None, None]
    x[7, 1] = 0
    x8, scales = quantized(x, stored)
    largest = (torch.finfo if stored.is_floating_point else torch.iinfo)(stored).max
    assert x8.float().abs().amax(-1).unique().tolist() == [0, largest]
    assert scales[7, 1] == 0
    numbers = torch.arange(256, dtype=torch.uint8).view(stored).float()
    numbers = numbers[numbers.isfinite()] * scales[..., None, None]
    least = (numbers - x[..., None]).abs().amin(-1)
    assert ((x8.float() * scales[..., None] - x).abs() <= 1.0001 * least).all()
    of_bfloat16, of_float = (quantized(y, stored)[0].view(torch.uint8) for y in (x.bfloat16(), x.bfloat16().float()))
    assert torch.equal(of_bfloat16, of_float)
    if stored.is_floating_point:
        by_torch = (x / scales[..., None]).nan_to_num().to(stored)
        assert torch.equal(x8.view(torch.uint8), by_torch.view(torch.uint8))


@each_stored_dtype
def test_rows_that_are_not_finite_are_read_as_nan(stored):
    ones, table, length = torch.ones(1, 1, 32), torch.tensor([[0]]), torch.tensor([1])
    for element in (math.nan, math.inf, -math.inf):
        row = ones.index_fill(2, torch.tensor(5), element)
        for k, v in ((row, ones), (ones, row)):
            pages, scales = torch.zeros(2, 1, 1, 1, 32).to(stored), torch.zeros(2, 1, 1, 1)
            o = fastattn.attention_paged(
                ones, *pages, table, length, k=k, v=v, k_scales=scales[0], v_scales=scales[1]
            )  # fmt: skip
            assert o.isnan().all()


@each_stored_dtype
def test_what_does_not_fit_quantized_pages_is_a_sentence(stored):
    requests, of_floats = OfQuantized(torch.float32, stored), Requests()
    scales, name = requests.k_scales, str(stored).removeprefix("torch.")
    (other,) = {*QUANTIZED} - {stored}
    for changed, sentence in [
        ({"k_scales": None}, "k_scales must be a Tensor of float32, got NoneType"),
        ({"v_scales": None}, "v_scales must be a Tensor of float32, got NoneType"),
        ({"k_scales": scales[:-1]}, f"k_scales must be {list(scales.shape)}, got {list(scales[:-1].shape)}"),
        ({"k_scales": scales.double()}, "k_scales must be a Tensor of float32, got torch.float64"),
        ({"v_pages": of_floats.v_pages}, f"v_pages must be a Tensor of {name}, got torch.float32"),
        ({"v_pages": requests.v_pages.view(other)}, f"v_pages must be a Tensor of {name}, got {other}"),
        ({"k_pages": requests.k_pages.view(torch.uint8)}, STORED + "got torch.uint8"),
        ({"k_pages": requests.k_pages.view(torch.float8_e5m2)}, STORED + "got torch.float8_e5m2"),
        (vars(of_floats), "k_scales must be None where k_pages is of torch.float32, got torch.float32"),
    ]:
        wrong = OfQuantized(torch.float32, stored)
        vars(wrong).update(changed)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            wrong.attend()


class Made(TorchDispatchMode):
    """The most elements of a tensor that an operator makes in this block."""

    most = 0

    def __torch_dispatch__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention_has_values_in_its_keys(dtype):
    """DeepSeek's: 128 heads share keys of 576, of which the first 512 are the values; no operator gathers them."""
    torch.manual_seed(0)
    table, lengths = torch.randperm(30).view(2, 15), torch.tensor([900, 333])
    latent, q = torch.randn(30, 64, 1, 576).to(dtype), torch.randn(2, 128, 576).to(dtype)
    with Made() as made:
        o = fastattn.attention_paged(q, latent, latent[..., :512], table, lengths, scale=192**-0.5)
    assert made.most < latent.numel() / 4
    for i, n in enumerate(lengths.tolist()):
        k = latent[table[i]].flatten(0, 1)[:n].transpose(0, 1)[None]
        of_rows = fastattn.attention(q[i, None, :, None], k, k[..., :512], scale=192**-0.5)
        expected = fastattn.attention(q[i, None, :, None].double(), k.double(), k[..., :512].double(), scale=192**-0.5)
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        for actual in (o[i], of_rows[0, :, 0]):
            torch.testing.assert_close(actual.double(), expected[0, :, 0], rtol=tolerance, atol=tolerance)
