"""Cases of tests and benchmarks: the table of cases, the inputs of a case, and the one error budget.

A result is right when it is as good as naive PyTorch in the same dtype. With `exact` the reference in fp64 on the same
inputs, and `naive` the plain formula in the dtype of the inputs:

    max|actual - exact| <= 2 max|naive - exact| + 4 eps max|exact|
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .api import attention
from .backends import reference
from .plan import drawn
from .spec import Mask, RelativeBias, Spec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OUTPUTS = ("o", "lse", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")


@dataclass(frozen=True)
class Case:
    """One shape and mask, and the reason it is in the table.

    q_offset: a tuple has one for each sample; "scattered" is another one for each query, anywhere among the keys.
    keys: pattern of real_keys: "right" padding with lengths spread evenly over [n_k / 4, n_k], "left" the same on
        the other side, "skewed" on the right with many short samples and few long ones (n_k / 4 on average), "holes"
        anywhere, "none" where the first sample has no real key at all.
    queries: real_queries, padded by the same lengths as the keys ("right" where `keys` is None).
    huge: the scores reach up to that power of the largest number of the dtype, 0 < huge < 1. q and k are then -1, 0
        and 1 times a power of two, so that no score is rounded, and several keys often share the largest one.
    huge_values: the values reach up to that power of the largest number; do is so small that no gradient overflows.
    layout: memory order of q, k and v: "BHND" as [B, H, N, D]; "BNHD" as a projection leaves them; "sliced" as parts
        of one wider tensor, with a stride between tokens that is no multiple of D; "columns" as such parts, transposed.
    relative_bias: heads of the table of a bias by distance, H or 1.
    timed: the suite of the benchmarks that it is for, "standard" (part of "limit" too), "limit" or "gpu"; such a case
        is too large for the tests. None elsewhere.
    """

    name: str
    why: str
    B: int = 2
    H: int = 2
    H_kv: int | None = None
    n_q: int = 64
    n_k: int | None = None
    D: int = 32
    d_v: int | None = None
    causal: bool = False
    q_offset: int | tuple[int, ...] | str = 0
    window: tuple[int | None, int | None] = (None, None)
    keys: str | None = None
    queries: bool = False
    segment_ids: bool = False
    dense: bool | str = False
    bias: tuple[int, ...] | None = None
    relative_bias: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    huge: float = 0.0
    huge_values: float = 0.0
    layout: str = "BHND"
    timed: str | None = None

    def __str__(self) -> str:
        return self.name

    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """[B, H, n_q, D] of q, and the shapes of k and v."""
        H_kv, n_k, d_v = self.H_kv or self.H, self.n_q if self.n_k is None else self.n_k, self.d_v or self.D
        return (self.B, self.H, self.n_q, self.D), (self.B, H_kv, n_k, self.D), (self.B, H_kv, n_k, d_v)


def _timed(name: str, B: int, H: int, L: int, D: int) -> list[Case]:
    masks = (
        ("none", {}),
        ("causal", {"causal": True}),
        ("pad", {"keys": "right"}),
        ("both", {"causal": True, "keys": "right"}),
    )
    why = "benchmark: {}"
    return [
        Case(f"{name}-{mask}", why.format(mask), B=B, H=H, n_q=L, D=D, timed="standard", **options)
        for mask, options in masks
    ]


# No multiples of what kernels work in.
ODD_HEAD_DIMS = (40, 80, 96, 112, 200)
ODD_LENGTHS = (1, 3, 7, 15, 17, 31, 33, 47, 63, 65, 70)


def _limit(name: str, why: str, **options: object) -> Case:
    return Case(name, f"benchmark: {why}", timed="limit", **options)


def _gpu(name: str, why: str, **options: object) -> Case:
    return Case(name, f"benchmark: {why}", timed="gpu", **options)


def _gpu_squares(head_dims: tuple[int, ...], lengths: tuple[int, ...]) -> list[Case]:
    """Cases that FlashAttention's authors time: 16k tokens, heads that make up 2048 channels."""
    masks = {"full": False, "causal": True}
    return [
        _gpu(f"D{D}-N{N}-{name}", "16k tokens", B=2**14 // N, H=2**11 // D, n_q=N, D=D, causal=causal)
        for N in lengths
        for D in head_dims
        for name, causal in masks.items()
    ]


CASES: tuple[Case, ...] = (
    Case("plain", "nothing special"),
    Case("one-query", "decoding: one query, many keys", n_q=1, n_k=70, causal=True, q_offset=69),
    Case("one-key", "softmax over a single key", n_q=5, n_k=1),
    Case(
        "decode-bias", "a bias beside dot products, keys in several parts", B=1, H_kv=1, n_q=2, n_k=600, keys="holes",
        bias=(2, 2, 600), softcap=3.0, sinks=True,
    ),
    Case(
        "decode-alibi", "distances beside dot products, and a bias that is one number for all keys", n_q=3, n_k=70,
        causal=True, q_offset=(66, 40), alibi=True, bias=(3, 1),
    ),
    Case(
        "decode-shared", "a few queries of many heads that share keys", H=18, H_kv=1, n_q=3, n_k=530, keys="right",
        causal=True, q_offset=500, sinks=True,
    ),
    Case(
        "decode-gaps", "few queries, and keys that a mask hides between others", n_q=2, n_k=600, dense=True,
        segment_ids=True,
    ),
    Case("one-by-one", "the smallest call", B=1, H=1, n_q=1, n_k=1, D=1),
    Case("tail-below", "one less than a block of 16, 32, 64 and 128", n_q=127, n_k=63),
    Case("tail-above", "one more than a block of 16, 32, 64 and 128", n_q=65, n_k=129),
    Case("cross-long", "more keys than queries", n_q=17, n_k=100),
    Case("cross-short", "more queries than keys", n_q=100, n_k=17),
    Case("odd-head-dim", "a head dim that is no multiple of 8", D=33, n_q=20),
    Case("small-head-dim", "a head dim below the smallest matrix tile", D=3, n_q=20),
    Case("no-head-dim", "scores that are all 0, since a head of q and k is empty", D=0, d_v=8, scale=1.0, n_q=20),
    Case("head-dim-80", "between two powers of two", D=80, n_q=40),
    Case("head-dim-256", "the widest head the GPU kernels take", B=1, H=1, D=256, n_q=40),
    Case("head-dim-512", "wider than the GPU kernels take: long sums", B=1, H=1, D=512, n_q=40),
    Case("wide-values", "d_v above d_qk", D=16, d_v=48, n_q=40),
    Case("narrow-values", "d_v below d_qk", D=48, d_v=8, n_q=40),
    Case("grouped-heads", "grouped-query attention", H=6, H_kv=2, n_q=40),
    Case("multi-query", "one key head for all, causal, padded", H=4, H_kv=1, n_q=40, causal=True, keys="right"),
    Case("causal", "PyTorch's is_causal", n_q=100, causal=True),
    Case("causal-cross", "top-left causal with fewer keys: late queries see all", n_q=70, n_k=33, causal=True),
    Case("causal-end", "bottom-right causal", n_q=33, n_k=70, causal=True, q_offset=37),
    Case("causal-before", "queries that stand before every key see nothing", n_q=70, n_k=33, causal=True, q_offset=-37),
    Case("causal-cached", "another cache length for each sample", n_q=9, n_k=60, causal=True, q_offset=(51, 20)),
    Case("window", "a window on both sides", n_q=100, window=(10, 5)),
    Case("window-causal", "sliding-window attention", n_q=100, causal=True, window=(16, None)),
    Case("window-right", "only the right is bounded", n_q=60, n_k=90, window=(None, 3), q_offset=10),
    Case("window-zero", "a query sees only itself", n_q=40, window=(0, 0)),
    Case(
        "window-outside", "windows that lie beyond the last key are empty",
        n_q=40, n_k=20, window=(3, 3), q_offset=10,
    ),
    Case("pad-right", "key padding on the right", B=3, n_q=90, keys="right"),
    Case("pad-left", "key padding on the left", B=3, n_q=90, keys="left"),
    Case("pad-holes", "padding anywhere", B=3, n_q=90, keys="holes"),
    Case("pad-tiles", "32 keys in the last tile of 64, beside a padded sample", n_q=40, n_k=96, keys="right"),
    Case("pad-all", "a sample without any real key", B=3, n_q=40, keys="none"),
    Case("pad-left-causal", "batched generation: rows of padding see nothing", B=3, n_q=70, keys="left", causal=True),
    Case("pad-holes-causal-window", "all positions", n_q=70, keys="holes", causal=True, window=(20, None)),
    Case("pad-queries", "queries padded like the keys", B=3, n_q=90, keys="right", queries=True),
    Case(
        "pad-queries-causal",
        "padded queries, causal, grouped",
        B=3, H=4, H_kv=2, n_q=50, keys="left", queries=True, causal=True,
    ),
    Case("pad-queries-only", "padded queries, all keys real", n_q=50, n_k=20, queries=True),
    Case("projection-layout", "q, k and v as a projection leaves them", n_q=50, layout="BNHD", keys="right"),
    Case("sliced-layout", "q, k and v cut out of one tensor", n_q=50, layout="sliced", causal=True),
    Case("columns-layout", "the same, transposed: tokens lie side by side", n_q=50, n_k=40, layout="columns"),
    Case("large-scores", "scores of thousands", n_q=40, scale=300.0, causal=True),
    Case("huge-scores", "scores as large as the dtype allows: one key or several take all", n_q=40, n_k=150, huge=0.95),
    Case("huge-values", "values as large as the dtype allows", n_q=40, n_k=150, huge_values=0.995),
    Case("huge-values-scores", "both, with a few queries", n_q=2, n_k=150, huge=0.4, huge_values=0.995),
    Case("zero-scale", "every visible key weighs the same", n_q=40, scale=0.0, keys="right"),
    Case("negative-scale", "the least similar key wins", n_q=40, scale=-0.5),
    Case("zero-scale-causal", "what is hidden is not 0 times infinity", n_q=40, causal=True, scale=0.0),
    Case("negative-scale-causal", "what is hidden is not minus infinity times less", n_q=40, causal=True, scale=-0.5),
    Case("segments", "packed documents with a padded tail", n_q=60, segment_ids=True),
    Case("segments-causal", "positions count in the document", n_q=60, segment_ids=True, causal=True, window=(8, None)),
    Case("scattered", "queries stand anywhere", n_q=40, n_k=60, q_offset="scattered", causal=True, keys="left"),
    Case(
        "scattered-segments-alibi", "each query stands somewhere else in its document",
        n_q=60, q_offset="scattered", segment_ids=True, window=(9, 4), alibi=True,
    ),
    Case("dense", "an arbitrary bool mask", n_q=40, dense=True),
    Case("dense-blocks", "a bool mask that shows a few blocks", n_q=100, n_k=170, dense="blocks", keys="holes"),
    Case("bias", "an additive bias for each head", n_q=40, bias=(1, 2, 40, 40)),
    Case("bias-broadcast", "a bias over keys only, with padding", n_q=40, bias=(40,), keys="right"),
    Case("bias-of-queries", "a bias of whole rows, against the sinks", n_q=20, bias=(20, 1), sinks=True),
    Case(
        "bias-shared",
        "one bias for all samples and heads",
        H=4, H_kv=2, n_q=40, n_k=36, keys="right", bias=(40, 36), dropout_p=0.2,
    ),
    Case("relative-bias", "a table by distance, as in T5", n_q=50, n_k=70, relative_bias=2, keys="right"),
    Case(
        "relative-bias-causal", "one table for all heads, and queries that stand after some keys", H=4, H_kv=2, n_q=70,
        n_k=100, causal=True, q_offset=30, window=(40, None), relative_bias=1, keys="left", queries=True,
    ),
    Case("relative-bias-cross", "more queries than keys", n_q=100, n_k=33, relative_bias=2, softcap=3.0, sinks=True),
    Case("relative-bias-decode", "one query", n_q=1, n_k=200, q_offset=199, relative_bias=2, keys="holes"),
    Case("relative-bias-long", "several tiles on each diagonal", n_q=200, n_k=150, relative_bias=2, dropout_p=0.2),
    Case("softcap", "bounded scores", n_q=40, softcap=2.0, causal=True),
    Case("alibi", "linear distance bias", n_q=40, alibi=True, causal=True),
    Case("alibi-segments", "distances count in the document", n_q=40, segment_ids=True, alibi=True),
    Case("sinks", "one learned logit a head", n_q=40, sinks=True, keys="none"),
    Case("sinks-segments", "each document has the sink", n_q=40, sinks=True, segment_ids=True, dropout_p=0.2),
    Case(
        "far-keys", "sinks that leave hardly anything to the keys", n_q=20, n_k=5, q_offset=24, alibi=True, sinks=True,
        bias=(20, 1),
    ),
    Case("dropout", "dropped weights, the same on every backend", n_q=40, dropout_p=0.3, causal=True),
    Case("dropout-all", "every weight dropped", n_q=20, dropout_p=1.0),
    Case(
        "everything",
        "all features in one call",
        H=4, H_kv=2, n_q=40, n_k=50, causal=True, q_offset=10, window=(30, None), keys="holes", queries=True,
        dense=True, bias=(2, 1, 40, 50), softcap=5.0, alibi=True, sinks=True, dropout_p=0.2,
    ),
    Case(
        "everything-wide", "the same in tiles of wide heads, which are other ones",
        H=4, H_kv=2, D=96, n_q=40, n_k=50, causal=True, q_offset=10, window=(30, None), keys="holes", queries=True,
        dense=True, bias=(2, 1, 40, 50), softcap=5.0, alibi=True, sinks=True, dropout_p=0.2,
    ),
    *_timed("L128", B=8, H=12, L=128, D=64),
    *_timed("L512", B=4, H=12, L=512, D=64),
    *_timed("L2048", B=1, H=16, L=2048, D=64),
    *_timed("L4096", B=1, H=8, L=4096, D=128),
    _limit("decode", "one query and a long cache", B=8, H=12, n_q=1, n_k=4096, D=64),
    _limit("L512-dropout", "training, where SDPA leaves its flash kernel", B=4, H=12, n_q=512, D=64, dropout_p=0.1),
    _limit("L512-pad-queries", "self-attention pads queries too", B=4, H=12, n_q=512, D=64, keys="right", queries=True),
    _limit("L2048-pad-queries", "the same, longer", B=1, H=16, n_q=2048, D=64, keys="right", queries=True),
    *(_limit(f"D{D}", "a head dim that ends inside a tile", B=2, H=8, n_q=512, D=D) for D in ODD_HEAD_DIMS),
    *(_limit(f"N{N}", "a length that ends inside a tile", B=128, H=16, n_q=N, D=64) for N in ODD_LENGTHS),
    # The telling ones first: a run that is cut off has done those.
    *_gpu_squares((128, 64), (4096,)),
    _gpu("D128-N2048-pad", "lengths over [N/4, N]", B=8, H=16, n_q=2048, D=128, keys="right", queries=True),
    _gpu("D64-N2048-pad", "the same, narrower", B=8, H=32, n_q=2048, D=64, keys="right", queries=True),
    _gpu("bert", "sentences: mean length 130", B=32, H=12, n_q=512, D=64, keys="skewed", queries=True),
    _gpu("launch", "so small that all of it is overhead", B=1, H=8, n_q=128, D=64),
    *_gpu_squares((128, 64), (2048,)),
    _gpu(
        "left-causal", "a batch of prompts before generation",
        B=8, H=32, H_kv=8, n_q=2048, D=128, keys="left", queries=True, causal=True,
    ),
    _gpu("grouped-causal", "four query heads share a key head", B=4, H=32, H_kv=8, n_q=4096, D=128, causal=True),
    _gpu("decode-grouped", "one query and a long cache", B=16, H=32, H_kv=8, n_q=1, n_k=8192, D=128),
    _gpu("decode-one", "the same of one sequence, for all multiprocessors", H=32, H_kv=8, B=1, n_q=1, n_k=8192, D=128),
    _gpu("bias-N1024", "a learned bias, with its gradient", B=8, H=16, n_q=1024, D=64, bias=(16, 1024, 1024)),
    _gpu("dropout-N1024", "training, where SDPA leaves its fast kernels", B=8, H=16, n_q=1024, D=64, dropout_p=0.1),
    *_gpu_squares((128, 64), (16384, 8192)),
    *_gpu_squares((256,), (4096,)),
    *_gpu_squares((128, 64), (1024, 512)),
    *_gpu_squares((256,), (16384, 8192, 2048, 1024, 512)),
)  # fmt: skip


@dataclass
class Inputs:
    """The tensors of a case: NaN stands in all that nobody may read.

    options: keyword arguments of `attention`, without q, k, v and mask.
    do, dlse: gradients that arrive at o and lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    mask: Mask
    options: dict[str, object] = field(default_factory=dict)

    def spec(self) -> Spec:
        """Spec that a backend is given for these inputs."""
        options = dict(self.options)
        scale = options.pop("scale")
        by_distance = isinstance(bias := options.get("bias"), RelativeBias)
        if by_distance:
            options["bias"] = bias.by_distance(self.q.shape[2], self.k.shape[2], self.mask.q_offset)
        generator = options.pop("generator", None)
        seed = None
        if generator is not None:
            seed = drawn(self.q.device, generator.clone_state()).seed
        return Spec(self.mask, scale, seed=seed, bias_by_distance=by_distance, **options)

    def learned(self) -> dict[str, Tensor]:
        """The tensors that get a gradient, by name."""
        names = ("bias", "alibi_slopes", "sinks")
        terms = {n: self.options[n] for n in names if n in self.options}
        if isinstance(bias := terms.get("bias"), RelativeBias):
            terms["bias"] = bias.table
        return {"q": self.q, "k": self.k, "v": self.v} | terms

    def with_terms(self, learned: dict[str, Tensor]) -> dict[str, object]:
        """The options with these tensors of `learned` in them."""
        options = self.options | {name: x for name, x in learned.items() if name in self.options}
        if isinstance(bias := self.options.get("bias"), RelativeBias):
            options["bias"] = replace(bias, table=learned["bias"])
        return options


def make_inputs(
    case: Case, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, drawn_there: bool = False
) -> Inputs:
    """Random inputs of a case, the same for the same seed.

    Args:
        drawn_there: q, k, v, the biases and the arriving gradients are drawn on the device itself: other numbers than
            the CPU's, and a hundred times as fast on a GPU.
    """
    generator = torch.Generator().manual_seed(seed)
    of_numbers = torch.Generator(device).manual_seed(seed) if drawn_there else generator

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=of_numbers, dtype=torch.float64, device=of_numbers.device)

    shapes = case.shapes()
    (B, H, n_q, D), (_, _, n_k, d_v) = shapes[0], shapes[2]
    ends = (n_k / 4, n_k) if B > 1 else (5 * n_k / 8,) * 2  # a batch has a full sample; one alone has the mean length
    lengths = torch.linspace(*ends, B).ceil().long()[torch.randperm(B, generator=generator)]
    real_keys = _real_keys(case.keys, lengths, n_k, generator)
    real_queries = None
    if case.queries:
        real_queries = (
            real_keys
            if n_q == n_k and real_keys is not None
            else torch.arange(n_q) < (lengths * n_q // max(n_k, 1))[:, None]
        )
    segment_ids = tuple(_documents(B, n, generator) for n in (n_q, n_k)) if case.segment_ids else None
    dense = None
    if case.dense:
        height, width, share = (24, 40, 0.3) if case.dense == "blocks" else (1, 1, 0.7)
        shown = torch.rand(B, 1, -(-n_q // height), -(-n_k // width), generator=generator) < share
        dense = shown.repeat_interleave(height, 2).repeat_interleave(width, 3)[:, :, :n_q, :n_k]
        dense[:1, 0, n_q // 2 : n_q // 2 + 1] = False  # a query that sees nothing
    q_offset = case.q_offset
    if q_offset == "scattered":
        q_offset = torch.randint(-n_q, n_k + 1, (B, n_q), generator=generator).to(device)
    elif isinstance(q_offset, tuple):
        q_offset = torch.tensor(q_offset, dtype=torch.int32, device=device)

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    mask = Mask(
        causal=case.causal,
        q_offset=q_offset,
        window=case.window,
        real_keys=there(real_keys),
        real_queries=there(real_queries),
        segment_ids=None if segment_ids is None else (there(segment_ids[0]), there(segment_ids[1])),
        dense=there(dense),
    )
    options: dict[str, object] = {"scale": D**-0.5 if case.scale is None else case.scale}
    if case.bias is not None:
        options["bias"] = normal(*case.bias).to(device, dtype)
    if case.relative_bias is not None:
        options["bias"] = RelativeBias(normal(case.relative_bias, 12).to(device, dtype), _bucket)
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** -torch.arange(1, H + 1)).to(device)
    if case.sinks:
        options["sinks"] = normal(H).to(device, torch.float32)
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "generator": torch.Generator(device).manual_seed(seed)}

    queries, keys = mask.readable_queries(), mask.readable_keys()
    numbers, do, exponent, largest_log2 = [normal(*x) for x in shapes], normal(B, H, n_q, d_v), 0, _largest_log2(dtype)
    if case.huge:
        exponent = (largest_log2 * case.huge - math.log2(D)) // 2
        for x in numbers[:2]:
            x.round_().clamp_(-1, 1).mul_(2.0**exponent)
    if case.huge_values and numbers[2].numel():
        kept = 1 - case.dropout_p if case.dropout_p < 1 else 1  # dropout divides by it, and o has to be finite
        numbers[2].div_(numbers[2].abs().max()).mul_(kept * 2.0 ** (largest_log2 * case.huge_values))
        do *= 2.0 ** -(largest_log2 // 2 + exponent)
    q, k, v = (_laid_out(x.to(device, dtype), case.layout) for x in numbers)
    do, dlse = do.to(device, dtype), normal(B, H, n_q).to(device, torch.float32)
    for x, rows in ((q, queries), (k, keys), (v, keys), (do, queries)):
        if rows is not None:
            x.masked_fill_(~rows[:, None, :, None], math.nan)
    return Inputs(q, k, v, do, dlse, mask, options)


def _bucket(distance: Tensor) -> Tensor:
    """A number from 0 to 11 for each distance: those that are far share one."""
    return distance.clamp(-7, 4) + 7


def _largest_log2(dtype: torch.dtype) -> float:
    return math.log2(torch.finfo(dtype).max)


def _real_keys(pattern: str | None, lengths: Tensor, n_k: int, generator: torch.Generator) -> Tensor | None:
    index, lengths = torch.arange(n_k), lengths[:, None]
    if pattern is None:
        return None
    if pattern == "right":
        return index < lengths
    if pattern == "left":
        return index >= n_k - lengths
    if pattern == "skewed":
        evenly = (lengths / n_k - 0.25) / 0.75  # in [0, 1], whose cubes are 1/4 on average
        return index < (n_k * evenly**3).ceil().clamp(min=1)
    if pattern == "holes":
        return torch.rand(len(lengths), n_k, generator=generator) < 0.6
    if pattern == "none":
        lengths = lengths.clone()
        lengths[:1] = 0
        return index < lengths
    raise ValueError(f"keys must be right, left, skewed, holes or none, got {pattern!r}")


def _documents(B: int, n: int, generator: torch.Generator) -> Tensor:
    """int32 [B, n]: three documents of random length, then padding."""
    ends = torch.rand(B, 3, generator=generator).sort(dim=-1).values * n
    ids = (torch.arange(n)[None, :, None] >= ends[:, None, :]).sum(-1)
    return ids.masked_fill(ids == 3, -1).int()


def _laid_out(x: Tensor, layout: str) -> Tensor:
    B, H, N, D = x.shape
    if layout == "BHND":
        return x
    if layout == "BNHD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = x.new_full((B, N, H, D + 5), math.nan)
        view = wide[..., 2 : 2 + D].transpose(1, 2)
        return view.copy_(x)
    if layout == "columns":
        wide = x.new_full((B, H, D, N + 5), math.nan)
        return wide[..., 2 : 2 + N].mT.copy_(x)
    raise ValueError(f"layout must be BHND, BNHD, sliced or columns, got {layout!r}")


def run(
    inputs: Inputs, backend: str | None, threads: int | None = None, wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients of `attention` by that backend: a dict over the names of OUTPUTS.

    Args:
        threads: how many PyTorch has meanwhile; None for as many as it has now.
        wanted: names of `Inputs.learned` whose gradients are computed; None for all.
    """
    if threads is not None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return run(inputs, backend, wanted=wanted)
        finally:
            torch.set_num_threads(before)
    learned = {
        name: x.detach().requires_grad_(wanted is None or name in wanted) for name, x in inputs.learned().items()
    }
    options = inputs.with_terms(learned)
    if "generator" in options:
        options["generator"] = options["generator"].clone_state()
    o, lse = attention(
        learned["q"], learned["k"], learned["v"], inputs.mask, **options, return_lse=True, backend=backend
    )
    leaves = {name: x for name, x in learned.items() if x.requires_grad}
    gradients = torch.autograd.grad((o, lse), list(leaves.values()), (inputs.do, inputs.dlse.to(lse.dtype)))
    return {"o": o.detach(), "lse": lse.detach()} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}


