"""Prints the random calls on one core of the CPU that take longer than PyTorch's own: the classes nobody thought of.

    python -m benchmarks.random_calls [--seed 1] [--seconds 300] [--at-least 16] [--dtype fp32 bf16]

Lengths, head dims, grouped heads, masks, biases, layouts and gradients are drawn anew; the answers of both are held to
fp64 before they are timed. A sample is the CPU time of a thread, and both take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn
from benchmarks.short_calls import in_turns
from fastattn import Mask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LARGEST_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
LENGTHS = (1, 2, 5, 16, 33, 64, 77, 128, 197, 256, 512, 1000, 2048)
KINDS = ("none", "none", "causal", "padding", "causal padding", "one bias", "bias for each head", "dense")
LAYOUTS = ("heads first", "tokens first", "tokens first", "of one projection", "cut out")
MOST_PAIRS, MOST_ELEMENTS = 2**29, 2**25  # times the head dim; of keys
SLOWER = 1.05


def tensor(layout: str, B: int, H: int, n: int, D: int, dtype: torch.dtype) -> Tensor:
    """Random numbers [B, H, n, D] as they lie in such a layout."""
    if layout == "heads first":
        return torch.randn(B, H, n, D, dtype=dtype)
    if layout == "tokens first":
        return torch.randn(B, n, H, D, dtype=dtype).transpose(1, 2)
    if layout == "of one projection":
        return torch.randn(B, n, 3, H, D, dtype=dtype)[:, :, 1].transpose(1, 2)
    return torch.randn(B, H, n + 3, D + 8, dtype=dtype)[:, :, 2:-1, :D]


def draw(rng: random.Random, dtypes: list[str], at_least: int) -> tuple[str, Callable, Callable, list[Tensor]] | None:
    """(what it is, attention and PyTorch's function of q, k and v, these); None where it would be too large."""
    dtype, kind, layout = DTYPES[rng.choice(dtypes)], rng.choice(KINDS), rng.choice(LAYOUTS)
    B, H_kv, group = rng.choice((1, 1, 2, 4, 8, 32)), rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 1, 2, 4, 8))
    lengths = [n for n in LENGTHS if n >= at_least]
    n_q, D = rng.choice(lengths), rng.choice((8, 16, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256))
    n_k = n_q if "causal" in kind or rng.random() < 0.5 else rng.choice(lengths)
    H, training = H_kv * group, rng.random() < 0.5
    if B * H * n_q * n_k * D > MOST_PAIRS or B * H * n_k * D > MOST_ELEMENTS:
        return None
    real_keys = torch.arange(n_k) < torch.tensor([rng.randint(-(-n_k // 4), n_k) for _ in range(B)])[:, None]
    mask, attn_mask, terms = None, None, {}
    if "padding" in kind:
        mask, attn_mask = Mask("causal" in kind, real_keys=real_keys), real_keys[:, None, None]
        attn_mask = attn_mask & torch.ones(n_q, n_k, dtype=torch.bool).tril() if mask.causal else attn_mask
    elif kind == "causal":
        mask = Mask(causal=True)
    elif kind == "dense":
        attn_mask = (torch.rand(B, 1, n_q, n_k) < 0.7).index_fill(3, torch.tensor([0]), value=True)
        mask = Mask(dense=attn_mask)
    elif kind != "none":
        attn_mask = torch.randn(*((1, 1) if kind == "one bias" else (B, H)), n_q, n_k, dtype=dtype)
        terms = {"bias": attn_mask}
    inputs = [
        tensor(layout, B, h, n, D, dtype).requires_grad_(training) for h, n in ((H, n_q), (H_kv, n_k), (H_kv, n_k))
    ]
    do = torch.randn_like(inputs[0])

    def outputs(function: Callable[[Tensor, Tensor, Tensor], Tensor], *x: Tensor) -> tuple[Tensor, ...]:
        o = function(*x)
        return torch.autograd.grad(o, x, do.to(o.dtype)) if training else (o,)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        added = attn_mask.to(q.dtype) if terms else attn_mask
        return F.scaled_dot_product_attention(q, k, v, added, is_causal=kind == "causal", enable_gqa=group > 1)

    what = f"{str(dtype)[6:]} B{B} H{H}/{H_kv} n_q {n_q} n_k {n_k} D{D}, {kind}, {layout}{', training' * training}"
    ours = partial(fastattn.attention, mask=mask, **terms)
    return what, partial(outputs, ours), partial(outputs, theirs), inputs


def check(what: str, attend: Callable, theirs: Callable, inputs: list[Tensor]) -> None:
    """Raises AssertionError where an answer is further from fp64's than one of this dtype should be."""
    exact = theirs(*(x.detach().double().requires_grad_(x.requires_grad) for x in inputs))
    size = max(x.norm().item() for x in exact)  # of a single key dq is 0
    for actual, expected in zip(attend(*inputs), exact, strict=True):
        error = (actual - expected).norm().item() / size
        assert error < LARGEST_ERROR[actual.dtype], f"{what}: off by {error:.1e}"


def main() -> None:
    """Prints the slower calls, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="at least one call is made")
    parser.add_argument("--at-least", type=int, choices=LENGTHS, default=1, help="queries and keys")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    warnings.simplefilter("ignore", fastattn.FallbackWarning)
    rng, end, ratios = random.Random(options.seed), time.monotonic() + options.seconds, []
    while not ratios or time.monotonic() < end:
        if (drawn := draw(rng, options.dtype, options.at_least)) is None:
            continue
        what, ours, theirs, inputs = drawn
        for attend in (ours, theirs):
            check(what, attend, theirs, inputs)
        ours, theirs = partial(ours, *inputs), partial(theirs, *inputs)
        for rounds in (10, 30):  # the more where it seems to be slower
            our_s, their_s, ratio = in_turns(ours, theirs, rounds, calls=1)
            if ratio <= SLOWER:
                break
        ratios.append(ratio)
        if ratio > SLOWER:
            print(f"{ratio:.2f} ({our_s * 1e6:.0f} and {their_s * 1e6:.0f} us) {what}", flush=True)
    slower, median = sum(ratio > SLOWER for ratio in ratios), statistics.median(ratios)
    print(f"{slower} of {len(ratios)} calls take more than {SLOWER} of PyTorch's time; median {median:.2f}")


if __name__ == "__main__":
    main()
