"""fastattn.flash_attn: the arguments, the documented semantics and the refusals of flash-attn 2.8."""

import inspect
import math
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from fastattn import flash_attn
from fastattn.testing import DTYPES, compare

COMMON = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {  # of flash_attn/flash_attn_interface.py, v2.8.3
    "flash_attn_func": f"q k v {COMMON}",
    "flash_attn_kvpacked_func": f"q kv {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv {COMMON}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {COMMON} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {COMMON}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
}


def formula(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What flash-attn documents for one sequence, q [n_q, H, D] and k, v [n_k, H_kv, ...]: out, and lse [H, n_q]."""
    n_q, n_k, groups = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
    ahead = torch.arange(n_k) - (torch.arange(n_q)[:, None] + n_k - n_q)
    if slopes is not None:
        scores = scores - slopes[:, None, None].to(q.dtype) * ahead.abs()
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    seen &= (ahead <= 0) | (not causal)
    seen &= (ahead >= -window_size[0]) | (window_size[0] < 0)
    seen &= (ahead <= window_size[1]) | (window_size[1] < 0)
    scores = scores.masked_fill(~seen, -math.inf)
    shift = scores.detach().logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - shift).exp()
    total = weights.sum(-1)
    out = torch.einsum("hij,jhd->ihd", weights / torch.where(total > 0, total, 1)[..., None], v)
    return out, total.log() + shift[..., 0]


def assert_right(actual: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    errors = [compare(name, x, plain[name], exact[name]) for name, x in actual.items()]
    assert [str(error) for error in errors if not error.right] == []


def compare_results(function, by_formula, qkv: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Output, lse and gradients of the function against those of the formula in fp64 and in the same dtype."""
    do = torch.randn_like(by_formula(*qkv)[0])

    def results(function, computed_in: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.to(dtype).to(computed_in).requires_grad_() for x in qkv]
        out, lse = function(*leaves)
        gradients = torch.autograd.grad(out, leaves, do.to(dtype).to(computed_in))
        return dict(zip(("o", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True))

    assert_right(results(function, dtype), results(by_formula, dtype), results(by_formula, torch.float64))


def drawn_terms(draw: random.Random, n: int) -> dict[str, object]:
    """Terms that all functions have."""
    options = {
        "softmax_scale": [None, 0.3], "causal": [False, True], "softcap": [0.0, 2.0],
        "window_size": [(-1, -1), (draw.randint(0, n), draw.randint(0, n)), (draw.randint(0, n), -1), (-1, 0)],
    }  # fmt: skip
    return {name: draw.choice(values) for name, values in options.items()}


def drawn_slopes(draw: random.Random, B: int, H: int, both: bool) -> Tensor | None:
    return draw.choice([None, torch.rand(H), torch.rand(B, H) if both else None])


def of_samples(slopes: Tensor | None, B: int, H: int) -> list[Tensor | None]:
    return [None] * B if slopes is None else list(slopes.expand(B, H))


@pytest.mark.parametrize("seed", range(30))
def test_func_and_its_gradients(seed):
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    B, H_kv, n_q, n_k, D, d_v = (draw.randint(*r) for r in ((1, 3), (1, 2), (1, 40), (0, 40), (1, 40), (1, 40)))
    H = H_kv * draw.randint(1, 3)
    q, k, v = torch.randn(B, n_q, H, D), torch.randn(B, n_k, H_kv, D), torch.randn(B, n_k, H_kv, d_v)
    terms, slopes = drawn_terms(draw, 40), drawn_slopes(draw, B, H, both=True)

    def by_formula(*qkv: Tensor) -> tuple[Tensor, ...]:
        samples = zip(*qkv, of_samples(slopes, B, H), strict=True)
        return tuple(map(torch.stack, zip(*(formula(*x, slopes=s, **terms) for *x, s in samples), strict=True)))

    def by_flash_attn(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, s_dmask = flash_attn.flash_attn_func(*qkv, **terms, alibi_slopes=slopes, return_attn_probs=True)
        assert s_dmask.shape == (0,)
        assert torch.equal(out, flash_attn.flash_attn_func(*qkv, **terms, alibi_slopes=slopes))
        return out, lse

    compare_results(by_flash_attn, by_formula, (q, k, v), draw.choice(DTYPES))


@pytest.mark.parametrize("seed", range(20))
def test_varlen(seed):
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    H_kv, D, d_v, B = (draw.randint(*r) for r in ((1, 2), (1, 40), (1, 40), (0, 4)))
    H = H_kv * draw.randint(1, 3)
    lengths = [[draw.randint(0, 30) for _ in range(B)] for _ in "qk"]
    q, k, v = (torch.randn(sum(n), h, d) for n, h, d in zip(
        (lengths[0], *[lengths[1]] * 2), (H, H_kv, H_kv), (D, D, d_v), strict=True
    ))  # fmt: skip
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in lengths]
    terms, slopes = drawn_terms(draw, 30), drawn_slopes(draw, B, H, both=False)

    def by_flash_attn(*qkv: Tensor) -> tuple[Tensor, ...]:
        longest = (max(n, default=0) for n in lengths)
        options = terms | {"alibi_slopes": slopes, "return_attn_probs": True}
        return flash_attn.flash_attn_varlen_func(*qkv, *cu, *longest, **options)[:2]

    def by_formula(*qkv: Tensor) -> tuple[Tensor, ...]:
        parts = [x.split(n) for x, n in zip(qkv, (lengths[0], *[lengths[1]] * 2), strict=True)]
        outs = [formula(*x, slopes=slopes, **terms) for x in zip(*parts, strict=True)]
        outs.append(formula(*(x[:0] for x in qkv), **terms))  # what there is without documents
        return torch.cat([o for o, _ in outs]), torch.cat([lse for _, lse in outs], 1)

    compare_results(by_flash_attn, by_formula, (q, k, v), torch.float32)


@pytest.mark.parametrize("seed", range(30))
def test_varlen_func_of_pages(seed):
    """Against the formula; what the pages hold elsewhere is NaN."""
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    H_kv, D, d_v, B, page = (draw.randint(*r) for r in ((1, 2), (1, 40), (1, 40), (1, 4), (1, 8)))
    H = H_kv * draw.randint(1, 3)
    n_k = [draw.randint(0, 30) for _ in range(B)]
    n_q = [draw.randint(0, n) for n in n_k]
    most = max(-(-n // page) for n in n_k)
    table = torch.randperm(B * most + 1)[: B * most].view(B, most).int()
    caches = [torch.full((B * most + 1, page, H_kv, d), math.nan) for d in (D, d_v)]
    q, *kv = torch.randn(sum(n_q), H, D), *([torch.randn(n, H_kv, d) for n in n_k] for d in (D, d_v))
    for cache, xs in zip(caches, kv, strict=True):
        for b, x in enumerate(xs):
            j = torch.arange(len(x))
            cache[table[b, j // page].long(), j % page] = x
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in (n_q, n_k)]
    terms, slopes = drawn_terms(draw, 30), drawn_slopes(draw, B, H, both=True)

    def by_formula(dtype: torch.dtype) -> dict[str, Tensor]:
        parts = zip(q.to(dtype).split(n_q), *([x.to(dtype) for x in xs] for xs in kv), strict=True)
        outs = [formula(*x, slopes=of_samples(slopes, B, H)[b], **terms) for b, x in enumerate(parts)]
        return {"o": torch.cat([o for o, _ in outs]), "lse": torch.cat([lse for _, lse in outs], 1)}

    options = terms | {"alibi_slopes": slopes, "block_table": table}
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, *caches, *cu, 30, 30, **options, return_attn_probs=True)
    assert_right({"o": o, "lse": lse}, by_formula(torch.float32), by_formula(torch.float64))
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, *caches, *cu, 30, 30, **options), o)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [n, H, D] by the angles [n, r / 2], by complex numbers."""
    r, angles = 2 * cos.shape[1], torch.complex(cos, sin)[:, None]
    first, second = (x[..., 0:r:2], x[..., 1:r:2]) if interleaved else (x[..., : r // 2], x[..., r // 2 : r])
    turned = torch.complex(first, second) * angles
    parts = torch.stack([turned.real, turned.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([parts, x[..., r:]], -1)


@pytest.mark.parametrize("seed", range(60))
def test_with_kvcache(seed):
    """Against the formula over the keys of each sample; what a cache holds elsewhere is NaN, and stays as it was."""
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    B, H_kv, n_q, half, d_v = (draw.randint(*r) for r in ((1, 3), (1, 2), (1, 6), (1, 8), (1, 20)))
    H, D, n_cache = H_kv * draw.randint(1, 3), 2 * half + draw.choice((0, 3)), 4 * draw.randint(3, 8)
    new, kind = draw.choice((True, True, False)), draw.choice(("rows", "index", "pages"))
    n_new = draw.choice((n_q, draw.randint(1, 6))) if new else 0
    starts = [draw.randint(0, n_cache - max(n_q, n_new)) for _ in range(B)]
    whole = draw.choice((starts, [starts[0]] * B, None))
    starts = whole or [n_cache - n_new if new else n_cache] * B
    ends = [start + n_new for start in starts]
    pads = [draw.randint(0, end) for end in ends] if draw.random() < 0.4 else [0] * B
    page = n_cache if kind != "pages" else draw.choice((1, 2, 4))
    n_rows = B if kind == "rows" else B * n_cache // page + 2
    table = torch.randperm(n_rows)[: B * n_cache // page].view(B, -1).int() if kind != "rows" else None
    where = torch.arange(B)[:, None] if table is None else table.long()
    k_cache, v_cache = torch.full((n_rows, page, H_kv, D), math.nan), torch.full((n_rows, page, H_kv, d_v), math.nan)
    q, k, v = torch.randn(B, n_q, H, D), torch.randn(B, n_new, H_kv, D), torch.randn(B, n_new, H_kv, d_v)
    for b in range(B):
        j = torch.arange(starts[b])[pads[b] :]
        for cache in (k_cache, v_cache):
            cache[where[b, j // page], j % page] = torch.randn(len(j), *cache.shape[2:])
    if kind == "pages":  # a page that is not in use yet may have any number
        table.masked_fill_(torch.arange(n_cache // page) * page >= torch.tensor(ends)[:, None], -7)
    before = k_cache.clone(), v_cache.clone()
    terms, slopes = drawn_terms(draw, n_cache), drawn_slopes(draw, B, H, both=True)
    cos, sin = torch.rand(2, n_cache + 6, half).mul(6).sub(3).unbind() if draw.random() < 0.6 and new else (None, None)
    interleaved = draw.choice((False, True))
    equal = len(set(starts)) == 1 and draw.random() < 0.7
    seqlens = starts[0] if equal else torch.tensor(starts, dtype=draw.choice((torch.int32, torch.int64)))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, *((k, v) if new else (None, None)), cos, sin, seqlens if whole or new else None,
        **{"cache_batch_idx": table[:, 0]} if kind == "index" else {"block_table": table},
        cache_leftpad=torch.tensor(pads).int() if any(pads) else None, rotary_interleaved=interleaved,
        alibi_slopes=slopes, num_splits=draw.randint(0, 2), return_softmax_lse=True, **terms,
    )  # fmt: skip

    expected = [x.clone() for x in before]
    moving = terms["causal"] or terms["window_size"] != (-1, -1)

    def by_formula(dtype: torch.dtype) -> dict[str, Tensor]:
        outs = []
        for b, (start, end, pad) in enumerate(zip(starts, ends, pads, strict=True)):
            q_b, k_b = q[b].to(dtype), k[b].to(dtype)
            if cos is not None:
                angles = [x.to(dtype) for x in (cos, sin)]
                at = torch.arange(start, start + n_q) if moving else torch.full((n_q,), start)
                q_b = rotated(q_b, *(x[at] for x in angles), interleaved)
                k_b = rotated(k_b, *(x[start:end] for x in angles), interleaved)
            keys, values = (x[where[b]].flatten(0, 1)[:start].to(dtype) for x in before)
            keys, values = torch.cat([keys, k_b])[pad:end], torch.cat([values, v[b].to(dtype)])[pad:end]
            outs.append(formula(q_b, keys, values, slopes=of_samples(slopes, B, H)[b], **terms))
            for j in range(n_new):
                place = where[b, (start + j) // page], (start + j) % page
                expected[0][place], expected[1][place] = k_b[j], v[b, j]
        return dict(zip(("o", "lse"), map(torch.stack, zip(*outs, strict=True)), strict=True))

    exact, plain = by_formula(torch.float64), by_formula(torch.float32)
    assert_right({"o": out, "lse": lse}, plain, exact)
    for actual, wanted in zip((k_cache, v_cache), expected, strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_those_of_flash_attn_in_their_order(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in parameters]
    assert " ".join(shown) == SIGNATURES[name]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(flash_attn.__all__) == SIGNATURES.keys()


def test_packed_functions_give_what_the_others_give():
    terms = (0.0, 0.4, True, (3, 1), 2.0, torch.rand(4), False, True)
    q, kv, cu = torch.randn(2, 8, 4, 16), torch.randn(2, 9, 2, 2, 16), torch.tensor([0, 3, 8]).int()
    qkv = torch.randn(2, 8, 3, 4, 16)
    for packed, expected in (
        (flash_attn.flash_attn_kvpacked_func(q, kv, *terms), (q, *kv.unbind(2))),
        (flash_attn.flash_attn_qkvpacked_func(qkv, *terms), qkv.unbind(2)),
    ):
        assert all(map(torch.equal, packed, flash_attn.flash_attn_func(*expected, *terms)))
    lengths = (cu, cu + torch.tensor([0, 1, 1]).int(), 5, 6)
    for packed, expected in (
        (flash_attn.flash_attn_varlen_kvpacked_func(q[0], kv[0], *lengths, *terms), (q[0], *kv[0].unbind(1), *lengths)),
        (flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 5, *terms), (*qkv[0].unbind(1), cu, cu, 5, 5)),
    ):
        assert all(map(torch.equal, packed, flash_attn.flash_attn_varlen_func(*expected, *terms)))


def test_causal_is_aligned_at_the_bottom_right_and_blind_rows_are_empty():
    """The two pictures of flash-attn's docstrings, as how many keys each query sees."""
    for n_q, n_k, seen in ((2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2])):
        q, k, v = torch.zeros(1, n_q, 1, 8), torch.randn(1, n_k, 1, 8), torch.ones(1, n_k, 1, 8)
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        torch.testing.assert_close(lse[0, 0], torch.tensor(seen).log())  # -inf where there is none
        torch.testing.assert_close(out[0, :, 0, 0], torch.tensor(seen).clamp(max=1).float())


def test_dropout_drops_and_the_cache_has_no_gradients():
    q, cache = torch.randn(1, 64, 1, 8, requires_grad=True), torch.zeros(1, 64, 1, 8)
    out = flash_attn.flash_attn_func(q * 0, q, torch.ones_like(q), 0.5)[0, :, 0, 0]
    assert (out - 1).abs().max() > 0.1  # without dropout each is 1
    assert not flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=0).requires_grad


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_break(dynamic):
    torch._dynamo.reset()
    q, cache, ends = torch.randn(2, 3, 2, 8), torch.zeros(2, 9, 2, 8), torch.tensor([2, 5])
    caches = [[cache.clone(), cache.clone()] for _ in range(2)]
    outs = [
        function(q, *own, q, q, cache_seqlens=ends, causal=True)
        for function, own in zip(
            (torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, dynamic=dynamic, backend="aot_eager"),
             flash_attn.flash_attn_with_kvcache), caches, strict=True,
        )
    ]  # fmt: skip
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(caches[0], caches[1])