def exact(inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients in fp64 by the reference, from the same (rounded) inputs."""

    def double(x: object) -> object:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    learned = {name: double(x) for name, x in inputs.learned().items()}
    options = {name: double(x) for name, x in inputs.with_terms(learned).items()}
    tensors = (double(x) for x in (inputs.q, inputs.k, inputs.v, inputs.do, inputs.dlse))
    return run(Inputs(*tensors, inputs.mask, options), reference.NAME)


def formula(inputs: Inputs, learned: dict[str, Tensor]) -> tuple[Tensor, Tensor, Callable[..., tuple[Tensor, ...]]]:
    """(o, lse, gradients) by softmax(q k^T) v in the dtype of `learned`; differentiable, and as simple as it can be.

    Args:
        learned: `inputs.learned()`, or copies of it in one dtype.

    Returns:
        o, lse, and the textbook gradients as a function of (do, dlse), in the order of `learned`. They subtract
        delta = sum(do * o), as every fused kernel does; autograd's softmax cancels it exactly where a query sees one
        key.
    """
    spec, mask, (q, k, v) = inputs.spec(), inputs.mask, (learned[name] for name in "qkv")
    (B, H, n_q, _), (_, H_kv, n_k, _) = q.shape, k.shape
    queries, keys = mask.readable_queries(), mask.readable_keys()

    def readable(x: Tensor, rows: Tensor | None) -> Tensor:
        return x if rows is None else x.masked_fill(~rows[:, None, :, None], 0)

    q, k, v = readable(q, queries), readable(k, keys), readable(v, keys)
    k, v = k.repeat_interleave(H // H_kv, 1), v.repeat_interleave(H // H_kv, 1)
    scores, capped = q @ k.mT * spec.scale, None
    relative, buckets = inputs.options.get("bias"), None
    if isinstance(relative, RelativeBias):
        distance = torch.arange(n_k, device=q.device) - torch.arange(n_q, device=q.device)[:, None]
        buckets = relative.bucket(distance - mask.q_offset)
    if spec.softcap is not None:
        capped = torch.tanh(scores / spec.softcap)
        scores = spec.softcap * capped
    if "bias" in learned:
        scores = scores + (learned["bias"] if buckets is None else learned["bias"][:, buckets])
    position_q, position_k = mask.positions(n_q, n_k, q.device)
    distance = (position_q[:, :, None] - position_k[:, None, :]).abs()[:, None].to(q.dtype)
    if "alibi_slopes" in learned:
        scores = scores - learned["alibi_slopes"][..., None, None] * distance
    keep = mask.keep(n_q, n_k, q.device)
    seen = keep.any(-1, keepdim=True)
    scores = scores.masked_fill(~keep, torch.finfo(q.dtype).min)  # not -inf, so that empty rows stay finite
    if "sinks" in learned:
        scores = torch.cat([scores, learned["sinks"][:, None, None].expand(B, H, n_q, 1)], -1)
    p_all = torch.softmax(scores, -1) * seen
    p, factor = p_all[..., :n_k], 1.0
    if spec.dropout_p > 0:
        factor = spec.dropout_keep(B, H, n_q, n_k).to(q.dtype) / (1 - spec.dropout_p) if spec.dropout_p < 1 else 0.0
    o, lse = (p * factor) @ v, torch.logsumexp(scores, -1).masked_fill(~seen.squeeze(-1), -math.inf)

    def gradients(do: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        do = readable(do, queries)
        delta = (do * o).sum(-1, keepdim=True) - dlse[..., None]
        ds = p * (do @ v.mT * factor - delta)
        dqk = ds * spec.scale if capped is None else ds * (1 - capped**2) * spec.scale
        by_head = (dqk.mT @ q, (p * factor).mT @ do)
        by_name = {
            "q": dqk @ k,
            "k": by_head[0].unflatten(1, (H_kv, -1)).sum(2),
            "v": by_head[1].unflatten(1, (H_kv, -1)).sum(2),
        }
        if "bias" in learned:
            by_entry = ds
            if buckets is not None:
                of_each = torch.nn.functional.one_hot(buckets.flatten(), learned["bias"].shape[1])
                by_entry = ds.sum(0).flatten(1) @ of_each.to(ds.dtype)
            by_name["bias"] = by_entry.sum_to_size(learned["bias"].shape)
        if "alibi_slopes" in learned:
            by_name["alibi_slopes"] = -(ds * distance).sum((0, 2, 3))
        if "sinks" in learned:
            by_name["sinks"] = -(p_all[..., n_k:] * delta).sum((0, 2, 3))
        return tuple(by_name[name] for name in learned)

    return o, lse, gradients


def naive(inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients by the plain formula in the dtype of the inputs."""
    learned = {name: x.detach().to(inputs.q.dtype) for name, x in inputs.learned().items()}
    o, lse, gradients = formula(inputs, learned)
    values = gradients(inputs.do, inputs.dlse.to(o.dtype))
    return {"o": o, "lse": lse} | {f"d{name}": g for name, g in zip(learned, values, strict=True)}


@dataclass(frozen=True)
class Error:
    """Error of one output against exact, and its budget; `right` says which is larger. NaN is never right.

    magnitude: the largest number in exact.
    """

    output: str
    largest: float
    budget: float
    magnitude: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the output is within the budget."""
        return self.largest <= self.budget  # False for NaN

    def __str__(self) -> str:
        return f"{self.output}: max error {self.largest:.3g}, budget {self.budget:.3g}"


def compare(output: str, actual: Tensor, naive: Tensor, exact: Tensor) -> Error:
    """The error of one output against the budget. -inf must stand exactly where exact has it."""
    actual64, naive64 = actual.double(), naive.double()
    empty = exact == -math.inf
    if not torch.equal(actual64 == -math.inf, empty):
        return Error(output, math.inf, 0.0)
    difference = (actual64 - exact).masked_fill(empty, 0).abs()
    tolerated = (naive64 - exact).masked_fill(empty, 0).abs()
    magnitude = exact.masked_fill(empty, 0).abs()

    def largest(x: Tensor) -> float:
        return x.max().item() if x.numel() else 0.0

    eps = torch.finfo(actual.dtype).eps
    budget = 2 * largest(tolerated) + 4 * eps * largest(magnitude)
    return Error(output, largest(difference), budget, largest(magnitude))


def errors(inputs: Inputs, actual: dict[str, Tensor]) -> list[Error]:
    """The error of each of these outputs (names from OUTPUTS) for these inputs."""
    right, plain = exact(inputs), naive(inputs)
    return [compare(name, value, plain[name], right[name]) for name, value in actual.items()]


def assert_right(inputs: Inputs, actual: dict[str, Tensor], slack: float = 1.0) -> None:
    """AssertionError naming each output that is outside `slack` times the budget."""
    wrong = [error for error in errors(inputs, actual) if not error.largest <= slack * error.budget]
    assert not wrong, "; ".join(str(error) for error in wrong)