def tokens(*shape):
    return torch.randn(*shape, 2, 8)


EXPORTED = {  # a call, and its arguments for the export and after it
    "func": (
        lambda q, k: flash_attn.flash_attn_func(q, k, k, causal=True),
        (tokens(2, 4), tokens(2, 6)), (tokens(3, 5), tokens(3, 9)),
    ),
    "varlen": (
        lambda q, cu: flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 9, 9),
        (tokens(6), torch.tensor([0, 2, 6])), (tokens(9), torch.tensor([0, 2, 3, 9])),
    ),
    "pages": (
        lambda q, c, n, t: flash_attn.flash_attn_with_kvcache(q, c, c, cache_seqlens=n, block_table=t),
        (tokens(2, 1), tokens(6, 4), torch.tensor([3, 7]), torch.tensor([[0, 1], [3, 5]])),
        (tokens(3, 1), tokens(9, 4), torch.tensor([3, 7, 8]), torch.tensor([[0, 1], [3, 5], [8, 2]])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_exports_for_any_lengths(name, strict):
    class Attend(torch.nn.Module):
        def forward(self, *given):
            return call(*given)

    call, first, then = EXPORTED[name]
    any_lengths = (tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in first),)
    program = torch.export.export(Attend(), first, dynamic_shapes=any_lengths, strict=strict).module()
    torch.testing.assert_close(program(*then), call(*then))


x, c, idx = torch.ones(2, 3, 2, 8), torch.ones(2, 6, 2, 8), torch.zeros(2, dtype=torch.int32)
VARLEN = {"q": x[0], "k": x[0], "v": x[0], "cu_seqlens_q": torch.tensor([0, 3]), "cu_seqlens_k": torch.tensor([0, 3])}
VARLEN |= {"max_seqlen_q": 3, "max_seqlen_k": 3}
KV = {"q": x[0], "kv": torch.ones(3, 2, 2, 4)} | {name: VARLEN[name] for name in LENGTHS.split()}
QKV = {"qkv": torch.ones(3, 3, 2, 8), "cu_seqlens": torch.tensor([0, 4]), "max_seqlen": 4}
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.jagged)
PAGED = {"k": c, "v": c, "block_table": idx[:1, None]}
CACHE = {"q": x, "k_cache": c, "v_cache": c}
NEW = CACHE | {"k": 2 * x, "v": 2 * x, "cache_seqlens": idx}
ROTARY = NEW | {"rotary_cos": torch.ones(6, 2), "rotary_sin": torch.ones(6, 2)}
REFUSED = [  # function, what is changed of a right call, exception, its message
    ("func", {"qv": x}, TypeError, "argument 'qv': it has those of flash-attn 2.8, q, k, v, drop.*_probs$"),
    ("func", {"q": x[0]}, ValueError, r"q must be \[B, n_q, H, D\], got \[3, 2, 8\]"),
    ("func", {"k": x[..., :4]}, ValueError, r"k must be \[2, n_k, H_kv, 8\], got \[2, 3, 2, 4\]"),
    ("func", {"v": x[:, :2]}, ValueError, r"v must be \[2, 3, 2, d_v\], got \[2, 2, 2, 8\]"),
    ("func", {"v": None}, TypeError, "v must be a Tensor, got NoneType"),
    ("func", {"window_size": (-2, 0)}, ValueError, r"window_size must be two ints, -1 for no limit, got \(-2, 0\)"),
    ("func", {"window_size": (None, None)}, ValueError, "window_size must be two ints"),
    ("func", {"window_size": 3}, ValueError, "window_size must be two ints, -1 for no limit, got 3"),
    ("func", {"softmax_scale": math.nan}, ValueError, "softmax_scale must be a number that fp32 .*, got nan"),
    ("func", {"softmax_scale": True}, ValueError, "softmax_scale must be a number that fp32 can hold, .*, got True"),
    ("func", {"softmax_scale": 3e38}, ValueError, r"softmax_scale must be a .* 2.35e\+38 at most, got 3e\+38"),
    ("func", {"softcap": None}, TypeError, "softcap must be a number, got None"),
    ("func", {"dropout_p": 2}, ValueError, "dropout_p must be between 0 and 1, got 2"),
    ("func", {"causal": 1}, TypeError, "causal must be a bool, got 1"),
    ("func", {"alibi_slopes": x}, ValueError, r"alibi_slopes must be \[2\] or \[2, 2\], got"),
    ("func", {"dropout_p": 0.1, "return_attn_probs": True}, NotImplementedError, "attn_probs must be False .*=0.1"),
    ("qkvpacked_func", {"qkv": x}, ValueError, r"qkv must be \[B, n, 3, H, D\], got \[2, 3, 2, 8\]"),
    ("qkvpacked_func", {"qkv": torch.ones(1, 2, 3, 1, 8).int()}, ValueError, "qkv must be float32, .* torch.int32"),
    ("kvpacked_func", {"q": x, "kv": c.view(2, 3, 2, 2, 8)[:1]}, ValueError, r"kv must be \[2, n_k, 2, H_kv, 8\], got"),
    ("varlen_kvpacked_func", KV, ValueError, r"kv must be \[total_k, 2, H_kv, 8\], got \[3, 2, 2, 4\]"),
    ("varlen_qkvpacked_func", QKV, ValueError, r"^cu_seqlens must begin at 0, never fall, and end at 3 .*\[0, 4\]"),
    ("varlen_func", {"alibi_slopes": NESTED}, ValueError, "alibi_slopes must be a floating .* got a nested"),
    ("varlen_func", {"max_seqlen_q": 3.0}, TypeError, "max_seqlen_q must be an int, got 3.0"),
    ("varlen_func", {"block_table": idx[:1, None]}, ValueError, r"k must be \[pages, page_size, H_kv, 8\], got \[3, 2"),
    ("varlen_func", PAGED | {"block_table": (None, -1)}, TypeError, "block_table must be a Tensor, got tuple"),
    ("varlen_func", PAGED | {"block_table": idx[:, None]}, ValueError, r"cu_seqlens_q must be \[3\], got \[2\]"),
    ("varlen_func", PAGED | {"block_table": idx[:1, None] + 2}, ValueError, "table must be below the 2 pages of k"),
    ("varlen_func", PAGED | {"cu_seqlens_k": torch.tensor([0, 7])}, ValueError, r"at most the 6 of .*, got \[7\]"),
    ("varlen_func", PAGED | {"cu_seqlens_k": torch.tensor([0, 2])}, ValueError, r"queries, \[3\], .*, got \[2\]"),
    ("varlen_func", PAGED | {"dropout_p": 0.5}, NotImplementedError, "dropout_p must be 0 with a block_table, got 0.5"),
    ("varlen_func", PAGED | {"q": x[0].clone().requires_grad_()}, NotImplementedError, "q, k and v must need no grad"),
    ("varlen_func", PAGED | {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be a Tensor, got NoneType"),
    ("varlen_func", {"alibi_slopes": x[0, :2, :, 0]}, NotImplementedError, r"alibi_slopes must be \[H\], .* \[2, 2\]"),
    ("varlen_func", {"cu_seqlens_k": idx[:, None]}, ValueError, "cu_seqlens_k must be"),
    ("with_kvcache", NEW | {"k": x.half()}, ValueError, "k must be torch.float32 on cpu like q, got torch.float16"),
    ("with_kvcache", NEW | {"v": None}, TypeError, "v must be a Tensor, got NoneType"),
    ("with_kvcache", NEW | {"cache_seqlens": None}, ValueError, "cache_seqlens must be an int or .* got None"),
    ("with_kvcache", NEW | {"cache_seqlens": 4}, ValueError, "cache_seqlens must leave room for 3 in the 6 .*, got 4"),
    ("with_kvcache", NEW | {"cache_seqlens": idx + 4}, ValueError, "cache_seqlens must be below 4, got 4"),
    ("with_kvcache", {"cache_seqlens": idx - 1}, ValueError, "cache_seqlens must be at least 0, got -1"),
    ("with_kvcache", {"cache_batch_idx": idx + 2}, ValueError, "cache_batch_idx must be below 2, got 2"),
    ("with_kvcache", {"k_cache": c[:1], "v_cache": c[:1]}, ValueError, "k_cache must have the 2 rows of q"),
    ("with_kvcache", {"cache_leftpad": idx.float()}, ValueError, "cache_leftpad must be int32 or int64, got"),
    ("with_kvcache", {"block_table": idx[:, None] + 2}, ValueError, "block_table must be below the 2 pages .*, got 2"),
    ("with_kvcache", {"block_table": idx[:, None], "cache_batch_idx": idx}, ValueError, "cache_batch_idx must be None"),
    ("with_kvcache", ROTARY | {"k": None, "v": None}, ValueError, "k must be given where rotary_cos"),
    ("with_kvcache", ROTARY | {"rotary_sin": None}, TypeError, "rotary_sin must be a Tensor, got NoneType"),
    ("with_kvcache", ROTARY | {"rotary_cos": x[0, :2, :, 0], "rotary_sin": x[0, :2, :, 0]}, ValueError, "n at least 3"),
    ("with_kvcache", NEW | {"alibi_slopes": x}, ValueError, r"alibi_slopes must be \[2\] or \[2, 2\], got"),
    ("with_kvcache", NEW | {"alibi_slopes": x, "block_table": idx[:, None]}, ValueError, "alibi_slopes must be"),
    ("with_kvcache", NEW | {"q": torch.ones(2, 3, 3, 8)}, ValueError, "heads of k must divide the 3 heads of q, got 2"),
    ("with_kvcache", {"num_splits": 1.5}, TypeError, "num_splits must be an int, got 1.5"),
    ("with_kvcache", {"page_table": idx}, TypeError, "'page_table': it has those of flash-attn 2.8, q, k_cache"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "error", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_refused_by_name(name, changed, error, message):
    calls = {"func": {"q": x, "k": x, "v": x}, "varlen_func": VARLEN, "with_kvcache": CACHE}
    with pytest.raises(error, match=message):
        getattr(flash_attn, f"flash_attn_{name}")(**calls.get(name, {}) | changed)
    assert (c == 1).all()  # nothing was written


MODEL = """
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_varlen_func

def attend(q, k, v):
    return flash_attn_func(q, k, v, dropout_p=0.0, causal=True)

def decode(q, k, v):
    caches, outs = [x.new_zeros(x.shape[0], 16, *x.shape[2:]) for x in (k, v)], []
    for i in range(q.shape[1]):
        now = slice(i, i + 1)
        outs.append(flash_attn_with_kvcache(q[:, now], *caches, k[:, now], v[:, now], cache_seqlens=i, causal=True))
    return outs
"""


def test_code_written_for_flash_attn_runs(monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, fastattn.flash_attn)
    exec(MODEL, model := {})
    q, k, v = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(model["attend"](q, k, v), expected)
    torch.testing.assert_close(torch.cat(model["decode"](q, k, v), 1), expected)


def test_the_flash_path_of_transformers(monkeypatch):
    """Padded and not, as the functions of FlashAttention-3, which transformers imports without asking for a GPU."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    for name, value in list(vars(utils).items()):
        if name.startswith("_flash_") or name in ("_loaded_implementation", "_pad_fn", "_unpad_fn"):
            monkeypatch.setattr(utils, name, value)  # which the call replaces
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fastattn.flash_attn)
    q, k, v = torch.randn(2, 7, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16)
    real = torch.arange(7) < torch.tensor([[4], [7]])
    for mask in (None, real):
        out = utils._flash_attention_forward(
            q, k, v, mask, 7, is_causal=True, sliding_window=3, attn_implementation="flash_attention_3"
        )
        seen = fastattn.Mask(causal=True, window=(2, None), real_keys=mask)
        expected = fastattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), seen).transpose(1, 2)
        torch.testing.assert_close(out[real], expected[real])
